"""The doctor's judgements on noise levels and stochastic steps, before anything is sampled.

Letters: S denoising steps.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flow_grpo.algorithm.rollout.denoise import SdeSettings, step_transition
from flow_grpo.maths.sde import coefficients
from flow_grpo.preflight.findings import Finding, finding

MAX_STD = 1.0  # of a step, in the latents' own unit: more noise than there is at sigma = 1 destroys the video
MAX_EXCESS = 0.25  # noise beyond what the network is told it carries; Flow-SDE 0.7 has 24 % where it still works
VANISHING = 1e-4  # share of the noise that is left to compare a step with the ODE's: its square enters the mean
ODE_ALLOWED = 1e-5  # of latents of order 1: what fp32 rounds, and the rest of the noise


@dataclasses.dataclass(frozen=True)
class Step:
    """One stochastic step of the table.

    Attributes:
        step: which, 0..S-1.
        sigma: noise level before it.
        delta: how far the level falls.
        std: noise added.
        c: weight of the noise estimate.
        excess: noise carried afterwards beyond the level the network is told, as a share of that.
        gain: pull of the log-probability on the velocity.
        weight: of the policy term.
    """

    step: int
    sigma: float
    delta: float
    std: float
    c: float
    excess: float
    gain: float
    weight: float


def step_table(sigmas: Tensor, steps: Sequence[int], sde: SdeSettings, weights: Tensor | None) -> list[Step]:
    """Return the scalars of every step that may be trained.

    Raises:
        ValueError: a step without a Gaussian: the last one, or one whose noise estimate changes its sign.
    """
    rows = []
    for step in steps:
        here, after = float(sigmas[step]), float(sigmas[step + 1])
        found = coefficients(
            here,
            after,
            kind=sde.kind,
            noise_level=sde.noise_level,
            sigma_cap=float(sigmas[1]),
            max_step_std=sde.max_step_std,
        )
        std, c = float(found.std), float(found.c)
        weight = 1.0 if weights is None else float(weights[step])
        rows.append(Step(step, here, here - after, std, c, math.hypot(c, std) / after - 1, float(found.gain), weight))
    return rows


def check_steps(sigmas: Tensor, steps: Sequence[int], sde: SdeSettings, weights: Tensor | None) -> list[Finding]:
    """Judge the noise of every step that may be trained: std above 0 and at most 1, c >= 0, little excess noise."""
    way_out = "lower sample.noise_level, set sample.max_step_std, or leave the step out of sample.sde_steps"
    try:
        table = step_table(sigmas, steps, sde, weights)
    except ValueError as error:
        return [finding("steps", str(error), fail=way_out)]
    gains = [row.gain for row in table]
    said = f"std at most {max(row.std for row in table):.3f}, gains spread {max(gains) / min(gains):.1f}x"
    said += "\nstep   sigma   delta    std      c excess   gain weight"
    for row in table:
        levels = f"{row.step:4} {row.sigma:7.4f} {row.delta:7.4f} {row.std:6.3f}"
        said += f"\n{levels} {row.c:6.3f} {row.excess:+6.0%} {row.gain:6.3f} {row.weight:6.2f}"
    numbers = [value for row in table for value in dataclasses.astuple(row)]
    wild = not all(map(math.isfinite, numbers)) or not all(0 < row.std <= MAX_STD for row in table)
    grainy = max(row.excess for row in table) > MAX_EXCESS
    grain = f"above {MAX_EXCESS:.0%} of excess noise late steps leave grain: {way_out}"
    return [finding("steps", said, fail=way_out if wild else "", warn=grain if grainy else "")]


def check_ode_limit(sigmas: Tensor, steps: Sequence[int], sde: SdeSettings) -> list[Finding]:
    """Judge the direction of every step: as its noise vanishes it must become the ODE's, x + (sigma' - sigma) v.

    Rollout and update share the step, so neither the residuals nor the ratio would show a wrong sign.
    """
    latents, velocity = torch.tensor([0.7]), torch.tensor([-1.3])
    policy: Any = types.SimpleNamespace(velocity=lambda *_: velocity)
    quiet = dataclasses.replace(sde, noise_level=VANISHING * sde.noise_level)
    worst = 0.0
    for step in steps:
        drawn = step_transition(policy, latents, policy, sigmas=sigmas, step=step, sde=quiet)
        fall = float(sigmas[step + 1]) - float(sigmas[step])
        worst = max(worst, float((drawn.mean - latents - fall * velocity).abs()))
    said = f"without noise {len(steps)} steps are {worst:.1g} from the ODE's, at most {ODE_ALLOWED:.0e}"
    way_out = "the mean of the step is wrong: see flow_grpo/maths/sde.py"
    return [finding("ode_limit", said, fail="" if worst <= ODE_ALLOWED else way_out)]


def check_window(windows: Sequence[Sequence[int]], allowed: Sequence[int], num_steps: int) -> list[Finding]:
    """Judge the stochastic steps of some epochs: inside the schedule, out of `sde_steps`, and never the last one."""
    steps = sorted({step for window in windows for step in window})
    outside = [step for step in steps if not 0 <= step < num_steps or step not in allowed]
    last = num_steps - 1 in steps
    where = f"steps {steps} of 0..{num_steps - 1} over {len(windows)} epochs"
    return [
        finding(
            "window",
            where,
            fail="" if steps and not outside else f"steps {outside} are not in sample.sde_steps={tuple(allowed)}",
        ),
        finding(
            "last_step",
            f"step {num_steps - 1} is {'trained' if last else 'left to the ODE'}",
            fail=f"keep sample.sde_steps within 0..{num_steps - 2}: the last step has no density" if last else "",
        ),
    ]
