"""How long ranks wait for one another over an epoch of videos of mixed length: planned rows beside packing per rank."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also when imported from elsewhere

import torch

from flow_grpo.data.dynamic_batch import DynamicBatchSampler, video_tokens
from flow_grpo.maths.keys import generator

SEED = 0
HEIGHT, WIDTH = 480, 832
MEDIAN_FRAMES, SPREAD = 49, 0.5  # of the log-normal distribution; the spread is that of the logarithm
MEDIANS_TO_A_BATCH = 8


def measure(items: int = 10_000, ranks: Sequence[int] = (4, 8)) -> dict[str, float]:
    """Return figures of one epoch for each number of ranks W, and the worst of them.

    The idle share is 1 - total cost / (W * the sum over steps of the largest cost on any rank): the part of all ranks'
    time in which they wait, when time goes with cost.

    Args:
        items: videos in the dataset.
        ranks: numbers of ranks to plan for.
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
    """Return 4n+1 frame counts, log-normal and no longer than a batch may be."""
    normal = torch.randn(items, dtype=torch.float64, generator=generator(SEED, "frames"))
    latent = (MEDIAN_FRAMES * (SPREAD * normal).exp() / 4).round().clamp(1, MEDIANS_TO_A_BATCH * MEDIAN_FRAMES // 4)
    return [4 * int(count) + 1 for count in latent.tolist()]


def planned_batches(frames: list[int], costs: list[int], limit: int, world: int) -> list[list[int]]:
    """Return the batch costs of every rank under `DynamicBatchSampler`, batches of one length each."""
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
    """Return the batch costs of ranks that each fill batches from their own share, in random order, up to the limit."""
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
    """Return the share of time spent waiting; a rank that has run out of batches waits for the rest of the epoch.

    Args:
        ranks: batch costs of every rank, filler included.
        total: cost of all items, filler left out.
    """
    steps = max(map(len, ranks))
    longest = sum(max(batches[step] for batches in ranks if step < len(batches)) for step in range(steps))
    return 1 - total / (len(ranks) * longest)
