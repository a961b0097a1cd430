"""Noise levels for a shift and a step count, which steps are stochastic, and what each of them weighs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flow_grpo.maths.keys import generator
from flow_grpo.maths.sde import coefficients

STEP_WEIGHTS = ("none", "inverse_gain", "inverse_delta")


def flow_sigmas(num_steps: int, shift: float) -> Tensor:
    """Return the (S+1,) fp32 CPU noise levels from 1 (noise) to 0 (clean).

    u_i = 1 - i / S, sigma_i = shift * u_i / (1 + (shift - 1) * u_i), computed in float64: the grid ReCamMaster samples
    on. It is indexed by step number, never looked up by timestep.

    Raises:
        ValueError: no step, or a shift that is not positive.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}, must be at least 1")
    if not 0 < shift < float("inf"):
        raise ValueError(f"shift is {shift}, must be > 0 and finite")
    u = 1 - torch.arange(num_steps + 1, dtype=torch.float64) / num_steps
    return (shift * u / (1 + (shift - 1) * u)).float()


def check_sde_steps(sde_steps: Sequence[int], num_steps: int) -> None:
    """Refuse steps that may not be stochastic.

    Raises:
        ValueError: empty, not strictly increasing, or outside 0..num_steps-2: the last step has c < 0 or std 0 in
            every variant.
    """
    steps = list(sde_steps)
    if not steps or steps != sorted(set(steps)):
        raise ValueError(f"sde_steps is {steps}, must be at least one step, each once, in increasing order")
    if steps[0] < 0 or steps[-1] > num_steps - 2:
        raise ValueError(
            f"sde_steps is {steps}, must lie within 0..{num_steps - 2} of {num_steps}: the last step is always ODE"
        )


def sde_window(sde_steps: Sequence[int], window: int, *, seed: int, round_index: int) -> tuple[int, ...]:
    """Return the steps that are stochastic in a round: `window` neighbouring entries of `sde_steps`.

    The draw depends on (seed, round_index) only, so every rank, group and resumed run agrees: windows that differ
    inside a group would add timestep bias to its rewards.

    Args:
        sde_steps: steps that may be stochastic, in increasing order.
        window: how many of them are; 0 takes all.
        seed: seed of the run.
        round_index: which round; an epoch is one round plus one per resample.

    Raises:
        ValueError: window is negative or exceeds the number of steps.
    """
    steps = tuple(sde_steps)
    if not 0 <= window <= len(steps):
        raise ValueError(f"window is {window}, must be 0 (all) to {len(steps)}, the number of sde_steps")
    if window == 0:
        return steps
    places = len(steps) - window + 1
    start = int(torch.randint(places, (), generator=generator(seed, "sde window", round_index)))
    return steps[start : start + window]


def step_weights(
    kind_of_weight: str,
    sigmas: Tensor,
    sde_steps: Sequence[int],
    *,
    kind: str,
    noise_level: float,
    max_step_std: float | None = None,
) -> Tensor:
    """Return the (S,) fp32 CPU weight of every step on the policy term.

    Divided by the mean over `sde_steps`, the steps that may be trained; 0 elsewhere. The gradient of a step's
    log-probability with respect to the velocity grows with its gain, hence `inverse_gain`, taken from the std that is
    really added (after clipping).

    Args:
        kind_of_weight: "none" (1), "inverse_gain" (1 / gain), or "inverse_delta" (1 / (sigma - sigma'), GRPO-Guard).
        sigmas: (S+1,) noise levels; sigmas[1] is the cap of the "flow" kind.
        sde_steps: all steps that may be trained, not the window of one round.
        kind: SDE variant, see `sde.coefficients`.
        noise_level: strength of the noise.
        max_step_std: bound of the step std.

    Raises:
        ValueError: unknown kind of weight, a step that may not be trained, or no noise to train with.
    """
    if kind_of_weight not in STEP_WEIGHTS:
        raise ValueError(f"step weight is {kind_of_weight!r}, must be one of {', '.join(STEP_WEIGHTS)}")
    if kind == "ode" or noise_level == 0:
        raise ValueError(f"sde kind {kind!r} with noise_level {noise_level} adds no noise: no step can be trained")
    num_steps = len(sigmas) - 1
    check_sde_steps(sde_steps, num_steps)
    steps = torch.tensor(list(sde_steps))
    before, after = sigmas[steps], sigmas[steps + 1]
    step = coefficients(
        before, after, kind=kind, noise_level=noise_level, sigma_cap=sigmas[1], max_step_std=max_step_std
    )
    raw = {
        "none": torch.ones(len(steps), dtype=torch.float64),
        "inverse_gain": 1 / step.gain,
        "inverse_delta": 1 / (before.double() - after.double()),
    }[kind_of_weight]
    weights = torch.zeros(num_steps, dtype=torch.float64)
    weights[steps] = raw / raw.mean()
    return weights.float()
