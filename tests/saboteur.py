"""A rank of `train_grpo.py` with one fault: torchrun starts this file in its place, for `test_faults.py` and the soak.

The environment variable FAULT names it, FAULTY_RANK the rank that has it, and FAULTY_EPOCH the epoch in which it
occurs, counted from 0: by default the second.
"""

import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import flow_grpo  # noqa: F401, I001 - before torch, which otherwise loads any accelerator plug-in, unguarded

import torch

import train_grpo
from flow_grpo.judging import evaluate
from flow_grpo.algorithm.update import objective, updater
from flow_grpo.data.multicam import MultiCamDataset
from flow_grpo.models.wan_policy import WanPolicy
from flow_grpo.rewards.base import RewardSet
from flow_grpo.run.trainer import Trainer
from flow_grpo.runtime.processes import launch
from flow_grpo.runtime.checkpoints import state_files
from flow_grpo.reporting.metric_files import MetricFiles

EPOCH = {"begun": -1}


def due() -> bool:
    """Return whether the fault occurs now, on this rank."""
    here = os.environ.get("RANK") == os.environ.get("FAULTY_RANK")
    return here and EPOCH["begun"] == int(os.environ.get("FAULTY_EPOCH", "1"))


def before(owner: Any, name: str, strike: Callable[[], None]) -> None:
    """Make the fault occur before every call of a function while it is due."""
    original = getattr(owner, name)

    def replaced(*args: Any, **named: Any) -> Any:
        if due():
            strike()
        return original(*args, **named)

    setattr(owner, name, replaced)


def raising(error: Exception) -> Callable[[], None]:
    """Return a function that raises an error."""

    def strike() -> None:
        raise error

    return strike


def broken_gradient() -> None:
    """Make the gradients NaN before every optimizer step while the fault is due."""
    original = updater.take_step

    def stepped(optimizer: torch.optim.Optimizer, *given: Any) -> torch.Tensor:
        for group in optimizer.param_groups if due() else ():
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.fill_(torch.nan)
        return original(optimizer, *given)

    updater.take_step = stepped


def slow_disk() -> None:
    """Let every rank write its part of a checkpoint slowly."""
    original = state_files.write

    def slowly(*args: Any) -> None:
        time.sleep(2)
        original(*args)

    state_files.write = slowly


def die() -> None:
    """Kill this process."""
    os.kill(os.getpid(), 9)


def started_again() -> bool:
    """Return whether the launcher has restarted the ranks."""
    return os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"


def freeze() -> None:
    """Stop the whole process, threads included, as a machine that hangs."""
    os.kill(os.getpid(), 19)


BROKEN = RuntimeError("the fault that was planted")
FULL = OSError(errno.ENOSPC, "No space left on device")
FAULTS: dict[str, Callable[[], object]] = {
    "fetch": lambda: before(MultiCamDataset, "condition", raising(BROKEN)),
    "fetch while saving": lambda: (slow_disk(), before(MultiCamDataset, "condition", raising(BROKEN))),
    "encode": lambda: before(WanPolicy, "encode", raising(BROKEN)),
    "rollout": lambda: before(WanPolicy, "velocity", raising(BROKEN)),
    "decode": lambda: before(WanPolicy, "decode", raising(BROKEN)),
    "decode memory": lambda: before(WanPolicy, "decode", raising(torch.OutOfMemoryError("3 GiB"))),
    "update": lambda: before(objective, "grpo_loss", raising(BROKEN)),
    "update memory": lambda: before(objective, "grpo_loss", raising(torch.OutOfMemoryError("3 GiB"))),
    "gradient": broken_gradient,
    "evaluate": lambda: before(evaluate, "decode", raising(BROKEN)),
    "log": lambda: before(MetricFiles, "append", raising(OSError(errno.EROFS, "Read-only file system"))),
    "save": lambda: before(state_files, "save_file", raising(FULL)),
    "die": lambda: before(WanPolicy, "velocity", die),
    "freeze": lambda: before(WanPolicy, "velocity", freeze),
    "hang": lambda: before(RewardSet, "__call__", lambda: time.sleep(3600)),
    "hang in update": lambda: before(objective, "grpo_loss", lambda: time.sleep(3600)),
    "die once": lambda: before(WanPolicy, "velocity", int if started_again() else die),
    "reward": lambda: before(RewardSet, "call", raising(BROKEN)),
    "slow": lambda: before(RewardSet, "__call__", lambda: time.sleep(3)),
    "very slow": lambda: before(RewardSet, "__call__", lambda: time.sleep(20)),
    "": lambda: None,
}


def main() -> None:
    """Install the fault and train."""
    train_epoch = Trainer.train_epoch

    def counted(trainer: Any, epoch: int) -> None:
        EPOCH["begun"] = epoch
        (trainer.run_folder / "begun").write_text(str(epoch))
        train_epoch(trainer, epoch)

    Trainer.train_epoch = counted
    FAULTS[os.environ["FAULT"]]()
    launch(train_grpo.main)


if __name__ == "__main__":
    main()
