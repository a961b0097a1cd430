"""Pictures as well exposed as the source's: a companion against glare, wrong colours, grids and flicker.

What the rewards of cameras and features do not notice: an over-exposed video keeps its features where they were. The
source says what the scene looks like; where there is a ground-truth view, looking like that is as right. What lies
between the two, or beyond them by less than a tolerance for another view of the same scene, costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from einops import reduce
from torch import Tensor

from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.frames import frame_numbers, luma

DARK, BRIGHT = 5 / 255, 250 / 255  # colours up to and from which detail is lost
PERIOD = 16  # pixels of one token: a codec of 8 times patches of 2. What repeats every 8 repeats every 16
OTHER_PERIODS = (13, 14, 15, 17, 18, 19)  # in which any content lies as well as in PERIOD
REACH = 2  # pixels, of the filter that keeps what differs from its surroundings
# (what is measured, tolerance, excess at which its score ends): shares of colour values, colours in [0, 1]
PARTS = (
    ("clipped", 0.01, 0.2),
    ("luma", 0.03, 0.2),
    ("saturation", 0.03, 0.2),
    ("grid", 0.002, 0.01),
    ("flicker", 0.003, 0.05),
)
BOTH_WAYS = ("luma", "saturation")  # too little is as wrong as too much


def looks(video: Tensor) -> Tensor:
    """Return (5,) measurements of a video (3, T, h, w) in [0, 1], in the order of `PARTS`.

    Clipped: share of colour values at or beyond the ends of the range. Luma: mean brightness. Saturation: mean
    distance of the largest and the smallest channel. Grid: see `grid`. Flicker: how far a frame's mean brightness is
    from the middle of its neighbours', mean over frames, so that steady changes do not count.
    """
    chosen = video[:, frame_numbers(video.shape[1])].float()
    brightness = luma(video).mean(dim=(1, 2))
    jumps = brightness[1:-1] - (brightness[:-2] + brightness[2:]) / 2
    clipped = ((chosen <= DARK) | (chosen >= BRIGHT)).float().mean()
    saturation = (chosen.amax(0) - chosen.amin(0)).mean()
    return torch.stack([clipped, brightness.mean(), saturation, grid(luma(chosen)), jumps.abs().mean()])


def grid(pictures: Tensor) -> Tensor:
    """Return the rms, a colour, of what repeats every 16 pixels in pictures (T, h, w), beyond what any content does.

    The mean tile of a picture that is cut every 16 pixels keeps a grid and averages content away; how much of that is
    left is told by tiles of other sizes, in which the grid averages away as well. Frame by frame, since a camera that
    moves by 16 pixels a frame would otherwise pass for a grid. Pictures of fewer than 4 tiles show none.
    """
    height, width = pictures.shape[-2:]
    if ((height - 2 * REACH) // PERIOD) * ((width - 2 * REACH) // PERIOD) < 4:
        return torch.zeros(())
    rows, columns = (slice(REACH, length - REACH) for length in (height, width))
    sides = pictures[:, rows, : -2 * REACH] + pictures[:, rows, 2 * REACH :]
    ends = pictures[:, : -2 * REACH, columns] + pictures[:, 2 * REACH :, columns]
    detail = pictures[:, rows, columns] - (sides + ends) / 4
    others = torch.stack([_tile_power(detail, period) for period in OTHER_PERIODS])
    return (_tile_power(detail, PERIOD) - others.mean()).clamp(min=0).sqrt()


def _tile_power(detail: Tensor, period: int) -> Tensor:
    """Return the variance within the mean tile of `period` pixels, mean over pictures (T, h, w)."""
    height, width = (length // period * period for length in detail.shape[-2:])
    tiles = reduce(detail[:, :height, :width], "t (i y) (j x) -> t y x", "mean", y=period, x=period)
    return tiles.var(dim=(1, 2), correction=0).mean()


class Exposure:
    """Looks of the video beside those of the source, and of the ground-truth view where there is one.

    value = -mean_k min(e_k / s_k, 1) over the five parts k: share of clipped colours, mean brightness, mean saturation,
    a grid of 8 or 16 pixels, flicker. e_k is by how much the range that the references span is left by more than the
    tolerance t_k; t_k and s_k are `PARTS`. `info`: e_k of every part.
    """

    name = "exposure"
    floor = 0.005
    measures = tuple(name for name, _, _ in PARTS)

    @torch.no_grad()
    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score (B, 3, T, h, w) videos in [0, 1].

        Raises:
            ValueError: videos of fewer than 3 frames, which cannot be seen to flicker.
        """
        if videos.shape[2] < 3:
            raise ValueError(f"flicker needs at least 3 frames, got videos of {videos.shape[2]}")
        tolerances, scales = (torch.tensor([part[place] for part in PARTS]) for place in (1, 2))
        least, most = (torch.stack(bounds) for bounds in zip(*map(_references, conditions), strict=True))
        seen = torch.stack([looks(video) for video in videos])
        excess = torch.maximum(seen - most, least - seen) - tolerances
        excess = excess.clamp(min=0)
        values = -(excess / scales).clamp(max=1).mean(1)
        valid = torch.ones(len(conditions), dtype=torch.bool)
        info = dict(zip(self.measures, excess.unbind(1), strict=True))
        return RewardResult(values, valid, ("",) * len(conditions), info)


def _references(condition: Condition) -> tuple[Tensor, Tensor]:
    """Return the least and the most (5,) that are right."""
    videos = [condition.source_video] + ([] if condition.target_video is None else [condition.target_video])
    seen = torch.stack([looks(video) for video in videos])
    both = torch.tensor([name in BOTH_WAYS for name in Exposure.measures])
    return seen.amin(0).where(both, torch.tensor(-math.inf)), seen.amax(0)
