"""What is recorded of rewards beside their averages: by kind of camera, and how their servers fare."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flow_grpo.algorithm.groups.compare import Gathered
from flow_grpo.runtime.ranks.process_group import Ranks

MOST_CAMERAS = 16  # kinds with numbers of their own: trackers draw a panel for each
OTHER = "other"


def pooled(cameras: Sequence[str]) -> tuple[str, ...]:
    """Return the camera kind of every condition as metrics name it.

    The 16 most frequent kinds (of equal ones the first by name) keep their names, all others become "other". What is no
    letter, digit or one of `.:+-_` becomes "-": a slash would begin a group of metrics.
    """
    clean = [re.sub(r"[^\w.:+-]", "-", camera) for camera in cameras]
    counts = Counter(clean)
    kept = set(sorted(counts, key=lambda camera: (-counts[camera], camera))[:MOST_CAMERAS])
    return tuple(camera if camera in kept else OTHER for camera in clean)


def camera_metrics(gathered: Gathered, cameras: Sequence[str]) -> dict[str, float]:
    """Return `reward_by_camera/` metrics: the mean of every reward's valid values, and the share of those.

    Args:
        gathered: N samples of all ranks, so that every rank finds the same.
        cameras: the kind of camera of every condition of the data set; none gives no metrics.
    """
    metrics: dict[str, float] = {}
    kinds = [cameras[index] for index in gathered.indices.tolist()] if cameras else []
    for camera in sorted(set(kinds)):
        rows = torch.tensor([kind == camera for kind in kinds])
        for name, values in gathered.rewards.items():
            metrics |= _mean(f"reward_by_camera/{camera}/{name}", values[rows], gathered.valid[name][rows])
    return metrics


def _mean(name: str, values: Tensor, valid: Tensor) -> dict[str, float]:
    share = {f"{name}_valid": float(valid.sum()) / len(valid)}
    return share | ({name: float(values[valid].mean())} if valid.any() else {})


def server_metrics(stats: Mapping[str, Mapping[str, float]], ranks: Ranks) -> dict[str, float]:
    """Return `server/` metrics of all ranks: calls and failures added up, seconds as the slowest rank saw them.

    An epoch waits for its slowest rank, so its percentiles are those that count. Every rank must call it, with the same
    rewards.

    Args:
        stats: reward name -> what this rank measured of its server, see `rewards.base.Served`.
        ranks: who takes part.
    """
    metrics: dict[str, float] = {}
    for name, own in stats.items():
        everyone = ranks.all_gather(torch.tensor([[own[key] for key in ("calls", "failures", "p50_s", "p95_s")]]))
        calls, failures, *percentiles = everyone.unbind(dim=1)
        prefix = f"server/{name.rpartition(':')[2]}"
        metrics |= {f"{prefix}_calls": float(calls.sum()), f"{prefix}_failures": float(failures.sum())}
        for label, seconds in zip(("p50_s", "p95_s"), percentiles, strict=True):
            if seconds.isfinite().any():
                metrics[f"{prefix}_{label}"] = float(seconds[seconds.isfinite()].max())
    return metrics
