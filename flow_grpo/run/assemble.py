"""A run is assembled in phases, on all ranks together: claim its folder, load, share, restore, open what reports."""

from __future__ import annotations

import functools
import math
import os
import time
from pathlib import Path

import torch

from flow_grpo.algorithm.groups.metrics import pooled
from flow_grpo.algorithm.rollout.collector import Collector, ConditionStream
from flow_grpo.cost.choose_recomputation import ASSUMED_GIB, choose_recomputation
from flow_grpo.cost.forward_count import ForwardCount
from flow_grpo.data.dataset import ConditionDataset, make_loader
from flow_grpo.data.splits import Split, held_out_data, training_data
from flow_grpo.data.tiny_world import ensure_tiny_world
from flow_grpo.judging.evaluate import Evaluator, keeps_start
from flow_grpo.judging.verdict import deciding, direction
from flow_grpo.models.adapters import Ema
from flow_grpo.models.policy import Policy
from flow_grpo.models.registry import build_policy, check_model
from flow_grpo.reporting.console import Progress
from flow_grpo.reporting.tracker import Tracker
from flow_grpo.rewards.base import RewardSet, try_rewards
from flow_grpo.run import parts, starts
from flow_grpo.run.run_state import RunState, common_identity
from flow_grpo.run.trainer import Trainer
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.checkpoints import resume
from flow_grpo.runtime.checkpoints.run_lock import RunLock
from flow_grpo.runtime.clock import Ledger
from flow_grpo.runtime.ranks.context_parallel import ContextParallel, share_samples
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.runtime.ranks.sharding import on_every_call, parallelize, sent_weights, unwrap
from flow_grpo.runtime.ranks.start_up import raise_on_all_ranks
from flow_grpo.settings.checks import trained_rewards
from flow_grpo.settings.errors import all_of, refusal
from flow_grpo.settings.loading import to_dict
from flow_grpo.settings.sampling import sampling_of
from flow_grpo.settings.schema import Config


def assemble(config: Config, spec: str, device: torch.device, world: World, ledger: Ledger | None = None) -> Trainer:
    """Return a run's trainer, at its start or where the checkpoint to resume from left it (collective call).

    `spec` is "FILE:RECIPE". The ledger counts seconds outside of epochs, by default from now on. ValueError on every
    rank for an input that is missing or unusable on any.
    """
    with raise_on_all_ranks(world):
        if world.is_main and config.data.tiny_world:
            ensure_tiny_world(config.data.root, config.data.tiny_world)
    world, context = share_samples(world, config.train.context_parallel, device)
    # A run draws from keyed generators only; this seed is for libraries that draw from torch's own.
    torch.manual_seed(config.seed)
    run_folder, lock = _claim_folder(config, spec, world)
    checkpoint = resume.find(config.resume, run_folder / "checkpoints", world=world)
    given, config = config, _choose_checkpointing(config, device, world)
    train, policy, rewards, evaluator = _load(config, device, world)
    share_tokens(policy, context)
    state = distribute(config, policy, train, device, world)
    from_own = _restore(config, checkpoint, state, evaluator, run_folder, world)
    with raise_on_all_ranks(world):
        if world.is_main:
            lock.take()
            lines = starts.record(
                *(run_folder, given, spec, checkpoint),
                epoch=state.finished,
                ranks=world.all.size,
                device=device_api.describe(device, config.device),
                served=rewards.served(),
                identity=state.identity,
            )
            print("\n".join(lines), end="\n" if lines else "", flush=True)
        tracker = _open_tracker(
            config, run_folder, evaluator, world, resumed_step=None if checkpoint is None else state.finished
        )
    seconds = 60 * config.max_minutes - state.train_seconds if config.max_minutes else math.inf
    progress = Progress(config.num_epochs, world, finished=state.finished, seconds=seconds)
    if checkpoint is not None:
        progress.say(_resumed_from(checkpoint, state, config, own=from_own))
    stream = ConditionStream(make_loader(train, state.sampler, config.data.num_workers), state.sampler)
    return Trainer(
        config=config,
        collector=Collector(policy, stream, rewards, sampling_of(config), config, world, on_batch=progress.rollout),
        updater=parts.build_updater(config, policy, state, progress, world),
        evaluator=evaluator,
        state=state,
        tracker=tracker,
        progress=progress,
        world=world,
        device=device,
        run_folder=run_folder,
        lock=lock,
        forwards=ForwardCount(unwrap(policy.module), config, device),
        ledger=ledger or Ledger(),
        dynamic_sampling=parts.build_dynamic_sampling(config, rewards, progress, world),
        cameras=pooled(train.cameras()),
        from_own=from_own,
        fixed=parts.build_fixed(config, policy, train, rewards, world),
    )


def _claim_folder(config: Config, spec: str, world: World) -> tuple[Path, RunLock]:
    """Return the run's folder and its lock, taken on rank 0 if the folder exists.

    A new folder is made and locked only once everything else is built.
    """
    run_folder = Path(config.output_root) / run_name(config, spec, world)
    lock = RunLock(run_folder)
    with raise_on_all_ranks(world):
        starts.check_places(config, run_folder)
        if world.is_main and run_folder.exists():
            lock.take()
    return run_folder, lock


def run_name(config: Config, spec: str, world: World) -> str:
    """Return the configured name, or one made of the recipe's and the time, identical on every rank."""
    if config.resume == "auto" and not config.run_name:
        raise ValueError("resume='auto' needs the name of the run to go on with: pass --config.run_name=NAME")
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and not config.run_name:
        raise ValueError("torchrun --max-restarts needs the name of the run to go on with: pass --config.run_name=NAME")
    return config.run_name or world.broadcast_text(f"{spec.rpartition(':')[2]}-{time.strftime('%Y%m%d-%H%M%S')}")


def _choose_checkpointing(config: Config, device: torch.device, world: World) -> Config:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
    gib = device_api.memory(device).get("total", ASSUMED_GIB) / ranks_here
    config, message = choose_recomputation(config, world.all.size, gib)
    if message and world.is_main:
        print(message, flush=True)
    return config


def _load(config: Config, device: torch.device, world: World) -> tuple[Split, Policy, RewardSet, Evaluator]:
    with raise_on_all_ranks(world):
        # What is missing is told together, and before minutes of loading.
        (train, held_out), _ = all_of([lambda: splits(config, world), lambda: check_model(config)])
        policy = build_policy(config, device)
        check_sizes(policy, train, held_out)
        rewards = parts.build_rewards(config, config.reward.weights, world)
        sample = config.sample
        together = sample.layout == "contiguous" and sample.train_batch_size % sample.k == 0
        whole_groups = together and config.train.context_parallel == 1
        try_rewards(rewards, train.condition(0), whole_groups=whole_groups)
        evaluator = parts.build_evaluator(config, policy, held_out, world)
    return train, policy, rewards, evaluator


def splits(config: Config, world: World) -> tuple[Split, Split]:
    """Return the training and the held-out data, disjoint in videos, after reading one condition of each."""
    train, held_out = training_data(config.data), held_out_data(config.data, config.eval)
    if world.is_main:
        train.check_apart(held_out)
    for data in (train, held_out):
        data.condition(len(data) - 1)
    return train, held_out


def check_sizes(policy: Policy, *data_sets: ConditionDataset) -> None:
    """Read one condition of every video size; ValueError for a size that the model cannot take."""
    for data in data_sets:
        for index in {data.size_of(index): index for index in range(len(data))}.values():
            policy.latent_shape([data.condition(index)])


def share_tokens(policy: Policy, context: ContextParallel) -> None:
    """Let the ranks of `context` compute every sample together; ConfigError for a policy that cannot."""
    if context.size == 1:
        return
    if not hasattr(policy, "share_tokens"):
        text = f"must be 1 for {type(policy).__name__}, a policy of one's own without a method share_tokens"
        raise refusal("train.context_parallel", context.size, f"{text}; see docs/add_a_model.md")
    policy.share_tokens(context)


def distribute(config: Config, policy: Policy, train: Split, device: torch.device, world: World) -> RunState:
    """Distribute the policy's network and its optimizer over the ranks, and return the run's state."""
    identity = common_identity(policy, config.model.trained, train, world)
    policy.module = parallelize(policy.module, config.train.sharding, device, world)
    if keeps_start(config, policy):
        policy.keep_reference(offload=config.model.offload)
    gathered = sent_weights(policy.module)

    def on_call() -> None:
        world.report_progress()  # for the watchdog, however large a batch is
        # FSDP gathers once more for the backward pass.
        world.all.sent["weights"] += int(gathered * (2 if torch.is_grad_enabled() else 1))

    on_every_call(policy.module, on_call)
    return RunState(
        module=policy.module,
        optimizer=parts.build_optimizer(config, policy),
        sampler=parts.build_sampler(config, train, world),
        ema=Ema(policy.trained_parameters(), config.train.ema_decay) if config.train.ema_decay else None,
        device=device,
        identity=identity,
    )


def _restore(
    config: Config, checkpoint: Path | None, state: RunState, evaluator: Evaluator, run_folder: Path, world: World
) -> bool:
    """Restore the checkpoint, if any, and return whether it is the run's own."""
    checkpoints = run_folder / "checkpoints"
    if checkpoint is not None:
        state.restore(checkpoint, world=world)
        state.match_evaluation(evaluator.measured_on, own=resume.is_own(checkpoint, checkpoints))
    return resume.commit(config.resume, checkpoint, checkpoints, world=world)


def _resumed_from(checkpoint: Path, state: RunState, config: Config, *, own: bool) -> str:
    message = f"resumes from {checkpoint}, saved after epoch {state.finished} of {config.num_epochs}"
    if own:
        return message
    message += ": trained weights, optimizer, weight average, position in the data and number of epochs come from there"
    if state.before is None:
        return (
            f"{message}; the held-out metrics before training are measured now, as they were measured otherwise there"
        )
    return f"{message}, and the held-out metrics before training"


def _open_tracker(
    config: Config, run_folder: Path, evaluator: Evaluator, world: World, *, resumed_step: int | None
) -> Tracker:
    # Curves are told which held-out metrics decide and which way they should go.
    return Tracker(
        run_folder,
        to_dict(config),
        config.trackers,
        world,
        resumed_step=resumed_step,
        direction=functools.partial(direction, rewards=evaluator.names),
        deciding=functools.partial(deciding, rewards=evaluator.names, trained=trained_rewards(config)),
    )
