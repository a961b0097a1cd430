"""The noise schedule, which of its steps are stochastic, and the weight of each step in the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flow_grpo.maths.keys import generator
from flow_grpo.maths.sde import coefficients

STEP_WEIGHTS = ("none", "inverse_gain", "inverse_delta")
TAIL_EXPONENT = 0.85


def flow_sigmas(num_steps: int, shift: float) -> Tensor:
    """Return the (S+1,) fp32 CPU noise levels from 1 (noise) to 0 (clean); step i goes from sigmas[i] to sigmas[i + 1].

    sigma_i = shift * u_i / (1 + (shift - 1) * u_i) with u_i = 1 - i / S, computed in float64: the timestep shift of SD3
    (arXiv 2403.03206, eq. 23), ReCamMaster's sampling schedule.

    Raises:
        ValueError: no step, or a shift that is not positive.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}, must be at least 1")
    if not 0 < shift < float("inf"):
        raise ValueError(f"shift is {shift}, must be > 0 and finite")
    return shifted(1 - torch.arange(num_steps + 1, dtype=torch.float64) / num_steps, shift).float()


def shifted(u: Tensor, shift: float) -> Tensor:
    """Return the noise levels of times u in [0, 1] before the shift, 1 is noise."""
    return shift * u / (1 + (shift - 1) * u)


def windows(sde_steps: Sequence[int], window: int) -> list[tuple[int, ...]]:
    """Return the windows a sample's stochastic steps may form: disjoint blocks of `sde_steps`, so each step is in one.

    Windows that overlap would train the first and the last steps less often than the others. (MixGRPO, arXiv
    2507.21802, trains a window of the schedule.)

    Args:
        sde_steps: steps that may be stochastic, in increasing order.
        window: number of stochastic steps of a sample; 0 takes all.

    Raises:
        ValueError: window does not divide the number of steps, or a block has a gap.
    """
    steps = tuple(sde_steps)
    size = window or len(steps)
    if not 0 < size <= len(steps) or len(steps) % size:
        raise ValueError(f"window is {window}, must divide {len(steps)}, the number of sde_steps, or be 0 (all)")
    blocks = [steps[start : start + size] for start in range(0, len(steps), size)]
    for block in blocks:
        if block[-1] - block[0] != size - 1:
            raise ValueError(f"sde_steps {steps} give a window {block} with a gap, must be consecutive steps")
    return blocks


def window_of(gid: int, blocks: Sequence[tuple[int, ...]], *, seed: int) -> tuple[int, ...]:
    """Return the stochastic steps of a group, shared by its copies: other steps would bias the comparison.

    Stratified: of every len(blocks) consecutive groups each takes another block, in an order drawn anew. A function of
    (seed, gid) only, so it does not depend on rank, layout, batch or restart. (One step per group, stratified over
    groups: Flash-GRPO, arXiv 2605.15980.)
    """
    cycle, place = divmod(gid, len(blocks))
    order = torch.randperm(len(blocks), generator=generator(seed, "sde window", cycle))
    return blocks[int(order[place])]


def tail_levels(sigmas: Tensor, tail_steps: int) -> Tensor:
    """Return (S+1, m+1) fp32 CPU noise levels: row e leads from sigmas[e] to 0 in m steps.

    sigma_j = sigmas[e] * (1 - j / m)^0.85: nearly equal steps in the noise level, the last a little longer. A few steps
    of the shifted schedule would leave half of the way to the last one, and rank copies worse: docs/learning.md,
    "Signal of a recipe, and of its tail".

    Raises:
        ValueError: no step.
    """
    if tail_steps < 1:
        raise ValueError(f"tail_steps is {tail_steps}, must be at least 1")
    left = 1 - torch.arange(tail_steps + 1, dtype=torch.float64) / tail_steps
    return (sigmas.double()[:, None] * left**TAIL_EXPONENT).float()


def step_weights(
    kind_of_weight: str,
    sigmas: Tensor,
    sde_steps: Sequence[int],
    *,
    kind: str,
    noise_level: float,
    max_step_std: float | None = None,
) -> Tensor:
    """Return the (S,) fp32 CPU weight of every step in the policy loss: mean 1 over `sde_steps`, 0 elsewhere.

    The gradient of a step's log-probability with respect to the velocity is proportional to its gain (see `sde`), so
    late steps dominate; "inverse_gain" equalises them, using the std after clipping.

    Args:
        kind_of_weight: "none" (1), "inverse_gain" (1 / gain), or "inverse_delta" (1 / (sigma - sigma'), GRPO-Guard).
        sigmas: (S+1,) noise levels; sigmas[1] is the cap of the "flow" kind.
        sde_steps: all steps that may be trained, not the window of one round.
        kind: SDE variant, see `sde.coefficients`.
        noise_level: scale of the noise.
        max_step_std: bound of the step std.

    Raises:
        ValueError: unknown kind of weight, no noise, or steps that are not strictly increasing within 0..S-2: in every
            variant the last step has c < 0 or std 0.
    """
    if kind_of_weight not in STEP_WEIGHTS:
        raise ValueError(f"step weight is {kind_of_weight!r}, must be one of {', '.join(STEP_WEIGHTS)}")
    if kind == "ode" or noise_level == 0:
        raise ValueError(f"sde kind {kind!r} with noise_level {noise_level} adds no noise: no step can be trained")
    num_steps, listed = len(sigmas) - 1, list(sde_steps)
    if not listed or listed != sorted(set(listed)):
        raise ValueError(f"sde_steps is {listed}, must be at least one step, each once, in increasing order")
    if listed[0] < 0 or listed[-1] > num_steps - 2:
        raise ValueError(
            f"sde_steps is {listed}, must lie within 0..{num_steps - 2} of {num_steps}: the last step is always ODE"
        )
    steps = torch.tensor(listed)
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
