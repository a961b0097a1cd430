"""Reward for a camera that moves as steadily as commanded; use it together with `pose_rot` and `pose_trans`.

The pose rewards score every frame independently: jitter below their noise floor still shakes visibly. This reward
compares the speed of the estimated path from one step to the next. It does not measure where the camera went, and a
static video is perfectly steady: never use it without `pose_*`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flow_grpo.maths.poses import rotation_vector
from flow_grpo.rewards.camera.pose import CAP_REACHES, ROT_CAP_DEG, PathReward, PoseErrors

TURN_NOISE_DEG, MOVE_NOISE_M = 0.1, 0.01  # jitter of the estimate itself on correct, even degraded, videos


def unsteadiness(poses: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
    """Return the changes of rotation and translation from one step to the next: degrees and metres (N - 2,) float64.

    With even steps these are the norms of the second differences of the rotation vector and of the centre. Rotations
    are taken from step to step, so that all stay far below 180 degrees. A step is the mean distance of the N frames, 3
    at least, by their numbers (N,). NaN in the poses (N, 4, 4) propagates.
    """
    gaps = frames.double().diff()[:, None]
    gaps = gaps / gaps.mean()
    turns = rotation_vector(poses[:-1, :3, :3].mT @ poses[1:, :3, :3]).rad2deg() / gaps
    moves = poses[:, :3, 3].diff(dim=0) / gaps
    return turns.diff(dim=0).norm(dim=-1), moves.diff(dim=0).norm(dim=-1)


class Smooth(PathReward):
    """Steadiness of the camera path, compared with the commanded one.

    value = -1/2 mean_i min(a_i / 45 deg, 1) - 1/2 mean_i min(b_i / 2 L, 1) over all pairs i of successive steps. a_i
    (degrees per step) and b_i (metres per step) are how much more the rotation and the translation change from one step
    to the next than in the commanded path, less the estimator's noise of 0.1 degrees and 1 cm. Caps and L are those of
    the pose rewards: with smaller ones a correct path with a little jitter would score below a static one. A step is a
    twentieth of a video of 21 frames or more. Pairs with an unlocated frame score the cap, as do all pairs of a video
    most of whose frames are unlocated.

    `info`: `shake_deg` and `shake_m`, means of a_i and b_i; `valid_frames` and `unregistered` as for `PoseRot`.
    """

    name = "smooth"
    floor = 0.001  # a tenth of a degree more
    measures = ("shake_deg", "shake_m", "valid_frames", "unregistered")

    def read(self, errors: PoseErrors) -> tuple[float, ...]:
        """Return the value, `shake_deg` and `shake_m`; ValueError for fewer than 3 frames with weight."""
        scored = errors.weights > 0
        if scored.sum() < 3:
            raise ValueError(f"steadiness needs at least 3 frames that can be scored, got {int(scored.sum())}")
        frames = torch.tensor(errors.frames)[scored]
        wanted = unsteadiness(errors.commanded[scored], frames)
        found = unsteadiness(errors.seen[scored], frames)
        caps = (ROT_CAP_DEG, CAP_REACHES * errors.reach)
        excess = []
        for seen, asked, noise, cap in zip(found, wanted, (TURN_NOISE_DEG, MOVE_NOISE_M), caps, strict=True):
            lost = seen.isnan() | errors.unregistered
            excess.append((seen - asked - noise).clamp(min=0).masked_fill(lost, cap))
        shares = [(part / cap).clamp(max=1).mean() for part, cap in zip(excess, caps, strict=True)]
        return -float(sum(shares)) / 2, float(excess[0].mean()), float(excess[1].mean())
