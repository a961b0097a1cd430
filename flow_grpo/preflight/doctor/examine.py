"""The doctor: lists of checks, made through the code of training before a run is paid for.

The fast list runs before the first epoch: one batch is rolled out as far as its stochastic steps and replayed. It
changes no number of the run: noise is keyed, the sampler is only asked for its plan, no weight moves, and there is
no backward pass, after which DDP would reduce gradients in another order. A resumed run is examined again, because it
may run on another machine. The full list is that of `tools/doctor.py`: also the rewards, and a short epoch with two
updates.

A check takes the trainer, measures, and yields findings. Every check is a collective call: every rank must call it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping

from flow_grpo.preflight.doctor.epoch import examine_epoch
from flow_grpo.preflight.doctor.findings import Finding, as_table, failed, finding, merge_over_ranks, summary
from flow_grpo.preflight.doctor.machine import examine_machine
from flow_grpo.preflight.doctor.probe import examine_probe
from flow_grpo.preflight.doctor.rewards import examine_rewards, examine_signal, examine_tail
from flow_grpo.preflight.doctor.schedule import examine_schedule, trained_steps
from flow_grpo.preflight.doctor.weights import examine_weights
from flow_grpo.run.trainer import Trainer
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.ranks.process_group import RankError

Check = Callable[[Trainer], Iterator[Finding]]

BEFORE_SAMPLING: tuple[Check, ...] = (examine_machine, examine_schedule, examine_weights)
FAST: Mapping[str, Check] = {"rollout": examine_probe}
"""Name of the finding where a check cannot be made -> check."""

# Without these no step can be sampled: not every one is a Gaussian, the same on all ranks.
NEEDED_TO_SAMPLE = {"steps", "window", "window_on_ranks", "rollout"}
WAY_OUT = "training itself would stop here: fix what the message names"


def full(updates_per_epoch: int) -> Mapping[str, Check]:
    """Return the full list, of a recipe with so many updates, for a trainer with one update per epoch.

    Its last check restores weights, optimizer state and EMA. The sampler has then advanced.
    """
    return {
        "rollout": functools.partial(examine_probe, batch_sizes=(1, 2)),
        "rewards": examine_rewards,
        "signal": examine_signal,
        "tail": examine_tail,
        "epoch": functools.partial(examine_epoch, updates_per_epoch=updates_per_epoch),
    }


def examine(trainer: Trainer) -> None:
    """Examine a run that has an epoch left, report, and plot its stochastic steps; ValueError if a check failed."""
    if trainer.config.doctor != "fast" or trainer.state.finished >= trainer.config.num_epochs:
        return
    begun, random = time.perf_counter(), device_api.rng_state(trainer.device)
    try:
        findings = run_checks(trainer, FAST)
        device_api.set_rng_state(trainer.device, random)
        others = [found for found in findings if found.status != "ok"]
        trainer.progress.say("\n".join([summary(findings, time.perf_counter() - begun), *as_table(others)]))
        if failed(findings):
            why = [
                f"{own.name}: {own.measured.splitlines()[0]}: {own.way_out}" for own in findings if own.status == "fail"
            ]
            raise ValueError(
                f"the doctor's check fails, {'; '.join(why)}; look closer with tools/doctor.py, or pass "
                "--config.doctor=off to train in spite of it"
            )
    except ValueError:
        trainer.tracker.close()
        raise
    sigmas = trainer.collector.sampling.sigmas.tolist()
    trainer.gallery.steps(sigmas, [vars(step) for step in trained_steps(trainer)])


def run_checks(trainer: Trainer, checks: Mapping[str, Check]) -> list[Finding]:
    """Return the findings of a list of checks, identical on every rank.

    A check that cannot be made, which every rank knows, is a failed one. After any other error with several ranks the
    peers wait in a collective call: it is raised, and rank 0 prints what was found before.
    """
    findings: list[Finding] = []
    try:
        for check in BEFORE_SAMPLING:
            findings.extend(check(trainer))
        findings = merge_over_ranks(findings, trainer.world)
        for name, check in checks.items():
            if name != "rewards" and NEEDED_TO_SAMPLE & set(failed(findings)):
                continue  # the same on every rank, as the findings are
            try:
                findings.extend(check(trainer))
            except (RuntimeError, ValueError, AssertionError) as error:
                if trainer.world.all.size > 1 and not isinstance(error, RankError | ValueError):
                    raise
                findings.append(finding(name, " ".join(str(error).split()), fail=WAY_OUT))
            findings = merge_over_ranks(findings, trainer.world)
    except RuntimeError:
        trainer.progress.say("\n".join(["the doctor's findings before the error below:", *as_table(findings)]))
        raise
    return findings
