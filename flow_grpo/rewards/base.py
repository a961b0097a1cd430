"""What a reward is, and how several are run side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from flow_grpo.records import Condition, RewardResult


class Reward(Protocol):
    name: str
    floor: float

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult: ...


class RewardSet:
    def __init__(self, rewards: Sequence[Reward], weights: Mapping[str, float]) -> None:
        self.rewards = tuple(rewards)
        self.weights = dict(weights)

    def floor(self, name: str) -> float:
        return next(r.floor for r in self.rewards if r.name == name)

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> dict[str, RewardResult]:
        return {r.name: r(videos, conditions) for r in self.rewards}


def build_reward(name: str, *, data_root: str) -> Reward:
    if name == "target_view":
        from flow_grpo.rewards.target_view import TargetView

        return TargetView()
    from flow_grpo.rewards.room_pose import RoomPose

    return RoomPose(data_root)
