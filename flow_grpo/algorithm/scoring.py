"""Latents -> videos -> rewards.

Scoring needs nothing but final latents and conditions and issues no collective, so it may move beside the next rollout
without a change here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from flow_grpo.models.policy import Policy
from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.base import RewardSet


@dataclasses.dataclass(frozen=True)
class Scores:
    """What B final latents are worth.

    Attributes:
        rewards: reward name -> result of B rows.
        videos: (B, 3, T, h, w) CPU fp32 in [0, 1], for logging and metrics.
    """

    rewards: dict[str, RewardResult]
    videos: Tensor


@torch.no_grad()
def decode(policy: Policy, latents: Tensor, *, batch_size: int) -> Tensor:
    """Return videos (B, 3, T, h, w) CPU fp32 of latents (B, C, F, H, W), `batch_size` at a time."""
    return torch.cat([policy.decode(part).float().cpu() for part in latents.split(batch_size)])


def score(
    policy: Policy, conditions: Sequence[Condition], latents: Tensor, rewards: RewardSet, *, batch_size: int
) -> Scores:
    """Decode B final latents (B, C, F, H, W) and measure every reward of the set.

    Raises:
        ValueError: the decoded videos have another size than the source videos.
    """
    videos = decode(policy, latents, batch_size=batch_size)
    wanted = (len(conditions), *conditions[0].source_video.shape)
    if tuple(videos.shape) != wanted:
        raise ValueError(
            f"decoded videos have shape {tuple(videos.shape)}, the conditions ask for {wanted}: data.num_frames, "
            "data.height and data.width must fit the model's codec"
        )
    return Scores(rewards=rewards(videos, conditions), videos=videos)
