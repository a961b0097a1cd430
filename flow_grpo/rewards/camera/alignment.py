"""Cameras of pictures too small for features, by the brightness of all that their source shows at once.

Where a pixel of the source lies in the scene, a depth map says. Seen from the right pose, most of these points look in
a frame as they do in the source: the pose is found by Levenberg-Marquardt on their brightness, coarse to fine (direct
image alignment, as in LSD-SLAM, ECCV 2014). No point is looked for by itself: in the soft videos of a small model flow
errs by chance, and what it says of their cameras scatters nine times as much in rotation.

Letters: F frames, M candidate poses of a frame, N points.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from torch import Tensor
from torch.nn.functional import grid_sample

from flow_grpo.maths.pose_fit import Fit, best, refine
from flow_grpo.maths.poses import orthogonal
from flow_grpo.rewards.camera.features import Floats

STEP = 2  # pixels between points
BLURS = (4.0, 2.0, 1.0)  # pixels: sigmas of the blurred pictures that are compared
STEPS = 6  # of Levenberg-Marquardt with each
DOUBT = 12.0  # grey levels of a difference that counts half
LEAST_INSIDE = 0.25  # share of the points that a pose must keep in the picture
LOST = 0.5  # share of the variance left unexplained: under 0.2 in a blurred retake, above 0.8 in another scene
NEAREST = 0.05  # of the usual depth: nearer points are behind the camera
CONTRAST, BRIGHTNESS = 0.6, 128.0  # grey levels: how far both may differ


def place_pixels(depth: Floats, turn: Floats, camera: Floats, size: tuple[int, int]) -> Floats:
    """Return where (N, 3) lies what every `STEP`th pixel of a picture (h, w) shows, seen from its camera.

    `depth` (h', w') is in metres along the optical axis; `turn` (3, 3) takes the camera's axes to the world's, in
    which the places are.
    """
    x, y = _pixels(size).T
    rows, columns = (
        (at * (shown / side)).astype(int) for at, shown, side in zip((y, x), depth.shape, size, strict=True)
    )
    rays = np.stack([x, y, np.ones_like(x)], -1) @ np.linalg.inv(camera).T
    return np.asarray((rays * depth[rows, columns, None]) @ turn.T)


def _pixels(size: tuple[int, int]) -> Floats:
    rows, columns = (np.arange(STEP // 2, side, STEP, dtype=np.float64) for side in size)
    return np.stack(np.meshgrid(columns, rows), -1).reshape(-1, 2)


@dataclasses.dataclass(frozen=True)
class _Level:
    """F pictures blurred alike, and the points that are looked for in them."""

    pictures: Tensor  # (F, 3, h, w) brightness and its slopes along x and y
    shown: Tensor  # (F, 1, N) brightness of the points in the source
    places: Tensor  # (F, 1, N, 3)
    camera: Tensor  # (4,) fx, fy, cx, cy in pixels from the centre of the first
    nearest: float  # metres

    def look_up(self, poses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the points as poses (F, M, 4, 4) see them.

        Those are their brightness (F, M, N), its slopes along the camera's axes a metre and a radian (F, M, N, 6), and
        which of the points are in the picture (F, M, N).
        """
        local = (self.places - poses[..., None, :3, 3]) @ poses[..., :3, :3]
        near = 1 / local[..., 2:].clamp(min=self.nearest)
        focal, centre = self.camera.split(2)
        pixels = focal * local[..., :2] * near + centre
        last = torch.tensor(self.pictures.shape[:-3:-1]) - 1
        inside = (local[..., 2] > self.nearest) & ((pixels >= 0) & (pixels <= last)).all(-1)
        seen, *slopes = grid_sample(self.pictures, 2 * pixels / last - 1, align_corners=True).unbind(1)
        slope = torch.stack(slopes, -1) * focal * near
        slope = torch.cat([slope, -(slope * local[..., :2]).sum(-1, keepdim=True) * near], -1)
        return seen, torch.cat([-torch.linalg.cross(local, slope), -slope], -1), inside


def _compare(level: _Level, poses: Tensor, look: Tensor) -> Fit:
    """Return how well poses explain the pictures; the look is contrast less 1, and brightness in grey levels."""
    seen, slopes, inside = level.look_up(poses)
    contrast, bright = look[..., None].unbind(-2)
    error = seen - (1 + contrast) * level.shown - bright
    squares = (error / DOUBT).square()
    looks = torch.stack([-level.shown.expand_as(error), -torch.ones_like(error)], -1)
    jacobian = torch.cat([slopes, looks], -1)
    weighted = (jacobian * (inside / (1 + squares))[..., None]).mT
    cost = (squares.log1p() * inside).sum(-1) / inside.sum(-1)
    few = inside.float().mean(-1) < LEAST_INSIDE
    gradient = (weighted @ error[..., None])[..., 0]
    return Fit(poses, look, cost.masked_fill(few, torch.inf), weighted @ jacobian, gradient)


def _confine(centres: Tensor, look: Tensor) -> tuple[Tensor, Tensor]:
    most = torch.tensor([CONTRAST, BRIGHTNESS])
    return centres, look.clamp(-most, most)


def _unexplained(level: _Level, poses: Tensor) -> Tensor:
    """Return the share (F, M) of the points' variance that poses do not explain."""
    seen, _, inside = level.look_up(poses)
    count = inside.sum(-1, keepdim=True)
    seen, shown = (((part - (inside * part).sum(-1, keepdim=True) / count) * inside) for part in (seen, level.shown))
    power = seen.square().sum(-1) * shown.square().sum(-1)
    return 1 - (seen * shown).sum(-1).square() / power


def align(
    video: NDArray[np.uint8], source: NDArray[np.uint8], places: Floats, camera: Floats, starts: Floats
) -> Floats:
    """Return the camera-to-world poses (F, 4, 4) of a video's frames, NaN where not located.

    Args:
        video: (F, h, w) grey.
        source: (F, h, w) likewise, of the same instants.
        places: (F, N, 3) in metres, from `place_pixels` and the source's place.
        camera: (3, 3) from `pnp.camera_matrix`.
        starts: (F, M, 4, 4) poses to start from; frames go on from where their neighbours end, too.
    """
    pixels = torch.from_numpy(_pixels(video.shape[1:])).float()
    at = (2 * pixels / (torch.tensor(video.shape[:0:-1]) - 1) - 1).expand(len(video), 1, -1, 2)
    where = torch.from_numpy(places[:, None]).float()
    focal = torch.tensor([camera[0, 0], camera[1, 1], camera[0, 2], camera[1, 2]]).float()
    nearest = NEAREST * float(np.median(np.linalg.norm(places - starts[:, :1, :3, 3], axis=-1)))
    poses = torch.from_numpy(starts).float()
    for blur in BLURS:
        soft, own = (
            torch.from_numpy(gaussian_filter(each.astype(np.float32), (0, blur, blur))) for each in (video, source)
        )
        pictures = torch.stack([soft, *torch.gradient(soft, dim=(-1, -2))], 1)
        level = _Level(pictures, grid_sample(own[:, None], at, align_corners=True)[:, 0], where, focal, nearest)
        fit = refine(functools.partial(_compare, level), _confine, poses, STEPS)
        poses = best(fit.poses, fit.cost, 1)
        if blur == BLURS[0]:
            before, after = poses[[0, *range(len(poses) - 1)]], poses[[*range(1, len(poses)), -1]]
            poses = torch.cat([poses, before, after], 1)
    located = (_unexplained(level, poses) < LOST) & fit.cost.isfinite()
    return np.where(located.numpy()[..., None], orthogonal(poses[:, 0]).numpy(), np.nan)
