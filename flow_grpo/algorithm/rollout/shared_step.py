"""Shared steps: the prefix of a group and its first stochastic step, computed once for all of its copies.

The copies of a group start from the same noise and follow the ODE until their window, so they enter its first step with
the same latents, noise level and condition: the network's velocity there is one call. From there each copy goes on with
noise of its own. Each group is dealt to one of the ranks that hold its copies. That rank makes the call, hands latents
and velocity to the others, and repeats the call in the update, for all of the group's copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from flow_grpo.algorithm.rollout.batching import full_batches
from flow_grpo.algorithm.rollout.denoise import initial_noise, prefix, step_noise, step_transition, window_rows
from flow_grpo.maths.sde import log_prob, sample
from flow_grpo.models.policy import Policy
from flow_grpo.records import Condition, Conditioning, Samples, Trajectory
from flow_grpo.runtime.ranks.exchange import even_owners, hand_out
from flow_grpo.runtime.ranks.process_group import Group
from flow_grpo.settings.sampling import Sampling

Batch = tuple[tuple[Condition, ...], Conditioning]


def dealt(gids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the groups of each rank, ascending, from the groups of the samples that each rank holds."""
    owner = even_owners(gids)
    return [[gid for gid in owner if owner[gid] == rank] for rank in range(len(gids))]


def filled_up(mine: Sequence[int], held: Sequence[int], count: int) -> list[int]:
    """Return a rank's groups with others of those it holds behind them, so that every rank has `count`.

    All ranks then make equally many calls, in the rollout and in the update, where the others have no weight.
    """
    spare = [gid for gid in dict.fromkeys(held) if gid not in mine]
    return [*mine, *spare[: count - len(mine)]]


@torch.no_grad()
def shared_steps(
    policy: Policy,
    batches: Sequence[Batch],
    gids: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    k: int,
    rows: int,
    group: Group,
    sync_errors: Callable[[], AbstractContextManager[None]],
) -> tuple[dict[int, Tensor], list[Samples]]:
    """Take the shared steps of a round (collective call).

    Args:
        policy: the model being trained.
        batches: this rank's conditions and conditioning, each batch of one video size.
        gids: per rank, the groups of its samples in this round.
        sampling: with initial noise that copies share.
        k: copies of a group.
        rows: groups that share a call.
        group: who takes part.
        sync_errors: entered while computing, so that an error reaches all ranks before they exchange.

    Returns:
        gid -> (2, C, F, H, W) latents before the window and velocity there, of every group on this rank; and the groups
        dealt to this rank with the draws of all their copies in the window's first step, a record for every call.
    """
    share = dealt(gids)
    most = max(map(len, share))
    mine = filled_up(share[group.rank], gids[group.rank], most)
    place = {c.gid: (batch, row) for batch, (own, _) in enumerate(batches) for row, c in enumerate(own)}
    conditions = {gid: batches[batch][0][row] for gid, (batch, row) in place.items()}
    made: dict[int, Tensor] = {}
    records = []
    with sync_errors():
        shapes = {gid: policy.latent_shape([condition]) for gid, condition in conditions.items()}
        for call in full_batches([shapes[gid] for gid in mine], rows):
            own = [mine[position] for position in call]
            inputs = [batches[place[gid][0]][1].rows(slice(place[gid][1], place[gid][1] + 1)) for gid in own]
            conditioning = Conditioning.concatenate(inputs)
            noise = torch.stack([initial_noise(conditions[gid], shapes[gid], sampling) for gid in own])
            steps = window_rows([sampling.window_of(gid) for gid in own], sampling)
            latents = prefix(policy, noise.to(conditioning.prompt_embeds.device), conditioning, steps, sampling)
            velocity = policy.velocity(latents, sampling.sigmas[steps[:, 0]].to(latents), conditioning)
            made |= zip(own, torch.stack([latents, velocity], dim=1), strict=True)
            if sampling.trains_groups:
                rows_of = [conditions[gid] for gid in own]
                records.append(_first_draws(policy, rows_of, conditioning, latents, velocity, steps, sampling, k))
    owner = {gid: rank for rank, groups in enumerate(share) for gid in groups}
    own_made = {gid: made[gid] for gid in share[group.rank]}
    return own_made | hand_out(own_made, dict(sorted(owner.items())), gids, group), records


def _first_draws(
    policy: Policy,
    conditions: Sequence[Condition],
    conditioning: Conditioning,
    latents: Tensor,
    velocity: Tensor,
    steps: Tensor,
    sampling: Sampling,
    k: int,
) -> Samples:
    """Return n groups with their first states and k draws of the first step, (n, 1 + k, C, F, H, W)."""
    gaussian = step_transition(policy, latents, conditioning, steps[:, 0], sampling, velocity=velocity).repeated(k)
    copies = [dataclasses.replace(condition, slot=slot) for condition in conditions for slot in range(k)]
    noise = step_noise(copies, latents.shape[1:], steps.shape[1], sampling)[:, 0]
    drawn = sample(gaussian, noise.to(latents.device))
    return Samples(
        keys=torch.tensor([[condition.gid, 0, condition.index] for condition in conditions], dtype=torch.int64),
        noise_ids=torch.zeros((len(conditions), 2), dtype=torch.int64),
        conditioning=conditioning,
        trajectory=Trajectory(
            states=torch.cat([latents[:, None], drawn.unflatten(0, (-1, k))], dim=1),
            log_probs=log_prob(drawn, gaussian).view(-1, k),
            steps=steps,
        ),
        final_latents=latents[:, :0],
        copies=k,
    )


def with_later_steps(
    groups: Sequence[Samples], samples: Sequence[Samples], gids: Sequence[Sequence[int]], k: int, group: Group
) -> list[Samples]:
    """Return the groups with the later steps of their copies, from the ranks that took them (collective call).

    Args:
        groups: from `shared_steps`.
        samples: this rank's batches, rolled out.
        gids: per rank, the groups of its samples in this round.
        k: copies of a group.
        group: who takes part.
    """
    if not groups or groups[0].trajectory.steps.shape[1] == 1:
        return list(groups)
    gid, slot = torch.cat([batch.keys[:, :2] for batch in samples]).unbind(dim=1)
    copies = group.all_gather(k * gid + slot).tolist()
    scores = group.all_gather(torch.cat([batch.trajectory.log_probs[:, 1:] for batch in samples]).cpu())
    holder = {copy: row // len(gid) for row, copy in enumerate(copies)}
    states = [row for batch in samples for row in batch.trajectory.states[:, 2:]]
    own = dict(zip((k * gid + slot).tolist(), states, strict=True))
    share = dealt(gids)
    most = max(map(len, share))
    needed = [filled_up(mine, held, most) for mine, held in zip(share, gids, strict=True)]
    wanted = [[k * gid + slot for gid in mine for slot in range(k)] for mine in needed]
    own |= hand_out(own, dict(sorted(holder.items())), wanted, group)
    score_of = dict(zip(copies, scores, strict=True))
    return [_with_later_steps(record, own, score_of) for record in groups]


def _with_later_steps(record: Samples, states: Mapping[int, Tensor], scores: Mapping[int, Tensor]) -> Samples:
    first, log_probs, k = record.trajectory.states, record.trajectory.log_probs, record.copies
    copies = [k * gid + slot for gid in record.keys[:, 0].tolist() for slot in range(k)]
    later = torch.stack([states[copy].to(first) for copy in copies]).unflatten(0, (-1, k))  # (n, k, K-1, C, F, H, W)
    own = torch.stack([scores[copy].to(log_probs) for copy in copies]).unflatten(0, (-1, k))  # (n, k, K-1)
    draws = torch.cat([first[:, 1:, None], later], dim=2).flatten(1, 2)
    trajectory = dataclasses.replace(
        record.trajectory,
        states=torch.cat([first[:, :1], draws], dim=1),
        log_probs=torch.cat([log_probs[:, :, None], own], dim=2).flatten(1, 2),
    )
    return dataclasses.replace(record, trajectory=trajectory)
