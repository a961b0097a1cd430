"""Denoising steps of the rollout: those that ranks make, and those that they wait for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from flow_grpo.data.k_repeat_sampler import DistributedKRepeatSampler
from flow_grpo.runtime.ranks.exchange import dealt
from flow_grpo.settings.objectives import window_length
from flow_grpo.settings.sampling import sampling_of
from flow_grpo.settings.schema import Config

CYCLES = 4  # of the windows, over which the steps of the slowest rank are averaged


Walk = Callable[[int], float]  # consecutive steps without noise -> how many exact ones are as much work


def steps_after(config: Config, window: Sequence[int], walk: Walk = float) -> float:
    """Return the steps of a sample behind the first of its window."""
    return len(window) - 1 + walk(config.sample.tail_steps or config.sample.num_steps - 1 - window[-1])


def sample_steps(config: Config, walk: Walk = float) -> float:
    """Return the steps of a sample that shares none, on average over the windows."""
    blocks = sampling_of(config).blocks
    every = [walk(block[0]) + 1 + steps_after(config, block, walk) for block in blocks]
    return sum(every) / len(every) if every else config.sample.num_steps


def round_steps(config: Config, ranks: int, walk: Walk = float) -> tuple[float, float]:
    """Return the steps of a rank in a round, on average over ranks and rounds, and those that take its seconds.

    All ranks wait for the slowest at the end of a round, and before it behind the prefixes that copies share.
    """
    sample, sampling = config.sample, sampling_of(config)
    batches, size, held = sample.num_batches_per_epoch, sample.train_batch_size, sample.expanded_batch_size
    if not sampling.blocks:
        return held * sample_steps(config), held * sample_steps(config)
    groups, cycle = held * ranks // sample.k, len(sampling.blocks) * sampling.window_groups
    sampler = DistributedKRepeatSampler(
        groups, size, sample.k, ranks, ranks - 1, 0, num_batches_per_epoch=batches, layout=sample.layout
    )

    def steps(held: Sequence[Sequence[int]], of_window: Callable[[Sequence[int]], float], calls: int) -> list[float]:
        # Of every rank. With sharded weights all ranks make equally many calls; those added have one row.
        counts = [[of_window(window) for window in sampling.windows(own)] for own in held]
        parts = [[own[start : start + size] for start in range(0, len(own), size)] for own in counts]
        return [sum(sum(part) + max(0, calls - max(part)) for part in own) for own in parts]

    before, behind = sampling.calls or (0, 0)
    behind = 0 if sample.tail_steps else behind + window_length(config) - 1
    mean, slowest, rounds = 0.0, 0.0, CYCLES * cycle // math.gcd(cycle, groups)
    for number in range(rounds):
        plans = [sampler.plan(step) for step in range(number * batches, (number + 1) * batches)]
        gids = [[gid for plan in plans for _, gid, *_ in plan[rank]] for rank in range(ranks)]
        first = steps(dealt(gids)[1] if sample.share_prefix else gids, lambda window: walk(window[0]) + 1, before + 1)
        rest = steps(gids, lambda window: steps_after(config, window, walk), behind)
        mean += (sum(first) + sum(rest)) / ranks
        slowest += max(first) + max(rest) if sample.share_prefix else max(map(sum, zip(first, rest, strict=True)))
    return mean / rounds, slowest / rounds
