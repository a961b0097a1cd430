"""Computes how long ranks wait for each other in an epoch of mixed-length videos, by batching method."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flow_grpo.data.dynamic_batch import DynamicBatchSampler, video_tokens
from flow_grpo.maths.keys import generator

SEED = 0
HEIGHT, WIDTH = 480, 832
MEDIAN_FRAMES, SPREAD = 49, 0.5  # of the log-normal distribution; SPREAD is the standard deviation of the logarithm
MEDIANS_TO_A_BATCH = 8


def measure(items: int = 10_000, ranks: Sequence[int] = (4, 8)) -> dict[str, float]:
    """Return batch counts and idle shares for each number of ranks W, and the worst idle shares.

    The idle share, 1 - total cost / (W * sum over steps of the largest cost on any rank), is the fraction of all ranks'
    time spent waiting, if time is proportional to cost.
    """
    frames = draw_frames(items)
    costs = [video_tokens(count, HEIGHT, WIDTH) for count in frames]
    limit = MEDIANS_TO_A_BATCH * video_tokens(MEDIAN_FRAMES, HEIGHT, WIDTH)
    figures: dict[str, float] = {}
    for world in ranks:
        naive = naive_batches(costs, limit, world)
        planned = planned_batches(frames, costs, limit, world)
        figures[f"batches_{world}"] = len(planned[0])
        figures[f"naive_batches_{world}"] = max(map(len, naive))
        figures[f"idle_share_{world}"] = idle_share(planned, sum(costs))
        figures[f"naive_idle_share_{world}"] = idle_share(naive, sum(costs))
    figures["idle_share"] = max(figures[f"idle_share_{world}"] for world in ranks)
    figures["naive_idle_share"] = max(figures[f"naive_idle_share_{world}"] for world in ranks)
    return figures


def draw_frames(items: int) -> list[int]:
    """Return log-normal 4n+1 frame counts, capped at the size of a batch."""
    normal = torch.randn(items, dtype=torch.float64, generator=generator(SEED, "frames"))
    latent = (MEDIAN_FRAMES * (SPREAD * normal).exp() / 4).round().clamp(1, MEDIANS_TO_A_BATCH * MEDIAN_FRAMES // 4)
    return [4 * int(count) + 1 for count in latent.tolist()]


def planned_batches(frames: list[int], costs: list[int], limit: int, world: int) -> list[list[int]]:
    """Return every rank's batch costs under `DynamicBatchSampler`."""
    return [
        [
            sum(costs[index] for index in batch)
            for batch in DynamicBatchSampler(
                frames,
                limit,
                num_replicas=world,
                rank=rank,
                seed=SEED,
                cost=costs.__getitem__,
                structure=frames.__getitem__,
            )
        ]
        for rank in range(world)
    ]


def naive_batches(costs: list[int], limit: int, world: int) -> list[list[int]]:
    """Return every rank's batch costs: the baseline that shuffles, splits among ranks and fills batches in order."""
    order = torch.randperm(len(costs), generator=generator(SEED, "naive")).tolist()
    ranks = []
    for rank in range(world):
        batches = [0]
        for index in order[rank::world]:
            if batches[-1] + costs[index] > limit:
                batches.append(0)
            batches[-1] += costs[index]
        ranks.append(batches)
    return ranks


def idle_share(ranks: list[list[int]], total: int) -> float:
    """Return the fraction of time spent waiting; a rank out of batches waits for the rest of the epoch.

    Args:
        ranks: every rank's batch costs, filler included.
        total: cost of all items, without filler.
    """
    steps = max(map(len, ranks))
    longest = sum(max(batches[step] for batches in ranks if step < len(batches)) for step in range(steps))
    return 1 - total / (len(ranks) * longest)
