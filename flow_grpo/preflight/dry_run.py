"""Shapes of one rank's epoch before there are weights: the real rollout and update, run on fake tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from flow_grpo.algorithm import debug_print
from flow_grpo.algorithm.rollout.denoise import rollout
from flow_grpo.algorithm.update.history import UpdateHistory
from flow_grpo.algorithm.update.objective import build_objective
from flow_grpo.algorithm.update.updater import Updater
from flow_grpo.cost.choose_recomputation import ASSUMED_GIB, choose_recomputation
from flow_grpo.cost.plan import largest_size
from flow_grpo.cost.savings import report
from flow_grpo.models.fake_policy import FakePolicy
from flow_grpo.records import Condition, RewardResult, Samples, ScoredBatch, TrainingBatch, Trajectory
from flow_grpo.run import parts
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.objectives import trained_rows, trains_groups
from flow_grpo.settings.sampling import sampling_of
from flow_grpo.settings.schema import Config

Tensors: TypeAlias = dict[tuple[str, str], Tensor]  # (phase of the epoch, such as "rollout", and name) -> tensor


def show_plan(config: Config, devices: int) -> None:
    """Print the tensor shapes of an epoch and the plan of memory and time, on rank 0, without loading weights."""
    if int(os.environ.get("RANK", "0")):
        return
    size = largest_size(config)
    tensors = epoch_tensors(config, size, devices)
    print(f"dry run on {devices} device(s), nothing is allocated; one rank's epoch at {size[0]}x{size[1]}x{size[2]}:")
    widest = max(len(name) for _, name in tensors)
    for (phase, name), tensor in tensors.items():
        of_type = f"{list(tensor.shape)!s:30s} {str(tensor.dtype).removeprefix('torch.'):9s}"
        print(f"{phase:12s} {name:{widest}s} {of_type} {tensor.nbytes / 2**20:10,.2f} MiB", flush=True)
    device = device_api.resolve(config.device)
    device_api.select(device)
    limit = ASSUMED_GIB if device.type == "cpu" else device_api.memory(device)["total"]
    config, message = choose_recomputation(config, devices, limit)
    print("the plan, as tools/plan.py makes it for any device:", *([message] if message else []), sep="\n", flush=True)
    print(report(config, devices, round(limit, 1)), flush=True)


def epoch_tensors(config: Config, size: tuple[int, int, int], world_size: int) -> Tensors:
    """Return the tensors, of which most are fake, of one rank's epoch with videos of (frames, rows, columns).

    Loaders, rewards and collectives are left out. ValueError for videos that do not fit the model.
    """
    found: Tensors = {}
    policy = FakePolicy(config)
    batch = _rolled_out(policy, config, size, found)
    batches = config.sample.num_batches_per_epoch
    samples = Samples.concatenate([batch.samples] * batches)
    trained, recorded, k = samples, samples.trajectory, config.sample.k
    if trains_groups(config):
        states = torch.cat([recorded.states[:, :1], recorded.states[:, 1:].repeat(1, k, 1, 1, 1, 1)], dim=1)
        grouped = Trajectory(states, recorded.log_probs.repeat(1, k), recorded.steps)
        trained = dataclasses.replace(samples, trajectory=grouped, copies=k).rows(slice(0, trained_rows(config)))
    epoch = dataclasses.replace(batch, conditions=batch.conditions * batches, samples=samples)
    views = debug_print.batch_view(epoch, sampling_of(config).sigmas, config.reward.weights)
    found |= {("epoch", name): value for name, value in views.items() if isinstance(value, Tensor)}
    rewards = torch.empty(world_size * config.sample.expanded_batch_size)
    repeated = debug_print.repeat_over_steps(rewards, samples.trajectory.steps.shape[1])
    found |= {("gather", "rewards"): rewards, ("gather", "rewards.avg over steps"): repeated}
    _update(policy, config, trained, found)
    return found


def _rolled_out(policy: FakePolicy, config: Config, size: tuple[int, int, int], found: Tensors) -> ScoredBatch:
    rows, prompt = config.sample.train_batch_size, config.data.prompt
    with policy.fake_mode:
        poses = torch.empty(size[0], 4, 4)
        fields: dict[str, Any] = {"source_video": torch.empty(3, *size), "intrinsics": torch.empty(4)}
        fields |= {"target_poses": poses, "source_poses": poses}
        given = {name: fields[name] for name in policy.model.needs}
        conditions = tuple(
            Condition(index=row, gid=row, slot=0, prompt=prompt, source_id=str(row), wanted_size=size, **given)
            for row in range(rows)
        )
    conditioning = policy.encode(conditions)
    sampling = sampling_of(config)
    windows = sampling.windows(condition.gid for condition in conditions)
    samples = rollout(policy, conditions, conditioning, windows, sampling)
    videos = policy.decode(samples.final_latents)
    if conditions[0].source_video is not None:
        found["data", "source_video"] = conditions[0].source_video
    found |= {("encode", name): tensor for name, tensor in conditioning.tensors().items()}
    found |= {("rollout", name): tensor for name, tensor in samples.trajectory.tensors().items()}
    found |= {("rollout", "final_latents"): samples.final_latents, ("decode", "videos"): videos}
    reward = RewardResult(torch.ones(rows), torch.ones(rows, dtype=torch.bool), ("",) * rows)
    return ScoredBatch(conditions, samples, dict.fromkeys(config.reward.weights, reward), videos, torch.arange(rows))


def _update(policy: FakePolicy, config: Config, samples: Samples, found: Tensors) -> None:
    """Take the epoch's optimizer steps; every trained tensor must receive a gradient."""
    ones, rows = torch.ones(len(samples), samples.copies).squeeze(1), torch.arange(len(samples))
    batch = TrainingBatch((samples,), torch.stack([torch.zeros_like(rows), rows]), ones, ones)
    if config.train.kl_coef > 0:
        policy.keep_reference()
    optimizer = parts.build_optimizer(config, policy)

    def check_gradients(*_: object) -> None:
        learned = [parameter.grad is not None for parameter in policy.trained_parameters()]
        assert all(learned), f"{learned.count(False)} of {len(learned)} trained tensors have no part in the loss"

    optimizer.register_step_pre_hook(check_gradients)
    objective = build_objective(config, policy, sampling_of(config), contextlib.nullcontext)
    updater = Updater(policy, objective, optimizer, config, World())
    plan = updater.plan(batch, epoch=0)
    micro_batch = batch.take(plan.steps[0][0], policy.device)
    found |= {("micro-batch", name): tensor for name, tensor in micro_batch.trajectory.tensors().items()}
    with _ScalarsAreOne():  # type: ignore[no-untyped-call]
        updater.run(batch, plan, UpdateHistory())


class _ScalarsAreOne(TorchDispatchMode):
    """Inside, reading a Python number from a fake tensor gives 1, so that finite checks and metrics can run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))
