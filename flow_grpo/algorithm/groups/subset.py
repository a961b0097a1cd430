"""Train on the best and the worst copies of every group only.

The copies in between have small advantages and cost as much. (Best and worst of a larger group: DanceGRPO,
arXiv 2505.07818.)
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from flow_grpo.algorithm.groups.compare import Chosen
from flow_grpo.algorithm.groups.sample_pool import SamplePool
from flow_grpo.algorithm.groups.selection import place
from flow_grpo.maths.advantages import CombinedAdvantages
from flow_grpo.runtime.ranks.process_group import World


def best_and_worst(gids: Tensor, compared: CombinedAdvantages, copies: int) -> Tensor:
    """Return (N,) bool: in every group with a signal, the copies/2 largest and the copies/2 smallest advantages.

    Args:
        gids: (N,) int64 group of every sample.
        compared: their advantages, 0 throughout in flat groups, which are left out.
        copies: how many of a group; even, at most k. Of equal advantages those of the first rows are taken.
    """
    order = compared.advantages.argsort(descending=True, stable=True)
    order = order[gids[order].argsort(stable=True)]  # group after group, each from its best copy to its worst
    _, group, counts = gids[order].unique_consecutive(return_inverse=True, return_counts=True)
    rank = torch.arange(len(gids)) - (counts.cumsum(0) - counts)[group]
    outer = (rank < copies // 2) | (rank >= counts[group] - copies // 2)
    has_signal = torch.zeros(len(counts)).index_add(0, group, (compared.advantages[order] != 0).float()) > 0
    wanted = torch.zeros(len(gids), dtype=torch.bool)
    wanted[order] = outer & has_signal[group]
    return wanted


def narrow(
    chosen: Chosen, compared: CombinedAdvantages, copies: int, world: World
) -> tuple[Chosen, CombinedAdvantages]:
    """Return the choice without the copies in between, in equal shares for all ranks (collective call).

    Where no group has a signal, the choice is returned as it is. In groups whose copies share a step the copies in
    between get weight 0: leaving them out would save nothing.

    Args:
        chosen: whole groups, equally many samples on every rank, in CPU memory if there are several ranks.
        compared: advantages of `chosen.gathered`.
        copies: see `best_and_worst`.
        world: who takes part.
    """
    if chosen.parts[0].copies > 1:
        outer = best_and_worst(chosen.gathered.gids, compared, copies)
        return chosen, dataclasses.replace(compared, weights=compared.weights * outer) if outer.any() else compared
    order = torch.tensor([row for rows in chosen.placement for row in rows])  # rows of `gathered`, by rank and position
    wanted = best_and_worst(chosen.gathered.gids, compared, copies)[order].nonzero().flatten().tolist()
    if not wanted:
        return chosen, compared
    pool = SamplePool(world)
    pool.add(chosen, set(wanted))
    narrowed, _ = pool.take(place(wanted, pool.rank_of, world.data.size))
    kept = order[wanted]
    return narrowed, dataclasses.replace(compared, advantages=compared.advantages[kept], weights=compared.weights[kept])
