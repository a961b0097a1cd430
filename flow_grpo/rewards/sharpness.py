"""Sharpness of the pictures: the simplest quality score, and the easiest to exploit.

Learned quality models fail in the same way, only more slowly: alone they reward pictures that no camera took
(docs/reward_hacking.md). Give it weight only together with a reward of the camera.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.results import all_valid

GREY_LEVEL = 1 / 255  # colour difference below which nothing counts as an edge


def edges(videos: Tensor) -> Tensor:
    """Return (B,) mean absolute colour differences of neighbouring pixels of (B, 3, T, h, w) videos in [0, 1]."""
    return (videos.diff(dim=-1).abs().mean(dim=(1, 2, 3, 4)) + videos.diff(dim=-2).abs().mean(dim=(1, 2, 3, 4))) / 2


class Sharpness:
    """value = log(m + e) with m from `edges` and e of one grey level. `info`: `edges`, m of the generated video."""

    name = "sharpness"
    floor = 0.001  # ten times what writing a video in 8 bits changes; nothing is estimated
    measures = ("edges",)

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score (B, 3, T, h, w) videos in [0, 1]."""
        found = edges(videos.float())
        return all_valid(conditions, (found + GREY_LEVEL).log(), {"edges": found})
