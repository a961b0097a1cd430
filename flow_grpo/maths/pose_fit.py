"""Levenberg-Marquardt on camera poses, for whatever says how well they explain a picture.

Letters: N frames, M candidate poses of a frame.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from flow_grpo.maths.pictures import choose
from flow_grpo.maths.poses import pose, rotation_matrix

LARGEST_TURN, LARGEST_MOVE = 0.3, 0.8  # radians and metres of one step


@dataclasses.dataclass(frozen=True)
class Fit:
    """M candidate poses for each of N frames."""

    poses: Tensor  # (N, M, 4, 4) absolute
    look: Tensor  # (N, M, 2) what is fitted with a pose of how a frame looks, 0 at first
    cost: Tensor  # (N, M) what is minimised, divided by a constant
    normal: Tensor  # (N, M, 8, 8) J^T J
    gradient: Tensor  # (N, M, 8) J^T r


Compare: TypeAlias = Callable[[Tensor, Tensor], Fit]  # of poses and look
Confine: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # camera centres (N, M, 3) and look


def refine(compare: Compare, confine: Confine, poses: Tensor, steps: int) -> Fit:
    """Improve M poses (N, M, 4, 4) of each frame, rejecting steps that make one worse.

    `compare` linearises in a rotation vector and a translation in the camera's axes, in radians and metres, and in the
    look; `confine` keeps centres and look where they may be.
    """
    fit = compare(poses, torch.zeros(*poses.shape[:2], 2))
    damping = torch.full_like(fit.cost, 1e-3)
    for _ in range(steps):
        diagonal = fit.normal.diagonal(dim1=-2, dim2=-1)
        ridge = damping[..., None] * diagonal + 1e-6
        step = -torch.linalg.solve(fit.normal + torch.diag_embed(ridge), fit.gradient[..., None])[..., 0]
        turn, move, look = step.split([3, 3, 2], dim=-1)
        turn = turn * (LARGEST_TURN / turn.norm(dim=-1, keepdim=True).clamp_min(LARGEST_TURN))
        move = move * (LARGEST_MOVE / move.norm(dim=-1, keepdim=True).clamp_min(LARGEST_MOVE))
        axes = fit.poses[..., :3, :3]
        centres, look = confine(fit.poses[..., :3, 3] + (axes @ move[..., None])[..., 0], fit.look + look)
        trial = compare(pose(axes @ rotation_matrix(turn), centres), look)
        better = trial.cost < fit.cost
        fit = choose(better, trial, fit)
        damping = torch.where(better, 0.1 * damping, 10 * damping)
    return fit


def best(poses: Tensor, cost: Tensor, count: int) -> Tensor:
    """Return the `count` poses of each frame with the lowest cost (N, M), best first."""
    index = cost.topk(count, dim=1, largest=False).indices
    return poses.take_along_dim(index[..., None, None], dim=1)
