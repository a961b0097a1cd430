"""Shared steps: the prefix of a group and its first stochastic step, computed once for all of its copies.

The copies of a group start from the same noise and follow the ODE until their window, so they enter its first step with
the same latents, noise level and condition: the network's velocity there is one call. From there each copy goes on with
noise of its own. Each group is dealt to one of the ranks that hold its copies. That rank makes the call, hands latents
and velocity to the others, and repeats the call in the update, for all of the group's copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from flow_grpo.algorithm.rollout.batching import full_batches
from flow_grpo.algorithm.rollout.denoise import initial_noise, prefix, window_rows
from flow_grpo.models.policy import Policy
from flow_grpo.records import Condition, Conditioning, Samples, Trajectory
from flow_grpo.runtime.ranks.exchange import dealt, hand_out
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.sampling import Sampling

Batch = tuple[tuple[Condition, ...], Conditioning]


@torch.no_grad()
def shared_steps(
    policy: Policy,
    batches: Sequence[Batch],
    gids: Sequence[Sequence[int]],
    sampling: Sampling,
    rows: int,
    world: World,
    phase: str,
) -> dict[int, Tensor]:
    """Return gid -> (2, C, F, H, W) latents before the window and velocity there, of this rank's groups (collective).

    Args:
        policy: the model being trained.
        batches: this rank's conditions and conditioning, each batch of one video size.
        gids: per rank, the groups of its samples in this round.
        sampling: with initial noise that copies share.
        rows: groups that share a call.
        world: who takes part.
        phase: what an error, which reaches all ranks before they exchange, says that it failed in.
    """
    group = world.data
    owner, share = dealt(gids)
    mine = share[group.rank]
    place = {c.gid: (batch, row) for batch, (own, _) in enumerate(batches) for row, c in enumerate(own)}
    conditions = {gid: batches[batch][0][row] for gid, (batch, row) in place.items()}
    made: dict[int, Tensor] = {}
    with world.sync_errors(phase):
        shapes = {gid: policy.latent_shape([condition]) for gid, condition in conditions.items()}
        for call in full_batches([shapes[gid] for gid in mine], rows):
            own = [mine[position] for position in call]
            inputs = [batches[place[gid][0]][1].rows(slice(place[gid][1], place[gid][1] + 1)) for gid in own]
            conditioning = Conditioning.concatenate(inputs)
            noise = torch.stack([initial_noise(conditions[gid], shapes[gid], sampling) for gid in own])
            steps = window_rows(sampling.windows(own))
            latents = prefix(policy, noise.to(conditioning.prompt_embeds.device), conditioning, steps, sampling)
            velocity = policy.velocity(latents, sampling.sigmas[steps[:, 0]].to(latents), conditioning)
            made |= zip(own, torch.stack([latents, velocity], dim=1), strict=True)
    made = {gid: made[gid] for gid in mine if owner[gid] == group.rank}
    return made | hand_out(made, owner, gids, group)


def as_groups(
    sizes: Sequence[Samples], gids: Sequence[Sequence[int]], k: int, world: World, phase: str
) -> list[Samples | None]:
    """Return this rank's groups with the draws of their k copies, from the ranks that drew them (collective call).

    `sizes` are this rank's samples, by video size, as the groups are; None where it has no group of a size. The other
    arguments are those of `shared_steps`.
    """
    group = world.data
    _, share = dealt(gids)
    keys = torch.cat([samples.keys for samples in sizes])
    copies = [k * gid + slot for gid, slot, _ in group.all_gather(keys).tolist()]
    scores = group.all_gather(torch.cat([samples.trajectory.log_probs for samples in sizes]).cpu())
    score = dict(zip(copies, scores, strict=True))
    holder = dict(sorted((copy, row // len(keys)) for row, copy in enumerate(copies)))
    states = [row for samples in sizes for row in samples.trajectory.states[:, 1:]]
    drawn = dict(zip(copies[group.rank * len(keys) :][: len(keys)], states, strict=True))
    drawn |= hand_out(drawn, holder, [[k * gid + slot for gid in own for slot in range(k)] for own in share], group)
    found: list[Samples | None] = []
    with world.sync_errors(phase):
        for samples in sizes:
            place = {gid: row for row, gid in enumerate(samples.keys[:, 0].tolist())}
            mine = [gid for gid in share[group.rank] if gid in place]
            if not mine:
                found.append(None)
                continue
            one = samples.rows(torch.tensor([place[gid] for gid in mine]))
            own, recorded = [k * gid + slot for gid in mine for slot in range(k)], one.trajectory
            after = torch.stack([drawn[copy].to(recorded.states) for copy in own]).unflatten(0, (-1, k)).flatten(1, 2)
            log_probs = torch.stack([score[copy] for copy in own]).to(recorded.log_probs).view(len(mine), -1)
            trajectory = Trajectory(torch.cat([recorded.states[:, :1], after], dim=1), log_probs, recorded.steps)
            keys, no_latents = one.keys * torch.tensor([1, 0, 1]), one.final_latents[:, :0]
            found.append(dataclasses.replace(one, keys=keys, trajectory=trajectory, final_latents=no_latents, copies=k))
    return found
