"""A rank of `train_grpo.py` that goes wrong when `tools/soak.py` says so; started by torchrun in its place.

The environment variable FLOW_GRPO_SOAK holds JSON: {"fault": NAME, "epoch": N, "rank": R}. In the N-th epoch of the
process, from 0,

    nan      the gradient of rank R turns into NaN before its step is taken
    reward   every reward of rank R raises
    slow     the rewards of rank R take 20 seconds
    none     nothing of this

Nothing in the library knows of this file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script from anywhere

import flow_grpo  # noqa: F401, I001 - before torch, which otherwise loads any accelerator plug-in, unguarded

import torch

import train_grpo
from flow_grpo.algorithm.update import updater
from flow_grpo.algorithm.trainer import Trainer
from flow_grpo.rewards.base import RewardSet

SLOW_S = 20.0


class Saboteur:
    """Stands before three functions of the program."""

    def __init__(self, fault: str, epoch: int, rank: int) -> None:
        self.fault, self.epoch, self.mine = fault, epoch, int(os.environ.get("RANK", "0")) == rank
        self.begun = -1
        self.train_epoch, self.take_step, self.measure = train_grpo.train_epoch, updater.take_step, RewardSet.__call__

    def arm(self) -> None:
        """Take the places."""
        train_grpo.train_epoch = self.counted
        updater.take_step = self.stepped
        RewardSet.__call__ = lambda rewards, *given: self.measured(rewards, *given)  # type: ignore[method-assign]

    def due(self, fault: str) -> bool:
        """Tell whether it is time for a fault."""
        return self.mine and self.fault == fault and self.begun == self.epoch

    def counted(self, trainer: Trainer, epoch: int) -> None:
        """Count the epochs of this process."""
        self.begun += 1
        self.train_epoch(trainer, epoch)

    def stepped(self, module: torch.nn.Module, *given: Any) -> torch.Tensor:
        """Spoil the gradient."""
        if self.due("nan"):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(torch.nan)
        return self.take_step(module, *given)

    def measured(self, rewards: RewardSet, *given: Any) -> Any:
        """Break the rewards or make them slow."""
        if self.due("slow"):
            time.sleep(SLOW_S)
        if self.due("reward"):
            rewards = RewardSet([Broken(reward) for reward in rewards.rewards], rewards.weights)
        return self.measure(rewards, *given)


class Broken:
    """A reward that always raises."""

    def __init__(self, reward: Any) -> None:
        self.name, self.floor, self.measures = reward.name, reward.floor, reward.measures

    def __call__(self, *_: Any) -> Any:
        """Raise."""
        raise RuntimeError("the soak broke this reward")


if __name__ == "__main__":
    Saboteur(**json.loads(os.environ["FLOW_GRPO_SOAK"])).arm()
    train_grpo.launch()
