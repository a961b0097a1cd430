"""An optimizer's moments by the position of their weight, whatever the optimizer's parameter groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def moments_by_place(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> dict[int, Any]:
    """State of every parameter that the optimizer has taken a step on, by position in `parameters`."""
    return {place: optimizer.state[weight] for place, weight in enumerate(parameters) if weight in optimizer.state}


def load_moments(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], moments: Mapping[int, Mapping[str, Any]]
) -> None:
    """Restore what `moments_by_place` returned for the same parameters, whatever the order of the optimizer's groups.

    Learning rates and the like stay the optimizer's own.

    Raises:
        ValueError: moments of other weights; nothing is changed.
    """
    foreign = [
        place
        for place, own in moments.items()
        if place >= len(parameters)
        or any(isinstance(v, Tensor) and v.ndim and v.shape != parameters[place].shape for v in own.values())
    ]
    if foreign:
        raise ValueError(
            f"the optimizer's state of {len(foreign)} of {len(moments)} weights has no place in these "
            f"{len(parameters)}: resume with train.sharding, train.camera_learning_rate and the model settings of the "
            "checkpoint, or start afresh"
        )
    places = {id(weight): place for place, weight in enumerate(parameters)}
    order = [places[id(weight)] for group in optimizer.param_groups for weight in group["params"]]
    state = {position: moments[place] for position, place in enumerate(order) if place in moments}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
