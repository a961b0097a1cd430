"""What the doctor examines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from flow_grpo.algorithm.rollout.sampling import SampleSettings
from flow_grpo.algorithm.update.objective import GrpoObjective, Objective
from flow_grpo.algorithm.update.updater import Updater
from flow_grpo.data.k_repeat_sampler import DistributedKRepeatSampler
from flow_grpo.judging.evaluate import ConditionSource
from flow_grpo.models.policy import Policy
from flow_grpo.records import TrainingBatch
from flow_grpo.rewards.base import RewardSet
from flow_grpo.run.run_state import Average
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.schema import Config


@dataclasses.dataclass(frozen=True)
class DoctorContext:
    """The parts of a run on one rank, as training uses them.

    Attributes:
        config: the recipe.
        world: this rank and its peers.
        device: of this rank.
        run_folder: where checkpoints would be written; it may not exist.
        policy: the model being trained.
        data: training conditions by index.
        sampler: plans which conditions each rank samples.
        rewards: the reward set of training.
        sampling: noise levels and stochastic steps of the rollout.
        objective: gives the loss; checks of replayed steps are those of `grpo`.
        updater: takes the gradient steps of that objective.
        ema: moving average of the trained weights, or None.
        epoch: the epoch that training starts with.
        sample_epoch: samples, scores and compares an epoch with the trainer's own code; returns the update's batch and
            the share of flat groups. Collective call: every rank must call it.
    """

    config: Config
    world: World
    device: torch.device
    run_folder: Path
    policy: Policy
    data: ConditionSource
    sampler: DistributedKRepeatSampler
    rewards: RewardSet
    sampling: SampleSettings
    objective: Objective
    updater: Updater
    ema: Average | None
    epoch: int
    sample_epoch: Callable[[], tuple[TrainingBatch, float]]

    @property
    def grpo(self) -> GrpoObjective | None:
        """The objective where it replays recorded steps, else None."""
        return self.objective if isinstance(self.objective, GrpoObjective) else None

    @property
    def bit_exact(self) -> bool:
        """Whether replaying a rollout batch must reproduce its log-probabilities bit for bit."""
        model = self.config.model
        return self.device.type == "cpu" and model.dtype == "fp32" and not model.compile
