"""Second-order multistep ODE steps."""

import torch

from flow_grpo.maths.multistep import second_order_step
from flow_grpo.maths.schedule import flow_sigmas


def test_a_velocity_linear_in_the_noise_level_is_followed_exactly_for_any_step_lengths():
    start, slope = torch.tensor([[0.3], [-1.0]]), torch.tensor([[2.0], [0.5]])
    before, sigma, after = (torch.tensor(levels) for levels in ([0.9, 0.8], [0.7, 0.75], [0.2, 0.7]))

    def velocity(level):  # of latents = start * level + slope * level^2
        return start + 2 * slope * level[:, None]

    def latents(level):
        return start * level[:, None] + slope * level[:, None] ** 2

    found = second_order_step(latents(sigma), velocity(sigma), velocity(before), before, sigma, after)
    torch.testing.assert_close(found, latents(after), rtol=0, atol=1e-6)


def test_halving_the_steps_divides_the_error_by_four_where_euler_s_is_halved():
    """dx/dsigma = -x from sigma 1 to 0, on the shifted schedule, after one exact step."""

    def error(steps: int, *, second_order: bool) -> float:
        sigmas = flow_sigmas(steps, 3.0).double()
        latents = torch.exp(-sigmas[1:2, None])
        previous = -torch.exp(-sigmas[0:1, None])
        for step in range(1, steps):
            velocity = -latents
            levels = sigmas[step - 1 : step], sigmas[step : step + 1], sigmas[step + 1 : step + 2]
            if second_order:
                latents = second_order_step(latents, velocity, previous, *levels)
            else:
                latents = latents + (levels[2] - levels[1]) * velocity
            previous = velocity
        return float((latents - 1.0).abs())

    assert 3.4 < error(40, second_order=True) / error(80, second_order=True) < 4.6
    assert 1.8 < error(40, second_order=False) / error(80, second_order=False) < 2.2
