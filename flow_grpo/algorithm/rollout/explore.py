"""Exploration in the command: the copies of a condition are each sampled for a camera path beside the commanded one.

A model that follows its commands films nearly the same path from every noise, so that the copies of a group differ in
picture more than in camera, and rewards of the camera rank little but luck. Asked for different paths, they differ in
camera by design. They are scored against the true command and the update learns from them under the true command: where
a path beside it was answered better, the model learns to answer the command as it answered that one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from flow_grpo.maths.keys import generator
from flow_grpo.maths.poses import pose, rotation_matrix
from flow_grpo.models.policy import Policy
from flow_grpo.records import Condition, Conditioning
from flow_grpo.settings.sampling import Sampling

PITCH_YAW_ROLL = (1.0, 1.0, 0.0)  # no command rolls the camera


def asked(
    policy: Policy, conditions: Sequence[Condition], conditioning: Conditioning, sampling: Sampling
) -> Conditioning:
    """Return what the copies are sampled for: their `conditioning`, or that of paths beside the commanded ones."""
    return policy.encode(beside(conditions, sampling)) if any(sampling.command_spread) else conditioning


def beside(conditions: Sequence[Condition], sampling: Sampling) -> list[Condition]:
    """Return copies' conditions with the camera paths that they are sampled for, by seed, gid and slot.

    Slots 2 n and 2 n + 1 of a group deviate by opposite amounts, so that the deviations of a group average to zero.
    """
    metres, degrees = sampling.command_spread
    varied = []
    for condition in conditions:
        path = condition.need_poses()
        move, turn = deviation(condition, sampling).to(path)
        turn = (degrees * turn * torch.tensor(PITCH_YAW_ROLL)).deg2rad()
        varied.append(dataclasses.replace(condition, target_poses=drifting(path, metres * move, turn)))
    return varied


def deviation(condition: Condition, sampling: Sampling) -> Tensor:
    """Return the (2, 3) standard normal numbers of a copy's move and turn."""
    pair, other = divmod(condition.slot, 2)
    draw = generator(sampling.seed, "command", condition.gid, pair)
    return (-1 if other else 1) * torch.randn(2, 3, generator=draw)


def drifting(path: Tensor, move: Tensor, turn: Tensor) -> Tensor:
    """Return a path (T, 4, 4) to which a steady motion is added: nothing at the first frame, all of it at the last.

    Args:
        path: (T, 4, 4) camera-to-world, relative to the reference camera.
        move: (3,) in metres, in the axes of the reference camera.
        turn: (3,) rotation vector in radians, in the camera's own axes.
    """
    progress = torch.linspace(0, 1, len(path), dtype=path.dtype)[:, None]
    return pose(path[:, :3, :3] @ rotation_matrix(progress * turn), path[:, :3, 3] + progress * move)
