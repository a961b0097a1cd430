"""Shared prefixes: the deterministic steps before a group's window are computed once and sent to all of its copies.

The copies of a group start from the same noise and follow the ODE until their window, so their prefixes are equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from flow_grpo.algorithm.rollout.batching import full_batches
from flow_grpo.algorithm.rollout.denoise import initial_noise, prefix, window_rows
from flow_grpo.algorithm.rollout.sampling import SampleSettings
from flow_grpo.models.policy import Policy
from flow_grpo.records import Condition, Conditioning
from flow_grpo.runtime.ranks.exchange import exchange_rows
from flow_grpo.runtime.ranks.process_group import Ranks

Batch = tuple[tuple[Condition, ...], Conditioning]


def owners(gids: Sequence[Sequence[int]], costs: Mapping[int, float]) -> dict[int, int]:
    """Return gid -> the rank that computes its prefix, one that holds a copy; ascending gids, equal on every rank.

    Args:
        gids: per rank, the groups of its samples.
        costs: gid -> cost of its prefix; expensive ones are dealt first, each to the holder with the least so far.
    """
    holders: dict[int, list[int]] = {}
    for rank, own in enumerate(gids):
        for gid in dict.fromkeys(own):
            holders.setdefault(gid, []).append(rank)
    load = [0.0] * len(gids)
    found = {}
    for gid in sorted(holders, key=lambda gid: (-costs[gid], gid)):
        owner = min(holders[gid], key=lambda rank: load[rank])
        load[owner] += costs[gid]
        found[gid] = owner
    return dict(sorted(found.items()))


def shared_prefixes(
    policy: Policy,
    batches: Sequence[Batch],
    gids: Sequence[Sequence[int]],
    sampling: SampleSettings,
    ranks: Ranks,
    sync_errors: Callable[[], AbstractContextManager[None]],
) -> dict[int, Tensor]:
    """Return gid -> (C, F, H, W) latents before the window, of every group on this rank (collective call).

    Args:
        policy: the model being trained.
        batches: this rank's conditions and conditioning, each batch of one video size.
        gids: per rank, the groups of its samples in this round.
        sampling: rollout settings with initial noise that copies share; `sample.train_batch_size` rows share a call.
        ranks: who takes part.
        sync_errors: entered while computing, so that an error reaches all ranks before they exchange.
    """
    owner = owners(gids, {gid: float(sampling.window_of(gid)[0]) for own in gids for gid in own})
    place = {c.gid: (batch, row) for batch, (own, _) in enumerate(batches) for row, c in enumerate(own)}
    conditions = {gid: batches[batch][0][row] for gid, (batch, row) in place.items()}
    mine = [gid for gid in owner if owner[gid] == ranks.rank]
    found: dict[int, Tensor] = {}
    with sync_errors():
        shapes = {gid: policy.latent_shape([condition]) for gid, condition in conditions.items()}
        for call in full_batches([shapes[gid] for gid in mine], sampling.sample.train_batch_size):
            own = [mine[position] for position in call]
            rows = [batches[place[gid][0]][1].rows(slice(place[gid][1], place[gid][1] + 1)) for gid in own]
            conditioning = Conditioning.concatenate(rows)
            noise = torch.stack([initial_noise(conditions[gid], shapes[gid], sampling.rollout) for gid in own])
            steps = window_rows([sampling.window_of(gid) for gid in own], sampling.rollout)
            latents = prefix(policy, noise.to(conditioning.prompt_embeds.device), conditioning, steps, sampling.rollout)
            found |= dict(zip(own, latents, strict=True))
    everyone: set[tuple[int, ...]] = set()
    for text in ranks.gather_text(json.dumps(list(shapes.values()))):
        everyone |= set(map(tuple, json.loads(text)))
    for shape in sorted(everyone):
        moved = {gid: rank for gid, rank in owner.items() if shapes.get(gid, shape) == shape}
        found |= _received({gid: found[gid] for gid in moved if gid in found}, moved, gids, ranks)
    return found


def _received(
    own: Mapping[int, Tensor], owner: Mapping[int, int], gids: Sequence[Sequence[int]], ranks: Ranks
) -> dict[int, Tensor]:
    """Send this rank's prefixes to the ranks that hold copies; return those of the other ranks (collective call).

    Args:
        own: gid -> (C, F, H, W) latents of one shape that this rank has computed.
        owner: gid -> rank, at least of the groups of this shape that this rank holds.
        gids: per rank, the groups of its samples.
        ranks: who takes part.
    """
    row = {gid: number for number, gid in enumerate(own)}
    wanted = [[gid for gid in owner if gid in held] for held in map(set, gids)]
    send = [
        [row[gid] for gid in needed if gid in row] if rank != ranks.rank else [] for rank, needed in enumerate(wanted)
    ]
    coming = sorted((owner[gid], gid) for gid in wanted[ranks.rank] if owner[gid] != ranks.rank)
    receive = [sum(rank == source for rank, _ in coming) for source in range(ranks.world_size)]
    tensors = {"latents": torch.stack(list(own.values())).cpu()} if own else {}
    received, _ = exchange_rows(tensors, send, receive, ranks)
    return dict(zip((gid for _, gid in coming), received["latents"], strict=True)) if coming else {}
