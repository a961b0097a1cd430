"""Shared prefixes: the deterministic steps before a group's window, computed once for all of its copies.

The copies of a group start from the same noise and follow the ODE until their window, so their prefixes are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from flow_grpo.algorithm.rollout.batching import full_batches
from flow_grpo.algorithm.rollout.denoise import initial_noise, prefix, window_rows
from flow_grpo.models.policy import Policy
from flow_grpo.records import Condition, Conditioning
from flow_grpo.runtime.ranks.exchange import hand_out, owners
from flow_grpo.runtime.ranks.process_group import Group
from flow_grpo.settings.sampling import Sampling

Batch = tuple[tuple[Condition, ...], Conditioning]


def shared_prefixes(
    policy: Policy,
    batches: Sequence[Batch],
    gids: Sequence[Sequence[int]],
    sampling: Sampling,
    rows: int,
    group: Group,
    sync_errors: Callable[[], AbstractContextManager[None]],
) -> dict[int, Tensor]:
    """Return gid -> (C, F, H, W) latents before the window, of every group on this rank (collective call).

    Args:
        policy: the model being trained.
        batches: this rank's conditions and conditioning, each batch of one video size.
        gids: per rank, the groups of its samples in this round.
        sampling: with initial noise that copies share.
        rows: groups that share a call.
        group: who takes part.
        sync_errors: entered while computing, so that an error reaches all ranks before they exchange.
    """
    owner = owners(gids, lambda gid: float(sampling.window_of(gid)[0]))
    place = {c.gid: (batch, row) for batch, (own, _) in enumerate(batches) for row, c in enumerate(own)}
    conditions = {gid: batches[batch][0][row] for gid, (batch, row) in place.items()}
    mine = [gid for gid in owner if owner[gid] == group.rank]
    found: dict[int, Tensor] = {}
    with sync_errors():
        shapes = {gid: policy.latent_shape([condition]) for gid, condition in conditions.items()}
        for call in full_batches([shapes[gid] for gid in mine], rows):
            own = [mine[position] for position in call]
            inputs = [batches[place[gid][0]][1].rows(slice(place[gid][1], place[gid][1] + 1)) for gid in own]
            conditioning = Conditioning.concatenate(inputs)
            noise = torch.stack([initial_noise(conditions[gid], shapes[gid], sampling) for gid in own])
            steps = window_rows([sampling.window_of(gid) for gid in own], sampling)
            latents = prefix(policy, noise.to(conditioning.prompt_embeds.device), conditioning, steps, sampling)
            found |= dict(zip(own, latents, strict=True))
    return found | hand_out(found, owner, gids, group)
