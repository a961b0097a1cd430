"""Agreement with the source video in texture, wherever the camera is: what judges the picture without a true view.

Colour differences of neighbouring pixels are distributed alike in two videos of one scene, from whatever camera; blur
removes large ones, noise and the block borders of a codec add some. Of the demo's training the measure sees 7 %, as
the residual of the known room sees 18 %; the true view's own value is 0.6 of the base policy's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.results import all_valid

BINS = 1024  # of colour differences in [0, 1]


def _shares(video: Tensor) -> Tensor:
    """Return (BINS,) shares of the differences of neighbouring pixels of (3, T, h, w) that are below each bin's end."""
    counts = sum(torch.histc(video.float().diff(dim=dim).abs(), BINS, 0, 1) for dim in (-1, -2))
    assert isinstance(counts, Tensor)
    return (counts / counts.sum()).cumsum(0)


class SourceTexture:
    """value = -W, the Wasserstein distance of the two distributions of colour differences, a colour in [0, 1]."""

    name = "source_texture"
    needs = ("source_video",)
    floor = 0.0005  # what writing in 8 bits changes at most; 0.0002 on average
    measures: tuple[str, ...] = ()

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score (B, 3, T, h, w) videos in [0, 1]."""
        pairs = zip(videos, conditions, strict=True)
        found = torch.stack([(_shares(video) - _shares(one.need_source())).abs().mean() for video, one in pairs])
        return all_valid(conditions, -found, {})
