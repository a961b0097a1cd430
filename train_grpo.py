"""Recipe in, trained adapter out: GRPO for a camera-controlled video-to-video model.

    torchrun --nproc_per_node=2 train_grpo.py --config config/grpo.py:tiny_recam --config.run_name=first

Any knob can follow as `--config.section.knob=value`; `--help` and docs/config.md list them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn, cast

if __name__ == "__main__":
    begun = time.perf_counter()  # before the imports, which take seconds
    gc.disable()  # until `launch`: walking what they make again and again took a fifth of them

import flow_grpo  # noqa: F401 - before torch, which otherwise loads any accelerator plug-in, unguarded
from flow_grpo.settings.reference import command_line

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):
    command_line(__doc__).print_help()  # now: what follows takes seconds to import
    sys.exit()

import torch

from flow_grpo.algorithm.groups import compare
from flow_grpo.algorithm.groups.compare import RewardFaultError
from flow_grpo.algorithm.groups.metrics import pooled
from flow_grpo.algorithm.groups.selection import ShortageError
from flow_grpo.cost.forward_count import ForwardCount
from flow_grpo.cost.plan import flops_of_rows, largest_size, recomputed_share
from flow_grpo.cost.recomputation import settled
from flow_grpo.cost.savings import report
from flow_grpo.data.dataset import ConditionDataset, Split
from flow_grpo.data.splits import held_out_data, training_data
from flow_grpo.data.tiny_world import ensure_tiny_world
from flow_grpo.judging.evaluate import ConditionSource, Evaluator
from flow_grpo.judging.reward_signal import NoSignalError
from flow_grpo.judging.stop_rules import BrokenPolicyError
from flow_grpo.judging.verdict import deciding, direction
from flow_grpo.models.adapters import Ema
from flow_grpo.models.policy import Policy
from flow_grpo.models.registry import build_policy, is_video_model
from flow_grpo.preflight import dry_run
from flow_grpo.preflight.doctor import fast as doctor
from flow_grpo.preflight.doctor.context import DoctorContext
from flow_grpo.preflight.doctor.schedule import trained_steps
from flow_grpo.records import TrainingBatch
from flow_grpo.reporting.console import Progress
from flow_grpo.reporting.tracker import Tracker
from flow_grpo.rewards.base import check_name, try_rewards
from flow_grpo.run import parts as parts
from flow_grpo.run import starts
from flow_grpo.run.run_state import RunState, common_identity
from flow_grpo.run.trainer import Trainer
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.checkpoints import resume
from flow_grpo.runtime.checkpoints.run_lock import RunLock
from flow_grpo.runtime.clock import Ledger
from flow_grpo.runtime.processes import start_program
from flow_grpo.runtime.ranks import process_group
from flow_grpo.runtime.ranks.context import Context, share_samples
from flow_grpo.runtime.ranks.process_group import InputError, Timeouts, World
from flow_grpo.runtime.ranks.sharding import on_every_call, parallelize, sent_weights, unwrap
from flow_grpo.settings.checks import check_world, largest_weights
from flow_grpo.settings.errors import refusal
from flow_grpo.settings.loading import ConfigError, to_dict
from flow_grpo.settings.schema import Config

ASSUMED_RATE, ASSUMED_GIB = 2e14, 64.0  # of a device, in a dry run on a machine that has none


def main(argv: Sequence[str] | None = None, begun: float | None = None) -> int:
    """Train and return the exit code: 0, or 2 when a setting, an input or a reward makes training impossible.

    Args:
        argv: words of the command line, by default the process's.
        begun: when the process began, by `time.perf_counter`; by default now.
    """
    world, ledger = None, Ledger(begun)
    try:
        config, spec = read_command_line(argv)
        say_rewards(spec, config)
        if config.dry_run:
            show_plan(config, int(os.environ.get("WORLD_SIZE", "1")))
            return 0
        device, world = set_up_rank(config, watched=True)
    except ValueError as error:
        refuse(error, world)
        return 2
    with world.broadcast_failure():
        try:
            trainer = build(config, spec, device, world)
            trainer.ledger = ledger
            if config.doctor == "fast" and trainer.state.finished < config.num_epochs:
                examine(trainer)
            if world.is_main and not (trainer.run_folder / starts.CONFIG).exists():
                starts.begin(trainer.run_folder)
            trainer.progress.say(f"run folder: {trainer.run_folder}")
        except ValueError as error:
            refuse(error, world)
            return 2
        with trainer.running():
            try:
                train(trainer)
                if trainer.ended_by:
                    trainer.leave()
                else:
                    trainer.finish()
            except (ShortageError, RewardFaultError, InputError, BrokenPolicyError, NoSignalError) as error:
                if not isinstance(error, ShortageError):
                    trainer.rewind()
                if not isinstance(error, NoSignalError):
                    trainer.save()
                trainer.close()
                refuse(error, world)
                return 2
            process_group.shut_down(world)
    return 0


def say_rewards(spec: str, config: Config) -> None:
    """Print the rewards of the run, on rank 0: own ones join the recipe's."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(starts.rewards_in_words(spec, config), flush=True)


def show_plan(config: Config, devices: int) -> None:
    """Print the tensor shapes of an epoch and the plan of memory and time, on rank 0, without loading weights.

    Raises:
        ValueError: the recipe's videos do not fit its model, or the device cannot be started.
    """
    if int(os.environ.get("RANK", "0")):
        return
    size = largest_size(config)
    tensors = dry_run.epoch_tensors(config, size, devices)
    print(f"dry run on {devices} device(s), nothing is allocated; one rank's epoch at {size[0]}x{size[1]}x{size[2]}:")
    print(dry_run.as_text(tensors), flush=True)
    device = device_api.resolve(config.device)
    device_api.select(device)
    limit = ASSUMED_GIB if device.type == "cpu" else device_api.memory(device)["total"]
    config, said = settled(config, devices, limit)
    print("the plan, as tools/plan.py makes it for any device:", *([said] if said else []), sep="\n", flush=True)
    print(report(config, devices, ASSUMED_RATE, round(limit, 1))[0], flush=True)


def examine(trainer: Trainer) -> None:
    """Run the fast doctor, and plot the stochastic steps that it found sound.

    Raises:
        ValueError: on every rank, if a check failed.
    """
    context = doctor_context(trainer)
    try:
        doctor.before_training(context, trainer.progress.say)
    except ValueError:
        trainer.tracker.close()
        raise
    trainer.gallery.steps(context.sampling.rollout.sigmas.tolist(), [vars(step) for step in trained_steps(context)])


def doctor_context(trainer: Trainer) -> DoctorContext:
    """Return the parts of a run that the doctor examines."""
    collector, updater, state = trainer.collector, trainer.updater, trainer.state

    def sample_epoch() -> tuple[TrainingBatch, float]:
        batches = trainer.sample()
        gathered = trainer.gather(batches)
        batch = trainer.compare(compare.everything(batches, gathered, trainer.world))
        return batch, trainer.metrics["train/zero_std_ratio"]

    return DoctorContext(
        config=trainer.config,
        world=trainer.world,
        device=trainer.device,
        run_folder=trainer.run_folder,
        policy=updater.policy,
        data=cast(ConditionSource, state.sampler.dataset),
        sampler=state.sampler,
        rewards=collector.rewards,
        sampling=collector.settings,
        objective=updater.objective,
        updater=updater,
        ema=state.ema,
        epoch=state.finished,
        sample_epoch=sample_epoch,
    )


def train(trainer: Trainer) -> None:
    """Evaluate, then train for the remaining epochs."""
    with trainer.progress:
        trainer.evaluate_before()
        for epoch in trainer.epochs():
            train_epoch(trainer, epoch)


def train_epoch(trainer: Trainer, epoch: int) -> None:
    """Train for one epoch; its samples are freed on return, before the next epoch samples."""
    batches = trainer.sample()
    gathered = trainer.gather(batches)
    chosen = trainer.choose(batches, gathered)
    training_batch = trainer.compare(chosen)
    trainer.update(training_batch, epoch)
    trainer.finish_epoch(epoch)
    trainer.log(batches)
    trainer.evaluate_if_due()
    trainer.save_if_due()


def read_command_line(argv: Sequence[str] | None) -> tuple[Config, str]:
    """Return the checked configuration and its recipe, "FILE:RECIPE"; print what a resumed run takes from where.

    Raises:
        ConfigError: a setting that cannot work, identical on every rank.
    """
    known, overrides = command_line(__doc__).parse_known_args(argv)
    config, said = starts.configuration(known.config, overrides)
    if said and int(os.environ.get("RANK", "0")) == 0:
        print("\n".join(said), flush=True)
    for name in config.reward.weights:
        check_name(name, config.reward.remote)
    check_world(config, int(os.environ.get("WORLD_SIZE", "1")))
    return config, known.config


def set_up_rank(config: Config, wait_s: float = 0.0, *, watched: bool = False) -> tuple[torch.device, World]:
    """Prepare this process's device and join the process group.

    Args:
        config: of the run.
        wait_s: seconds that a collective call waits for the slowest rank; 0 uses the configuration's.
        watched: exit when another rank dies, fails or hangs; the caller must then report progress.
    """
    waits = config.distributed
    device = device_api.resolve(config.device)
    device_api.setup(device, config.deterministic, config.num_threads, waits.collective_s)
    dead_s = waits.dead_s if watched else 0.0
    timeouts = Timeouts(
        control_s=wait_s or waits.control_s, device_s=waits.device_s, dead_s=dead_s, silent_s=waits.silent_s
    )
    world = process_group.init_ranks(device, timeouts)
    if world.is_main:
        print(device_api.describe(device, config.device), f"x {world.data.size}", flush=True)
    return device, world


def refuse(error: ValueError, world: World | None) -> None:
    """Print a refusal in one line: on rank 0 when every rank raised it, else on the rank that did."""
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0 or (world is None and not isinstance(error, ConfigError)):
        print("error:", " ".join(str(error).split()), file=sys.stderr, flush=True)
    if world is not None:
        process_group.shut_down(world)


@contextlib.contextmanager
def raise_on_all_ranks(world: World) -> Iterator[None]:
    """Run start-up work without collective calls, and raise any rank's ValueError or OSError on all ranks.

    Raises:
        ValueError: with the distinct messages of all ranks.
    """
    problem: ValueError | None = None
    try:
        yield
    except ValueError as error:
        problem = error
    except OSError as error:  # which names its file
        problem = ValueError(f"{error}; see that the file or folder can be used")
    found = [text for text in world.all.gather_text("" if problem is None else str(problem)) if text]
    if found:
        raise ValueError("; ".join(dict.fromkeys(found))) from problem


def build(config: Config, spec: str, device: torch.device, world: World) -> Trainer:
    """Load data, model and rewards, build the trainer, and restore the checkpoint to resume from.

    Raises:
        ValueError: on every rank, for an input that is missing or unusable on any.
    """
    with raise_on_all_ranks(world):
        if world.is_main and config.data.tiny_world:
            ensure_tiny_world(config.data.root, config.data.tiny_world)
    world, context = share_samples(world, config.train.context_parallel, device)
    # A run draws from keyed generators only; this seed is for libraries that draw from torch's own.
    torch.manual_seed(config.seed)
    run_folder = Path(config.output_root) / run_name(config, spec, world)
    lock, checkpoints = RunLock(run_folder), run_folder / "checkpoints"
    with raise_on_all_ranks(world):
        starts.check_places(config, run_folder)
        if world.is_main and run_folder.exists():  # a new folder is made only once everything else is built
            lock.take()
    path = resume.find(config.resume, checkpoints, world=world)
    given, config = config, settle_checkpointing(config, device, world)
    with raise_on_all_ranks(world):
        train, held_out = splits(config, world)
        policy = build_policy(config, device)
        check_sizes(policy, train, held_out)
        rewards = parts.build_rewards(config, config.reward.weights, world)
        try_rewards(rewards, train.condition(0))
        evaluator = parts.build_evaluator(config, policy, held_out, world)
    share_tokens(policy, context)
    state = distribute_model(config, policy, train, device, world)
    if path is not None:
        state.restore(path, world=world)
        state.match_evaluation(evaluator.settings.measured_on, own=resume.is_own(path, checkpoints))
    from_own = resume.commit(config.resume, path, checkpoints, world=world)
    with raise_on_all_ranks(world):
        if world.is_main:
            lock.take()
            place, count = device_api.describe(device, config.device), world.all.size
            by, done = rewards.served(), state.finished
            said = starts.record(run_folder, given, spec, path, epoch=done, ranks=count, device=place, served=by)
            print("\n".join(said), end="\n" if said else "", flush=True)
        step = None if path is None else state.finished
        tracker = open_tracker(config, run_folder, evaluator, world, resumed_step=step)
    seconds = 60 * config.max_minutes - state.train_seconds if config.max_minutes else math.inf
    progress = Progress(config.num_epochs, world, finished=state.finished, seconds=seconds)
    if path is not None:
        progress.say(resumed_from(path, state, config, own=from_own))
    collector = parts.build_collector(config, policy, train, state.sampler, rewards, progress, world)
    return Trainer(
        config=config,
        collector=collector,
        updater=parts.build_updater(config, policy, state, progress, world),
        evaluator=evaluator,
        state=state,
        tracker=tracker,
        progress=progress,
        world=world,
        device=device,
        run_folder=run_folder,
        lock=lock,
        forwards=count_forwards(config, policy, device),
        dynamic_sampling=parts.build_dynamic_sampling(config, rewards, progress, world),
        cameras=pooled(train.cameras()),
        from_own=from_own,
        films=is_video_model(config.model.kind),
    )


def open_tracker(
    config: Config, run_folder: Path, evaluator: Evaluator, world: World, *, resumed_step: int | None
) -> Tracker:
    """Return the run's tracker, which knows the held-out metrics that decide and which way they should go."""
    gold = evaluator.gold is not None
    return Tracker(
        run_folder,
        to_dict(config),
        config.trackers,
        world,
        resumed_step=resumed_step,
        direction=functools.partial(direction, rewards=evaluator.names),
        deciding=functools.partial(deciding, rewards=evaluator.names, weights=largest_weights(config), gold=gold),
    )


def share_tokens(policy: Policy, context: Context) -> None:
    """Let the ranks of `context` compute every sample together (collective call).

    Raises:
        ConfigError: the policy cannot do that.
    """
    if context.size == 1:
        return
    if not hasattr(policy, "share_tokens"):
        text = f"must be 1 for {type(policy).__name__}, a policy of one's own without a method share_tokens"
        raise refusal("train.context_parallel", context.size, f"{text}; see docs/add_a_model.md")
    policy.share_tokens(context)


def settle_checkpointing(config: Config, device: torch.device, world: World) -> Config:
    """Return the configuration with `model.checkpointing=auto` decided for this device, and say what and why."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
    config, said = settled(config, world.all.size, device_api.memory(device).get("total", ASSUMED_GIB) / ranks_here)
    if said and world.is_main:
        print(said, flush=True)
    return config


def count_forwards(config: Config, policy: Policy, device: torch.device) -> ForwardCount:
    """Return the count of the network's calls, with the rate of the device that their operations are a share of."""

    def rate() -> float:
        return 1e12 * config.device_tflops or device_api.matrix_rate(device, device_api.DTYPES[config.model.dtype])

    network, share = unwrap(policy.module), recomputed_share(config)
    return ForwardCount(network, recomputed=share, flops=flops_of_rows(config), rate=rate)


def resumed_from(path: Path, state: RunState, config: Config, *, own: bool) -> str:
    """Return one line: from which checkpoint and epoch a run goes on, and what it takes from another run's."""
    said = f"resumes from {path}, saved after epoch {state.finished} of {config.num_epochs}"
    if own:
        return said
    said += ": trained weights, optimizer, weight average, position in the data and number of epochs come from there"
    if state.before is None:
        return f"{said}; the held-out metrics before training are measured now, as they were measured otherwise there"
    return f"{said}, and the held-out metrics before training"


def distribute_model(config: Config, policy: Policy, train: Split, device: torch.device, world: World) -> RunState:
    """Distribute the policy's network and its optimizer over the ranks, and return the run's state.

    Raises:
        ValueError: on every rank, when ranks hold different models or data, or the network cannot be sharded so.
    """
    identity = common_identity(policy.module, config.model.trained, train, world)
    policy.module = parallelize(policy.module, config.train.sharding, device, world)
    if config.train.kl_coef > 0:
        policy.keep_reference(offload=config.model.offload)
    optimizer = parts.build_optimizer(config, policy)

    def on_call() -> None:
        world.report_progress()  # for the watchdog, however large a batch is
        # FSDP gathers once more for the backward pass.
        world.sent["weights"] += int(gathered * (2 if torch.is_grad_enabled() else 1))

    gathered = sent_weights(policy.module)
    on_every_call(policy.module, on_call)
    sampler = parts.build_sampler(config, train, world)
    return RunState(
        module=policy.module,
        optimizer=optimizer,
        sampler=sampler,
        ema=Ema(policy.trained_parameters(), config.train.ema_decay) if config.train.ema_decay else None,
        device=device,
        identity=identity,
    )


def run_name(config: Config, spec: str, world: World) -> str:
    """Return the configured name, or one made of the recipe's and the time, identical on every rank.

    Raises:
        ValueError: a run that is to be resumed has no name.
    """
    if config.resume == "auto" and not config.run_name:
        raise ValueError("resume='auto' needs the name of the run to go on with: pass --config.run_name=NAME")
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and not config.run_name:
        raise ValueError("torchrun --max-restarts needs the name of the run to go on with: pass --config.run_name=NAME")
    return config.run_name or world.broadcast_text(f"{spec.rpartition(':')[2]}-{time.strftime('%Y%m%d-%H%M%S')}")


def splits(config: Config, world: World) -> tuple[Split, Split]:
    """Return the training and the held-out data, disjoint in videos, after reading one condition of each.

    Raises:
        ValueError: a split that cannot be used.
    """
    train, held_out = training_data(config.data), held_out_data(config.data, config.eval)
    if world.is_main:
        train.check_apart(held_out)
    for data in (train, held_out):
        data.condition(len(data) - 1)
    return train, held_out


def check_sizes(policy: Policy, *data_sets: ConditionDataset) -> None:
    """Read one condition of every video size in every data set; ValueError for a size that the model cannot take."""
    for data in data_sets:
        for index in {data.size_of(index): index for index in range(len(data))}.values():
            policy.latent_shape([data.condition(index)])


def launch(begun: float | None = None) -> NoReturn:
    """Run `main` and exit with its code; `begun` as for `main`.

    After an error it skips the interpreter's shutdown, which can abort or hang while a process group is up.
    """
    start_program()
    try:
        code = main(begun=begun)
    except (Exception, KeyboardInterrupt):  # noqa: BLE001 - printed; the exit code tells the launcher
        try:
            traceback.print_exc()
            sys.stdout.flush()
        finally:
            os._exit(1)
    sys.exit(code)


if __name__ == "__main__":
    launch(begun)
