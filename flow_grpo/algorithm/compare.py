"""Gather the small facts of all ranks' samples and turn rewards into advantages, computed alike on every rank."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from flow_grpo.algorithm import debug_print
from flow_grpo.algorithm.rollout import check_noise
from flow_grpo.config import RewardConfig, SampleConfig
from flow_grpo.maths.advantages import CombinedAdvantages, combine_rewards
from flow_grpo.records import ScoredBatch, TrainingBatch
from flow_grpo.runtime.distributed import Ranks


@dataclasses.dataclass(frozen=True)
class Gathered:
    """What all ranks know of all N samples of an epoch, in rank order.

    Attributes:
        gids: (N,) int64 group.
        slots: (N,) int64 copy number within the group.
        indices: (N,) int64 dataset position of the condition.
        noise_ids: (N, 2) int64 noise hashes.
        rewards: reward name -> (N,) float64.
        valid: reward name -> (N,) bool.
        info: extra measurement -> (N,) float64, NaN where its reward is not valid.
    """

    gids: Tensor
    slots: Tensor
    indices: Tensor
    noise_ids: Tensor
    rewards: dict[str, Tensor]
    valid: dict[str, Tensor]
    info: dict[str, Tensor]


def gather(batch: ScoredBatch, ranks: Ranks) -> Gathered:
    """Exchange ids and rewards of every rank's n samples, never latents; ids travel as integers."""
    keys = torch.tensor([[c.gid, c.slot, c.index] for c in batch.conditions], dtype=torch.int64)
    ids = ranks.all_gather(torch.cat([keys, batch.trajectory.noise_ids], dim=1))
    columns = {("value", name): r.values.double() for name, r in batch.rewards.items()}
    columns |= {("valid", name): r.valid.double() for name, r in batch.rewards.items()}
    for name, result in batch.rewards.items():
        for extra, values in result.info.items():
            masked = values.double().where(result.valid, torch.tensor(torch.nan, dtype=torch.float64))
            columns["info", f"{name}_{extra}"] = masked
    table = ranks.all_gather(torch.stack(list(columns.values()), dim=1))
    by_key = dict(zip(columns, table.unbind(dim=1), strict=True))
    return Gathered(
        gids=ids[:, 0],
        slots=ids[:, 1],
        indices=ids[:, 2],
        noise_ids=ids[:, 3:],
        rewards={name: column for (kind, name), column in by_key.items() if kind == "value"},
        valid={name: column.bool() for (kind, name), column in by_key.items() if kind == "valid"},
        info={name: column for (kind, name), column in by_key.items() if kind == "info"},
    )


def check(gathered: Gathered, sample: SampleConfig, ranks: Ranks) -> None:
    """Assert that the gathered samples are the epoch's groups, whole, and that no two copies share their noise.

    Raises:
        AssertionError: a count is wrong, or a group has not each of its k copies once.
        RuntimeError: two copies of a group were drawn from the same noise.
    """
    expected = ranks.world_size * sample.train_batch_size * sample.num_batches_per_epoch
    debug_print.check_gathered(gathered.gids, gathered.slots, expected, sample.k)
    check_noise(gathered.gids, gathered.noise_ids, same_initial_noise=sample.same_initial_noise)


def show_gathered(
    batch: ScoredBatch, gathered: Gathered, sample: SampleConfig, ranks: Ranks, weights: dict[str, float]
) -> None:
    """Print the gathered counts on rank 0, from rewards that travelled; every rank must call it.

    The average reward is repeated over the remembered steps for this print only: an advantage has one value per sample.
    """
    average = debug_print.average_reward(batch, weights)
    repeated = debug_print.repeat_over_steps(average, len(batch.trajectory.steps))
    everyone = ranks.all_gather(repeated.cpu())
    assert everyone.shape == (len(gathered.gids), len(batch.trajectory.steps))
    if ranks.is_main:
        debug_print.show(debug_print.gathered_lines(len(everyone), sample.k))


def advantages(gathered: Gathered, config: RewardConfig, *, k: int, floors: dict[str, float]) -> CombinedAdvantages:
    """Return the advantages of all N samples; every rank computes the same.

    Args:
        gathered: all ranks' rewards.
        config: weights and normalisation.
        k: group size.
        floors: reward name -> range below which a group is flat in it.
    """
    return combine_rewards(
        gathered.rewards,
        gathered.valid,
        config.weights,
        gathered.gids,
        k=k,
        floors=floors,
        adv_norm=config.adv_norm,
        adv_eps=config.adv_eps,
        adv_ddof=config.adv_ddof,
        flat_eps=config.flat_eps,
    )


def own_rows(batch: ScoredBatch, gathered: Gathered, compared: CombinedAdvantages, ranks: Ranks) -> TrainingBatch:
    """Return this rank's samples with their advantages, found by position and checked by gid and slot."""
    rows = slice(ranks.rank * len(batch.conditions), (ranks.rank + 1) * len(batch.conditions))
    mine = torch.tensor([[condition.gid, condition.slot] for condition in batch.conditions])
    found = torch.stack([gathered.gids[rows], gathered.slots[rows]], dim=1)
    assert torch.equal(mine, found), f"rank {ranks.rank} holds (gid, slot) {mine.tolist()}, gathered {found.tolist()}"
    return TrainingBatch(
        conditioning=batch.conditioning,
        trajectory=batch.trajectory,
        advantages=compared.advantages[rows].float(),
        weights=compared.weights[rows].float(),
        gids=gathered.gids[rows],
    )


def reward_metrics(gathered: Gathered, compared: CombinedAdvantages, weights: dict[str, float]) -> dict[str, float]:
    """Return `reward/` statistics over all samples and `dyn/` counts of groups.

    Per reward: mean and std over valid samples, mean std within a group, share of valid samples; `reward/mean`,
    `reward/std` and `reward/group_std` are those of the weighted sum where every weighted reward is valid.
    """
    metrics: dict[str, float] = {}
    for name, values in gathered.rewards.items():
        metrics |= _statistics(f"reward/{name}_", values, gathered.valid[name], gathered.gids)
    for name, values in gathered.info.items():
        if values.isfinite().any():
            metrics[f"reward/{name}"] = float(values[values.isfinite()].mean())
    active = [name for name, weight in weights.items() if weight != 0]
    both = torch.stack([gathered.valid[name] for name in active]).all(dim=0)
    total = torch.stack([weights[name] * gathered.rewards[name] for name in active]).sum(dim=0)
    metrics |= _statistics("reward/", total, both, gathered.gids)
    groups = len(compared.gids)
    flat, incomplete = int(compared.flat.sum()), int(compared.incomplete.sum())
    return metrics | {
        "reward/advantage_abs": float(compared.advantages.abs().mean()),
        "train/zero_std_ratio": flat / groups,
        "dyn/flat_groups": float(flat),
        "dyn/incomplete_groups": float(incomplete),
        "dyn/valid_groups_ratio_initial": (groups - flat - incomplete) / groups,
    }


def _statistics(prefix: str, values: Tensor, valid: Tensor, gids: Tensor) -> dict[str, float]:
    metrics = {f"{prefix}valid": float(valid.double().mean())}
    if valid.any():
        metrics[f"{prefix}mean"] = float(values[valid].mean())
        metrics[f"{prefix}std"] = float(values[valid].std(correction=0))
    inside = [values[valid & (gids == gid)] for gid in gids.unique()]
    spreads = [float(own.std(correction=0)) for own in inside if len(own) > 1]
    if spreads:
        metrics[f"{prefix}group_std"] = sum(spreads) / len(spreads)
    return metrics
