"""ReCamMaster that is told its commands times constants, `scaled_recam.py:by_SHIFT_TURN` in percent: a baseline.

If a policy only moves too little or too much, a constant on the command mends it without any training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from flow_grpo.maths.poses import pose, rotation_matrix, rotation_vector
from flow_grpo.models.encoders.encodings import Encodings
from flow_grpo.models.recam import RECAM
from flow_grpo.models.video_model import VideoModel
from flow_grpo.records import Condition


def __getattr__(name: str) -> VideoModel:
    word, *numbers = name.split("_")
    if word != "by" or len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        raise AttributeError(name)
    shift, turn = (int(number) / 100 for number in numbers)

    def inputs(encodings: Encodings, conditions: Sequence[Condition]) -> dict[str, Tensor]:
        told = [dataclasses.replace(c, target_poses=scaled(c.need_poses(), shift, turn)) for c in conditions]
        return RECAM.inputs(encodings, told)

    return dataclasses.replace(RECAM, inputs=inputs)


def scaled(path: Tensor, shift: float, turn: float) -> Tensor:
    """Return a path (T, 4, 4) from the identity with `shift` times its translations and `turn` times its rotations."""
    return pose(rotation_matrix(turn * rotation_vector(path[:, :3, :3])), shift * path[:, :3, 3])
