"""How much a reward counts: weights that follow the epoch, and gates that another reward holds; float64 on the CPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

ABOVE_FLOOR = 2.0  # floors between the worst value and a gated one: one floor would still pass for equally good


def weight_at(points: Sequence[tuple[int, float]], epoch: int) -> float:
    """Return the weight of an epoch: linear between points, constant before the first and after the last.

    Args:
        points: (epoch, weight), at least one, by rising epoch.
        epoch: counted from 0 over the whole run, so a resumed run has the weights of an uninterrupted one.
    """
    if epoch <= points[0][0]:
        return points[0][1]
    for (begin, low), (end, high) in itertools.pairwise(points):
        if epoch <= end:
            share = (epoch - begin) / (end - begin)
            return (1 - share) * low + share * high
    return points[-1][1]


def weights_at(
    weights: Mapping[str, float], schedules: Mapping[str, Sequence[tuple[int, float]]], epoch: int
) -> dict[str, float]:
    """Return reward name -> weight in an epoch: by its schedule, or as it is where it has none."""
    return {
        name: weight_at(schedules[name], epoch) if name in schedules else weight for name, weight in weights.items()
    }


@dataclasses.dataclass(frozen=True)
class Gated:
    """A reward behind a gate; N samples, CPU tensors.

    Attributes:
        values: (N,) float64 to compare copies by, NaN where not valid.
        valid: (N,) bool, reward and gate are both known.
        failed: (N,) bool, valid and below the gate's threshold.
    """

    values: Tensor
    valid: Tensor
    failed: Tensor


def gate(
    values: Tensor,
    valid: Tensor,
    holder: Tensor,
    holder_valid: Tensor,
    group_ids: Tensor,
    *,
    threshold: float,
    floor: float,
) -> Gated:
    """Return a reward that counts only for copies whose holder of the gate reaches the threshold.

    A copy that fails takes the lowest valid value of its group, whoever has it, minus two noise floors. Hence

    - it stays below every copy that passes, also where those are alike: two floors apart, the group is not flat;
    - failing never pays: the copy's own value bounds the lowest from above, so whatever it scored, it stands lower than
      if it had passed, and the advantage of a copy rises with its value. The lowest of those that *passed* would lift a
      copy that is bad at both;
    - how far copies that fail differ from one another does not count: a group in which all fail has one value and
      advantages of exactly 0.

    What is not measured is not judged: without the holder's value, or its own, a copy has no value.

    Args:
        values: (N,) gathered values of the reward.
        valid: (N,) bool.
        holder: (N,) raw values of the reward that holds the gate, never gated ones: the order of gates is no matter.
        holder_valid: (N,) bool.
        group_ids: (N,) int64 group of every sample.
        threshold: least value of the holder at which a copy passes.
        floor: noise of the reward in its own unit.
    """
    values, holder = values.double(), holder.double()
    known = valid & values.isfinite() & holder_valid & holder.isfinite()
    failed = known & (holder < threshold)
    gids, member = torch.unique(group_ids, return_inverse=True)
    lowest = torch.full((len(gids),), torch.inf, dtype=torch.float64)
    lowest = lowest.scatter_reduce(0, member, values.masked_fill(~known, torch.inf), "amin")
    counted = torch.where(failed, lowest[member] - ABOVE_FLOOR * floor, values)
    return Gated(counted.masked_fill(~known, torch.nan), known, failed)
