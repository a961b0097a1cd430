"""Amount of motion compared with the reference: a companion reward against frozen and flickering videos."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.references import References
from flow_grpo.rewards.results import scored_rows, why_not_comparable

GREY_LEVEL = 1 / 255  # colour difference below which nothing counts as motion


def motion(videos: Tensor) -> Tensor:
    """Return (B,) mean absolute colour change between neighbouring frames of (B, 3, T, h, w) videos in [0, 1]."""
    return videos.diff(dim=2).abs_().mean(dim=(1, 2, 3, 4))


class MotionMag:
    """value = -|log((m_generated + e) / (m_reference + e))| with m from `motion` and e of one grey level.

    The reference is the ground-truth view; without one there is no value: a camera along another path sees another
    amount of motion than the source's, and beside a still source the best video would stand still. `info`: `motion`,
    m of the generated video.
    """

    name = "motion_mag"
    needs = ("target_video",)
    floor = 0.02  # 2 % more or less motion
    measures = ("motion",)

    def __init__(self) -> None:
        self.prepare = References(_reference_motion)

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score videos (B, 3, T, h, w); ValueError for a single frame."""
        if videos.shape[2] < 2:
            raise ValueError(f"motion needs at least 2 frames, got videos of {videos.shape[2]}")

        def score(rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
            wanted, found = self.prepare([conditions[row] for row in rows]), motion(videos[rows].float())
            return -((found + GREY_LEVEL) / (wanted + GREY_LEVEL)).log().abs(), {"motion": found}

        causes = [why_not_comparable(video, condition) for video, condition in zip(videos, conditions, strict=True)]
        return scored_rows(causes, self.measures, score)


def _reference_motion(condition: Condition) -> Tensor:
    assert condition.target_video is not None, "rows without a true view are left out"
    return motion(condition.target_video[None].float())[0]
