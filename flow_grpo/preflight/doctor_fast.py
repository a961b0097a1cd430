"""The doctor's fast form: one batch rolled out as far as its stochastic steps and replayed, before the first epoch.

No weight moves and no random state is used up, so a run is the same with it and without: draws are keyed, the sampler
is only asked for its plan, and there is no backward pass, after which gradients would be exchanged in another order. A
resumed run is examined as well, since it may have come to another machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from flow_grpo.algorithm.rollout.batching import full_batches
from flow_grpo.algorithm.rollout.denoise import RolloutSettings, rollout
from flow_grpo.algorithm.trainer import Trainer
from flow_grpo.algorithm.update.objective import GrpoObjective
from flow_grpo.algorithm.update.updater import Updater
from flow_grpo.data.k_repeat_sampler import SampleKey
from flow_grpo.maths.sde import log_prob
from flow_grpo.models.adapters import adapted_modules, trained_parameters
from flow_grpo.preflight import doctor_checks as checks
from flow_grpo.preflight import doctor_steps, machine_checks
from flow_grpo.preflight.findings import Finding, agreed, as_table, attempted, failed, finding, in_one_line
from flow_grpo.preflight.layer_diff import first_difference, recording
from flow_grpo.records import Condition, Samples
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.ranks.sharding import averaging_gradients, is_sharded, local, unwrap

WINDOWS = 16  # epochs whose stochastic steps are looked at
_SAMPLED = 64  # values per tensor that a digest looks at


@dataclasses.dataclass(frozen=True)
class ProbeBatch:
    """One batch, rolled out as far as its stochastic steps.

    Attributes:
        conditions: its B conditions.
        part: what the update would replay.
    """

    conditions: tuple[Condition, ...]
    part: Samples


@dataclasses.dataclass(frozen=True)
class Replayed:
    """A specimen replayed in calls of some rows.

    Attributes:
        log_ratios: (B, K) log-probabilities minus those of the rollout, in the unit of `train.clip_range`: under
            GRPO-Guard times the step std, its bias left out, which is 0 before the first update.
        units: (K,) what was multiplied by: 1, or the step std.
        residuals: step -> (B, C, F, H, W): (next latents - mean) / std.
    """

    log_ratios: Tensor
    units: Tensor
    residuals: dict[int, Tensor]


def before_training(trainer: Trainer) -> None:
    """Examine a run in its fast form, and say on rank 0 how it is; every rank must call it.

    Raises:
        ValueError: on every rank alike, if a check failed.
    """
    begun = time.perf_counter()
    random = device_api.rng_state(trainer.device)
    findings = examine(trainer)
    device_api.set_rng_state(trainer.device, random)
    others = [found for found in findings if found.status != "ok"]
    trainer.progress.say(
        "\n".join([in_one_line(findings, time.perf_counter() - begun), *as_table(others).splitlines()])
    )
    if failed(findings):
        trainer.tracker.close()
        raise ValueError(
            f"the doctor's checks {', '.join(failed(findings))} fail, see above; mend that, look closer with "
            "tools/doctor.py, or pass --config.doctor=off to train in spite of it"
        )


def examine(trainer: Trainer, rows: Iterable[int] = ()) -> list[Finding]:
    """Return the findings of the fast form, alike on every rank; every rank must call it.

    Args:
        trainer: as built; it is left as it is.
        rows: further batch shapes to replay the specimen in.
    """
    findings = agreed([*machine(trainer), *schedule(trainer), *weights(trainer)], trainer.ranks)
    if not can_sample(findings):
        return findings
    with attempted("rollout", findings, trainer.ranks, "the run itself would stop here: mend what the message names"):
        specimen = take(trainer)
        findings += sampled(trainer, specimen, rows)
    return agreed(findings, trainer.ranks)


def can_sample(findings: Sequence[Finding]) -> bool:
    """Tell whether every stochastic step is a Gaussian, the same on all ranks, and sampling did not fail."""
    return not {"steps", "window", "windows", "last_step", "rollout"} & set(failed(findings))


def machine(trainer: Trainer) -> list[Finding]:
    """Return what is found of the machine; every rank must call it."""
    config, device, ranks = trainer.config, trainer.device, trainer.ranks
    kept = 3 + (trainer.state.ema is not None)  # weights, two moments, average
    size = 4 * kept * sum(parameter.numel() for parameter in trained_parameters(trainer.state.module).values())
    assert trainer.conditions is not None, "the trainer was made without its conditions"
    pixels = sum(math.prod(trainer.conditions.size_of(index)) for *_, index in draws(trainer))
    batch = pixels * 3 * 4 * 2  # colours, bytes, source and target
    return [
        *machine_checks.check_disk(trainer.run_folder, size, config.checkpoint.keep + bool(config.checkpoint.best)),
        *machine_checks.check_shared_memory(batch, config.data.num_workers, machine_checks.local_ranks()),
        *machine_checks.check_versions(ranks),
        *machine_checks.check_device(device, config, ranks),
        *machine_checks.check_backends(device, ranks),
        *machine_checks.check_run_folder(trainer.run_folder, ranks),
    ]


def schedule(trainer: Trainer) -> list[Finding]:
    """Return what is found of noise levels and stochastic steps; every rank must call it."""
    settings, objective = trainer.collector.settings, grpo(trainer)
    first = trainer.state.finished
    windows = [settings.window(epoch) for epoch in range(first, first + WINDOWS)]
    allowed = settings.sample.sde_steps
    findings = doctor_steps.check_steps(objective.sigmas, allowed, objective.sde, objective.step_weight)
    if not failed(findings):
        findings += doctor_steps.check_ode_limit(objective.sigmas, allowed, objective.sde)
    return [
        *findings,
        *doctor_steps.check_window(windows, allowed, len(objective.sigmas) - 1),
        *checks.check_alike(
            "windows",
            trainer.ranks.gather_text(str(windows)),
            f"stochastic steps of {WINDOWS} epochs, {windows[0]} first,",
            "draw them by (seed, epoch) only: copies of a group must not differ in them",
        ),
    ]


def weights(trainer: Trainer) -> list[Finding]:
    """Return what is found of the weights as they lie; every rank must call it."""
    module, mode = trainer.state.module, trainer.config.model.trained
    trained = trained_parameters(module)
    adapted = len(adapted_modules(module))
    found = checks.check_adapters(mode, adapted, sum(parameter.numel() for parameter in trained.values()))
    return [*found, *alike(trainer, "weights", "trained weights")]


def alike(trainer: Trainer, name: str, what: str) -> list[Finding]:
    """Return whether the trained weights are equal on every rank; every rank must call it."""
    if is_sharded(trainer.state.module):
        return [finding(name, "in shards: every rank holds another part")]
    digests = trainer.ranks.gather_text(digest(trained_parameters(trainer.state.module).values()))
    return checks.check_alike(
        name, digests, what, "gradients are not averaged over ranks: see runtime/ranks/sharding.py"
    )


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of some values of every tensor: where an optimizer moved one, it moved nearly all of it."""
    found = blake2b(digest_size=8)
    for tensor in tensors:
        flat = local(tensor).flatten()
        found.update(flat[:: max(1, flat.numel() // _SAMPLED)].float().cpu().numpy().tobytes())
    return found.hexdigest()


def sampled(trainer: Trainer, specimen: ProbeBatch, rows: Iterable[int]) -> list[Finding]:
    """Return what is found of a batch that was rolled out; every rank must call it.

    Raises:
        RuntimeError: on every rank, if it cannot be replayed on any.
    """
    trained, full = trainer.config.train, len(specimen.part)
    shapes = sorted({trained.batch_size, full, *(n for n in rows if n <= full)})
    with trainer.ranks.sync_errors("the replay"):
        replayed = {n: replay(trainer.updater, specimen.part, n) for n in shapes}
        between = by_gradients(trainer.updater, specimen.part, replayed[trained.batch_size].log_ratios)
    gaps = {n: _largest(found.log_ratios) for n, found in replayed.items()}
    exact, layer = calls_are_exact(trainer), ""
    worst = trainer.ranks.all_gather(torch.tensor([[gaps[full], _largest(between)]])).amax(dim=0)
    bound = checks.ratio_bound(trained.clip_range, exact=exact)
    # Alike on every rank: where weights lie in shards, what follows is an exchange.
    if not (worst <= bound).all():
        with trainer.ranks.sync_errors("the comparison of calls"):
            by_value = not worst[0] <= bound
            layer = (first_divergent_layer if by_value else parting_by_gradients)(trainer, specimen)
    log_ratios = torch.cat([replayed[full].log_ratios, between])
    return [
        *checks.check_residuals(replayed[full].residuals),
        *checks.check_stored(specimen.part.trajectory.states),
        *checks.check_ratio(log_ratios, trained.clip_range, trained.old_log_prob, exact=exact, layer=layer),
        *checks.check_geometry(gaps, trained.clip_range, trained.batch_size, trained.old_log_prob),
        *noise(trainer, specimen),
    ]


def calls_are_exact(trainer: Trainer) -> bool:
    """Tell whether a replay of the rollout's own batch must agree to the last bit."""
    model = trainer.config.model
    return trainer.device.type == "cpu" and model.dtype == "fp32" and not model.compile


def draws(trainer: Trainer) -> list[SampleKey]:
    """Return this rank's next batch, or what of it is of one video size, as the sampler plans it; it is not taken."""
    sampler, data = trainer.state.sampler, trainer.conditions
    assert data is not None, "the trainer was made without its conditions"
    planned = sampler.plan(sampler.next_step)[sampler.rank]
    first = full_batches([data.size_of(key[3]) for key in planned], len(planned))[0]
    return [planned[row] for row in first]


def take(trainer: Trainer) -> ProbeBatch:
    """Roll out this rank's next batch by the trainer's own code, no further than its stochastic steps reach.

    Raises:
        RuntimeError: on every rank, if any failed.
    """
    policy, data, ranks = trainer.collector.policy, trainer.conditions, trainer.ranks
    assert data is not None, "the trainer was made without its conditions"
    with ranks.sync_errors("loading"):
        conditions = tuple(data.condition(index, gid, slot) for _, gid, slot, index in draws(trainer))
        conditioning = policy.encode(conditions)
    with ranks.sync_errors("the rollout"):
        return ProbeBatch(
            conditions, rollout(policy, conditions, conditioning, window(trainer), as_far_as_needed(trainer))
        )


def window(trainer: Trainer) -> tuple[int, ...]:
    """Return the stochastic steps of the next epoch."""
    return trainer.collector.settings.window(trainer.state.finished)


def grpo(trainer: Trainer) -> GrpoObjective:
    """Return the objective of the run, which replays recorded steps."""
    objective = trainer.updater.objective
    assert isinstance(objective, GrpoObjective)
    return objective


def as_far_as_needed(trainer: Trainer) -> RolloutSettings:
    """Return the rollout's settings without the steps that come after the stochastic ones and one more."""
    settings = trainer.collector.settings.rollout
    return dataclasses.replace(settings, sigmas=settings.sigmas[: window(trainer)[-1] + 3])


def replay(updater: Updater, part: Samples, rows: int, *, gradients: bool | None = None) -> Replayed:
    """Replay all steps of B samples in calls of `rows`, as the update does; with more rows than B, some stand twice.

    Args:
        updater: of the run.
        part: the samples.
        rows: of a call.
        gradients: whether to keep them, as the update does; unless given, where an update's call has as many rows: a
            device need not have room for more.
    """
    ratios, units, residuals = [], [], []
    for positions in (torch.arange(max(rows, len(part))) % len(part)).split(rows):
        micro = part.rows(positions)
        scored = [_scored(updater, micro, column, gradients) for column in range(len(micro.trajectory.steps))]
        ratios.append(torch.stack([ratio for ratio, _, _ in scored], dim=1))
        units.append(torch.tensor([unit for _, unit, _ in scored]))
        residuals.append([drawn for *_, drawn in scored])
    by_step = [torch.cat(drawn)[: len(part)] for drawn in zip(*residuals, strict=True)]
    return Replayed(torch.cat(ratios)[: len(part)], units[0], dict(zip(part.trajectory.steps, by_step, strict=True)))


def by_gradients(updater: Updater, part: Samples, log_ratios: Tensor) -> Tensor:
    """Return (b, K) log-ratios of the update's call to the same one without gradients, as old ones are scored again.

    With b = 0 where the rollout's own batch is replayed with gradients: that shows the same.

    Args:
        updater: of the run.
        part: B samples.
        log_ratios: (B, K), replayed in the update's calls, to the rollout's own.
    """
    rows = updater.settings.train.batch_size
    if len(part) <= rows:
        return part.trajectory.log_probs[:0]
    return log_ratios[:rows] - replay(updater, part.rows(slice(0, rows)), rows, gradients=False).log_ratios


@contextlib.contextmanager
def as_in_update(updater: Updater, rows: int, gradients: bool | None = None) -> Iterator[None]:
    """Inside, a call of `rows` keeps gradients if told to, or unless told, if an update's calls have as many rows."""
    kept = rows <= updater.settings.train.batch_size if gradients is None else gradients
    with torch.set_grad_enabled(kept), averaging_gradients(updater.policy.module, now=False):
        yield


def _scored(updater: Updater, micro: Samples, column: int, gradients: bool | None) -> tuple[Tensor, float, Tensor]:
    """Return one step's log-ratios, their unit and its residuals; a function, so that no graph outlives its call."""
    with as_in_update(updater, len(micro), gradients):
        assert isinstance(updater.objective, GrpoObjective)
        step = updater.objective.replay(micro, column)
    after = micro.trajectory.next_latents(column)
    unit = float(step.std) if updater.settings.train.guard else 1.0
    ratio = unit * (log_prob(after, step).detach() - micro.trajectory.log_probs[:, column])
    return ratio, unit, ((after - step.mean) / step.std).detach()


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def first_divergent_layer(trainer: Trainer, specimen: ProbeBatch) -> str:
    """Return the layer where the rollout's call of the first stochastic step and its replay part."""
    settings, policy = as_far_as_needed(trainer), trainer.collector.policy
    network = unwrap(policy.module)
    with recording(network) as rollout_calls:
        rollout(policy, specimen.conditions, specimen.part.conditioning, window(trainer), settings)
    with recording(network) as replay_calls, as_in_update(trainer.updater, len(specimen.part)):
        grpo(trainer).replay(specimen.part, 0)
    return first_difference(rollout_calls[window(trainer)[0]], replay_calls[0])


def parting_by_gradients(trainer: Trainer, specimen: ProbeBatch) -> str:
    """Return the layer where an update's call of the first stochastic step and the same without gradients part."""
    few = specimen.part.rows(slice(0, trainer.config.train.batch_size))
    with recording(unwrap(trainer.updater.policy.module)) as calls:
        for kept in (False, True):
            with as_in_update(trainer.updater, len(few), kept):
                grpo(trainer).replay(few, 0)
    return f"the same call without gradients and with: {first_difference(*calls)}"


def noise(trainer: Trainer, specimen: ProbeBatch) -> list[Finding]:
    """Return whether all samples of all ranks have noise of their own; every rank must call it."""
    own = [(c.gid, c.slot, *ids) for c, ids in zip(specimen.conditions, specimen.part.noise_ids.tolist(), strict=True)]
    rows = [row for text in trainer.ranks.gather_text(json.dumps(own)) for row in json.loads(text)]
    return checks.check_noise(
        [row[0] for row in rows],
        [row[1] for row in rows],
        [row[2:] for row in rows],
        same_initial_noise=trainer.config.sample.same_initial_noise,
    )
