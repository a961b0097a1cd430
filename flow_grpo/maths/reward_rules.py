"""Weight schedules over epochs, and gates: a reward that only counts where another reward reaches a threshold."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

ABOVE_FLOOR = 2.0  # noise floors between the worst value and a failed one: one would still count as equal


def weight_at(points: Sequence[tuple[int, float]], epoch: int) -> float:
    """Return the weight in an epoch: linear between points, constant before the first and after the last.

    Args:
        points: (epoch, weight), at least one, in order of epoch.
        epoch: counted from 0 over the whole run, so that resuming does not change weights.
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
    """Return reward name -> weight in an epoch, from its schedule or, without one, the constant weight."""
    return {
        name: weight_at(schedules[name], epoch) if name in schedules else weight for name, weight in weights.items()
    }


@dataclasses.dataclass(frozen=True)
class Gated:
    """A gated reward of N samples; CPU tensors.

    Attributes:
        values: (N,) float64 values to compute advantages from, NaN where not valid.
        valid: (N,) bool, both the reward and the gating reward are valid.
        failed: (N,) bool, valid but below the gate's threshold.
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
    """Return a reward that counts only for samples whose gating reward (the holder) reaches the threshold.

    A sample that fails gets the lowest valid value of its group, failed samples included, minus two noise floors. Hence

    - it is below every sample that passes, and two floors keep a group of otherwise equal samples from being flat;
    - failing never pays: the sample's own value bounds that minimum, so it ends lower than if it had passed. Taking the
      minimum of the samples that *passed* would lift a sample that is bad at both rewards;
    - differences among failed samples do not count: a group in which all fail has equal values and zero advantages.

    A sample without its own value or the holder's is invalid.

    Args:
        values: (N,) gathered values of the reward.
        valid: (N,) bool.
        holder: (N,) raw values of the gating reward, never gated ones, so the order of gates does not matter.
        holder_valid: (N,) bool.
        group_ids: (N,) int64 group id of every sample.
        threshold: a sample passes with holder >= threshold.
        floor: noise floor of the reward, in its unit.
    """
    values, holder = values.double(), holder.double()
    known = valid & values.isfinite() & holder_valid & holder.isfinite()
    failed = known & (holder < threshold)
    gids, member = torch.unique(group_ids, return_inverse=True)
    lowest = torch.full((len(gids),), torch.inf, dtype=torch.float64)
    lowest = lowest.scatter_reduce(0, member, values.masked_fill(~known, torch.inf), "amin")
    counted = torch.where(failed, lowest[member] - ABOVE_FLOOR * floor, values)
    return Gated(counted.masked_fill(~known, torch.nan), known, failed)
