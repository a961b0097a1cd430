"""A run is examined before it trains: the fast doctor, on the parts that will train."""

from __future__ import annotations

from typing import cast

from flow_grpo.algorithm.groups import compare
from flow_grpo.judging.evaluate import ConditionSource
from flow_grpo.preflight.doctor import fast
from flow_grpo.preflight.doctor.context import DoctorContext
from flow_grpo.preflight.doctor.schedule import trained_steps
from flow_grpo.records import TrainingBatch
from flow_grpo.run.trainer import Trainer


def examine(trainer: Trainer) -> None:
    """Run the fast doctor, and plot the stochastic steps that it found sound; nothing where no epoch is left.

    Raises:
        ValueError: on every rank, if a check failed.
    """
    if trainer.config.doctor != "fast" or trainer.state.finished >= trainer.config.num_epochs:
        return
    context = doctor_context(trainer)
    try:
        fast.before_training(context, trainer.progress.say)
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
