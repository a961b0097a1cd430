"""What both pre-training commands share: gloo processes, resumable state, the log and the record of a finished run."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flow_grpo.runtime.atomic_file import atomic_path


@contextlib.contextmanager
def processes(args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Seed torch, make the folder args.work and join the gloo process group; yields (rank, world size)."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    args.work.mkdir(parents=True, exist_ok=True)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    yield rank, world
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


class Resumable:
    """Modules and optimizers with a step counter, resumed from WORK/state.pt if that exists."""

    def __init__(self, work: Path, **parts: Any) -> None:
        self.work, self.parts, self.step, self.seconds = work, parts, 0, 0.0
        self.file = work / "state.pt"
        self.resumed = self.file.exists()
        if self.resumed:
            state = torch.load(self.file, weights_only=True, map_location="cpu")
            for name, part in parts.items():
                part.load_state_dict(state[name])
            self.step, self.seconds = state["step"], state["seconds"]

    def save(self) -> None:
        state = {name: part.state_dict() for name, part in self.parts.items()}
        save_tensors(self.file, {**state, "step": self.step, "seconds": self.seconds})

    def log(self, row: dict[str, float]) -> None:
        with (self.work / "log.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def write_record(self, file: Path, tool: str, args: argparse.Namespace, names: Sequence[str], **more: Any) -> None:
        """Write how the weights were made: the named settings, `more`, and the log."""
        record = {
            "tool": tool,
            "torch": torch.__version__,
            "seed": 0,
            "settings": {name: getattr(args, name) for name in names},
            **more,
            "log": [json.loads(line) for line in (self.work / "log.jsonl").read_text().splitlines()],
        }
        file.write_text(json.dumps(record, indent=1))


def load_shares(args: argparse.Namespace, name: str, make: Callable[[range], Any], rank: int, world: int) -> list[Any]:
    """Return what all ranks have made of args.scenes scenes, each of its share; of an earlier call what is there.

    The earlier call may have had another number of ranks. Collective call.
    """
    files = [args.work / f"{name}_{args.scenes}_{part}_of_{world}.pt" for part in range(world)]
    for earlier in args.work.glob(f"{name}_{args.scenes}_0_of_*.pt"):
        count = int(earlier.stem.rpartition("_")[2])
        others = [args.work / f"{name}_{args.scenes}_{part}_of_{count}.pt" for part in range(count)]
        files = others if all(map(Path.exists, others)) else files
    if rank < len(files) and not files[rank].exists():
        began = time.time()
        save_tensors(files[rank], make(range(rank, args.scenes, world)))
        print(f"rank {rank}: {name} made in {time.time() - began:.0f} s", flush=True)
    if world > 1:
        dist.barrier()
    return [torch.load(file, weights_only=True) for file in files]


def save_tensors(file: Path, content: Any) -> None:
    with atomic_path(file) as partial:
        torch.save(content, partial)
