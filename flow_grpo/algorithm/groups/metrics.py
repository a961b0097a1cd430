"""Metrics of an epoch's rewards, groups and reward servers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flow_grpo.algorithm.groups.compare import Gathered, gated
from flow_grpo.maths.bootstrap import percentiles
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.schema import RewardConfig

MOST_CAMERAS = 16  # kinds with metrics of their own: trackers draw a panel for each
OTHER = "other"


def pooled(cameras: Sequence[str]) -> tuple[str, ...]:
    """Return the camera kind of every condition as metrics name it.

    The 16 most frequent kinds (ties by name) keep their names, all others become "other". Characters other than
    letters, digits and `.:+-_` become "-": a slash would start a group of metrics.
    """
    clean = [re.sub(r"[^\w.:+-]", "-", camera) for camera in cameras]
    counts = Counter(clean)
    kept = set(sorted(counts, key=lambda camera: (-counts[camera], camera))[:MOST_CAMERAS])
    return tuple(camera if camera in kept else OTHER for camera in clean)


def camera_metrics(gathered: Gathered, cameras: Sequence[str]) -> dict[str, float]:
    """Return `reward_by_camera/` metrics: the mean of every reward's valid values, and the share of those.

    Args:
        gathered: N samples of all ranks.
        cameras: the kind of camera of every condition of the data set; () gives no metrics.
    """
    metrics: dict[str, float] = {}
    kinds = [cameras[index] for index in gathered.indices.tolist()] if cameras else []
    for camera in sorted(set(kinds)):
        rows = torch.tensor([kind == camera for kind in kinds])
        for name, values in gathered.rewards.items():
            metric, valid = f"reward_by_camera/{camera}/{name}", gathered.valid[name][rows]
            metrics[f"{metric}_valid"] = float(valid.sum()) / len(valid)
            metrics |= {metric: float(values[rows][valid].mean())} if valid.any() else {}
    return metrics


def server_metrics(stats: Mapping[str, Mapping[str, float]], world: World) -> dict[str, float]:
    """Return `server/` metrics (collective call): calls and failures of all ranks, seconds of the slowest.

    An epoch waits for its slowest rank.

    Args:
        stats: reward name -> this rank's statistics of its server, see `RewardSet.stats`; the same names on all.
        world: who takes part.
    """
    metrics: dict[str, float] = {}
    for name, own in stats.items():
        found, prefix = world.all.all_gather_scalars(own), f"server/{name.rpartition(':')[2]}"
        metrics |= {f"{prefix}_{key}": float(found[key].sum()) for key in ("calls", "failures")}
        for key in ("p50_s", "p95_s"):
            seconds = found[key][found[key].isfinite()]
            metrics |= {f"{prefix}_{key}": float(seconds.max())} if len(seconds) else {}
    return metrics


def reward_metrics(gathered: Gathered, weights: Mapping[str, float]) -> dict[str, float]:
    """Return `reward/` statistics over all samples, of the values as measured.

    Per reward: mean and std over valid samples, share of valid samples, and over groups the mean std and the 10th, 50th
    and 90th percentile of the range, which `reward.flat_eps` is compared with; `reward/mean` and the like are of the
    weighted sum, over samples in which every weighted reward is valid; of several rewards it adds unlike units.
    """
    metrics: dict[str, float] = {}
    for name, values in gathered.rewards.items():
        metrics |= _statistics(f"reward/{name}_", values, gathered.valid[name], gathered.gids)
    for name, values in gathered.info.items():
        if values.isfinite().any():
            metrics[f"reward/{name}"] = float(values[values.isfinite()].mean())
    return metrics | _statistics("reward/", *weighted_sum(gathered, weights), gathered.gids)


def weighted_sum(gathered: Gathered, weights: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """Return the (N,) float64 weighted sum of the rewards, and (N,) bool where all of non-zero weight are valid."""
    active = [name for name, weight in weights.items() if weight != 0]
    total = torch.stack([weights[name] * gathered.rewards[name] for name in active]).sum(dim=0)
    return total, torch.stack([gathered.valid[name] for name in active]).all(dim=0)


def rule_metrics(gathered: Gathered, config: RewardConfig) -> dict[str, float]:
    """Return the weight of every reward, and for gated ones the share of valid copies that fail the gate."""
    metrics = {f"reward/{name}_weight": weight for name, weight in config.weights.items()}
    for name, found in gated(gathered, config, floors={}).items():
        if found.valid.any():
            metrics[f"reward/{name}_gated"] = float(found.failed.sum() / found.valid.sum())
    return metrics


def group_metrics(groups: int, flat: int, incomplete: int) -> dict[str, float]:
    """Return how many of the groups of a round are flat or incomplete."""
    return {
        "dyn/flat_groups": float(flat),
        "dyn/incomplete_groups": float(incomplete),
        "dyn/valid_groups_ratio_initial": (groups - flat - incomplete) / groups,
    }


def _statistics(prefix: str, values: Tensor, valid: Tensor, gids: Tensor) -> dict[str, float]:
    metrics = {f"{prefix}valid": float(valid.double().mean())}
    if valid.any():
        metrics[f"{prefix}mean"] = float(values[valid].mean())
        metrics[f"{prefix}std"] = float(values[valid].std(correction=0))
    order = gids[valid].argsort(stable=True)
    _, sizes = gids[valid][order].unique_consecutive(return_counts=True)
    inside = [own for own in values[valid][order].split(sizes.tolist()) if len(own) > 1]
    if inside:
        metrics[f"{prefix}group_std"] = sum(float(own.std(correction=0)) for own in inside) / len(inside)
        ranges = torch.stack([own.max() - own.min() for own in inside])
        metrics |= percentiles(f"{prefix}group_range_p", ranges)
    return metrics
