"""A second-order multistep ODE step: the accuracy of two calls of the network for the price of one."""

from __future__ import annotations

from torch import Tensor

from flow_grpo.maths.sde import per_sample


def second_order_step(
    latents: Tensor, velocity: Tensor, previous_velocity: Tensor, before: Tensor, sigma: Tensor, after: Tensor
) -> Tensor:
    """Return the latents at noise level `after` by the two-step Adams-Bashforth method with variable step length.

        x' = x + h * ((1 + r / 2) * v - r / 2 * v_previous),    h = after - sigma,  r = h / (sigma - before)

    It is exact where the velocity is linear in the noise level (Hairer, Norsett and Wanner, Solving Ordinary
    Differential Equations I, section III.5).

    Args:
        latents: (B, ...) at noise level `sigma`.
        velocity: (B, ...) at `sigma`.
        previous_velocity: (B, ...) at `before`, one step earlier.
        before: (B,) CPU noise level of the previous step.
        sigma: (B,) CPU noise level of this step, below `before`.
        after: (B,) CPU noise level to reach, below `sigma`.
    """
    before, sigma, after = before.cpu().double(), sigma.cpu().double(), after.cpu().double()
    length = after - sigma
    ratio = length / (sigma - before)
    now = per_sample(length * (1 + ratio / 2), latents)
    then = per_sample(length * ratio / 2, latents)
    return latents + now * velocity - then * previous_velocity
