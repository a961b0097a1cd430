"""The doctor's full form: the fast one, then a whole short epoch with two updates, and what they did.

Advantages are +1 and -1 in turn: those of the rewards may all be 0, and then nothing could be seen of gradients.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Iterator

import torch
from torch import Tensor

from flow_grpo.algorithm.groups import compare
from flow_grpo.algorithm.trainer import Trainer
from flow_grpo.algorithm.update.objective import GrpoObjective
from flow_grpo.algorithm.update.updater import Updater
from flow_grpo.maths.sde import gaussian_kl
from flow_grpo.models.adapters import trained_parameters
from flow_grpo.preflight import doctor_checks as checks
from flow_grpo.preflight.doctor_fast import (
    ProbeBatch,
    Replayed,
    alike,
    calls_are_exact,
    can_sample,
    digest,
    draws,
    examine,
    grpo,
    replay,
    take,
)
from flow_grpo.preflight.doctor_rewards import check_rewards, preferences
from flow_grpo.preflight.findings import Finding, agreed, attempted, finding
from flow_grpo.records import TrainingBatch
from flow_grpo.runtime.ranks.sharding import averaging_gradients, is_partitioned, is_sharded, local

SHAPES = (1, 2)  # rows of a call, beside those of the rollout and the update
FIXTURES = 2  # conditions whose true views are shown to the rewards
UPDATES = 2  # the gradient of one factor of an adapter is 0 until the other has moved


@dataclasses.dataclass
class Gradients:
    """What every optimizer step saw on this rank.

    Attributes:
        norms: per step, weight -> norm of its gradient.
        digests: per step, a hash of all gradients.
    """

    norms: list[dict[str, float]] = dataclasses.field(default_factory=list)
    digests: list[str] = dataclasses.field(default_factory=list)


def examine_fully(trainer: Trainer, updates_per_epoch: int = 1, found: list[Finding] | None = None) -> list[Finding]:
    """Return the findings of the full form, alike on every rank; every rank must call it.

    Args:
        trainer: as built, with one update per epoch.
        updates_per_epoch: of the recipe.
        found: what is found is added here on the way, for whoever wants to see it after an error.

    Weights, optimizer state and average are afterwards as they were, except for the optimizer's under ZeRO-2, whose
    engine keeps it; the sampler has moved on by an epoch.
    """
    findings = [] if found is None else found
    findings += examine(trainer, SHAPES)
    with attempted("rewards", findings, trainer.ranks, "see the message; a reward is measured as in training"):
        findings += judged(trainer)
    if can_sample(findings):
        way_out = "the run itself would stop here: mend what is named"
        with untouched(trainer), attempted("epoch", findings, trainer.ranks, way_out):
            findings += an_epoch(trainer, updates_per_epoch)
    return agreed(findings, trainer.ranks)


def judged(trainer: Trainer) -> list[Finding]:
    """Return what is found of the rewards, measured on rank 0; every rank must call it.

    Raises:
        RuntimeError: on every rank, if rank 0 failed.
    """
    findings: list[Finding] = []
    with trainer.ranks.sync_errors("the rewards"):
        if trainer.ranks.is_main:
            data, config = trainer.conditions, trainer.config.reward
            assert data is not None, "the trainer was made without its conditions"
            indices = dict.fromkeys([*(draw[3] for draw in draws(trainer)), *range(min(len(data), 4 * FIXTURES))])
            shown = [condition for condition in map(data.condition, indices) if condition.target_video is not None]
            one_size = [condition for condition in shown if condition.size == shown[0].size][:FIXTURES]
            if one_size:
                first, last = trainer.state.finished, max(trainer.state.finished, trainer.config.num_epochs - 1)
                bends = {min(epoch, last) for points in config.schedules.values() for epoch, _ in points}
                epochs = sorted({first, *(epoch for epoch in bends if epoch > first)})  # straight pieces between
                weights = {epoch: compare.in_epoch(config, epoch).weights for epoch in epochs}
                findings = check_rewards(preferences(trainer.collector.rewards, one_size, config), weights)
            else:
                findings = [finding("reward_order", "no condition has a true view", warn="look at the videos instead")]
    return findings


def an_epoch(trainer: Trainer, updates_per_epoch: int) -> list[Finding]:
    """Return what is found of a whole epoch and its updates; every rank must call it.

    Raises:
        RuntimeError: on every rank, for whatever ends an epoch.
    """
    state, mode = trainer.state, trainer.config.model.trained
    specimen = take(trainer)
    unmoved = replay(trainer.updater, specimen.part, trainer.config.train.batch_size)
    before = kl(trainer, specimen)[0]
    findings, batch = groups(trainer)
    with gradients(trainer) as seen:
        told = [update(trainer.updater, batch, 0)]
        findings += clip(trainer, specimen, unmoved, updates_per_epoch)
        findings += penalty(trainer, specimen, before)
        told += [update(unclipped(trainer.updater), batch, number) for number in range(1, UPDATES)]
    if any(metrics["train/bad_steps"] for metrics in told):
        way_out = "lower train.learning_rate or sample.noise_level, or compute in fp32 (model.dtype)"
        return [*findings, finding("update", "a loss or a gradient was not finite, see above", fail=way_out)]
    findings += carried(trainer, batch, unmoved, told[0]["policy/ratio_first_max_abs_log"])
    findings += alike(trainer, "parameters", "trained weights after updates")
    if not is_sharded(state.module) and not is_partitioned(state.module):
        digests = trainer.ranks.gather_text(" ".join(seen.digests))
        way_out = "gradients are not averaged over ranks: see runtime/ranks/sharding.py"
        findings += checks.check_alike("gradients", digests, "gradients of data of each rank's own", way_out)
    if not is_partitioned(state.module):
        findings += checks.check_received(mode, _over_ranks(trainer, seen.norms))
    norms = ", ".join(f"{metrics['train/grad_norm']:.2g}" for metrics in told)
    stopped = "the advantages reach no weight: look at train.step_weight and at what is trained"
    still = not all(metrics["train/grad_norm"] > 0 for metrics in told)
    return [*findings, finding("update", f"gradient norms {norms}", fail=stopped if still else "")]


def groups(trainer: Trainer) -> tuple[list[Finding], TrainingBatch]:
    """Sample, score and compare an epoch, and return what is found of its groups with what the update replays."""
    samples = trainer.sample(0)
    gathered = trainer.gather(samples)  # which raises where groups are no whole groups
    batch = trainer.compare(compare.everything(samples, gathered, trainer.ranks))
    flat = float(trainer.metrics["train/zero_std_ratio"])
    said = f"{len(gathered.gids.unique())} groups of {trainer.config.sample.k} copies, {flat:.0%} of them flat"
    way_out = "copies score alike: raise sample.noise_level or sample.k, or look at the rewards' floors"
    return [finding("groups", said, warn=way_out if flat == 1 else "")], _with_signs(batch, trainer.ranks.rank)


@contextlib.contextmanager
def gradients(trainer: Trainer) -> Iterator[Gradients]:
    """Inside, what every optimizer step is about to use is noted."""
    seen, named = Gradients(), trained_parameters(trainer.state.module)

    def note(*_: object) -> None:
        own = {name: p.grad for name, p in named.items() if p.grad is not None}
        seen.norms.append({name: float(local(own[name]).norm()) if name in own else 0.0 for name in named})
        seen.digests.append(digest(own.values()))

    handle = trainer.state.optimizer.register_step_pre_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


def unclipped(updater: Updater) -> Updater:
    """Return one that takes every ratio as 1: what the first update moved beyond the clip range has no gradient."""
    assert isinstance(updater.objective, GrpoObjective)
    train = dataclasses.replace(updater.settings.train, old_log_prob="detach")
    other = copy.copy(updater)
    other.objective = dataclasses.replace(updater.objective, train=train)
    return other


def update(updater: Updater, batch: TrainingBatch, epoch: int) -> dict[str, float]:
    """Take the optimizer steps of an epoch and return their metrics."""
    return updater.run(batch, updater.plan(batch, epoch), [])


def clip(trainer: Trainer, specimen: ProbeBatch, before: Replayed, updates_per_epoch: int) -> list[Finding]:
    """Return what is found of the clip range after an update; every rank must call it."""
    train = trainer.config.train
    after = replay(trainer.updater, specimen.part, train.batch_size)
    moved = guarded(before, after) if train.guard else after.log_ratios - before.log_ratios
    return checks.check_clip(moved, train.clip_range, updates_per_epoch)


def guarded(before: Replayed, after: Replayed) -> Tensor:
    """Return (B, K) GRPO-Guard log-ratios of one replay to another: the means of z_old * (mean - mean_old).

    Not of the log-probabilities alone: their bias, which the guard takes out, may outweigh what is left.
    """
    columns = [
        unit * (old * (old - new)).flatten(1).mean(dim=1).cpu()
        for unit, old, new in zip(before.units, before.residuals.values(), after.residuals.values(), strict=True)
    ]
    return torch.stack(columns, dim=1)


def carried(trainer: Trainer, batch: TrainingBatch, specimen: Replayed, gap: float) -> list[Finding]:
    """Return whether what the epoch remembered reached the update as it was; every rank must call it.

    Args:
        trainer: of the run.
        batch: what was replayed.
        specimen: a batch of its own, replayed before the update.
        gap: largest log-ratio of the first update to the rollout, in nats.
    """
    updater = trainer.updater
    alone = (specimen.log_ratios.cpu() / specimen.units).abs().max()
    exact = calls_are_exact(trainer) and updater.plan(batch, 0).as_rolled_out
    nats = trainer.config.train.clip_range / float(specimen.units.max())
    found = checks.check_carried(gap, float(trainer.ranks.all_gather(alone[None]).max()), nats, exact=exact)
    for part in batch.parts:
        found += checks.check_stored(part.trajectory.states)
    return found


def penalty(trainer: Trainer, specimen: ProbeBatch, before: float) -> list[Finding]:
    """Return what is found of the KL after an update; every rank must call it."""
    coefficient = trainer.config.train.kl_coef
    if coefficient == 0:
        return [finding("kl", "train.kl_coef is 0: no reference is kept and none is asked")]
    after, gradient = kl(trainer, specimen)
    return checks.check_kl(coefficient, before, after, gradient, exact=calls_are_exact(trainer))


def kl(trainer: Trainer, specimen: ProbeBatch) -> tuple[float, float]:
    """Return the KL of the first remembered step to the starting policy, and the norm of its gradient on this rank.

    Of as many samples as an update's call has: a device need not have room for more. An infinite norm under ZeRO-2,
    whose engine takes gradients away; zeros where no reference is kept.
    """
    policy, train = trainer.updater.policy, trainer.config.train
    if train.kl_coef == 0:
        return 0.0, 0.0
    part = specimen.part.rows(slice(0, train.batch_size))
    reference = grpo(trainer).reference_mean(part, 0)
    with averaging_gradients(policy.module, now=False):
        current = grpo(trainer).replay(part, 0)
        value = gaussian_kl(current.mean, reference, current.std).mean()
        if not is_partitioned(policy.module):
            value.backward()
    norms = [local(p.grad).norm() for p in policy.trained_parameters() if p.grad is not None]
    trainer.state.optimizer.zero_grad(set_to_none=True)
    gradient = float(torch.stack(norms).norm()) if norms else float("inf")
    return float(value.detach()), gradient


@contextlib.contextmanager
def untouched(trainer: Trainer) -> Iterator[None]:
    """Inside, weights may move; on the way out weights, optimizer state and average are as they were."""
    state = trainer.state
    parameters = list(trained_parameters(state.module).values())
    kept = [local(parameter).clone() for parameter in parameters]
    moments = copy.deepcopy(state.optimizer.state_dict())
    average = None if state.ema is None else state.ema.state_dict()
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in zip(parameters, kept, strict=True):
                local(parameter).copy_(values)
        state.optimizer.zero_grad(set_to_none=True)
        if not is_partitioned(state.module):
            state.optimizer.load_state_dict(moments)
        if state.ema is not None and average is not None:
            state.ema.load_state_dict(average)


def _with_signs(batch: TrainingBatch, rank: int) -> TrainingBatch:
    """Return the samples with advantages +1 and -1 in turn, in another order on every rank, and weights of 1."""
    parts = []
    for part in batch.parts:
        signs: Tensor = 1.0 - 2.0 * ((part.places + rank) % 2).float()
        parts.append(dataclasses.replace(part, advantages=signs, weights=torch.ones_like(signs)))
    return dataclasses.replace(batch, parts=tuple(parts))


def _over_ranks(trainer: Trainer, norms: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the largest norm of any rank: where weights lie in shards, a rank may hold none of a small one."""
    everyone = [json.loads(text) for text in trainer.ranks.gather_text(json.dumps(norms))]
    return [{name: max(rank[number][name] for rank in everyone) for name in own} for number, own in enumerate(norms)]
