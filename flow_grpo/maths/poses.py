"""Camera poses: file conversion, relative poses, preset paths, and pose errors in the published conventions.

A pose is a 4x4 OpenCV camera-to-world matrix (camera axes x right, y down, z forward) in metres; a path is (F, 4, 4).
Everything is float64: in float32 the usual arccos form of the rotation error gives up to 0.028 degrees for identical
rotations. The names of reduced errors hold unit and reduction, because numbers of different conventions are not
comparable:

    rotation error of a frame       theta = angle of R_commanded^T R_estimated
    translation error of a frame    |t_commanded - t_estimated|
    CamMC of a frame                Frobenius norm of [R|t]_commanded - [R|t]_estimated    (CamI2V, arXiv 2410.15957)
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

ORTHONORMAL_TOLERANCE = 1e-3  # camera files print few digits
FARTHEST = 1e5  # metres from the origin; larger coordinates mean a damaged file or another unit
ZERO_BASELINE = 1e-6  # rms spread of camera centres, in their unit, below which a path is static
CENTIMETRES_PER_METRE = 100.0
UNREAL_TO_OPENCV = (1, 2, 0, 3)  # columns: Unreal forward, right, up -> right, up, forward; up is then negated
OPENCV_TO_UNREAL = (2, 0, 1, 3)


@dataclasses.dataclass(frozen=True)
class Preset:
    """A camera motion from the identity at uniform speed.

    Attributes:
        camera: its name in ReCamMaster's example file, "cam01" to "cam10".
        translation: camera centre at the last frame, in metres: x right, y down, z forward.
        rotation: rotation vector at the last frame, in degrees, same axes.
    """

    camera: str
    translation: tuple[float, float, float]
    rotation: tuple[float, float, float]


# Frame 80 of ReCamMaster's example_test_data/cameras/camera_extrinsics.json. The centre moves on a straight line even
# for the arcs: (1.988, 0.533) is 0.994 times the chord of a 30 degree arc of radius 4 m.
PRESETS: dict[str, Preset] = {
    "pan_right": Preset("cam01", (0.0, 0.0, 0.0), (0.0, 19.88, 0.0)),
    "pan_left": Preset("cam02", (0.0, 0.0, 0.0), (0.0, -19.88, 0.0)),
    "tilt_up": Preset("cam03", (0.0, 0.0, 0.0), (9.94, 0.0, 0.0)),
    "tilt_down": Preset("cam04", (0.0, 0.0, 0.0), (-9.94, 0.0, 0.0)),
    "zoom_in": Preset("cam05", (0.0, 0.0, 1.988), (0.0, 0.0, 0.0)),
    "zoom_out": Preset("cam06", (0.0, 0.0, -1.988), (0.0, 0.0, 0.0)),
    "translate_up": Preset("cam07", (0.0, -0.994, 0.0), (-13.95, 0.0, 0.0)),
    "translate_down": Preset("cam08", (0.0, 0.994, 0.0), (13.95, 0.0, 0.0)),
    "arc_left": Preset("cam09", (-1.988, 0.0, 0.533), (0.0, 29.82, 0.0)),
    "arc_right": Preset("cam10", (1.988, 0.0, 0.533), (0.0, -29.82, 0.0)),
}


def preset_path(name: str, frames: int, *, translation_scale: float = 1.0, rotation_scale: float = 1.0) -> Tensor:
    """Return the (frames, 4, 4) float64 path of a preset: identity at frame 0, the full motion at the last frame.

    Raises:
        ValueError: unknown name, or fewer than one frame.
    """
    if name not in PRESETS:
        raise ValueError(f"camera preset is {name!r}, must be one of {', '.join(PRESETS)}")
    if frames < 1:
        raise ValueError(f"frames of a camera path is {frames}, must be at least 1")
    preset = PRESETS[name]
    progress = torch.arange(frames, dtype=torch.float64)[:, None] / max(frames - 1, 1)
    translation = translation_scale * torch.tensor(preset.translation, dtype=torch.float64)
    rotation = rotation_scale * torch.tensor(preset.rotation, dtype=torch.float64)
    return pose(rotation_matrix(progress * rotation.deg2rad()), progress * translation)


def rotation_matrix(vector: Tensor) -> Tensor:
    """Return rotations (..., 3, 3) of rotation vectors (..., 3) in radians; differentiable, also at zero.

    Rodrigues' formula: R = I + sin(a) / a [v]x + (1 - cos(a)) / a^2 [v]x^2 with a = |v|.
    """
    # In terms of sinc; several hundred times faster on small inputs than torch.linalg.matrix_exp.
    x, y, z = vector.unbind(-1)
    zero = torch.zeros_like(x)
    rows = [torch.stack(row, dim=-1) for row in ([zero, -z, y], [z, zero, -x], [-y, x, zero])]
    cross = torch.stack(rows, dim=-2)
    angle = (vector.square().sum(-1)[..., None, None] + 1e-30).sqrt() / torch.pi  # in units of pi; never exactly 0
    identity = torch.eye(3, dtype=vector.dtype, device=vector.device)
    return identity + torch.sinc(angle) * cross + 0.5 * torch.sinc(angle / 2).square() * (cross @ cross)


def rotation_vector(rotation: Tensor) -> Tensor:
    """Return the rotation vectors (..., 3) in radians of rotations (..., 3, 3) of well below 180 degrees."""
    skew = (rotation - rotation.mT) / 2
    sines = torch.stack([skew[..., 2, 1], skew[..., 0, 2], skew[..., 1, 0]], dim=-1)
    cosine = (rotation.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True) - 1) / 2
    angle = torch.atan2(torch.linalg.vector_norm(sines, dim=-1, keepdim=True), cosine)
    return sines / torch.sinc(angle / torch.pi)


def pose(rotation: Tensor, translation: Tensor) -> Tensor:
    """Return poses (..., 4, 4) from rotations (..., 3, 3) and camera centres (..., 3)."""
    top = torch.cat([rotation, translation[..., None]], dim=-1)
    bottom = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=top.dtype, device=top.device).expand_as(top[..., :1, :])
    return torch.cat([top, bottom], dim=-2)


def multicam_to_opencv(matrices: Tensor) -> Tensor:
    """Convert the camera matrices of a MultiCamVideo file to float64 OpenCV camera-to-world in metres.

    The file holds 4x4 matrices for row vectors, in Unreal axes (x forward, y right, z up, left-handed) and centimetres.
    Only the camera axes are converted: the world stays left-handed, so absolute rotations have determinant -1 and
    relative ones +1.

    Args:
        matrices: (..., 4, 4), the translation in the last row.
    """
    converted = matrices.double().mT[..., list(UNREAL_TO_OPENCV)].clone()
    converted[..., :3, 1] *= -1
    converted[..., :3, 3] /= CENTIMETRES_PER_METRE
    return converted


def opencv_to_multicam(poses: Tensor) -> Tensor:
    """Return the inverse of `multicam_to_opencv`: (..., 4, 4) float64 matrices as in a MultiCamVideo camera file."""
    converted = poses.double().clone()
    converted[..., :3, 1] *= -1
    converted[..., :3, 3] *= CENTIMETRES_PER_METRE
    return converted[..., list(OPENCV_TO_UNREAL)].mT.contiguous()


def check_poses(poses: Tensor, name: str = "poses") -> None:
    """Raise for matrices that are not poses; determinant -1 is accepted, as absolute MultiCamVideo poses have it.

    Raises:
        ValueError: wrong shape, non-finite entries, a last row that is not 0 0 0 1, a rotation part that is not
            orthonormal to 1e-3 (a singular matrix included), or a centre more than 100 km from the origin.
    """
    if poses.ndim < 2 or poses.shape[-2:] != (4, 4):
        raise ValueError(f"{name} has shape {tuple(poses.shape)}, must be (..., 4, 4)")
    if not poses.isfinite().all():
        raise ValueError(f"{name} holds values that are not finite; check the camera file")
    bottom = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=poses.dtype)
    if not torch.allclose(poses[..., 3, :], bottom, rtol=0, atol=ORTHONORMAL_TOLERANCE):
        raise ValueError(f"{name} has a last row other than 0 0 0 1; is the matrix transposed?")
    rotation = poses[..., :3, :3].double()
    error = (rotation.mT @ rotation - torch.eye(3, dtype=torch.float64)).abs().amax().item()
    if error > ORTHONORMAL_TOLERANCE:
        raise ValueError(
            f"{name} has a rotation part that is off orthonormal by {error:.3g}, must be at most "
            f"{ORTHONORMAL_TOLERANCE:g}; the matrix is singular, scaled or sheared"
        )
    if (reach := poses[..., :3, 3].abs().max().item()) > FARTHEST:
        raise ValueError(
            f"{name} stands {reach:.3g} m from the origin, must be at most {FARTHEST:g}; is the file in metres where "
            "centimetres are meant, or damaged?"
        )


def relative(reference: Tensor, poses: Tensor) -> Tensor:
    """Return poses relative to a reference camera: inverse(reference) @ poses, float64.

    Args:
        reference: (4, 4), or (..., 4, 4) with one reference per path.
        poses: (..., F, 4, 4).

    Raises:
        ValueError: either is not a pose (`check_poses`).
    """
    check_poses(reference, "reference pose")
    check_poses(poses)
    inverse = torch.linalg.inv(reference.double())
    if 2 < inverse.ndim < poses.ndim:
        inverse = inverse.unsqueeze(-3)
    seen: Tensor = inverse @ poses.double()
    return seen


def camera_tokens(poses: Tensor, stride: int = 4) -> Tensor:
    """Return ReCamMaster's camera tokens: (..., F, 12) fp32, the row-major 3x4 of frames 0, stride, 2 * stride, ...

    Args:
        poses: (..., T, 4, 4) relative poses of all video frames, T = stride * n + 1.
        stride: video frames per latent frame.

    Raises:
        ValueError: T is not stride * n + 1.
    """
    frames = poses.shape[-3]
    if (frames - 1) % stride:
        raise ValueError(f"camera path has {frames} frames, must be {stride}n+1: one pose per latent frame")
    return poses[..., ::stride, :3, :].flatten(-2).float()


def rot_err(first: Tensor, second: Tensor) -> Tensor:
    """Return the angle (...) in radians, float64, between rotations (..., 3, 3) or poses (..., 4, 4).

    2 asin(|A - B|_F / (2 sqrt 2)), which equals arccos((tr(A^T B) - 1) / 2) but is stable near 0.
    """
    difference = first[..., :3, :3].double() - second[..., :3, :3].double()
    norm = torch.linalg.matrix_norm(difference)
    return 2 * torch.asin((norm / (2 * math.sqrt(2))).clamp(max=1.0))


def trans_err(commanded: Tensor, estimated: Tensor) -> Tensor:
    """Return the distance between camera centres of each frame, (..., F) in metres, for poses (..., F, 4, 4)."""
    distance: Tensor = torch.linalg.vector_norm(_centres(commanded) - _centres(estimated), dim=-1)
    return distance


def cam_mc(commanded: Tensor, estimated: Tensor) -> Tensor:
    """Return CamMC of each frame, (..., F), the distance of the 12-vectors [R|t], for poses (..., F, 4, 4)."""
    distance: Tensor = torch.linalg.matrix_norm(commanded[..., :3, :].double() - estimated[..., :3, :].double())
    return distance


def rot_deg_pair_mean(commanded: Tensor, estimated: Tensor) -> Tensor:
    """Return the error of the relative rotation in degrees, mean over ordered pairs of different frames, (...).

    Convention B (ReDirector, Geo-Align): invariant to a constant rotation between the two world frames.
    """
    frames = commanded.shape[-3]
    if frames < 2:
        raise ValueError(f"rotation error over frame pairs needs at least 2 frames, got {frames}")
    errors = rot_err(_pairwise_rotation(commanded), _pairwise_rotation(estimated)).rad2deg()
    return errors.sum(dim=(-2, -1)) / (frames * (frames - 1))


def trans_sim3_rel(commanded: Tensor, estimated: Tensor) -> Tensor:
    """Return the mean distance of camera centres after Sim(3) alignment, over the commanded path's diameter, (...).

    Convention B (ReDirector, Geo-Align): invariant to speed and scale. NaN if the commanded path is static or has fewer
    than three frames; average only over paths where it is defined. A static estimate is aligned to the commanded
    centroid, so a frozen video gets a (bad) score instead of being dropped.
    """
    target, source = _centres(commanded), _centres(estimated)
    scale, rotation, translation = umeyama(target, source)
    aligned = scale[..., None, None] * source @ rotation.mT + translation[..., None, :]
    aligned = torch.where(is_static(source)[..., None, None], target.mean(-2, keepdim=True), aligned)
    residual = torch.linalg.vector_norm(target - aligned, dim=-1).mean(-1)
    largest = torch.linalg.vector_norm(target[..., :, None, :] - target[..., None, :, :], dim=-1).amax((-2, -1))
    undefined = is_static(target) | (target.shape[-2] < 3)
    return torch.where(undefined, torch.nan, residual / largest)


def umeyama(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the least-squares similarity from source points (..., F, 3) to target points (..., F, 3), float64.

    Scale s (...), rotation R (..., 3, 3) of determinant +1 and translation t (..., 3) of x -> s R x + t. Umeyama
    (TPAMI 1991), never a reflection: mirrored points keep a residual. NaN for fewer than three points, coincident
    points in either set, or non-finite values.
    """
    target, source = target.double(), source.double()
    undefined = is_static(target) | is_static(source) | (target.shape[-2] < 3)
    undefined = undefined | ~(target + source).isfinite().all(-1).all(-1)
    # SVD raises on NaN: replace undefined paths by zeros and overwrite their result.
    target = torch.where(undefined[..., None, None], 0.0, target)
    source = torch.where(undefined[..., None, None], 0.0, source)
    target_mean, source_mean = target.mean(-2, keepdim=True), source.mean(-2, keepdim=True)
    covariance = (target - target_mean).mT @ (source - source_mean) / target.shape[-2]
    left, singular, right = torch.linalg.svd(covariance)
    signs = torch.ones_like(singular)
    signs[..., 2] = torch.where(torch.linalg.det(left) * torch.linalg.det(right) < 0, -1.0, 1.0)
    rotation = left * signs[..., None, :] @ right
    variance = (source - source_mean).square().sum(-1).mean(-1)
    scale = (singular * signs).sum(-1) / variance
    rotation = torch.where(undefined[..., None, None], torch.nan, rotation)
    scale = torch.where(undefined, torch.nan, scale)
    translation = target_mean[..., 0, :] - scale[..., None] * (rotation @ source_mean.mT)[..., 0]
    return scale, rotation, translation


def is_static(points: Tensor) -> Tensor:
    """Return (...) bool: camera centres (..., F, 3) do not move. Their rms spread is at most 1e-6 in their own unit."""
    spread = (points - points.mean(-2, keepdim=True)).square().sum(-1).mean(-1).sqrt()
    return spread <= ZERO_BASELINE


def orthogonal(poses: Tensor) -> Tensor:
    """Return poses (..., 4, 4) in float64 with exact rotations: float32 steps leave them orthogonal to 1e-6 only."""
    left, _, right = torch.linalg.svd(poses[..., :3, :3].double())
    return pose(left @ right, poses[..., :3, 3].double())


def _centres(poses: Tensor) -> Tensor:
    return poses[..., :3, 3].double()


def _pairwise_rotation(poses: Tensor) -> Tensor:
    rotation = poses[..., :3, :3].double()
    return rotation.mT[..., :, None, :, :] @ rotation[..., None, :, :, :]
