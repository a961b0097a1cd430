"""Recipe in, trained adapter out: GRPO for a camera-controlled video-to-video model.

    torchrun --nproc_per_node=2 train_grpo.py --config config/grpo.py:tiny_recam --config.run_name=first

Any knob of `config/base.py` can follow as `--config.section.knob=value`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from flow_grpo.algorithm.debug_print import show
from flow_grpo.algorithm.dynamic_sampling import DynamicSampling
from flow_grpo.algorithm.epoch import Collector, ConditionStream, SampleSettings
from flow_grpo.algorithm.evaluate import EvalSettings, Evaluator
from flow_grpo.algorithm.group_choice import ShortageError
from flow_grpo.algorithm.rollout import SdeSettings
from flow_grpo.algorithm.run_state import RunState, fingerprint
from flow_grpo.algorithm.trainer import Trainer
from flow_grpo.algorithm.update import Updater, UpdateSettings
from flow_grpo.config import Config, ConfigError, load_config, to_dict
from flow_grpo.config_checks import check_world, parse_bucket
from flow_grpo.data.k_repeat_sampler import DistributedKRepeatSampler
from flow_grpo.data.multicam import MultiCamDataset
from flow_grpo.data.tiny_world import ensure_tiny_world
from flow_grpo.maths.schedule import flow_sigmas, step_weights
from flow_grpo.models.adapters import Ema
from flow_grpo.models.recam_policy import RecamPolicy
from flow_grpo.rewards.base import RewardSet, build_reward, build_reward_set
from flow_grpo.runtime import checkpoint, distributed
from flow_grpo.runtime import device as device_door
from flow_grpo.runtime.console import Progress
from flow_grpo.runtime.distributed import Ranks
from flow_grpo.runtime.parallel import parallelize
from flow_grpo.runtime.tracker import Tracker


def main(words: Sequence[str] | None = None) -> int:
    """Train, and return the process's exit code: 0, or 2 for a setting that cannot work, at the start or later."""
    ranks = None
    try:
        config, recipe = read_command_line(words)
        device, ranks = join(config)
        trainer = build(config, recipe, device, ranks)
    except ValueError as error:
        refuse(error, ranks)
        return 2
    try:
        with trainer.progress:
            trainer.evaluate_before()
            for epoch in trainer.epochs():
                train_epoch(trainer, epoch)
    except ShortageError as error:
        trainer.save()
        refuse(error, ranks)
        return 2
    trainer.finish()
    distributed.stop(ranks)
    return 0


def train_epoch(trainer: Trainer, epoch: int) -> None:
    """Sample, score, compare within groups, update; a function, so that nothing of an epoch outlives it."""
    samples = trainer.sample(epoch)
    gathered = trainer.gather(samples)
    chosen = trainer.choose(samples, gathered, epoch)
    batch = trainer.compare(chosen)
    trainer.update(batch, epoch)
    trainer.log(samples)


def read_command_line(words: Sequence[str] | None) -> tuple[Config, str]:
    """Return the checked configuration and the recipe's name.

    Raises:
        ConfigError: a setting that cannot work, alike on every rank.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE:RECIPE", help="such as config/grpo.py:tiny_recam")
    known, overrides = parser.parse_known_args(words)
    config = load_config(known.config, overrides)
    check_world(config, int(os.environ.get("WORLD_SIZE", "1")))
    return config, known.config.rpartition(":")[2]


def join(config: Config) -> tuple[torch.device, Ranks]:
    """Prepare this process's device and meet the other ranks."""
    device = device_door.resolve(config.device)
    device_door.setup(device, config.deterministic, config.num_threads)
    ranks = distributed.start(device)
    if ranks.is_main:
        print(device_door.describe(device, config.device), f"x {ranks.world_size}", flush=True)
    return device, ranks


def refuse(error: ValueError, ranks: Ranks | None) -> None:
    """Say in one line what cannot work; once when every rank knows it, else by the rank that does."""
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0 or (ranks is None and not isinstance(error, ConfigError)):
        print("error:", " ".join(str(error).split()), file=sys.stderr, flush=True)
    if ranks is not None:
        distributed.stop(ranks)


@contextlib.contextmanager
def alike(ranks: Ranks) -> Iterator[None]:
    """Run a part of the start-up that exchanges nothing; what any rank finds wrong is raised on all.

    Raises:
        ValueError: with the message of every rank that raised one, each text once.
    """
    problem = ""
    try:
        yield
    except ValueError as error:
        problem = str(error)
    found = [text for text in ranks.gather_text(problem) if text]
    if found:
        raise ValueError("; ".join(dict.fromkeys(found)))


def build(config: Config, recipe: str, device: torch.device, ranks: Ranks) -> Trainer:
    """Load everything and connect it; resumes when asked to.

    Raises:
        ValueError: on every rank alike, for anything missing or unfit.
    """
    with alike(ranks):
        if ranks.is_main and config.data.tiny_world:
            ensure_tiny_world(config.data.root, config.data.tiny_world)
    run_folder = Path(config.output_root) / run_name(config, recipe, ranks)
    with alike(ranks):
        policy = RecamPolicy.from_config(config.model, config.sample, device)
        train, held_out = splits(config, policy)
        rewards = build_reward_set(config.reward.weights, data_root=config.data.root)
        evaluator = build_evaluator(config, policy, held_out, ranks)
    identity = {"model": fingerprint(policy.module), "trained": config.model.trained, "data": train.fingerprint()}
    ranks.all_equal(str(identity), "model and data")
    policy.module = parallelize(policy.module, config.train.sharding, device, ranks)
    if config.train.kl_coef > 0:
        policy.keep_reference(offload=config.model.offload)
    sampler = build_sampler(config, train, ranks)
    state = RunState(
        module=policy.module,
        optimizer=build_optimizer(config, policy),
        sampler=sampler,
        ema=Ema(policy.trained_parameters(), config.train.ema_decay) if config.train.ema_decay else None,
        device=device,
        identity=identity,
    )
    resumed_step = resume(config, state, run_folder / "checkpoints", ranks)
    progress = Progress(config.num_epochs, ranks, finished=state.finished)
    collector = build_collector(config, policy, train, sampler, rewards, progress, is_main=ranks.is_main)
    return Trainer(
        config=config,
        collector=collector,
        updater=build_updater(config, policy, state, progress, ranks),
        evaluator=evaluator,
        state=state,
        tracker=Tracker(run_folder, to_dict(config), config.trackers, ranks, resumed_step=resumed_step),
        progress=progress,
        ranks=ranks,
        device=device,
        run_folder=run_folder,
        dynamic_sampling=build_dynamic_sampling(config, rewards, state, progress, ranks),
    )


def run_name(config: Config, recipe: str, ranks: Ranks) -> str:
    """Return the configured name, or one made of recipe and time, alike on every rank.

    Raises:
        ValueError: a run without a name cannot be found again to be resumed.
    """
    if config.resume == "auto" and not config.run_name:
        raise ValueError("resume='auto' needs the name of the run to go on with: pass --config.run_name=NAME")
    return config.run_name or ranks.broadcast_text(f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}")


def splits(config: Config, policy: RecamPolicy) -> tuple[MultiCamDataset, MultiCamDataset]:
    """Return the data to train on and the held-out data; ValueError for a size that the model cannot take."""
    train, held_out = (dataset(config, split) for split in (config.data.train_split, config.data.eval_split))
    for data in (train, held_out):
        for index in {data.structure(index): index for index in range(len(data))}.values():
            policy.latent_shape([data.condition(index)])
    return train, held_out


def dataset(config: Config, split: str) -> MultiCamDataset:
    """Return a split of the configured data."""
    data = config.data
    return MultiCamDataset(
        data.root,
        split,
        num_frames=data.num_frames,
        height=data.height,
        width=data.width,
        prompt=data.prompt,
        reference=data.reference,
        buckets=[parse_bucket(text) for text in data.buckets],
    )


def build_sampler(config: Config, train: MultiCamDataset, ranks: Ranks) -> DistributedKRepeatSampler:
    """Return this rank's sampler over the training conditions."""
    sample = config.sample
    return DistributedKRepeatSampler(
        train,
        sample.train_batch_size,
        sample.k,
        ranks.world_size,
        ranks.rank,
        config.seed,
        num_batches_per_epoch=sample.num_batches_per_epoch,
        layout=sample.layout,
        structures=[train.structure(index) for index in range(len(train))],
    )


def build_optimizer(config: Config, policy: RecamPolicy) -> torch.optim.Optimizer:
    """Return AdamW over the trained weights."""
    train = config.train
    return torch.optim.AdamW(
        policy.trained_parameters(),
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
        foreach=True,
    )


def sde_settings(config: Config) -> SdeSettings:
    """Return the noise of the stochastic steps."""
    return SdeSettings(config.sample.sde, config.sample.noise_level, config.sample.max_step_std)


def build_collector(
    config: Config,
    policy: RecamPolicy,
    train: MultiCamDataset,
    sampler: DistributedKRepeatSampler,
    rewards: RewardSet,
    progress: Progress,
    *,
    is_main: bool,
) -> Collector:
    """Return what samples an epoch. The loader is never prepared by accelerate: the sampler already serves ranks."""
    workers = config.data.num_workers
    loader = DataLoader(
        train,
        batch_sampler=sampler,
        collate_fn=list,
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,  # a forked child must not touch a device in use
    )
    settings = SampleSettings(
        sample=config.sample,
        sigmas=flow_sigmas(config.sample.num_steps, config.sample.shift),
        sde=sde_settings(config),
        seed=config.seed,
        debug=config.debug,
        offload=config.sample.offload or config.dynamic_sampling.enabled,
    )
    stream = ConditionStream(loader, sampler)
    return Collector(policy, stream, rewards, settings, is_main=is_main, on_batch=progress.rollout)


def build_dynamic_sampling(
    config: Config, rewards: RewardSet, state: RunState, progress: Progress, ranks: Ranks
) -> DynamicSampling | None:
    """Return what draws further rounds when groups are flat, or None when that is not asked for."""
    if not config.dynamic_sampling.enabled:
        return None
    return DynamicSampling(
        config=config.dynamic_sampling,
        reward=config.reward,
        floors=rewards.floors,
        k=config.sample.k,
        local=config.sample.expanded_batch_size,
        seed=config.seed,
        ranks=ranks,
        history=state.shortages,
        say=progress.say if ranks.is_main else lambda line: show([line]),
    )


def build_updater(config: Config, policy: RecamPolicy, state: RunState, progress: Progress, ranks: Ranks) -> Updater:
    """Return what moves the weights."""
    sample, train = config.sample, config.train
    sigmas, sde = flow_sigmas(sample.num_steps, sample.shift), sde_settings(config)
    weights = step_weights(
        "inverse_delta" if train.guard else train.step_weight,
        sigmas,
        sample.sde_steps,
        kind=sde.kind,
        noise_level=sde.noise_level,
        max_step_std=sde.max_step_std,
    )
    settings = UpdateSettings(
        sigmas=sigmas,
        sde=sde,
        step_weight=weights,
        rollout_batch_size=sample.train_batch_size,
        seed=config.seed,
        train=train,
    )
    after_step = None if state.ema is None else state.ema.update
    return Updater(policy, state.optimizer, settings, ranks, after_step=after_step, on_replay=progress.update)


def build_evaluator(config: Config, policy: RecamPolicy, held_out: MultiCamDataset, ranks: Ranks) -> Evaluator:
    """Return what measures held-out conditions: rewards, agreement with the true view, gold metric."""
    evaluation = config.eval
    settings = EvalSettings(
        sigmas=flow_sigmas(evaluation.num_steps, config.sample.shift),
        num_conditions=evaluation.num_conditions,
        batch_size=evaluation.batch_size,
        videos=evaluation.videos,
    )
    measured = build_reward_set({"target_view": 0.0} | config.reward.weights, data_root=config.data.root)
    gold = build_reward(evaluation.gold, data_root=config.data.root) if evaluation.gold else None
    return Evaluator(policy, held_out, measured, gold, settings, ranks)


def resume(config: Config, state: RunState, folder: Path, ranks: Ranks) -> int | None:
    """Go on from a checkpoint when asked to, and return its step; every rank must call it.

    Raises:
        ValueError: on every rank alike, for a checkpoint that cannot be used.
    """
    checkpoint.remove_stale(folder, ranks=ranks)
    path = checkpoint.resolve_resume(config.resume, folder, ranks=ranks)
    if path is None:
        return None
    state.restore(path, ranks=ranks)
    return state.finished


if __name__ == "__main__":
    sys.exit(main())
