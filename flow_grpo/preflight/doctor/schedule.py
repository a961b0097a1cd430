"""Checks of how samples are drawn, before any is: evaluation, guidance, noise levels, stochastic steps.

S is the number of denoising steps.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flow_grpo.algorithm.rollout.denoise import step_transition
from flow_grpo.judging import power
from flow_grpo.judging.changes import LEAST_SCENES
from flow_grpo.judging.evaluate import eval_guidance, training_guidance
from flow_grpo.maths.sde import coefficients
from flow_grpo.preflight.doctor.findings import Finding, equal_on_ranks, finding
from flow_grpo.preflight.doctor.probe import replaying_objective
from flow_grpo.records import Guidance
from flow_grpo.run.trainer import Trainer
from flow_grpo.settings.sampling import Sampling

BLIND = 0.3  # of a metric's value: the demo changes TransErr by 44 %, most runs change it by less
GROUPS = 64  # groups whose stochastic steps are checked
MAX_STD = 1.0  # of a step, in units of the latents: more than the noise at sigma = 1 destroys the video
MIN_STD = 0.01  # of the largest step: below, a percent of the latents' size, the copies of a group are the same video
MAX_EXCESS = 0.25  # noise above the level the network is told; Flow-SDE at 0.7 still works with 0.24
VANISHING = 1e-4  # factor on the noise level for the ODE limit; the step's mean depends on its square
ODE_TOLERANCE = 1e-5  # for latents of order 1: fp32 rounding and the remaining noise
LEGEND = (
    "delta: fall of sigma; std: of the added noise; c: weight of the predicted noise; excess: noise above the next\n"
    "sigma; gain: |d mean / d velocity| / std, scales the log-probability's gradient; weight: of the log-ratio in the\n"
    "policy loss, with train.guard times std"
)


@dataclasses.dataclass(frozen=True)
class Step:
    """Scalars of one stochastic step: its index, 0..S-1, its noise level before, and those of `LEGEND`."""

    step: int
    sigma: float
    delta: float
    std: float
    c: float
    excess: float
    gain: float
    weight: float


def examine_schedule(trainer: Trainer) -> Iterator[Finding]:
    """Check the evaluation, and the noise and choice of stochastic steps unless the ODE is sampled; collective call."""
    yield check_guidance(training_guidance(trainer.config), eval_guidance(trainer.config))
    evaluator = trainer.evaluator
    ranks = trainer.world.data.size
    yield check_power(power.usual_spreads(trainer.config), len(evaluator.indices), evaluator.scenes, ranks)
    settings, allowed = trainer.collector.sampling, trainer.config.sample.sde_steps
    if settings.sde.kind == "ode":
        return
    objective, guard = replaying_objective(trainer), trainer.config.train.guard
    steps = check_steps(step_table(settings, allowed, None if objective is None else objective.step_weight, guard))
    yield steps
    if steps.status != "fail":
        yield check_ode_limit(settings, allowed)
    windows = [settings.window_of(gid) for gid in range(GROUPS)]
    yield check_window(windows, allowed, len(settings.sigmas) - 1)
    what = f"stochastic steps of {GROUPS} groups, first {windows[0]},"
    way_out = "draw them from (seed, gid) only: the copies of a group must share them"
    yield equal_on_ranks("window_on_ranks", str(windows), what, trainer.world, way_out)


def trained_steps(trainer: Trainer) -> list[Step]:
    """Return the scalars of every step that may be trained; none where no step is replayed."""
    objective, steps, guard = replaying_objective(trainer), trainer.config.sample.sde_steps, trainer.config.train.guard
    if objective is None:
        return []
    return step_table(trainer.collector.sampling, steps, objective.step_weight, guard)


def step_table(sampling: Sampling, steps: Sequence[int], weights: Tensor | None, guard: bool) -> list[Step]:
    """Return the scalars of every step that may be trained.

    `weights` are the (S,) ones of the policy loss, None for 1. With `guard` the loss multiplies log-ratios by the std
    of their step.
    """
    sigmas, rows = sampling.sigmas, []
    for step in steps:
        here, after = float(sigmas[step]), float(sigmas[step + 1])
        found = coefficients(here, after, sigma_cap=float(sigmas[1]), **vars(sampling.sde))
        std, c = float(found.std), float(found.c)
        weight = (1.0 if weights is None else float(weights[step])) * (std if guard else 1.0)
        rows.append(Step(step, here, here - after, std, c, math.hypot(c, std) / after - 1, float(found.gain), weight))
    return rows


def check_steps(table: Sequence[Step]) -> Finding:
    """Check the noise of every step that may be trained: enough to explore, 0 < std <= 1, little excess."""
    way_out = "lower sample.noise_level, set sample.max_step_std, or leave the step out of sample.sde_steps"
    gains, most = [row.gain for row in table], max(row.std for row in table)
    message = f"std at most {most:.3f}, largest gain {max(gains) / min(gains):.1f}x the smallest"
    message += f"\n{LEGEND}\nstep   sigma   delta    std      c excess   gain weight"
    for row in table:
        levels = f"{row.step:4} {row.sigma:7.4f} {row.delta:7.4f} {row.std:6.3f}"
        message += f"\n{levels} {row.c:6.3f} {row.excess:+6.0%} {row.gain:6.3f} {row.weight:6.2f}"
    numbers = [value for row in table for value in dataclasses.astuple(row)]
    wild = not all(map(math.isfinite, numbers)) or not all(0 < row.std <= MAX_STD for row in table)
    silent = f"noise of at most {most:.2g} explores nothing: raise sample.noise_level" if most < MIN_STD else ""
    grainy = max(row.excess for row in table) > MAX_EXCESS
    grain = f"above {MAX_EXCESS:.0%} of excess noise late steps leave grain: {way_out}"
    return finding("steps", message, fail=way_out if wild else silent, warn=grain if grainy else "")


def check_ode_limit(sampling: Sampling, steps: Sequence[int]) -> Finding:
    """Check that every step tends to the ODE step x + (sigma' - sigma) v as its noise vanishes.

    Rollout and update share the step, so a wrong sign would show neither in the residuals nor in the ratio.
    """
    latents, velocity = torch.tensor([0.7]), torch.tensor([-1.3])
    policy: Any = types.SimpleNamespace(velocity=lambda *_: velocity)
    sigmas, sde = sampling.sigmas, sampling.sde
    quiet = dataclasses.replace(sampling, sde=dataclasses.replace(sde, noise_level=VANISHING * sde.noise_level))
    worst = 0.0
    for step in steps:
        drawn = step_transition(policy, latents, policy, torch.tensor([step]), quiet)
        fall = float(sigmas[step + 1]) - float(sigmas[step])
        worst = max(worst, float((drawn.mean - latents - fall * velocity).abs()))
    message = f"with vanishing noise {len(steps)} steps differ from the ODE's by {worst:.1g}, bound {ODE_TOLERANCE:.0e}"
    way_out = "the mean of the step is wrong: see flow_grpo/maths/sde.py"
    return finding("ode_limit", message, fail="" if worst <= ODE_TOLERANCE else way_out)


def check_window(windows: Sequence[Sequence[int]], allowed: Sequence[int], num_steps: int) -> Finding:
    """Check the stochastic steps of some groups: inside the schedule and `sde_steps`, and never the last step."""
    steps, last = sorted({step for window in windows for step in window}), num_steps - 1
    outside = [step for step in steps if not 0 <= step < num_steps or step not in allowed]
    wrong = "" if steps and not outside else f"steps {outside} are not in sample.sde_steps={tuple(allowed)}"
    return finding("window", f"steps {steps} of 0..{last} over {len(windows)} groups", fail=wrong)


def check_guidance(training: Guidance, evaluation: Guidance) -> Finding:
    """Check that training and the held-out evaluation sample with the same guidance."""
    scales = training.scale, evaluation.scale
    same = scales[0] == scales[1] and (scales[0] == 1 or training.negative_prompt == evaluation.negative_prompt)
    message = f"training samples with guidance {scales[0]:g}, evaluation with {scales[1]:g}"
    if not same and scales[0] == scales[1]:
        message += " and another negative prompt"
    way_out = "a rising reward/ may be guidance that the weights recover: look at the change of eval/, measured with "
    way_out += "the same guidance before and after, and at the evaluation's videos"
    return finding("guidance", message, warn="" if same else way_out)


def check_power(spreads: dict[str, float], conditions: int, scenes: int, ranks: int = 1) -> Finding:
    """Check what an evaluation of so many conditions of so many scenes can see; `spreads` as of `judging.power`."""
    few = scenes < LEAST_SCENES
    blind = few or any(power.least_visible(s, conditions, scenes) > BLIND for s in spreads.values())
    way_out = "the verdict may stay unclear: raise eval.num_conditions, and for more scenes data.report_scenes, with "
    way_out += "eval.split='tune' data.tune_scenes"
    return finding("evaluation", power.in_words(spreads, conditions, scenes, ranks), warn=way_out if blind else "")
