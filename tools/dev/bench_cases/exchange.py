"""Times dynamic sampling's exchange against gathering objects on several CPU processes, and measures peak memory.

One group of the first round is flat and is replaced by a resampled group from another rank. Both ways start with a
rank's scored samples and end with its training record, and each runs in processes of its own. Linux only: peak memory
is read from /proc, as getrusage may report the parent process's peak.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from flow_grpo.algorithm.groups import compare
from flow_grpo.algorithm.groups.dynamic_sampling import DynamicSampling
from flow_grpo.records import Condition, Conditioning, RewardResult, Samples, ScoredBatch, Trajectory
from flow_grpo.runtime.ranks import process_group
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.loading import load_config
from flow_grpo.settings.schema import DynamicSamplingConfig

K = 2  # two groups of two on every rank
MEBIBYTE = 2**20


def measure(world: int = 4, local: int = 4, mebibytes: int = 32) -> dict[str, float]:
    """Return seconds and MiB of peak memory growth of both ways, each of the worst rank, and the ratios."""
    # The exchange takes a tenth of a second, too short to time once on a shared machine.
    ours = _run(_pooled, world, local, mebibytes, repeats=5)
    objects = _run(_gathered_objects, world, local, mebibytes, repeats=1)
    return {
        "exchange_s": ours[0],
        "objects_s": objects[0],
        "time_ratio": objects[0] / ours[0],
        "exchange_mib": ours[1],
        "objects_mib": objects[1],
        "memory_ratio": objects[1] / max(ours[1], 1.0),  # a small exchange reuses freed memory
    }


def _run(way: Callable[..., object], world: int, local: int, mebibytes: int, *, repeats: int) -> tuple[float, float]:
    """Return median seconds and memory growth in MiB of the first repetition, of the worst rank."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (way, world, local, mebibytes, folder, repeats)
        torch.multiprocessing.start_processes(_rank, arguments, nprocs=world, start_method="spawn")
        results = [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(world)]
    return max(seconds for seconds, _ in results), max(growth for _, growth in results)


def _rank(
    rank: int, way: Callable[..., object], world: int, local: int, mebibytes: int, folder: str, repeats: int
) -> None:
    world = join(rank, world, folder)
    rounds = [_round(world, number, local, mebibytes) for number in range(2)]
    dist.barrier(group=world.all.gloo)
    before, seconds, growth = resident_mib(), [], 0.0
    for _ in range(repeats):
        begun = time.perf_counter()
        kept = way(world, rounds, local)
        dist.barrier(group=world.all.gloo)
        seconds.append(time.perf_counter() - begun)
        growth = growth or peak_mib() - before
        del kept
    torch.save((statistics.median(seconds), growth), f"{folder}/{rank}.pt")
    process_group.shut_down(world)
    os._exit(0)  # gloo may abort in the interpreter's teardown after large transfers


def join(rank: int, world: int, folder: str) -> World:
    """Return this CPU process among so many that meet by a file in a folder; it computes with one thread."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    meeting = f"file://{folder}/rendezvous"
    return process_group.init_ranks(torch.device("cpu"), process_group.Timeouts(300.0), init_method=meeting)


def resident_mib() -> float:
    """Return this process's resident MiB, and reset its peak."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status_mib("VmRSS")


def peak_mib() -> float:
    """Return this process's peak resident MiB since `resident_mib`."""
    return _status_mib("VmHWM")


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def _round(world: World, number: int, local: int, mebibytes: int) -> tuple[ScoredBatch, ...]:
    """Return a rank's samples: in the first round the last group is flat, in the second all but one."""
    groups = world.data.size * local // K
    rows = [world.data.rank * local + row for row in range(local)]
    conditions = [condition(number * groups + row // K, row % K) for row in rows]
    flat = [(row // K == groups - 1) if number == 0 else (row // K != 0) for row in rows]
    rewards = torch.tensor([0.0 if same else float(row % K) for row, same in zip(rows, flat, strict=True)])
    states = torch.rand(local, 4, mebibytes, MEBIBYTE // 16)
    ids = torch.tensor([[2 * (number * 1000 + row), 2 * (number * 1000 + row) + 1] for row in rows])
    samples = Samples(
        keys=torch.tensor([[c.gid, c.slot, c.index] for c in conditions]),
        places=torch.arange(local),
        noise_ids=ids,
        conditioning=Conditioning(torch.zeros(local, 1, 1)),
        trajectory=Trajectory(states, torch.zeros(local, 3), torch.tensor([[1, 2, 3]]).repeat(local, 1)),
        final_latents=torch.zeros(local, 1),
    )
    result = RewardResult(rewards, torch.ones(local, dtype=torch.bool), ("",) * local)
    return (ScoredBatch(tuple(conditions), samples, {"reward": result}, torch.zeros(0)),)


def condition(gid: int, slot: int) -> Condition:
    """Return a copy of a group, with a video of one black pixel."""
    video = torch.zeros(3, 1, 1, 1)
    return Condition(gid, gid, slot, "", video, torch.eye(4, dtype=torch.float64)[None], "", "cam01", "cam02")


RECIPE = f"{Path(__file__).resolve().parents[3]}/config/grpo.py:my_recam_8npu"


def _pooled(world: World, rounds: list[tuple[ScoredBatch, ...]], local: int) -> Any:
    """Exchange only the missing groups, as a run does."""
    sampling = DynamicSampling(
        config=DynamicSamplingConfig(True, 3, "fallback_original", "", skip_step_if_all_flat=False),
        floors={},
        k=K,
        local=local,
        seed=0,
        world=world,
        say=lambda _: None,
    )

    def draw(number: int) -> tuple[tuple[ScoredBatch, ...], compare.Gathered]:
        return rounds[number], compare.gather(rounds[number], world)

    reward = dataclasses.replace(load_config(RECIPE).reward, weights={"reward": 1.0})
    chosen, metrics = sampling.choose(*draw(0), draw, reward=reward, shortages=[])
    assert metrics["dyn/moved_samples"] == K, metrics
    return chosen


def _gathered_objects(world: World, rounds: list[tuple[ScoredBatch, ...]], local: int) -> Any:
    """Gather all valid samples as objects and take this rank's slice, as published trainers do."""
    pool: list[Samples] = []
    for (batch,) in rounds:
        rewards = batch.rewards["reward"].values.view(-1, K)
        valid = (rewards.max(dim=1).values > rewards.min(dim=1).values).repeat_interleave(K)
        mine = [batch.samples.rows(slice(row, row + 1)).map(torch.clone) for row in range(local) if valid[row]]
        everyone: list[Any] = [None] * world.data.size
        dist.all_gather_object(everyone, mine, group=world.all.gloo)
        pool += [sample for samples in everyone for sample in samples]
    assert len(pool) == world.data.size * local
    return Samples.concatenate(pool[world.data.rank * local : (world.data.rank + 1) * local])
