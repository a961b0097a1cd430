"""The full doctor, `tools/doctor.py`: the fast one, then the rewards, and a short epoch with two updates.

Advantages are replaced by +1 and -1 in turn: those of the rewards may all be 0, which would hide every fault of the
gradients.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Iterator

import torch
from torch import Tensor

from flow_grpo.algorithm.update.history import UpdateHistory
from flow_grpo.algorithm.update.objective import GrpoObjective
from flow_grpo.algorithm.update.updater import Updater
from flow_grpo.maths.sde import gaussian_kl
from flow_grpo.models.adapters import trained_parameters
from flow_grpo.preflight.doctor import checks
from flow_grpo.preflight.doctor.context import DoctorContext
from flow_grpo.preflight.doctor.fast import NOT_AVERAGED, can_sample, digest, equal_weights, examine
from flow_grpo.preflight.doctor.findings import Finding, equal_on_ranks, errors_as_finding, finding, merge_over_ranks
from flow_grpo.preflight.doctor.probe import Replay, replay, roll_out_probe
from flow_grpo.preflight.doctor.rewards import examine_rewards
from flow_grpo.preflight.doctor.signal import examine_signal
from flow_grpo.records import Samples, TrainingBatch
from flow_grpo.runtime.ranks.sharding import averaging_gradients, is_sharded, local

BATCH_SIZES = (1, 2)  # rows of a replay, in addition to those of the rollout and the update
UPDATES = 2  # one factor of a LoRA adapter has no gradient until the other has moved


@dataclasses.dataclass
class GradientLog:
    """The gradients of every optimizer step on this rank.

    Attributes:
        norms: per step, weight -> norm of its gradient.
        digests: per step, a hash of all gradients.
        counts: per step, how many elements are not 0, and how many of these are below 10 x adam_eps.
    """

    norms: list[dict[str, float]] = dataclasses.field(default_factory=list)
    digests: list[str] = dataclasses.field(default_factory=list)
    counts: list[tuple[int, int]] = dataclasses.field(default_factory=list)


def examine_fully(
    context: DoctorContext, updates_per_epoch: int = 1, findings: list[Finding] | None = None
) -> list[Finding]:
    """Return the findings of the full doctor, identical on every rank; collective call: every rank must call it.

    Weights, optimizer state and EMA are restored at the end. The sampler has advanced by an epoch.

    Args:
        context: of a run with one update per epoch.
        updates_per_epoch: of the recipe.
        findings: receives this rank's findings as they are made, for a caller that prints them after an error.
    """
    world = context.world
    findings = [] if findings is None else findings
    findings += examine(context, BATCH_SIZES)
    with errors_as_finding("rewards", findings, world, "see the message; rewards are measured as in training"):
        findings += examine_rewards(context)
    if can_sample(findings):
        with errors_as_finding("signal", findings, world, "see the message; groups are sampled as in training"):
            findings.append(examine_signal(context))
    if can_sample(findings):
        way_out = "training itself would stop here: fix what the message names"
        with restored_afterwards(context), errors_as_finding("epoch", findings, world, way_out):
            findings += examine_epoch(context, updates_per_epoch)
    return merge_over_ranks(findings, world)


def examine_epoch(context: DoctorContext, updates_per_epoch: int) -> list[Finding]:
    """Check an epoch and its updates; collective call: every rank must call it.

    Raises:
        RuntimeError: on every rank, for anything that ends an epoch.
    """
    updater, train = context.updater, context.config.train
    objective = context.grpo
    if objective is not None:
        probe = roll_out_probe(context)
        before = replay(objective, probe, train.batch_size)
        kl_before = kl_and_gradient(context, objective, probe)[0]
    groups, batch = sample_groups(context)
    findings = [groups]
    with logged_gradients(context) as gradients:
        metrics = [update(updater, batch, 0)]
        if objective is not None:
            findings.append(examine_clip(context, objective, probe, before, updates_per_epoch))
            findings.append(examine_kl(context, objective, probe, kl_before))
        metrics += [update(unclipped(context), batch, number) for number in range(1, UPDATES)]
    if any(row["train/bad_steps"] for row in metrics):
        way_out = "lower train.learning_rate or sample.noise_level, or compute in fp32 (model.dtype)"
        return [*findings, finding("update", "a loss or a gradient was not finite, see above", fail=way_out)]
    if objective is not None:
        findings += examine_transport(context, batch, before, metrics[0]["policy/ratio_first_max_abs_log"])
    findings += examine_gradients(context, gradients)
    norms = [row["train/grad_norm"] for row in metrics]
    way_out = "no gradient reaches the weights: check train.step_weight and model.trained"
    said = f"gradient norms of two updates {', '.join(f'{norm:.2g}' for norm in norms)}"
    return [*findings, finding("update", said, fail="" if all(norm > 0 for norm in norms) else way_out)]


def sample_groups(context: DoctorContext) -> tuple[Finding, TrainingBatch]:
    """Sample an epoch; return the finding on its groups, and the update's batch with alternating advantages."""
    batch, flat = context.sample_epoch()  # raises where groups are incomplete
    said = (
        f"{len(batch) * context.world.data.size // context.config.sample.k} groups of {context.config.sample.k} copies"
    )
    way_out = "copies score the same: raise sample.noise_level or sample.k, or check the rewards' noise floors"
    found = finding("groups", f"{said}, {flat:.0%} of them flat", warn=way_out if flat == 1 else "")
    return found, with_signs(batch, context.world.data.rank)


def with_signs(batch: TrainingBatch, rank: int) -> TrainingBatch:
    """Return the samples with weights 1 and advantages +1 and -1 in turn, on odd ranks -1 first."""
    parts = []
    for part in batch.parts:
        signs: Tensor = 1.0 - 2.0 * ((part.places + rank) % 2).float()
        parts.append(dataclasses.replace(part, advantages=signs, weights=torch.ones_like(signs)))
    return dataclasses.replace(batch, parts=tuple(parts))


@contextlib.contextmanager
def logged_gradients(context: DoctorContext) -> Iterator[GradientLog]:
    """Inside, the gradients of every optimizer step are logged just before the step."""
    log, named = GradientLog(), trained_parameters(context.policy.module)
    small = checks.EPS_FACTOR * context.config.train.adam_eps

    def note(*_: object) -> None:
        own = {name: p.grad for name, p in named.items() if p.grad is not None}
        log.norms.append({name: float(local(own[name]).norm()) if name in own else 0.0 for name in named})
        log.digests.append(digest(own.values()))
        sizes = [local(gradient).abs() for gradient in own.values()]
        present = sum(int((size > 0).sum()) for size in sizes)
        log.counts.append((present, sum(int(((size > 0) & (size < small)).sum()) for size in sizes)))

    handle = context.updater.optimizer.register_step_pre_hook(note)
    try:
        yield log
    finally:
        handle.remove()


def update(updater: Updater, batch: TrainingBatch, epoch: int) -> dict[str, float]:
    """Take the optimizer steps of an epoch and return their metrics; collective call: every rank must call it."""
    after_warm_up = UpdateHistory(taken=updater.settings.train.warmup_steps)
    return updater.run(batch, updater.plan(batch, epoch), after_warm_up)


def unclipped(context: DoctorContext) -> Updater:
    """Return an updater with a ratio of 1 everywhere: samples beyond the clip range would have no gradient."""
    train = dataclasses.replace(context.config.train, old_log_prob="detach")
    other = copy.copy(context.updater)
    other.objective = context.objective.with_settings(train)
    return other


def examine_clip(
    context: DoctorContext, objective: GrpoObjective, probe: Samples, before: Replay, updates_per_epoch: int
) -> Finding:
    """Check the clip range after an update; collective call: every rank must call it."""
    train = context.config.train
    after = replay(objective, probe, train.batch_size)
    moved = guard_log_ratios(before, after) if train.guard else after.log_ratios - before.log_ratios
    return checks.check_clip(moved, train.clip_range, updates_per_epoch)


def log_ratio_of_one_update(context: DoctorContext) -> float:
    """Return the rms log-ratio of a batch after one update with signs as advantages; weights are restored.

    Collective call: every rank must call it.
    """
    objective, train = context.grpo, context.config.train
    assert objective is not None, "only recorded steps have a log-ratio"
    with restored_afterwards(context):
        probe = roll_out_probe(context)
        before = replay(objective, probe, train.batch_size)
        batch, _ = context.sample_epoch()
        update(context.updater, with_signs(batch, context.world.data.rank), 0)
        moved = replay(objective, probe, train.batch_size).log_ratios - before.log_ratios
    return float(context.world.data.all_gather(moved.square().mean().cpu()[None]).mean().sqrt())


def guard_log_ratios(before: Replay, after: Replay) -> Tensor:
    """Return (B, K) GRPO-Guard log-ratios between two replays: the means of z_old * (mean - mean_old).

    Computed from the means, because in a difference of log-probabilities the bias that the guard removes may dominate.
    """
    return before.units * (before.residuals * (before.residuals - after.residuals)).flatten(2).mean(dim=2).cpu()


def examine_transport(context: DoctorContext, batch: TrainingBatch, probe: Replay, gap: float) -> list[Finding]:
    """Check that the samples of an epoch reached the update unchanged; collective call: every rank must call it.

    Args:
        context: of the run.
        batch: of the update.
        probe: a batch replayed directly, before the update.
        gap: largest |log-ratio| of the first update to the rollout, in nats.
    """
    exact = context.bit_exact and context.updater.plan(batch, 0).as_rolled_out
    probe_gap = (probe.log_ratios.cpu() / probe.units).abs().max()
    worst = float(context.world.data.all_gather(probe_gap[None]).max())
    clip_range = context.config.train.clip_range / float(probe.units.max())
    return [
        checks.check_ratio_in_update(gap, worst, clip_range, exact=exact),
        *(checks.check_latents_fp32(part.trajectory.states) for part in batch.parts),
    ]


def examine_gradients(context: DoctorContext, gradients: GradientLog) -> list[Finding]:
    """Check gradients and weights after the updates; collective call: every rank must call it."""
    module, world = context.policy.module, context.world
    findings = [equal_weights(context, "weights_after_update", "trained weights after two updates")]
    if not is_sharded(module):
        digests = " ".join(gradients.digests)
        findings.append(equal_on_ranks("gradient_sync", digests, "averaged gradients", world, NOT_AVERAGED))
    # The largest norm of any rank: of a small weight in shards some ranks hold nothing.
    peers = [json.loads(text) for text in world.data.gather_text(json.dumps(gradients.norms))]
    norms = [
        {name: max(rank[number][name] for rank in peers) for name in own} for number, own in enumerate(gradients.norms)
    ]
    findings.append(checks.check_gradient_coverage(context.config.model.trained, norms))
    present, below = world.data.all_gather(torch.tensor([gradients.counts[-1]])).sum(dim=0).tolist()
    return [*findings, checks.check_gradient_size(below, present, context.config.train.adam_eps)]


def examine_kl(context: DoctorContext, objective: GrpoObjective, probe: Samples, before: float) -> Finding:
    """Check the KL to the reference after an update; collective call: every rank must call it."""
    coefficient = context.config.train.kl_coef
    if coefficient == 0:
        return finding("kl", "train.kl_coef is 0: there is no reference policy")
    after, gradient = kl_and_gradient(context, objective, probe)
    return checks.check_kl(coefficient, before, after, gradient, exact=context.bit_exact)


def kl_and_gradient(context: DoctorContext, objective: GrpoObjective, probe: Samples) -> tuple[float, float]:
    """Return the KL of the first stochastic step to the reference, and the norm of its gradient on this rank.

    Computed on one micro-batch, since the device may not have memory for more. Both are 0 without a reference.
    """
    policy = context.policy
    if context.config.train.kl_coef == 0:
        return 0.0, 0.0
    part = probe.rows(slice(0, context.config.train.batch_size))
    reference = objective.reference_mean(part, 0)
    with averaging_gradients(policy.module, now=False):
        current = objective.replay(part, 0)
        value = gaussian_kl(current.mean, reference, current.std).mean()
        value.backward()
    norms = [local(p.grad).norm() for p in policy.trained_parameters() if p.grad is not None]
    context.updater.optimizer.zero_grad(set_to_none=True)
    return float(value.detach()), float(torch.stack(norms).norm())


@contextlib.contextmanager
def restored_afterwards(context: DoctorContext) -> Iterator[None]:
    """Inside, weights may move; on exit weights, optimizer state and EMA are restored."""
    optimizer, ema = context.updater.optimizer, context.ema
    parameters = context.policy.trained_parameters()
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
