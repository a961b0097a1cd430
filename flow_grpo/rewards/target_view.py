"""Agreement with the synchronised ground-truth view, where the data set has one.

Pixel scores saturate far from the target and, near it, mostly measure how sharp the sample happens to be: on small
soft videos the motion explains little of their variance inside a group. So each frame is aligned with its target by a
shift, a zoom and a roll; the score is how far that moves the picture, plus a term for content that no motion explains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

from flow_grpo.maths.pictures import blur, choose, shrink
from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.results import scored_rows, why_not_comparable

ALIGN_COLUMNS = 48  # pictures are aligned at this width or less
COARSE_BLUR = 1 / 16  # of the width: reaches displacements of several pixels
STEPS = (3, 4)  # Levenberg-Marquardt steps on the blurred, then on the sharp picture
DISPLACEMENT_CAP = 0.25  # of the width: at and beyond it a frame has the lowest score
SMALLEST_CONTRAST = 0.05  # standard deviation of a target frame's colours, below which mismatch is not magnified
SSIM_SIGMA, SSIM_LUMA, SSIM_CONTRAST = 1.5, 0.01**2, 0.03**2  # Wang et al. 2004, for colours in [0, 1]


def psnr_db(videos: Tensor, targets: Tensor) -> Tensor:
    """Return (B,) dB: the mean over frames of each frame's PSNR, at most 100 dB; videos (B, 3, T, h, w) in [0, 1]."""
    error = (videos - targets).square().mean(dim=(1, 3, 4))
    return (-10 * error.clamp_min(1e-10).log10()).mean(-1)


def ssim(videos: Tensor, targets: Tensor) -> Tensor:
    """Return (B,) structural similarity, the mean over pixels, colours and frames of (B, 3, T, h, w) in [0, 1]."""
    first, second = blur(videos, SSIM_SIGMA), blur(targets, SSIM_SIGMA)
    first_power = blur(videos.square(), SSIM_SIGMA) - first.square()
    second_power = blur(targets.square(), SSIM_SIGMA) - second.square()
    product = blur(videos * targets, SSIM_SIGMA) - first * second
    luma = (2 * first * second + SSIM_LUMA) / (first.square() + second.square() + SSIM_LUMA)
    contrast = (2 * product + SSIM_CONTRAST) / (first_power + second_power + SSIM_CONTRAST)
    return (luma * contrast).mean(dim=(1, 2, 3, 4))


@dataclasses.dataclass(frozen=True)
class _Overlay:
    """Warped frames: motions (N, 4), contrasts (N,), cost (N,), J^T J (N, 5, 5) and gradient J^T r (N, 5)."""

    motion: Tensor
    contrast: Tensor
    cost: Tensor
    normal: Tensor
    gradient: Tensor


def _motions(height: int, width: int) -> Tensor:
    """Return (4, 2, h, w) displacement fields of 1 pixel rms: right, down, zoom, roll.

    Four parameters describe what a camera does to a whole picture; six or eight also fit noise and halve the signal
    near the target.
    """
    y, x = torch.meshgrid(torch.arange(height) + 0.5 - height / 2, torch.arange(width) + 0.5 - width / 2, indexing="ij")
    one, zero = torch.ones_like(x), torch.zeros_like(x)
    radius = (x.square() + y.square()).mean().sqrt()
    pairs = [(one, zero), (zero, one), (x / radius, y / radius), (-y / radius, x / radius)]
    return torch.stack([torch.stack(pair) for pair in pairs])


def _warp(source: Tensor, target: Tensor, fields: Tensor, motion: Tensor, contrast: Tensor) -> _Overlay:
    """Warp `source` (N, 9, h, w), colours and their gradients in x and y, and compare it with target (N, 3, h, w)."""
    height, width = target.shape[-2:]
    right, down = rearrange(motion @ fields.flatten(1), "n (i y x) -> i n y x", i=2, y=height)
    x, y = torch.arange(width) + 0.5, torch.arange(height)[:, None] + 0.5
    place = torch.stack([(x + right) * (2 / width) - 1, (y + down) * (2 / height) - 1], dim=-1)
    warped = functional.grid_sample(source, place, align_corners=False, padding_mode="border")
    inside = (place.abs() < 1).all(-1)[:, None].float()
    colours, along_x, along_y = warped.split(3, dim=1)
    centred = colours - colours.mean(dim=(1, 2, 3), keepdim=True)
    gain = contrast[:, None, None, None]
    error = (colours + gain * centred - target) * inside
    along_x, along_y = along_x * (inside * (1 + gain)), along_y * (inside * (1 + gain))
    by_motion = [along_x * field[0] + along_y * field[1] for field in fields]
    jacobian = torch.stack([*by_motion, centred * inside], dim=1).flatten(2)
    # A warp must not win by moving the picture out of sight: at least a fifth of it is counted.
    count = 3 * inside.sum(dim=(1, 2, 3)).clamp_min(0.2 * height * width)
    cost = error.square().sum(dim=(1, 2, 3)) / count
    gradient = (jacobian @ error.flatten(1)[..., None])[..., 0]
    return _Overlay(motion, contrast, cost, jacobian @ jacobian.mT, gradient)


def _planes(pictures: Tensor) -> Tensor:
    """Return (N, 9, h, w): colours, then their gradients along x and y per pixel."""
    framed = functional.pad(pictures, (1, 1, 1, 1), mode="replicate")
    along_x = framed[..., 1:-1, 2:] - framed[..., 1:-1, :-2]
    along_y = framed[..., 2:, 1:-1] - framed[..., :-2, 1:-1]
    return torch.cat([pictures, along_x / 2, along_y / 2], dim=1)


def _improve(source: Tensor, target: Tensor, motion: Tensor, contrast: Tensor, steps: int) -> _Overlay:
    height, width = target.shape[-2:]
    fields, limit = _motions(height, width), width / 8
    planes = _planes(source)
    overlay = _warp(planes, target, fields, motion, contrast)
    damping = torch.full_like(overlay.cost, 1e-2)
    for _ in range(steps):
        diagonal = overlay.normal.diagonal(dim1=-2, dim2=-1)
        ridge = damping[:, None] * diagonal + 1e-4 * diagonal.mean(-1, keepdim=True) + 1e-6
        step = -torch.linalg.solve(overlay.normal + torch.diag_embed(ridge), overlay.gradient[..., None])[..., 0]
        motion = overlay.motion + step[:, :4].clamp(-limit, limit)
        contrast = (overlay.contrast + step[:, 4]).clamp(-0.5, 1.0)
        trial = _warp(planes, target, fields, motion, contrast)
        better = trial.cost < overlay.cost
        overlay = choose(better, trial, overlay)
        damping = torch.where(better, 0.1 * damping, 10 * damping)
    return overlay


def align(frames: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Align frames (N, 3, h, w) with targets by shift, zoom, roll and contrast: least squares, coarse to fine.

    Return (N,) root mean square displacements of the picture, as a share of its width, and (N,) mismatches, the share
    of the target's colour variance that the aligned frame does not explain.
    """
    frames, targets = shrink(frames, ALIGN_COLUMNS), shrink(targets, ALIGN_COLUMNS)
    count, _, height, width = targets.shape
    soft = COARSE_BLUR * width
    coarse = _improve(blur(frames, soft), blur(targets, soft), torch.zeros(count, 4), torch.zeros(count), STEPS[0])
    overlay = _improve(frames, targets, coarse.motion, coarse.contrast, STEPS[1])
    moved = overlay.motion @ _motions(height, width).flatten(1)
    displacement = moved.square().mean(-1).mul(2).sqrt() / width  # both directions
    variance = targets.var(dim=(2, 3)).mean(1).clamp_min(SMALLEST_CONTRAST**2)
    # Contrast is fitted so that it does not bias the motion; the mismatch counts it.
    faithful = _warp(_planes(frames), targets, _motions(height, width), overlay.motion, torch.zeros(count))
    return displacement, faithful.cost / variance


class TargetPsnr:
    """Pixel agreement with the ground-truth view: value = PSNR in dB, the mean over frames.

    PSNR hardly measures how far a wrong camera is off, but penalises what no displacement explains, such as blur and
    bent walls. Next to `target_view` it stops a policy that already moves correctly from trading sharpness for the last
    tenth of a pixel.
    """

    name = "target_psnr"
    needs = ("target_video",)
    floor = 0.1  # dB: spread of good samples over their initial noise
    measures: tuple[str, ...] = ()

    @torch.no_grad()
    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score (B, 3, T, h, w) videos in [0, 1]; invalid where there is no target video of the same shape."""

        def score_rows(rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
            targets = torch.stack([t for row in rows if (t := conditions[row].target_video) is not None])
            return self.score(videos[rows].float(), targets)

        causes = [why_not_comparable(video, condition) for video, condition in zip(videos, conditions, strict=True)]
        return scored_rows(causes, self.measures, score_rows)

    def score(self, videos: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the values (B,) and measures of videos with their targets, both (B, 3, T, h, w) fp32."""
        return psnr_db(videos, targets), {}


class TargetView(TargetPsnr):
    """Agreement with the ground-truth view.

    value = -mean_i min(1, d_i / 0.25 + u_i^2) over frames i, with d_i the displacement to the target as a share of
    the picture's width and u_i the unexplained share of the target's colour variance. The square suppresses the small
    differences in sharpness between good samples, while an empty picture (u = 1) gets the worst score
    however well it "aligns". `info`: `psnr_db`, `ssim`, `displacement`, `mismatch`, means over frames.
    """

    name = "target_view"
    floor = 0.005  # a displacement of 0.12 % of the width, which a codec's noise can cause
    measures = ("psnr_db", "ssim", "displacement", "mismatch")

    def score(self, videos: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the values (B,) and measures of videos with their targets, both (B, 3, T, h, w) fp32."""
        frames, true = (rearrange(part, "b c t h w -> (b t) c h w") for part in (videos, targets))
        displacement, mismatch = align(frames, true)
        penalty = (displacement / DISPLACEMENT_CAP + mismatch.square()).clamp(max=1)
        penalty, *means = (part.unflatten(0, (len(videos), -1)).mean(1) for part in (penalty, displacement, mismatch))
        measured = (psnr_db(videos, targets), ssim(videos, targets), *means)
        return -penalty, dict(zip(self.measures, measured, strict=True))
