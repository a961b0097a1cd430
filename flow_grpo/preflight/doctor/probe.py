"""One batch, rolled out as in training as far as its stochastic steps, and replayed as the update does: its checks.

Letters: B rows, K stochastic steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from flow_grpo.algorithm.rollout.batching import full_batches
from flow_grpo.algorithm.rollout.denoise import rollout
from flow_grpo.algorithm.update.objective import GrpoObjective
from flow_grpo.data.k_repeat_sampler import SampleKey
from flow_grpo.maths.keys import generator
from flow_grpo.maths.sde import log_prob, per_sample
from flow_grpo.preflight.doctor.findings import Finding, finding
from flow_grpo.records import Condition, Conditioning, Rows, Samples
from flow_grpo.run.trainer import Trainer
from flow_grpo.runtime.ranks.sharding import averaging_gradients, unwrap
from flow_grpo.settings.objectives import micro_batch, traits_of

STANDARD_ERRORS = 5.0  # a false alarm with probability 6e-7
KS_BOUND = 2.745  # the same probability under Kolmogorov's law, 2 exp(-2 x^2) (Smirnov 1948)
KS_ELEMENTS = 1_000_000  # at most: sorting more finds nothing more
ROW_GAP = {"fp32": 1e-3, "bf16": 0.1}  # rounding that differs with the rows of a call, times guidance; mixed rows: 1
SHARE_OF_CLIP = 0.1  # of clip_range that a mismatch may use up
RECORDED = 4096  # elements recorded of every layer's output, evenly spaced: all of them would not fit in memory

Layers = dict[str, tuple[tuple[int, ...], Tensor]]
"""Per input and layer, in order of completion: the shape of its tensor and some of its elements."""


@dataclasses.dataclass(frozen=True)
class Replay(Rows):
    """A probe batch, replayed."""

    log_ratios: Tensor  # (B, K) log-probabilities minus those of the rollout, times `units`
    # (B, K) CPU: 1, or under GRPO-Guard the step's std: the unit of `train.clip_range`. The guard's bias, which is 0
    # before the first update, is not subtracted.
    units: Tensor
    residuals: Tensor  # (B, K, C, F, H, W): (next latents - mean) / std


def replaying_objective(trainer: Trainer) -> GrpoObjective | None:
    """Return the objective if its traits say that it replays single steps, by the methods of GRPO's."""
    return cast(GrpoObjective, trainer.updater.objective) if traits_of(trainer.config).single_steps else None


def examine_probe(trainer: Trainer, batch_sizes: Iterable[int] = ()) -> Iterator[Finding]:
    """Check a batch against its replays, also in calls of `batch_sizes`, and its noise."""
    objective, probe = replaying_objective(trainer), roll_out_probe(trainer)
    if not trainer.config.model.compile:  # which would compile once more, for a single row
        yield _examine_rows(trainer, probe)
    if objective is not None:
        yield from _examine_replays(trainer, objective, probe, batch_sizes)
    else:
        yield _examine_loss(trainer, probe)
    own = [[gid, slot, *ids] for (gid, slot, _), ids in zip(probe.keys.tolist(), probe.noise_ids.tolist(), strict=True)]
    rows = [row for text in trainer.world.data.gather_text(json.dumps(own)) for row in json.loads(text)]
    yield check_noise(rows, same_initial_noise=trainer.config.sample.same_initial_noise)


def _examine_replays(
    trainer: Trainer, objective: GrpoObjective, probe: Samples, batch_sizes: Iterable[int]
) -> Iterator[Finding]:
    train, world, full, exact = trainer.config.train, trainer.world, len(probe), bit_exact(trainer)
    few = micro_batch(trainer.config)
    with world.sync_errors("the replay"):
        rows = sorted({few, full, *(n for n in batch_sizes if n <= full)})
        replays = {n: replay(objective, probe, n) for n in rows}
        # Calls of the update with gradients to the same calls without, (b, K). A rollout batch that fits into one call
        # of the update is replayed with gradients as it is.
        by_grad_mode = probe.trajectory.log_probs[:0]
        if full > few:
            without = replay(objective, probe.rows(slice(0, few)), few, gradients=False)
            by_grad_mode = replays[few].log_ratios[:few] - without.log_ratios
    gaps = {n: _largest(found.log_ratios) for n, found in replays.items()}
    bound = _ratio_bound(train.clip_range, exact=exact)
    worst = world.data.all_gather(torch.tensor([[gaps[full], _largest(by_grad_mode)]])).amax(dim=0)
    layer = ""
    # Decided by the worst rank: with sharded weights the calls below are collective.
    if not (worst <= bound).all():
        with world.sync_errors("the comparison of layers"):
            compare = _layer_differing_by_grad_mode if worst[0] <= bound else layer_differing_from_rollout
            layer = compare(trainer, objective, probe)
    log_ratios = torch.cat([replays[full].log_ratios, by_grad_mode])
    yield check_residuals(probe.trajectory.steps, replays[full].residuals)
    yield check_latents_fp32(probe.trajectory.states)
    yield check_ratio(log_ratios, train.clip_range, train.old_log_prob, exact=exact, layer=layer)
    yield check_ratio_by_batch_size(gaps, train.clip_range, few, train.old_log_prob)


def _examine_rows(trainer: Trainer, probe: Samples) -> Finding:
    """Check that the first and the last row of a batch get the velocity that they get alone; each has its own noise."""
    policy, like, last = trainer.updater.policy, probe.final_latents, len(probe) - 1
    draws = [torch.randn(like.shape[1:], generator=generator("doctor", "row", row)) for row in range(len(probe))]
    latents, sigma = torch.stack(draws).to(like), trainer.collector.sampling.sigmas[:1].expand(len(probe)).to(like)
    gap = 0.0
    with trainer.world.sync_errors("the rows"), torch.no_grad():
        together = policy.velocity(latents, sigma, probe.conditioning)
        for row in (slice(0, 1), slice(last, last + 1)):
            alone = policy.velocity(latents[row], sigma[row], probe.conditioning.rows(row))
            gap = max(gap, float((together[row] - alone).norm() / alone.norm().clamp(min=1e-9)))
    bound = ROW_GAP[trainer.config.model.dtype]
    message = (
        f"the velocity of a row differs by {gap:.2g} of its size from that in a batch of {len(probe)}, bound {bound}"
    )
    way_out = (
        "velocity() of the policy must treat every row of its batch by itself: look for flip, mean or [0] over rows"
    )
    return finding("rows", message, fail="" if gap <= bound else way_out)


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _examine_loss(trainer: Trainer, probe: Samples) -> Finding:
    """Check that a loss without recorded steps repeats itself."""
    train, objective = trainer.config.train, trainer.updater.objective
    rows = probe.rows(slice(0, micro_batch(trainer.config)))
    micro = dataclasses.replace(rows, advantages=torch.ones(len(rows)), weights=torch.ones(len(rows)))
    memory: Any = {}
    with trainer.world.sync_errors("the loss"), torch.no_grad():
        ratios = torch.stack([objective.loss(micro, memory, 0).drift for _ in range(2)], dim=1)
    return check_ratio(ratios, train.clip_range, "recompute", exact=bit_exact(trainer))


def bit_exact(trainer: Trainer) -> bool:
    """Return whether replaying a rollout batch must reproduce its log-probabilities bit for bit."""
    model = trainer.config.model
    return trainer.device.type == "cpu" and model.dtype == "fp32" and not model.compile


def planned_keys(trainer: Trainer) -> list[SampleKey]:
    """Return this rank's next batch as the sampler plans it, or its part of one video size; nothing is consumed."""
    sampler = trainer.state.sampler
    planned = sampler.plan(sampler.next_step)[sampler.rank]
    first = full_batches([trainer.training_data.size_of(key[3]) for key in planned], len(planned))[0]
    return [planned[row] for row in first]


def planned_conditions(trainer: Trainer) -> tuple[Condition, ...]:
    """Load their conditions."""
    data = trainer.training_data
    return tuple(data.condition(index, gid, slot) for _, gid, slot, index in planned_keys(trainer))


def roll_out_probe(trainer: Trainer) -> Samples:
    """Return this rank's next batch, rolled out; collective call, which raises RuntimeError on all ranks or on none."""
    policy, world = trainer.updater.policy, trainer.world
    with world.sync_errors("loading"):
        conditions = planned_conditions(trainer)
        conditioning = policy.encode(conditions)
    with world.sync_errors("the rollout"):
        samples = _roll_out(trainer, conditions, conditioning)
        if not torch.isfinite(samples.final_latents).all():
            raise ValueError(
                "latents are not finite: the model's velocity is NaN or infinite; look at its weights, or pass "
                "--config.model.dtype=fp32"
            )
        return samples


def _roll_out(trainer: Trainer, conditions: Sequence[Condition], conditioning: Conditioning) -> Samples:
    """Roll out until one step after the last stochastic one of any group, or for two steps."""
    sampling = trainer.collector.sampling
    windows = sampling.windows(condition.gid for condition in conditions)
    last = max((block[-1] for block in sampling.blocks), default=0)
    until_then = dataclasses.replace(sampling, sigmas=sampling.sigmas[: last + 3], tails=None)
    return rollout(trainer.updater.policy, conditions, conditioning, windows, until_then)


def replay(objective: GrpoObjective, samples: Samples, rows: int, *, gradients: bool | None = None) -> Replay:
    """Replay all stochastic steps of B samples in calls of `rows`; with more rows than samples, samples repeat.

    With `gradients` the graph is built, as in the update. By default only calls of at most as many rows as the update's
    do so: the device may not have memory for more.
    """
    parts = []
    for positions in (torch.arange(max(rows, len(samples))) % len(samples)).split(rows):
        micro = samples.rows(positions)
        # A step's graph is freed with its call.
        steps = [_scored(objective, micro, column, gradients) for column in range(objective.passes(micro))]
        parts.append(Replay(*(torch.stack(values, dim=1) for values in zip(*steps, strict=True))))
    return Replay.concatenate(parts).rows(slice(0, len(samples)))


def _scored(
    objective: GrpoObjective, micro: Samples, column: int, gradients: bool | None
) -> tuple[Tensor, Tensor, Tensor]:
    with _grad_mode(objective, len(micro), gradients):
        step = objective.replay(micro, column)
        if torch.is_grad_enabled() and not step.mean.requires_grad:
            raise ValueError(
                "no gradient reaches the trained weights: velocity() of the policy must call its network, and not "
                "inside torch.no_grad()"
            )
    recorded = micro.replayed(column)
    unit = step.std if objective.train.guard else torch.ones_like(step.std)
    ratio = unit * (log_prob(recorded.drawn, step).detach() - recorded.log_probs)
    return ratio, unit.cpu(), ((recorded.drawn - step.mean) / per_sample(step.std, step.mean)).detach()


@contextlib.contextmanager
def _grad_mode(objective: GrpoObjective, rows: int, gradients: bool | None = None) -> Iterator[None]:
    """Inside, a call of `rows` builds a graph as `replay` describes, and averages no gradients over ranks."""
    enabled = rows <= objective.train.batch_size if gradients is None else gradients
    with torch.set_grad_enabled(enabled), averaging_gradients(objective.policy.module, now=False):
        yield


def layer_differing_from_rollout(trainer: Trainer, objective: GrpoObjective, probe: Samples) -> str:
    """Return the first layer whose output differs between rollout and replay of the first stochastic step."""
    network, calls = unwrap(trainer.updater.policy.module), trainer.collector.sampling.calls
    with recorded_layers(network) as rollout_calls:
        _roll_out(trainer, planned_conditions(trainer), probe.conditioning)
    with recorded_layers(network) as replay_calls, _grad_mode(objective, len(probe)):
        objective.replay(probe, 0)
    prefix_calls = calls[0] if calls else int(probe.trajectory.steps[:, 0].max())
    return first_difference(rollout_calls[prefix_calls], replay_calls[0])


def _layer_differing_by_grad_mode(trainer: Trainer, objective: GrpoObjective, probe: Samples) -> str:
    few = probe.rows(slice(0, micro_batch(trainer.config)))
    with recorded_layers(unwrap(trainer.updater.policy.module)) as calls:
        for enabled in (False, True):
            with _grad_mode(objective, len(few), enabled):
                objective.replay(few, 0)
    return f"the same call without gradients and with: {first_difference(*calls)}"


@contextlib.contextmanager
def recorded_layers(network: nn.Module) -> Iterator[list[Layers]]:
    """Inside, every call of the network appends its inputs and its layers' outputs to the yielded list."""
    calls: list[Layers] = []

    def note_inputs(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        calls.append({f"input {number}": _sampled(tensor) for number, tensor in enumerate(tensors)})

    def note_output(name: str, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor):
            calls[-1][name] = _sampled(first)

    handles = [network.register_forward_pre_hook(note_inputs)]
    for name, layer in network.named_modules():
        noted = functools.partial(note_output, f"layer {name}" if name else "the network")
        handles.append(layer.register_forward_hook(noted))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _sampled(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    flat = tensor.detach().flatten()
    return tuple(tensor.shape), flat[:: max(1, flat.numel() // RECORDED)].float().cpu()


def first_difference(rollout: Layers, update: Layers) -> str:
    """Return in words the first layer in which two calls differ, and by how much."""
    for name, (shape, values) in rollout.items():
        if name not in update:
            return f"{name} ran in the rollout only"
        other_shape, others = update[name]
        if shape != other_shape:
            return f"{name} gave {shape} in the rollout and {other_shape} in the update"
        if not torch.equal(values, others):
            gap = float((values - others).abs().max())
            return f"{name} differs first, by {gap:.2g} in values up to {float(values.abs().max()):.2g}"
    return "no layer differs: the step's Gaussian or its log-probability does"


def kolmogorov_smirnov(values: Tensor) -> float:
    """Return sqrt(n) times the largest gap between the (n,) values' distribution and the standard normal."""
    ordered = values.cpu().double().sort().values
    count = len(ordered)
    normal, ranks = torch.special.ndtr(ordered), torch.arange(count + 1) / count
    gap = torch.maximum((ranks[1:] - normal).max(), (normal - ranks[:-1]).max())
    return math.sqrt(count) * float(gap)


def check_residuals(steps: Tensor, residuals: Tensor) -> Finding:
    """Check that (B, K, ...) residuals of (B, K) denoising steps follow the Gaussian under which they are scored."""
    parts, wrong = [], False
    for step in steps.unique().tolist():
        flat = residuals[(steps == step).to(residuals.device)].flatten()
        some = flat[:: max(1, flat.numel() // KS_ELEMENTS)].cpu().double()
        count, mean, std = len(some), float(some.mean()), float(some.std(correction=0))
        distance = kolmogorov_smirnov(some)
        wrong |= not (
            abs(mean) < STANDARD_ERRORS / math.sqrt(count)
            and abs(std - 1) < STANDARD_ERRORS / math.sqrt(2 * count)
            and distance < KS_BOUND
        )
        parts.append(
            f"step {step}: mean {mean:+.4f} std {std:.4f} Kolmogorov-Smirnov {distance:.2f} of {count} elements"
        )
    way_out = "the rollout draws from another Gaussian than it scores: its step must be maths.sde.sample of transition"
    measured = f"(next latents - mean) / std must be standard normal; {'; '.join(parts)}"
    return finding("residuals", measured, fail=way_out if wrong else "")


def check_latents_fp32(states: Tensor) -> Finding:
    """Check by their values that (B, M, C, F, H, W) states are fp32: rounding to half precision must change them.

    The ratio alone may not show rounded latents on devices where replays are not exact to the bit.
    """
    count = states.shape[1]
    message, rounded = f"{count} stored latents per sample are fp32", False
    for dtype in (torch.float16, torch.bfloat16):  # bf16 last: most of its values survive fp16 as well
        short = sum(torch.equal(own, own.to(dtype).to(own.dtype)) for own in states.unbind(1))
        if short:
            message, rounded = f"{short} of {count} stored latents per sample were rounded to {dtype}", True
    way_out = "keep the latents of stochastic steps in fp32: see Trajectory.states in flow_grpo/records.py"
    return finding("latents_fp32", message, fail=way_out if rounded else "")


def _ratio_bound(clip_range: float, *, exact: bool) -> float:
    return 0.0 if exact else SHARE_OF_CLIP * clip_range


def check_ratio(log_ratios: Tensor, clip_range: float, old_log_prob: str, *, exact: bool, layer: str = "") -> Finding:
    """Check the (B, K) log-ratios of a replay to the rollout; `layer` names the first layer that differs.

    With `old_log_prob="detach"` the ratio is taken against the update's own call, so differences in rounding, such as
    those of compiled blocks, only warn; beyond the clip range it is no rounding.
    """
    worst = float(log_ratios.abs().max())
    bound = _ratio_bound(clip_range, exact=exact)
    message = f"largest |log-ratio| before the first update {worst:.2g}, bound {bound:.2g}"
    way_out = (
        "rollout and update must call the same network with the same latents: see flow_grpo/algorithm/update/updater.py"
    )
    hidden = old_log_prob == "detach" and not exact and worst <= clip_range
    warn = "" if worst <= bound else way_out
    return finding("ratio", f"{message}; {layer}" if layer else message, fail="" if hidden else warn, warn=warn)


def check_ratio_by_batch_size(
    gaps: Mapping[int, float], clip_range: float, micro_batch: int, old_log_prob: str
) -> Finding:
    """Check how much log-probabilities depend on the rows of a call: rows -> largest |log-ratio| to the rollout's."""
    bound = SHARE_OF_CLIP * clip_range
    message = ", ".join(f"{rows}: {gap:.2g}" for rows, gap in gaps.items())
    harmful = old_log_prob == "rollout" and not gaps[micro_batch] <= bound
    way_out = "pass --config.train.old_log_prob=auto: it recomputes old log-probabilities in the update's own batches"
    shaky = not all(gap <= bound for gap in gaps.values())
    corrected = "train.old_log_prob corrects for it; to lower it use fp32 or the rollout's batch size in the update"
    return finding(
        "ratio_by_batch_size",
        f"largest |log-ratio| of the same samples replayed in batches of {message}; harmless up to {bound:.2g}",
        fail=way_out if harmful else "",
        warn=corrected if shaky else "",
    )


def check_noise(rows: Sequence[Sequence[int]], *, same_initial_noise: bool) -> Finding:
    """Check that only copies that share their initial noise on purpose were drawn from the same noise.

    Every row is a sample's group, its copy number, and the hashes of its initial noise and of its step noise.
    """
    shared = []
    for column, what in ((2, "initial noise"), (3, "step noise")):
        by_noise: dict[int, set[tuple[int, int]]] = {}
        for row in rows:
            owner = row[0], 0 if same_initial_noise and column == 2 else row[1]
            by_noise.setdefault(row[column], set()).add(owner)
        same = [sorted(users) for users in by_noise.values() if len(users) > 1]
        if same:
            shared.append(f"{len(same)} {what} shared, for example by (group, copy) {same[0][:3]}")
    groups = len({row[0] for row in rows})
    message = "; ".join(shared) or f"{len(rows)} samples of {groups} groups, each with its own noise"
    way_out = "draw noise from (seed, gid, slot): from all three, and from nothing of the rank or the batch"
    return finding("noise", message, fail=way_out if shared else "")
