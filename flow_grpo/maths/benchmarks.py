"""Camera paths and pose errors as published benchmarks define them, where `poses.py` has no name for them.

ReDirector      github.com/byeongjun-park/ReDirector: model_utils.py, eval_utils.py, evaluate.py
Redirect4D      github.com/VVeiCao/redirect4d-bench: metrics/camera_pose_metrics/eval_camera_pose.py
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flow_grpo.maths import poses
from flow_grpo.maths.path_errors import LEAST_BASELINE_M, baseline_m, path_errors

PRESET_FRAMES = 81  # of the file that defines the presets; a path of more or fewer frames keeps their speed
PRINTED_DIGITS = 2  # ReDirector's code rounds both errors of a video, degrees and share of the path, before any mean


def preset_at_own_speed(name: str, frames: int) -> Tensor:
    """Return the (frames, 4, 4) float64 path of a preset as ReDirector commands it for a video of any length.

    A step from frame to frame is that of the 81-frame preset, so `frames` frames make (frames - 1) / 80 of its motion.
    A step's direction is taken in the camera's own axes at the same share of the 81-frame path, then applied in the
    axes of the frame that it leads to: except at 81 frames, arcs bend a little.

    Raises:
        ValueError: unknown name, or fewer than one frame.
    """
    poses.preset_path(name, frames)  # refuses both
    original = poses.preset_path(name, PRESET_FRAMES)
    rotation, centres = original[:, :3, :3], original[:, :3, 3]
    steps = (rotation[:-1].mT @ centres.diff(dim=0)[..., None])[..., 0]
    places = torch.linspace(0, len(steps) - 1, frames - 1, dtype=torch.float64)
    before = places.floor().long().clamp(max=len(steps) - 2)
    steps = torch.lerp(steps[before], steps[before + 1], (places - before)[:, None])
    count = torch.arange(frames, dtype=torch.float64)[:, None]
    turned = poses.rotation_matrix(count * poses.rotation_vector(rotation[1]))
    moved = (turned[1:] @ steps[..., None])[..., 0].cumsum(0)
    return poses.pose(turned, torch.cat([torch.zeros(1, 3, dtype=torch.float64), moved]))


def printed_errors(commanded: Tensor, estimated: Tensor) -> tuple[float, float]:
    """Return a video's (TransErr, RotErr in degrees) as ReDirector's code prints them, each rounded to two decimals.

    They are `trans_sim3_rel` and `rot_deg_mean` of `path_errors`. A command that stays in place has TransErr 0 whatever
    the video does: a similarity of scale 0 maps every estimate onto the only commanded centre.

    Args:
        commanded: (F, 4, 4).
        estimated: (F, 4, 4), all finite; F at least 3.
    """
    errors = path_errors(commanded, estimated)
    shape, turn = errors["trans_sim3_rel"], errors["rot_deg_mean"]
    if baseline_m(commanded) < LEAST_BASELINE_M:
        shape = 0.0
    assert shape is not None
    assert turn is not None
    return round(shape, PRINTED_DIGITS), round(turn, PRINTED_DIGITS)


def redirect4d_errors(commanded: Tensor, estimated: Tensor) -> dict[str, object]:
    """Return Redirect4D-Bench's pose errors of a video under its own keys: no alignment, so metres must be metres.

    Args:
        commanded: (F, 4, 4) camera-to-world in metres, in any world.
        estimated: (F, 4, 4) camera-to-world in metres, in any world.
    """
    commanded, estimated = poses.relative(commanded[0], commanded), poses.relative(estimated[0], estimated)
    turns, ways = poses.rot_err(commanded, estimated), poses.trans_err(commanded, estimated)
    return {
        "n_frames": len(turns),
        "rot_err_rad_per_frame": turns.tolist(),
        "trans_err_m_per_frame": ways.tolist(),
        "rot_err_rad_mean": float(turns.mean()),
        "rot_err_deg_mean": math.degrees(turns.mean()),
        "rot_err_rad_sum": float(turns.sum()),
        "trans_err_m_mean": float(ways.mean()),
        "trans_err_m_sum": float(ways.sum()),
    }


def from_world_to_camera(matrices: Tensor) -> Tensor:
    """Return (F, 4, 4) float64 camera-to-world poses of (F, 3, 4) world-to-camera matrices, OpenCV axes.

    Raises:
        ValueError: another shape, or matrices that are not rigid (`check_poses`).
    """
    if matrices.ndim != 3 or matrices.shape[1:] != (3, 4):
        raise ValueError(f"world-to-camera matrices have shape {tuple(matrices.shape)}, must be (F, 3, 4)")
    found = poses.pose(matrices[:, :, :3].double(), matrices[:, :, 3].double())
    poses.check_poses(found, "world-to-camera matrices")
    inverse: Tensor = torch.linalg.inv(found)
    return inverse
