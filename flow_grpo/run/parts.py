"""From a recipe to the parts of a run: data, sampler, collector, updater, rewards, evaluator."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from flow_grpo.algorithm.debug_print import show
from flow_grpo.algorithm.groups.dynamic_sampling import DynamicSampling
from flow_grpo.algorithm.update.objective import build_objective
from flow_grpo.algorithm.update.updater import Updater
from flow_grpo.data.k_repeat_sampler import DistributedKRepeatSampler
from flow_grpo.data.splits import Split
from flow_grpo.judging.evaluate import Evaluator
from flow_grpo.maths.keys import key
from flow_grpo.models.policy import Policy
from flow_grpo.reporting.console import Progress
from flow_grpo.rewards.base import SCENE_FILES, RewardSet, build_reward, build_reward_set
from flow_grpo.run.run_state import RunState
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.errors import refusal
from flow_grpo.settings.sampling import sampling_of
from flow_grpo.settings.schema import Config


def build_sampler(config: Config, train: Split, world: World) -> DistributedKRepeatSampler:
    """Return this rank's sampler over the training conditions."""
    sample = config.sample
    return DistributedKRepeatSampler(
        train,
        sample.train_batch_size,
        sample.k,
        world.data.size,
        world.data.rank,
        config.seed,
        num_batches_per_epoch=sample.num_batches_per_epoch,
        layout=sample.layout,
        structures=[train.size_of(index) for index in range(len(train))],
    )


def build_optimizer(config: Config, policy: Policy) -> torch.optim.Optimizer:
    """Return AdamW over the trained weights; those that read the camera are a group where they have a rate."""
    train, parameters = config.train, policy.trained_parameters()
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if train.camera_learning_rate:
        camera = policy.camera_parameters()
        if not camera:
            raise refusal(
                "train.camera_learning_rate",
                train.camera_learning_rate,
                "must be 0 where no trained weight reads the camera; or train some, see model.trained and "
                "model.lora_full_modules",
            )
        own = set(map(id, camera))
        others = [parameter for parameter in parameters if id(parameter) not in own]
        groups = [{"params": others}] if others else []
        groups += [{"params": camera, "lr": train.camera_learning_rate, "metric": "camera_learning_rate"}]
    return torch.optim.AdamW(
        groups,
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
        foreach=True,
    )


def build_dynamic_sampling(
    config: Config, rewards: RewardSet, progress: Progress, world: World
) -> DynamicSampling | None:
    """Return dynamic sampling, or None when it is disabled."""
    if not config.dynamic_sampling.enabled:
        return None
    return DynamicSampling(
        config=config.dynamic_sampling,
        floors=rewards.floors,
        k=config.sample.k,
        local=config.sample.expanded_batch_size,
        seed=config.seed,
        world=world,
        say=progress.say if world.is_main else lambda line: show([line]),
    )


def build_updater(config: Config, policy: Policy, state: RunState, progress: Progress, world: World) -> Updater:
    """Return the updater."""
    average = contextlib.nullcontext if state.ema is None else state.ema.applied
    return Updater(
        policy,
        build_objective(config, policy, sampling_of(config), average),
        state.optimizer,
        config,
        world,
        after_step=(lambda: None) if state.ema is None else state.ema.update,
        on_pass=progress.update,
    )


def build_rewards(config: Config, weights: Mapping[str, float], world: World) -> RewardSet:
    """Return the rewards that `weights` names, measured in this process or by the recipe's servers."""
    servers, timeout_s = config.reward.remote, config.reward.remote_timeout
    rewards = build_reward_set(weights, data_root=config.data.root, servers=servers, timeout_s=timeout_s)
    rewards.on_call = world.calls_reward
    return rewards


def build_evaluator(config: Config, policy: Policy, held_out: Split, world: World) -> Evaluator:
    """Return the evaluator on held-out conditions: rewards, similarity to the target video, gold metric."""
    evaluation = config.eval
    needed = SCENE_FILES.get(evaluation.gold)
    if needed and not held_out.has_scene_file(needed):
        raise ValueError(
            f"eval.gold is {evaluation.gold!r}, which needs the tiny world: no held-out scene in {config.data.root} "
            f"has a {needed}; pass --config.eval.gold= and judge checkpoints with tools/evaluate.py --checkpoint"
        )
    first, beside = held_out.condition(0), {}
    if first.source_video is not None:  # a prompt has neither source nor true view
        beside = {"source_texture" if first.target_video is None else "target_view": 0.0}
    measured = build_rewards(config, beside | config.reward.weights, world)
    gold = build_reward(evaluation.gold, data_root=config.data.root) if evaluation.gold else None
    return Evaluator(policy, held_out, measured, gold, config, world)


def build_fixed(config: Config, policy: Policy, train: Split, rewards: RewardSet, world: World) -> Evaluator | None:
    """Return the evaluator on training conditions that stay the same, sampled as in training; None without any."""
    count = min(config.eval.fixed_conditions, len(train))
    if not count:
        return None
    own = dataclasses.replace(config.eval, num_conditions=count, guidance_scale=None, negative_prompt=None, videos=0)
    sampling = dataclasses.replace(sampling_of(config), seed=key("fixed conditions"), record=False, window_groups=1)
    return Evaluator(policy, train, rewards, None, dataclasses.replace(config, eval=own), world, sampling)
