"""Exposure compared with the source video: a companion reward against glare, wrong colours, grids and flicker.

Rewards of cameras and features miss these: an over-exposed video keeps its features in place. The source, and the
ground-truth view if there is one, span a range of correct values. There is no penalty inside it, or outside by less
than a tolerance for another view of the same scene.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from einops import reduce
from torch import Tensor

from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.frames import frame_numbers, luma
from flow_grpo.rewards.references import References
from flow_grpo.rewards.results import all_valid

DARK, BRIGHT = 5 / 255, 250 / 255  # colours at or beyond these are clipped
PERIOD = 16  # pixels of a token: codec stride 8 times patch size 2; what repeats every 8 repeats every 16
OTHER_PERIODS = (13, 14, 15, 17, 18, 19)  # show how much any content repeats
REACH = 2  # pixels, of the high-pass filter
# (name, tolerance, excess that costs all of the part): shares of colour values, colours in [0, 1]
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

    Clipped: share of clipped colour values. Luma: mean brightness. Saturation: mean difference of the largest and the
    smallest channel. Grid: see `grid`. Flicker: mean distance of a frame's mean brightness from the average of its
    neighbours', so that steady changes do not count.
    """
    chosen = video[:, frame_numbers(video.shape[1])].float()
    brightness = luma(video).mean(dim=(1, 2))
    jumps = brightness[1:-1] - (brightness[:-2] + brightness[2:]) / 2
    clipped = ((chosen <= DARK) | (chosen >= BRIGHT)).float().mean()
    saturation = (chosen.amax(0) - chosen.amin(0)).mean()
    return torch.stack([clipped, brightness.mean(), saturation, grid(luma(chosen)), jumps.abs().mean()])


def grid(pictures: Tensor) -> Tensor:
    """Return the rms amplitude of a pattern with a period of 16 pixels in pictures (T, h, w), corrected for content.

    Averaging a picture's 16-pixel tiles keeps such a grid and suppresses content; averages of tiles of other sizes,
    which suppress the grid too, estimate the content's remainder, which is subtracted. Each frame is averaged alone: a
    camera that moves by 16 pixels a frame would otherwise look like a grid. 0 for pictures of fewer than 4 tiles.
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
    """Average each picture's tiles of `period` x `period` pixels; return the variance of that tile, mean over T."""
    height, width = (length // period * period for length in detail.shape[-2:])
    tiles = reduce(detail[:, :height, :width], "t (i y) (j x) -> t y x", "mean", y=period, x=period)
    return tiles.var(dim=(1, 2), correction=0).mean()


class Exposure:
    """Looks of the video, compared with the source and, if there is one, the ground-truth view.

    value = -mean_k min(e_k / s_k, 1) over the five `PARTS` k: share of clipped colours, mean brightness, mean
    saturation, a grid of 8 or 16 pixels, flicker. e_k is the distance from the range that the references span, less the
    tolerance t_k; s_k is the scale. `info`: e_k of every part.
    """

    name = "exposure"
    needs = ("source_video",)
    floor = 0.005
    measures = tuple(name for name, _, _ in PARTS)

    def __init__(self) -> None:
        self.prepare = References(_range)

    @torch.no_grad()
    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score videos (B, 3, T, h, w); ValueError for fewer than 3 frames, in which flicker is not defined."""
        if videos.shape[2] < 3:
            raise ValueError(f"flicker needs at least 3 frames, got videos of {videos.shape[2]}")
        tolerances, scales = (torch.tensor([part[place] for part in PARTS]) for place in (1, 2))
        low, high = self.prepare(conditions).unbind(1)
        found = torch.stack([looks(video) for video in videos])
        excess = (torch.maximum(found - high, low - found) - tolerances).clamp(min=0)
        values = -(excess / scales).clamp(max=1).mean(1)
        return all_valid(conditions, values, dict(zip(self.measures, excess.unbind(1), strict=True)))


def _range(condition: Condition) -> Tensor:
    """Return the lowest and the highest right measurements (2, 5), each as `looks`."""
    videos = [condition.need_source()] + ([] if condition.target_video is None else [condition.target_video])
    found = torch.stack([looks(video) for video in videos])
    both = torch.tensor([name in BOTH_WAYS for name in Exposure.measures])
    return torch.stack([found.amin(0).where(both, torch.tensor(-math.inf)), found.amax(0)])
