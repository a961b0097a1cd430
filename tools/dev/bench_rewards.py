"""Measure the CPU-seconds of rewards, and how long a host's cores keep a device waiting for those of its last batch.

    python tools/dev/bench_rewards.py
    python tools/dev/bench_rewards.py --size 33 240 416 --cores 8 --rewards pose_rot pose_trans

Two samples of one condition are scored in a textured room, one call after the other on one core; a call of the pool is
then dealt to `--cores` as they get free, and what runs in the scoring thread is added as it is. What depends on the
condition alone is measured first: a run does that while it samples its first batch.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script from anywhere

import flow_grpo.rewards  # noqa: F401, I001 - before torch, which loads accelerator plug-ins unguarded

import torch

from flow_grpo.records import Condition
from flow_grpo.rewards.base import build_reward_set
from flow_grpo.rewards.camera.pose import shared_measurer
from flow_grpo.rewards.frames import frame_numbers
from flow_grpo.rewards.process_pool import CallPool, Outcome
from flow_grpo.settings.loading import load_config
from tests import textured_room as room
from tools.common import make_parser, markdown_table

RECIPE = Path(__file__).resolve().parents[2] / "config" / "grpo.py"


class OneCore(CallPool):
    """Runs every call here and notes its CPU-seconds; calls are cut as for `workers` processes."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.batches: list[list[float]] = []

    def run(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], **_: Any) -> list[Outcome[Any]]:
        """Return the outcomes of the calls; seconds and name do not matter."""
        outcomes, seconds = [], []
        for each in arguments:
            begun = time.process_time()
            outcomes.append(Outcome(function(*each)))
            seconds.append(time.process_time() - begun)
        self.batches.append(seconds)
        return outcomes


def main(words: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    usual = list(load_config(f"{RECIPE}:my_recam_8npu").reward.weights)
    parser.add_argument("--rewards", nargs="+", default=usual, metavar="NAME", help="else those of my_recam_8npu")
    parser.add_argument("--size", nargs=3, type=int, default=[81, 480, 832], metavar=("FRAMES", "ROWS", "COLUMNS"))
    parser.add_argument("--cores", type=int, default=16)
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    measurer = shared_measurer()
    measurer.pool = measurer.features.pool = pool = OneCore(asked.cores)
    rewards = build_reward_set(dict.fromkeys(asked.rewards, 1.0), data_root=".")
    videos, conditions = samples(asked)
    calls: dict[str, Callable[[], object]] = {"the condition alone": functools.partial(rewards.prepare, conditions)}
    calls |= {one.name: functools.partial(one, videos, conditions) for one in rewards.rewards}
    rows = []
    for name, call in calls.items():
        pool.batches.clear()
        begun = time.process_time()
        call()
        seconds = time.process_time() - begun
        shared = sum(map(sum, pool.batches))
        rows.append((name, seconds, seconds - shared + sum(dealt(each, asked.cores) for each in pool.batches)))
    rows.append(("after the last batch", *(sum(row[column] for row in rows[1:]) for column in (1, 2))))
    shown = [(name, f"{seconds:.1f}", f"{waited:.1f}") for name, seconds, waited in rows]
    print("\n".join(markdown_table(["", "CPU-s of two samples", f"s on {asked.cores} cores"], shown)))
    return 0


def samples(asked: argparse.Namespace) -> tuple[torch.Tensor, list[Condition]]:
    """Return two videos of an arc that is too slow, (2, 3, T, h, w), and their conditions."""
    frames, size = asked.size[0], tuple(asked.size[1:])
    filmed = frame_numbers(frames)  # the others repeat them: what they show takes no more or less time
    shown = [max(row for row, number in enumerate(filmed) if number <= frame) for frame in range(frames)]

    def film(preset: str, speed: float = 1.0) -> torch.Tensor:
        return room.film(preset, size, len(filmed), speed=speed)[:, shown]

    condition = room.condition("arc_right", film("source"), room.source_path(len(filmed))[shown], film("arc_right"))
    return torch.stack([film("arc_right", 0.9), film("arc_right", 0.8)]), [condition] * 2


def dealt(seconds: Sequence[float], cores: int) -> float:
    """Return when the last of calls of so many seconds ends that go in their order to whichever core is free."""
    free = [0.0] * cores
    for each in seconds:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


if __name__ == "__main__":
    sys.exit(main())
