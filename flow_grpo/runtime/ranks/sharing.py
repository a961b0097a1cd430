"""What several ranks need is made by one of them, which sends it to the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from flow_grpo.runtime.ranks.exchange import exchange_rows
from flow_grpo.runtime.ranks.process_group import Group

Key = TypeVar("Key", int, str)


def owners(wanted: Sequence[Sequence[Key]], cost: Callable[[Key], float] = lambda _: 1.0) -> dict[Key, int]:
    """Return which rank makes each thing, one that needs it; keys ascend, equal on every rank.

    Args:
        wanted: per rank, the keys of what it needs.
        cost: cost of making one; expensive ones are dealt first, each to the rank with the least so far.
    """
    holders: dict[Key, list[int]] = {}
    for rank, own in enumerate(wanted):
        for key in dict.fromkeys(own):
            holders.setdefault(key, []).append(rank)
    load = [0.0] * len(wanted)
    found = {}
    for key in sorted(holders, key=lambda key: (-cost(key), key)):
        found[key] = min(holders[key], key=lambda rank: load[rank])
        load[found[key]] += cost(key)
    return dict(sorted(found.items()))


def hand_out(
    own: Mapping[Key, Tensor], owner: Mapping[Key, int], wanted: Sequence[Sequence[Key]], group: Group
) -> dict[Key, Tensor]:
    """Send what this rank has made to the ranks that need it; return what it needs of theirs (collective call).

    Args:
        own: key -> tensor in fp32 that this rank has made; shapes may differ.
        owner: from `owners`.
        wanted: as there.
        group: who takes part.
    """
    shape = _shapes({key: own[key].shape for key in owner if key in own}, owner, group)
    needed = [set(keys) for keys in wanted]
    found: dict[Key, Tensor] = {}
    for one in sorted(set(shape.values())):
        keys = [key for key in owner if shape[key] == one]
        held = [key for key in keys if key in own]
        send = [
            [row for row, key in enumerate(held) if key in needs] if rank != group.rank else []
            for rank, needs in enumerate(needed)
        ]
        coming = [key for key in keys if owner[key] != group.rank and key in needed[group.rank]]
        coming.sort(key=lambda key: owner[key])  # stable: of one rank they come in its order
        receive = [sum(owner[key] == rank for key in coming) for rank in range(group.size)]
        tensors = {"made": torch.stack([own[key] for key in held]).cpu()} if held else {}
        received, _ = exchange_rows(tensors, send, receive, group)
        if coming:
            found |= dict(zip(coming, received["made"], strict=True))
    return found


def _shapes(own: Mapping[Key, Sequence[int]], owner: Mapping[Key, int], group: Group) -> dict[Key, tuple[int, ...]]:
    """Return the shapes of all that is made, by key, of those that each rank has made (collective call)."""
    texts = group.gather_text(json.dumps([list(shape) for shape in own.values()]))
    made = [iter(json.loads(text)) for text in texts]
    return {key: tuple(next(made[rank])) for key, rank in owner.items()}
