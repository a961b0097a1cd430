"""A rank's start: its device, the process group, and refusals that all ranks print as one line."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.processes import refused, say_last
from flow_grpo.runtime.ranks import process_group
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.schema import Config


def set_up_rank(config: Config, wait_s: float = 0.0, *, watched: bool = False) -> tuple[torch.device, World]:
    """Prepare this process's device and join the process group.

    Args:
        config: configuration of the run.
        wait_s: seconds that a collective call waits for the slowest rank; 0 uses the configuration's.
        watched: exit when another rank dies, fails or hangs; the caller must then report progress.
    """
    waits = config.distributed
    device = device_api.resolve(config.device)
    device_api.setup(device, config.deterministic, config.num_threads, waits.collective_s)
    waits = dataclasses.replace(waits, control_s=wait_s or waits.control_s, dead_s=waits.dead_s if watched else 0.0)
    world = process_group.init_ranks(device, waits)
    if world.is_main:
        print(device_api.describe(device, config.device), f"x {world.all.size}", flush=True)
    return device, world


def refuse(error: ValueError, world: World | None) -> int:
    """Print a refusal in one line, leave the process group, and return exit code 2.

    Rank 0 prints what every rank raised, a rank alone what it raised before there was a process group.
    """
    if world is None:
        return refused(error)
    if world.is_main:
        say_last(str(error))
    process_group.shut_down(world)
    return 2


@contextlib.contextmanager
def raise_on_all_ranks(world: World) -> Iterator[None]:
    """Run start-up work without collective calls, and raise any rank's ValueError or OSError on all ranks.

    Raises:
        ValueError: with the distinct messages of all ranks.
    """
    problem: ValueError | None = None
    world.begin_phase("start-up")
    try:
        yield
    except ValueError as error:
        problem = error
    except OSError as error:  # which names its file
        problem = ValueError(f"{error}; see that the file or folder can be used")
    found = [text for text in world.all.gather_text("" if problem is None else str(problem)) if text]
    if found:
        raise ValueError("; ".join(dict.fromkeys(found))) from problem
