"""A camera that moves as steadily as its command: a companion of `pose_rot` and `pose_trans` against trembling.

The pose rewards judge every frame on its own; a path that trembles by less than they can tell from the truth is still
seen to shake. Here the speed of the path that was found is compared from one step to the next. A video that stands
still is perfectly steady, so this reward says nothing of where the camera went: never use it without `pose_*`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flow_grpo.maths.poses import rotation_vector
from flow_grpo.rewards.camera.pose import CAP_REACHES, ROT_CAP_DEG, PathReward, PoseErrors

TURN_NOISE_DEG, MOVE_NOISE_M = 0.1, 0.01  # what the estimate itself trembles on right videos, spoiled ones included


def unsteadiness(poses: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
    """Return how much turn and move change from one step to the next: degrees and metres (N - 2,) float64.

    With even steps these are the lengths of the second differences of the rotation vector and of the centre. Turns are
    taken from step to step, so that no path comes near half a turn.

    Args:
        poses: (N, 4, 4) float64 in metres; what touches a NaN is NaN.
        frames: (N,) numbers of the frames, at least 3; a step is their mean distance.
    """
    gaps = frames.double().diff()[:, None]
    gaps = gaps / gaps.mean()
    turns = rotation_vector(poses[:-1, :3, :3].mT @ poses[1:, :3, :3]).rad2deg() / gaps
    moves = poses[:, :3, 3].diff(dim=0) / gaps
    return turns.diff(dim=0).norm(dim=-1), moves.diff(dim=0).norm(dim=-1)


class Smooth(PathReward):
    """Steadiness of the camera's path, compared with the commanded one.

    value = -1/2 mean_i min(a_i / 45 deg, 1) - 1/2 mean_i min(b_i / 2 L, 1) over all places i between two steps: by how
    much the path found exceeds the commanded one in change of turn a_i (degrees a step) and of move b_i (metres a
    step), less the 0.1 degrees and 1 cm that the estimate trembles by itself. Caps and L are those of the pose rewards:
    with smaller ones a right path that trembles a little would lose to a static one. A step is a twentieth of a video
    of 21 frames or more. What touches a frame that is not recognised takes the cap, and so does all of a video that is
    mostly not recognised.

    `info`: `shake_deg` and `shake_m`, means of a_i and b_i with the cap for what is lost; `valid_frames` and
    `unregistered` as for `PoseRot`.
    """

    name = "smooth"
    floor = 0.001  # a tenth of a degree more
    measures = ("shake_deg", "shake_m", "valid_frames", "unregistered")

    def read(self, errors: PoseErrors) -> tuple[float, ...]:
        """Return the value, and the mean excess in degrees and metres.

        Raises:
            ValueError: fewer than 3 frames may be judged, which show no change of speed.
        """
        judged = errors.weights > 0
        if judged.sum() < 3:
            raise ValueError(f"steadiness needs at least 3 frames that may be judged, got {int(judged.sum())}")
        frames = torch.tensor(errors.frames)[judged]
        wanted = unsteadiness(errors.commanded[judged], frames)
        found = unsteadiness(errors.seen[judged], frames)
        caps = (ROT_CAP_DEG, CAP_REACHES * errors.reach)
        excess = []
        for seen, asked, noise, cap in zip(found, wanted, (TURN_NOISE_DEG, MOVE_NOISE_M), caps, strict=True):
            lost = seen.isnan() | errors.unregistered
            excess.append((seen - asked - noise).clamp(min=0).masked_fill(lost, cap))
        shares = [(part / cap).clamp(max=1).mean() for part, cap in zip(excess, caps, strict=True)]
        return -float(sum(shares)) / 2, float(excess[0].mean()), float(excess[1].mean())
