"""How sharp the pictures are: a quality score that asks for nothing else, and so the plainest one to be hacked.

Learned judges of quality fail in the same way, only slower: alone, they are satisfied by pictures that no camera took
(docs/reward_hacking.md). Give it weight only beside a reward that sees the camera.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flow_grpo.records import Condition, RewardResult

SMALLEST_EDGE = 1 / 255  # colour, one grey level: less than this is no edge


def edges(videos: Tensor) -> Tensor:
    """Return (B,) mean absolute colour differences of neighbouring pixels of (B, 3, T, h, w) videos in [0, 1]."""
    return (videos.diff(dim=-1).abs().mean(dim=(1, 2, 3, 4)) + videos.diff(dim=-2).abs().mean(dim=(1, 2, 3, 4))) / 2


class Sharpness:
    """value = log(m + e) with m from `edges` and e of one grey level. `info`: `edges`, m of the generated video."""

    name = "sharpness"
    floor = 0.01  # 1 % more or less contrast between neighbours
    measures = ("edges",)

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score (B, 3, T, h, w) videos in [0, 1]."""
        seen = edges(videos.float())
        valid = torch.ones(len(conditions), dtype=torch.bool)
        return RewardResult((seen + SMALLEST_EDGE).log(), valid, ("",) * len(conditions), {"edges": seen})
