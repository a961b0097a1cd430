"""One batch, rolled out as in training as far as its stochastic steps, and replayed as the update does.

Letters: B rows, K stochastic steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flow_grpo.algorithm.rollout.batching import full_batches
from flow_grpo.algorithm.rollout.denoise import RolloutSettings, rollout
from flow_grpo.algorithm.update.objective import GrpoObjective
from flow_grpo.data.k_repeat_sampler import SampleKey
from flow_grpo.maths.sde import log_prob, per_sample
from flow_grpo.preflight.doctor.context import DoctorContext
from flow_grpo.records import Condition, Samples
from flow_grpo.runtime.ranks.sharding import averaging_gradients, unwrap

RECORDED = 4096  # elements recorded of every layer's output, evenly spaced: all of them would not fit in memory

Layers = dict[str, tuple[tuple[int, ...], Tensor]]
"""Per input and layer, in order of completion: the shape of its tensor and some of its elements."""


@dataclasses.dataclass(frozen=True)
class Replay:
    """A probe batch replayed in calls of a given number of rows.

    Attributes:
        log_ratios: (B, K) log-probabilities minus those of the rollout, times `units`.
        units: (B, K) CPU: 1, or under GRPO-Guard the step's std: the unit of `train.clip_range`. The guard's bias,
            which is 0 before the first update, is not subtracted.
        residuals: (B, K, C, F, H, W): (next latents - mean) / std.
    """

    log_ratios: Tensor
    units: Tensor
    residuals: Tensor


def planned_keys(context: DoctorContext) -> list[SampleKey]:
    """Return this rank's next batch as the sampler plans it, or its part of one video size; nothing is consumed."""
    planned = context.sampler.plan(context.sampler.next_step)[context.sampler.rank]
    first = full_batches([context.data.size_of(key[3]) for key in planned], len(planned))[0]
    return [planned[row] for row in first]


def planned_conditions(context: DoctorContext) -> tuple[Condition, ...]:
    """Load the conditions of `planned_keys`."""
    return tuple(context.data.condition(index, gid, slot) for _, gid, slot, index in planned_keys(context))


def roll_out_probe(context: DoctorContext) -> Samples:
    """Return this rank's next batch, rolled out; collective call: every rank must call it.

    Raises:
        RuntimeError: on every rank, if any failed.
    """
    with context.world.sync_errors("loading"):
        conditions = planned_conditions(context)
        conditioning = context.policy.encode(conditions)
    with context.world.sync_errors("the rollout"):
        windows = context.sampling.windows(conditions)
        samples = rollout(context.policy, conditions, conditioning, windows, truncated_rollout(context))
        if not torch.isfinite(samples.final_latents).all():
            raise ValueError(
                "latents are not finite: the model's velocity is NaN or infinite; look at its weights, or pass "
                "--config.model.dtype=fp32"
            )
        return samples


def truncated_rollout(context: DoctorContext) -> RolloutSettings:
    """Return settings whose schedule ends one step after the last stochastic one of any group, or after two steps."""
    settings = context.sampling.rollout
    if settings.sde.kind == "ode":
        return dataclasses.replace(settings, sigmas=settings.sigmas[:3])
    return dataclasses.replace(settings, sigmas=settings.sigmas[: context.sampling.last_step + 3], tails=None)


def replay(objective: GrpoObjective, samples: Samples, rows: int, *, gradients: bool | None = None) -> Replay:
    """Replay all stochastic steps of B samples in calls of `rows`; with more rows than samples, samples repeat.

    Args:
        objective: of the run.
        samples: B of them.
        rows: of a call.
        gradients: whether to build the graph, as the update does. By default only in calls of at most as many rows as
            the update's: the device may not have memory for more.
    """
    parts: list[list[tuple[Tensor, Tensor, Tensor]]] = []
    for positions in (torch.arange(max(rows, len(samples))) % len(samples)).split(rows):
        micro = samples.rows(positions)
        parts.append([_scored(objective, micro, column, gradients) for column in range(objective.passes(micro))])
    fields = ([torch.stack([step[field] for step in part], dim=1) for part in parts] for field in range(3))
    return Replay(*(torch.cat(values)[: len(samples)] for values in fields))


def _scored(
    objective: GrpoObjective, micro: Samples, column: int, gradients: bool | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one step's (b,) log-ratios, their (b,) units and its residuals; its graph is freed on return."""
    with _grad_mode(objective, len(micro), gradients):
        step = objective.replay(micro, column)
        if torch.is_grad_enabled() and not step.mean.requires_grad:
            raise ValueError(
                "no gradient reaches the trained weights: velocity() of the policy must call its network, and not "
                "inside torch.no_grad()"
            )
    after = micro.trajectory.next_latents(column)
    unit = step.std if objective.train.guard else torch.ones_like(step.std)
    ratio = unit * (log_prob(after, step).detach() - micro.trajectory.log_probs[:, column])
    return ratio, unit.cpu(), ((after - step.mean) / per_sample(step.std, after)).detach()


@contextlib.contextmanager
def _grad_mode(objective: GrpoObjective, rows: int, gradients: bool | None = None) -> Iterator[None]:
    """Inside, a call of `rows` builds a graph as `replay` describes, and averages no gradients over ranks."""
    enabled = rows <= objective.train.batch_size if gradients is None else gradients
    with torch.set_grad_enabled(enabled), averaging_gradients(objective.policy.module, now=False):
        yield


def grad_mode_gap(objective: GrpoObjective, samples: Samples, log_ratios: Tensor) -> Tensor:
    """Return (b, K) log-ratios of the update's calls with gradients to the same calls without.

    b is 0 where a rollout batch fits into one call of the update: its own replay, with gradients, already covers this.

    Args:
        objective: of the run.
        samples: B of them.
        log_ratios: (B, K) to the rollout, replayed in the update's calls.
    """
    rows = objective.train.batch_size
    if len(samples) <= rows:
        return samples.trajectory.log_probs[:0]
    return log_ratios[:rows] - replay(objective, samples.rows(slice(0, rows)), rows, gradients=False).log_ratios


def layer_differing_from_rollout(context: DoctorContext, objective: GrpoObjective, probe: Samples) -> str:
    """Return the first layer whose output differs between rollout and replay of the first stochastic step."""
    network, conditions = unwrap(context.policy.module), planned_conditions(context)
    windows, settings = context.sampling.windows(conditions), truncated_rollout(context)
    with recorded_layers(network) as rollout_calls:
        rollout(context.policy, conditions, probe.conditioning, windows, settings)
    with recorded_layers(network) as replay_calls, _grad_mode(objective, len(probe)):
        objective.replay(probe, 0)
    prefix_calls = settings.calls[0] if settings.calls else int(probe.trajectory.steps[:, 0].max())
    return first_difference(rollout_calls[prefix_calls], replay_calls[0])


def layer_differing_by_grad_mode(context: DoctorContext, objective: GrpoObjective, probe: Samples) -> str:
    """Return the first layer whose output differs between a call of the update with gradients and without."""
    few = probe.rows(slice(0, objective.train.batch_size))
    with recorded_layers(unwrap(context.policy.module)) as calls:
        for enabled in (False, True):
            with _grad_mode(objective, len(few), enabled):
                objective.replay(few, 0)
    return f"the same call without gradients and with: {first_difference(*calls)}"


@contextlib.contextmanager
def recorded_layers(network: nn.Module) -> Iterator[list[Layers]]:
    """Inside, every call of the network appends its inputs and its layers' outputs to the yielded list."""
    calls: list[Layers] = []
    handles = [network.register_forward_pre_hook(_record_inputs(calls))]
    handles += [layer.register_forward_hook(_record_output(calls, name)) for name, layer in network.named_modules()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


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


def _record_inputs(calls: list[Layers]) -> Any:
    def hook(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        calls.append({f"input {number}": _sampled(tensor) for number, tensor in enumerate(tensors)})

    return hook


def _record_output(calls: list[Layers], name: str) -> Any:
    def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor):
            calls[-1][f"layer {name}" if name else "the network"] = _sampled(first)

    return hook


def _sampled(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    flat = tensor.detach().flatten()
    return tuple(tensor.shape), flat[:: max(1, flat.numel() // RECORDED)].float().cpu()
