"""From the rewards of all ranks to advantages, identical on every rank."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from flow_grpo.algorithm import debug_print
from flow_grpo.algorithm.rollout.denoise import check_noise
from flow_grpo.maths.advantages import CombinedAdvantages, combine_rewards
from flow_grpo.maths.reward_rules import Gated, gate, weights_at
from flow_grpo.records import Rows, Samples, ScoredBatch, TrainingBatch
from flow_grpo.runtime.ranks.exchange import dealt
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.errors import RunStoppedError
from flow_grpo.settings.schema import RewardConfig, SampleConfig


class RewardFaultError(RunStoppedError):
    """A reward failed on too many samples to train on the rest."""


@dataclasses.dataclass(frozen=True)
class Gathered(Rows):
    """Ids and rewards of all ranks' N samples, in rank order and within a rank in sampling order.

    Attributes:
        gids: (N,) int64 group.
        slots: (N,) int64 copy number within the group.
        indices: (N,) int64 dataset position of the condition.
        sizes: (N, 3) int64 video frames, rows and columns.
        noise_ids: (N, 2) int64 noise hashes.
        rewards: reward name -> (N,) float64.
        valid: reward name -> (N,) bool.
        info: extra measurement -> (N,) float64, NaN where its reward is not valid.
        faulty: reward name -> (N,) bool, where measuring failed.
    """

    gids: Tensor
    slots: Tensor
    indices: Tensor
    sizes: Tensor
    noise_ids: Tensor
    rewards: dict[str, Tensor]
    valid: dict[str, Tensor]
    info: dict[str, Tensor]
    faulty: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.gids)


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What an epoch trains on, row by row: samples, or groups whose copies share a step.

    Attributes:
        gathered: ids and rewards: whole groups, each sample once.
        placement: per rank, in its order, which row of `gathered` each of its rows is; of a group that of copy 0.
        parts: records that hold this rank's rows.
        table: (2, n) int64 CPU: which part holds each of this rank's rows, and where. What lies beyond the rank's
            placement is padding of weight 0, so that every rank replays equally many.
        as_rolled_out: this is the round as it was sampled, nothing moved or left out.
    """

    gathered: Gathered
    placement: tuple[tuple[int, ...], ...]
    parts: tuple[Samples, ...]
    table: Tensor
    as_rolled_out: bool


def everything(batches: Sequence[ScoredBatch], gathered: Gathered, world: World) -> Chosen:
    """Return the choice of a whole round, unchanged."""
    rows = [own.tolist() for own in torch.arange(len(gathered)).chunk(world.data.size)]
    # Of each sample, in sampling order, the batch that holds it and its row there.
    places = [torch.stack([torch.full((len(b),), number), torch.arange(len(b))]) for number, b in enumerate(batches)]
    parts, table = tuple(batch.samples for batch in batches), torch.cat(places, dim=1)[:, _sampling_order(batches)]
    groups = tuple(batch.groups for batch in batches if batch.groups is not None)
    if groups:
        held = [own.tolist() for own in gathered.gids.chunk(world.data.size)]
        first = first_copies(gathered)
        owner, share = dealt(held)
        rows = [[first[gid] for gid in own if owner[gid] == rank] for rank, own in enumerate(share)]
        place = {
            gid: (number, row) for number, part in enumerate(groups) for row, gid in enumerate(part.keys[:, 0].tolist())
        }
        parts, table = groups, torch.tensor([place[gid] for gid in share[world.data.rank]]).T
    return Chosen(gathered, tuple(map(tuple, rows)), parts, table, as_rolled_out=True)


def first_copies(gathered: Gathered) -> dict[int, int]:
    """Return gid -> row of its copy 0."""
    rows = (gathered.slots == 0).nonzero().flatten()
    return dict(zip(gathered.gids[rows].tolist(), rows.tolist(), strict=True))


def _sampling_order(batches: Sequence[ScoredBatch]) -> Tensor:
    # (n,) rows of the batches, one after the other, in the order in which their rank sampled them.
    return torch.cat([batch.positions for batch in batches]).argsort()


def gather(batches: Sequence[ScoredBatch], world: World) -> Gathered:
    """Exchange ids and rewards of every rank's n samples, never latents.

    Collective call. Ids travel as integers: as floats the large ones would be rounded.

    Args:
        batches: this rank's samples of a round; their positions are 0..n-1, each once.
        world: who takes part, each with n samples.
    """
    order = _sampling_order(batches)
    sizes = torch.tensor([condition.size for batch in batches for condition in batch.conditions], dtype=torch.int64)
    keys = torch.cat([batch.samples.keys for batch in batches])
    noise_ids = torch.cat([batch.samples.noise_ids for batch in batches])
    ids = world.data.all_gather(torch.cat([keys, sizes, noise_ids], dim=1)[order])
    tables = [_reward_columns(batch) for batch in batches]
    names = list(tables[0])
    table = torch.cat([torch.stack([own[name] for name in names], dim=1) for own in tables])
    by_key = dict(zip(names, world.data.all_gather(table[order]).unbind(dim=1), strict=True))
    return Gathered(
        gids=ids[:, 0],
        slots=ids[:, 1],
        indices=ids[:, 2],
        sizes=ids[:, 3:6],
        noise_ids=ids[:, 6:],
        rewards={name: column for (kind, name), column in by_key.items() if kind == "value"},
        valid={name: column.bool() for (kind, name), column in by_key.items() if kind == "valid"},
        info={name: column for (kind, name), column in by_key.items() if kind == "info"},
        faulty={name: column.bool() for (kind, name), column in by_key.items() if kind == "faulty"},
    )


def _reward_columns(batch: ScoredBatch) -> dict[tuple[str, str], Tensor]:
    """Return (kind, name) -> (B,) float64 of every value, validity and measurement."""
    columns = {("value", name): r.values.double() for name, r in batch.rewards.items()}
    columns |= {("valid", name): r.valid.double() for name, r in batch.rewards.items()}
    for name, result in batch.rewards.items():
        columns["faulty", name] = result.faults.double()
        for extra, values in result.info.items():
            masked = values.double().where(result.valid, torch.tensor(torch.nan, dtype=torch.float64))
            columns["info", f"{name}_{extra}"] = masked
    return columns


def check(gathered: Gathered, sample: SampleConfig, world: World) -> None:
    """Assert that the gathered samples are complete groups and that no two copies share their noise.

    Raises:
        AssertionError: a count is wrong, or a group has not each of its k copies once.
        RuntimeError: two copies of a group were drawn from the same noise.
    """
    expected, k = world.data.size * sample.expanded_batch_size, sample.k
    assert len(gathered) == expected, f"{len(gathered)} samples were gathered, expected {expected}"
    copies = Counter(zip(gathered.gids.tolist(), gathered.slots.tolist(), strict=True))
    groups = {gid for gid, _ in copies}
    assert len(groups) == expected // k, f"{len(groups)} groups were gathered, expected {expected // k}"
    wrong = {gid for gid in groups if any(copies[gid, slot] != 1 for slot in range(k))}
    assert not wrong, f"groups {sorted(wrong)} do not hold each of the {k} copies once"
    check_noise(gathered.gids, gathered.noise_ids, same_initial_noise=sample.same_initial_noise)


def show_gathered(
    batches: Sequence[ScoredBatch], gathered: Gathered, sample: SampleConfig, world: World, weights: dict[str, float]
) -> None:
    """Print on rank 0 the gathered counts, and which rank holds which copy (collective call).

    The average reward is repeated over the recorded steps for this print only: an advantage has one value per sample.
    """
    steps = batches[0].samples.trajectory.steps.shape[1]
    average = torch.cat([debug_print.average_reward(batch, weights) for batch in batches])
    everyone = world.data.all_gather(debug_print.repeat_over_steps(average, steps).cpu())
    assert everyone.shape == (len(gathered.gids), steps)
    if world.is_main:
        groups = debug_print.group_lines(gathered.gids, gathered.slots, gathered.indices, world.data.size)
        debug_print.show([*debug_print.gathered_lines(len(everyone), sample.k), *groups])


def in_epoch(config: RewardConfig, epoch: int) -> RewardConfig:
    """Return the settings with the weights that the schedules give an epoch."""
    return dataclasses.replace(config, weights=weights_at(config.weights, config.schedules, epoch))


def gated(gathered: Gathered, config: RewardConfig, floors: Mapping[str, float]) -> dict[str, Gated]:
    """Return every gated reward with its gate applied, see `maths.reward_rules.gate`."""
    rewards, valid = gathered.rewards, gathered.valid
    return {
        name: gate(
            rewards[name],
            valid[name],
            rewards[holder],
            valid[holder],
            gathered.gids,
            threshold=threshold,
            floor=max(floors.get(name, 0.0), config.flat_eps),
        )
        for name, (holder, threshold) in config.gates.items()
    }


def advantages(
    gathered: Gathered,
    config: RewardConfig,
    *,
    k: int,
    floors: Mapping[str, float],
    metric: str = "",
    adv_clip: float = math.inf,
) -> CombinedAdvantages:
    """Return the advantages of N samples and which of their groups are flat or incomplete.

    Args:
        gathered: samples of all ranks, whole groups.
        config: weights of the epoch, gates and normalisation.
        k: group size.
        floors: reward name -> range below which a group is flat in it.
        metric: use this reward alone, with weight 1; "" uses the weighted rewards.
        adv_clip: largest absolute advantage, to which a group is scaled as a whole.
    """
    after_gates = gated(gathered, config, floors)
    return combine_rewards(
        gathered.rewards | {name: found.values for name, found in after_gates.items()},
        gathered.valid | {name: found.valid for name, found in after_gates.items()},
        {metric: 1.0} if metric else config.weights,
        gathered.gids,
        k=k,
        floors=floors,
        adv_norm=config.adv_norm,
        adv_eps=config.adv_eps,
        adv_ddof=config.adv_ddof,
        flat_eps=config.flat_eps,
        adv_clip=adv_clip,
    )


def own_rows(chosen: Chosen, compared: CombinedAdvantages, world: World) -> TrainingBatch:
    """Return this rank's samples, or groups, with their advantages, checked by gid and slot."""
    gathered = chosen.gathered
    mine = torch.tensor(chosen.placement[world.data.rank], dtype=torch.int64)
    held = [chosen.parts[part].keys[row, :2].tolist() for part, row in chosen.table[:, : len(mine)].T.tolist()]
    found = torch.stack([gathered.gids[mine], gathered.slots[mine]], dim=1).tolist()
    assert held == found, f"rank {world.data.rank} holds (gid, slot) {held}, chosen {found}"
    copies, samples = chosen.parts[0].copies, mine
    if copies > 1:
        by_slot = gathered.slots.argsort()
        own = [by_slot[gathered.gids[by_slot] == gid] for gid in gathered.gids[mine]]
        samples = torch.cat(own).view(-1, copies) if own else mine.new_empty(0, copies)
    advantages, weights = torch.zeros(2, chosen.table.shape[1], *samples.shape[1:])
    advantages[: len(mine)], weights[: len(mine)] = compared.advantages[samples], compared.weights[samples]
    return TrainingBatch(chosen.parts, chosen.table, advantages, weights, chosen.as_rolled_out)


def check_faults(batches: Sequence[ScoredBatch], gathered: Gathered, config: RewardConfig, world: World) -> None:
    """Refuse to train on a round in which a reward failed on too many samples (collective call).

    Args:
        batches: this rank's samples.
        gathered: all ranks' samples.
        config: weights of the epoch, gates and `most_faults`, the share of the samples that a reward may fail to
            measure; a reward of weight 0 may fail altogether, unless it is the gate of one with weight.
        world: who takes part.

    Raises:
        RewardFaultError: on every rank, when a reward failed on more.
    """
    weighted = {name for name, weight in config.weights.items() if weight}
    needed = weighted | {holder for name, (holder, _) in config.gates.items() if name in weighted}
    for name, faulty in gathered.faulty.items():
        count = int(faulty.sum())
        if name in needed and count > config.most_faults * len(faulty):
            results = [batch.rewards[name] for batch in batches]
            here = [result.causes[row] for result in results for row in result.faults.nonzero().flatten().tolist()]
            causes = [text for text in world.data.gather_text(here[0] if here else "") if text]
            raise RewardFaultError(
                f"reward {name} failed to measure {count} of {len(faulty)} samples, more than the share "
                f"reward.most_faults={config.most_faults:g} ({causes[0]}); mend that and go on, or train without it"
            )


def failures(batches: Sequence[ScoredBatch], names: Iterable[str]) -> list[str]:
    """Return a line for each of these rewards that has no value for some samples of this rank."""
    causes = {name: [text for batch in batches for text in batch.rewards[name].causes if text] for name in names}
    return [
        f"reward {name}: {len(found)} samples of rank 0 have no value, first: {found[0]}"
        for name, found in causes.items()
        if found
    ]
