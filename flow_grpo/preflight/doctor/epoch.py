"""A short epoch with two updates: what becomes of its samples, and what the updates do to the policy.

Advantages are replaced by +1 and -1 in turn: those of the rewards may all be 0, which would hide every fault of the
gradients.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from flow_grpo.algorithm.groups import compare
from flow_grpo.algorithm.update.history import UpdateHistory
from flow_grpo.algorithm.update.objective import GrpoObjective, build_objective
from flow_grpo.algorithm.update.updater import Updater
from flow_grpo.maths.sde import gaussian_kl
from flow_grpo.preflight.doctor.findings import Finding, finding
from flow_grpo.preflight.doctor.probe import (
    SHARE_OF_CLIP,
    Replay,
    bit_exact,
    check_latents_fp32,
    replay,
    replaying_objective,
    roll_out_probe,
)
from flow_grpo.preflight.doctor.weights import examine_gradients, logged_gradients
from flow_grpo.records import Samples, TrainingBatch
from flow_grpo.run.trainer import Trainer
from flow_grpo.runtime.ranks.sharding import averaging_gradients, local
from flow_grpo.settings.objectives import micro_batch

PROBE_FACTOR = 10.0  # how much larger the maximum over an epoch may be than over one batch
CLIP_USUAL = (1e-6, 1e-2)  # clip ranges of mean log-probabilities are 1e-5 to 1e-3, GRPO-Guard's 2e-6: a decade around
BF16_KL = 1e-5  # rounding: 2^-9 of the velocity, at gains up to 1.5 a KL of 4e-6


def examine_epoch(trainer: Trainer, updates_per_epoch: int) -> Iterator[Finding]:
    """Check an epoch and its updates, and restore the weights.

    The trainer has one update per epoch, the recipe `updates_per_epoch`.
    """
    updater, train, replaying = trainer.updater, trainer.config.train, replaying_objective(trainer)
    with _restored_afterwards(trainer), logged_gradients(trainer) as gradients:
        if replaying is not None:
            probe = roll_out_probe(trainer)
            before = replay(replaying, probe, micro_batch(trainer.config))
            kl_before, _ = _kl_and_gradient(trainer, replaying, probe)
        batch = _sample_epoch(trainer)
        k, flat = trainer.config.sample.k, trainer.metrics["train/zero_std_ratio"]
        groups = trainer.config.sample.expanded_batch_size * trainer.world.data.size // k
        message = f"{groups} groups of {k} copies, {flat:.0%} of them flat"
        way_out = "copies score the same: raise sample.noise_level or sample.k, or check the rewards' noise floors"
        yield finding("groups", message, warn=way_out if flat == 1 else "")
        first = update(updater, batch, 0)
        if replaying is not None:
            after = replay(replaying, probe, micro_batch(trainer.config))
            moved = guard_log_ratios(before, after) if train.guard else after.log_ratios - before.log_ratios
            yield check_clip(moved, train.clip_range, updates_per_epoch)
            if train.kl_coef:
                kl, gradient = _kl_and_gradient(trainer, replaying, probe)
                yield check_kl(train.kl_coef, kl_before, kl, gradient, exact=bit_exact(trainer))
            else:
                yield finding("kl", "train.kl_coef is 0: there is no reference policy")
        # One factor of a LoRA adapter has no gradient until the other has moved. The ratio is 1 in this update:
        # samples beyond the clip range would have no gradient.
        unclipped = copy.copy(updater)
        config = dataclasses.replace(trainer.config, train=dataclasses.replace(train, old_log_prob="detach"))
        unclipped.objective = build_objective(config, updater.policy, trainer.collector.sampling, trainer.weights)
        second = update(unclipped, batch, 1)
        if first["train/bad_steps"] or second["train/bad_steps"]:
            way_out = "lower train.learning_rate or sample.noise_level, or compute in fp32 (model.dtype)"
            yield finding("update", "a loss or a gradient was not finite, see above", fail=way_out)
            return
        if replaying is not None:
            yield from _examine_transport(trainer, batch, before, first["policy/ratio_first_max_abs_log"])
        yield from examine_gradients(trainer, gradients)
        norms = first["train/grad_norm"], second["train/grad_norm"]
        message = f"gradient norms of two updates {', '.join(f'{norm:.2g}' for norm in norms)}"
        way_out = "no gradient reaches the weights: check train.step_weight and model.trained"
        yield finding("update", message, fail="" if all(norm > 0 for norm in norms) else way_out)


@contextlib.contextmanager
def _restored_afterwards(trainer: Trainer) -> Iterator[None]:
    optimizer, ema = trainer.updater.optimizer, trainer.state.ema
    parameters = trainer.updater.policy.trained_parameters()
    weights = [local(parameter).clone() for parameter in parameters]
    moments = copy.deepcopy(optimizer.state_dict())
    average = None if ema is None else ema.state_dict()
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in zip(parameters, weights, strict=True):
                local(parameter).copy_(values)
        optimizer.zero_grad(set_to_none=True)
        optimizer.load_state_dict(moments)
        if ema is not None and average is not None:
            ema.load_state_dict(average)


def _sample_epoch(trainer: Trainer) -> TrainingBatch:
    """Sample, score and compare an epoch as training does, with signs as advantages."""
    batches = trainer.sample()
    gathered = trainer.gather(batches)
    whole, rank = compare.everything(batches, gathered, trainer.world), trainer.world.data.rank
    return with_signs(trainer.compare(whole), rank, len(whole.placement[rank]))


def with_signs(batch: TrainingBatch, rank: int, own: int) -> TrainingBatch:
    """Return the rows with advantages +1 and -1 in turn and weight 1, the first `own` of them: others are padding.

    The copies of a group have both signs: in its row, or with -1 first on odd ranks where a row is a sample.
    """
    numbers = torch.arange(batch.advantages.numel()).view_as(batch.advantages)
    signs: Tensor = 1.0 - 2.0 * ((numbers + (rank if numbers.ndim == 1 else 0)) % 2).float()
    weights = torch.zeros_like(signs)
    weights[:own] = 1.0
    return dataclasses.replace(batch, advantages=signs, weights=weights)


def update(updater: Updater, batch: TrainingBatch, epoch: int) -> dict[str, float]:
    """Take the optimizer steps of an epoch after the warm-up and return their metrics; collective call."""
    after_warm_up = UpdateHistory(taken=updater.config.train.warmup_steps)
    return updater.run(batch, updater.plan(batch, epoch), after_warm_up)


def log_ratio_of_one_update(trainer: Trainer) -> float:
    """Return the rms log-ratio of a batch after one update with signs as advantages, restoring weights; collective."""
    objective, rows = replaying_objective(trainer), micro_batch(trainer.config)
    assert objective is not None, "only recorded steps have a log-ratio"
    with _restored_afterwards(trainer):
        probe = roll_out_probe(trainer)
        before = replay(objective, probe, rows)
        update(trainer.updater, _sample_epoch(trainer), 0)
        moved = replay(objective, probe, rows).log_ratios - before.log_ratios
    return float(trainer.world.data.all_gather(moved.square().mean().cpu()[None]).mean().sqrt())


def guard_log_ratios(before: Replay, after: Replay) -> Tensor:
    """Return (B, K) GRPO-Guard log-ratios between two replays: the means of z_old * (mean - mean_old).

    Computed from the means, because in a difference of log-probabilities the bias that the guard removes may dominate.
    """
    return before.units * (before.residuals * (before.residuals - after.residuals)).flatten(2).mean(dim=2).cpu()


def check_clip(log_ratios: Tensor, clip_range: float, updates: int) -> Finding:
    """Check the clip range against the (B, K) log-ratios after one of an epoch's updates.

    Only from the second update on does the clip act.
    """
    values = log_ratios.flatten().cpu().double()
    share = float((values.abs() > clip_range).float().mean())
    message = f"after one update log-ratio {float(values.mean()):+.2g} +- {float(values.std(correction=0)):.2g}, "
    message += f"{share:.0%} beyond train.clip_range={clip_range:g}"
    if not values.any():
        return finding("clip", message, fail="nothing moved: check train.learning_rate and model.trained")
    low, high = CLIP_USUAL
    warn, all_clipped = "", share > 0.99 and updates > 1
    if not low <= clip_range <= high:
        warn = f"log-probabilities are means over latent elements: use {low:g} to {high:g}, not the 0.2 usual for sums"
    elif share > 0.5:
        warn = "most of the signal is clipped: lower train.learning_rate or raise train.clip_range"
    elif share == 0 and updates > 1:
        warn = "the clip never acts: lower train.clip_range towards the spread"
    return finding("clip", message, fail=warn if all_clipped else "", warn=warn)


def _kl_and_gradient(trainer: Trainer, objective: GrpoObjective, probe: Samples) -> tuple[float, float]:
    """Return the KL of the first stochastic step to the reference, and the norm of its gradient on this rank.

    Computed on one micro-batch, since the device may not have memory for more. Both are 0 without a reference.
    """
    train, policy = trainer.config.train, trainer.updater.policy
    if train.kl_coef == 0:
        return 0.0, 0.0
    part = probe.rows(slice(0, micro_batch(trainer.config)))
    reference = objective.reference_mean(part, 0)
    with averaging_gradients(policy.module, now=False):
        current = objective.replay(part, 0)
        value = gaussian_kl(current.mean, reference, current.std).mean()
        value.backward()
    norms = [float(local(p.grad).norm()) for p in policy.trained_parameters() if p.grad is not None]
    trainer.updater.optimizer.zero_grad(set_to_none=True)
    return float(value.detach()), math.hypot(*norms)


def check_kl(coefficient: float, before: float, after: float, gradient: float, *, exact: bool) -> Finding:
    """Check that the KL to the reference policy starts at 0, rises with an update, and has a gradient.

    KL is in nats per latent element, `gradient` its gradient's norm over the trained weights after the update.
    """
    message = f"{before:.2g} before and {after:.2g} after one update (times train.kl_coef {coefficient * after:.2g}), "
    message += f"gradient norm {gradient:.2g}"
    starts = before == 0 if exact else before < BF16_KL
    way_out = "the reference must be the starting policy, and the KL must carry the gradient of the current one"
    return finding("kl", message, fail="" if starts and after > before and gradient > 0 else way_out)


def _examine_transport(trainer: Trainer, batch: TrainingBatch, probe: Replay, gap: float) -> Iterator[Finding]:
    """Check that the samples of an epoch reached the update unchanged.

    `probe` was replayed directly, before the update, whose largest |log-ratio| to the rollout is `gap` nats.
    """
    exact = bit_exact(trainer) and trainer.updater.plan(batch, 0).as_rolled_out
    probe_gap = (probe.log_ratios.cpu() / probe.units).abs().max()
    worst = float(trainer.world.data.all_gather(probe_gap[None]).max())
    clip_range = trainer.config.train.clip_range / float(probe.units.max())
    yield check_ratio_in_update(gap, worst, clip_range, exact=exact)
    for part in batch.parts:
        yield check_latents_fp32(part.trajectory.states)


def check_ratio_in_update(gap: float, probe_gap: float, clip_range: float, *, exact: bool) -> Finding:
    """Check the first update's largest |log-ratio| to the rollout by that of a batch replayed directly, all in nats."""
    bound = 0.0 if exact else max(SHARE_OF_CLIP * clip_range, PROBE_FACTOR * probe_gap)
    message = f"largest |log-ratio| between the rollout of an epoch and its first update {gap:.2g}, bound {bound:.2g}"
    way_out = "latents or conditions change on their way into the update: see Collector and TrainingBatch.take"
    return finding("ratio_in_update", message, fail="" if gap <= bound else way_out)
