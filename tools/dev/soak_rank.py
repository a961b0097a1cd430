"""A rank of `train_grpo.py` with an injected fault; `tools/dev/soak.py` lets torchrun start it instead.

The environment variable FLOW_GRPO_SOAK holds JSON: {"fault": NAME, "epoch": N, "rank": R}. In the N-th epoch of the
process, counted from 0, on rank R:

    nan      the gradient becomes NaN before the optimizer step
    reward   every reward raises
    slow     the rewards take 20 seconds
    none     nothing happens
"""

from __future__ import annotations

import dataclasses
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
from flow_grpo.run.trainer import Trainer
from flow_grpo.algorithm.update import updater
from flow_grpo.rewards.base import RewardSet
from flow_grpo.runtime.processes import launch

SLOW_S = 20.0


@dataclasses.dataclass
class Saboteur:
    """Injects one fault by wrapping functions of the program."""

    fault: str
    epoch: int
    rank: int
    begun: int = -1  # epochs that this process has begun, minus one

    def due(self, fault: str) -> bool:
        return (fault, int(os.environ.get("RANK", "0")), self.begun) == (self.fault, self.rank, self.epoch)

    def arm(self) -> None:
        train_epoch, take_step, score = Trainer.train_epoch, updater.take_step, RewardSet.__call__

        def counted(trainer: Trainer, epoch: int) -> None:
            self.begun += 1
            train_epoch(trainer, epoch)

        def stepped(optimizer: torch.optim.Optimizer, *given: Any) -> torch.Tensor:
            if self.due("nan"):
                for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                    if parameter.grad is not None:
                        parameter.grad.fill_(torch.nan)
            return take_step(optimizer, *given)

        def scored(rewards: RewardSet, *given: Any) -> Any:
            if self.due("slow"):
                time.sleep(SLOW_S)
            if self.due("reward"):
                rewards = RewardSet([Broken(reward) for reward in rewards.rewards], rewards.weights)
            return score(rewards, *given)

        Trainer.train_epoch = counted  # type: ignore[method-assign]
        updater.take_step = stepped
        RewardSet.__call__ = scored  # type: ignore[method-assign]


class Broken:
    def __init__(self, reward: Any) -> None:
        self.name, self.floor, self.measures = reward.name, reward.floor, reward.measures

    def __call__(self, *_: Any) -> Any:
        raise RuntimeError("the soak broke this reward")


if __name__ == "__main__":
    Saboteur(**json.loads(os.environ["FLOW_GRPO_SOAK"])).arm()
    launch(train_grpo.main)
