"""The fast doctor, run before the first epoch: one batch is rolled out as far as its stochastic steps and replayed.

It changes no number of the run: noise is keyed, the sampler is only asked for its plan, no weight moves, and there is
no backward pass, after which DDP would reduce gradients in another order. A resumed run is examined again, because it
may run on another machine.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from flow_grpo.algorithm.update.objective import GrpoObjective
from flow_grpo.models.adapters import adapted_modules, trained_parameters
from flow_grpo.preflight.doctor import checks
from flow_grpo.preflight.doctor.context import DoctorContext
from flow_grpo.preflight.doctor.findings import (
    Finding,
    as_table,
    equal_on_ranks,
    errors_as_finding,
    failed,
    finding,
    merge_over_ranks,
    summary,
)
from flow_grpo.preflight.doctor.machine import examine_machine
from flow_grpo.preflight.doctor.probe import (
    grad_mode_gap,
    layer_differing_by_grad_mode,
    layer_differing_from_rollout,
    replay,
    roll_out_probe,
)
from flow_grpo.preflight.doctor.schedule import examine_schedule
from flow_grpo.records import Samples
from flow_grpo.run.parts import eval_guidance, training_guidance
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.ranks.sharding import is_sharded, local

NOT_AVERAGED = "gradients are not averaged over ranks: see flow_grpo/runtime/ranks/sharding.py"
DIGEST_VALUES = 64  # of every tensor; an optimizer step moves nearly all values of a tensor it moves


def before_training(context: DoctorContext, say: Callable[[str], None]) -> None:
    """Run the fast doctor and report on rank 0; collective call: every rank must call it.

    Args:
        context: of the run.
        say: prints a text on rank 0.

    Raises:
        ValueError: on every rank, if a check failed.
    """
    begun = time.perf_counter()
    random = device_api.rng_state(context.device)
    findings = examine(context)
    device_api.set_rng_state(context.device, random)
    others = [found for found in findings if found.status != "ok"]
    rows = as_table(others).splitlines()
    say("\n".join([summary(findings, time.perf_counter() - begun), *rows]))
    if failed(findings):
        raise ValueError(
            f"the doctor's checks {', '.join(failed(findings))} fail, see above; fix that, look closer with "
            "tools/doctor.py, or pass --config.doctor=off to train in spite of it"
        )


def examine(context: DoctorContext, batch_sizes: Iterable[int] = ()) -> list[Finding]:
    """Return the findings of the fast doctor, identical on every rank; collective call: every rank must call it.

    Args:
        context: of the run, which is left unchanged.
        batch_sizes: further numbers of rows in which to replay the batch.
    """
    found = [*examine_machine(context), *examine_schedule(context), *examine_weights(context)]
    found.append(checks.check_guidance(training_guidance(context.config), eval_guidance(context.config)))
    findings = merge_over_ranks(found, context.world)
    if not can_sample(findings):
        return findings
    way_out = "training itself would stop here: fix what the message names"
    with errors_as_finding("rollout", findings, context.world, way_out):
        probe = roll_out_probe(context)
        if context.grpo is None:
            findings += examine_matching(context, probe)
        else:
            findings += examine_probe(context, context.grpo, probe, batch_sizes)
        findings.append(examine_noise(context, probe))
    return merge_over_ranks(findings, context.world)


def can_sample(findings: Sequence[Finding]) -> bool:
    """Return whether every stochastic step is a Gaussian and the same on all ranks, and the rollout did not fail."""
    return not {"steps", "window", "window_on_ranks", "last_step", "rollout"} & set(failed(findings))


def examine_weights(context: DoctorContext) -> list[Finding]:
    """Check that weights are trained and equal on every rank; collective call: every rank must call it."""
    module, mode = context.policy.module, context.config.model.trained
    trained = sum(parameter.numel() for parameter in trained_parameters(module).values())
    adapters = checks.check_adapters(mode, len(adapted_modules(module)), trained)
    return [adapters, equal_weights(context, "weights", "trained weights"), examine_rate(context)]


def examine_rate(context: DoctorContext) -> Finding:
    """Check the learning rates against the size of the weights they move; collective call: every rank must call it."""
    sizes = []
    for group in context.updater.optimizer.param_groups:
        for parameter in group["params"]:
            values = local(parameter).detach().float()
            rms = float(values.square().mean().sqrt()) if values.numel() else 0.0
            sizes += [group["lr"] / rms] if rms else []  # zero-initialised: a step of any size begins from nothing
    return checks.check_rate(sizes, context.config.train.learning_rate)


def equal_weights(context: DoctorContext, name: str, what: str) -> Finding:
    """Check that trained weights are equal on every rank; collective call: every rank must call it."""
    module = context.policy.module
    if is_sharded(module):
        return finding(name, "sharded: every rank holds another part")
    weights = digest(trained_parameters(module).values())
    return equal_on_ranks(name, weights, what, context.world, NOT_AVERAGED)


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of some values of every tensor."""
    found = blake2b(digest_size=8)
    for tensor in tensors:
        flat = local(tensor).flatten()
        found.update(flat[:: max(1, flat.numel() // DIGEST_VALUES)].float().cpu().numpy().tobytes())
    return found.hexdigest()


def examine_matching(context: DoctorContext, probe: Samples) -> list[Finding]:
    """Check that a loss without recorded steps repeats itself; collective call: every rank must call it."""
    rows = probe.rows(slice(0, context.config.train.batch_size))
    micro = dataclasses.replace(rows, advantages=torch.ones(len(rows)), weights=torch.ones(len(rows)))
    memory: Any = {}
    with context.world.sync_errors("the loss"), torch.no_grad():
        first, again = (context.objective.loss(micro, memory, 0) for _ in range(2))
    ratios = torch.stack([first.drift, again.drift], dim=1)
    clip_range = context.config.train.clip_range
    return [checks.check_ratio(ratios, clip_range, "recompute", exact=context.bit_exact, layer="")]


def examine_probe(
    context: DoctorContext, objective: GrpoObjective, probe: Samples, batch_sizes: Iterable[int]
) -> list[Finding]:
    """Check a rolled-out batch against its replays; collective call: every rank must call it.

    Raises:
        RuntimeError: on every rank, if it cannot be replayed on any.
    """
    train, world, full = context.config.train, context.world, len(probe)
    rows = sorted({train.batch_size, full, *(n for n in batch_sizes if n <= full)})
    with world.sync_errors("the replay"):
        replays = {n: replay(objective, probe, n) for n in rows}
        by_grad_mode = grad_mode_gap(objective, probe, replays[train.batch_size].log_ratios)
    gaps = {n: _largest(found.log_ratios) for n, found in replays.items()}
    bound = checks.ratio_bound(train.clip_range, exact=context.bit_exact)
    worst = world.data.all_gather(torch.tensor([[gaps[full], _largest(by_grad_mode)]])).amax(dim=0)
    layer = ""
    # Decided by the worst rank: with sharded weights the calls below are collective.
    if not (worst <= bound).all():
        with world.sync_errors("the comparison of layers"):
            compare = layer_differing_by_grad_mode if worst[0] <= bound else layer_differing_from_rollout
            layer = compare(context, objective, probe)
    log_ratios = torch.cat([replays[full].log_ratios, by_grad_mode])
    return [
        checks.check_residuals(probe.trajectory.steps, replays[full].residuals),
        checks.check_latents_fp32(probe.trajectory.states),
        checks.check_ratio(log_ratios, train.clip_range, train.old_log_prob, exact=context.bit_exact, layer=layer),
        checks.check_ratio_by_batch_size(gaps, train.clip_range, train.batch_size, train.old_log_prob),
    ]


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def examine_noise(context: DoctorContext, probe: Samples) -> Finding:
    """Check that samples of all ranks have their own noise; collective call: every rank must call it."""
    own = [[gid, slot, *ids] for (gid, slot, _), ids in zip(probe.keys.tolist(), probe.noise_ids.tolist(), strict=True)]
    rows = [row for text in context.world.data.gather_text(json.dumps(own)) for row in json.loads(text)]
    return checks.check_noise(
        [row[0] for row in rows],
        [row[1] for row in rows],
        [row[2:] for row in rows],
        same_initial_noise=context.config.sample.same_initial_noise,
    )
