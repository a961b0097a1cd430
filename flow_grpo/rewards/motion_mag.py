"""Amount of motion compared with the reference: a companion reward against frozen and flickering videos."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.references import References
from flow_grpo.rewards.results import all_valid

GREY_LEVEL = 1 / 255  # colour difference below which nothing counts as motion


def motion(videos: Tensor) -> Tensor:
    """Return (B,) mean absolute colour change between neighbouring frames of (B, 3, T, h, w) videos in [0, 1]."""
    return videos.diff(dim=2).abs_().mean(dim=(1, 2, 3, 4))


class MotionMag:
    """value = -|log((m_generated + e) / (m_reference + e))| with m from `motion` and e of one grey level.

    The reference is the ground-truth view, else the source video. `info`: `motion`, m of the generated video.
    """

    name = "motion_mag"
    needs = ("source_video",)
    floor = 0.02  # 2 % more or less motion
    measures = ("motion",)

    def __init__(self) -> None:
        self.prepare = References(_reference_motion)

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score videos (B, 3, T, h, w); ValueError for a single frame."""
        if videos.shape[2] < 2:
            raise ValueError(f"motion needs at least 2 frames, got videos of {videos.shape[2]}")
        wanted = self.prepare(conditions)
        found = motion(videos.float())
        values = -((found + GREY_LEVEL) / (wanted + GREY_LEVEL)).log().abs()
        return all_valid(conditions, values, {"motion": found})


def _reference_motion(condition: Condition) -> Tensor:
    reference = condition.need_source() if condition.target_video is None else condition.target_video
    return motion(reference[None].float())[0]
