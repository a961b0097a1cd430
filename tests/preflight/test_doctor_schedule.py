"""Checks of noise levels and stochastic steps: what passes, and the fault that each must find."""

from unittest import mock

import pytest
import torch

from flow_grpo.maths import sde
from flow_grpo.maths.loss import GuardTerms, grpo_loss
from flow_grpo.maths.schedule import flow_sigmas
from flow_grpo.preflight.doctor import schedule as checks
from flow_grpo.settings.sampling import Sampling, SdeSettings
from tests.doctor_cases import status

SIGMAS = flow_sigmas(10, 3.0)


@pytest.mark.parametrize(
    ("step", "kind", "level", "std", "gain", "excess"),
    [
        (1, "flow", 0.7, 0.7384, 0.06948, 0.06),
        (8, "flow", 0.7, 0.256, 0.868, 0.24),
        (8, "constant", 0.3, 0.127, 1.49, 0.05),
        (4, "cps", 0.8, 0.713, 0.228, 0.0),
    ],
)
def test_the_table_holds_the_published_scalars(step, kind, level, std, gain, excess):
    (row,) = checks.step_table(Sampling(SIGMAS, SdeSettings(kind, level), 0), [step], None, False)
    assert (row.std, row.gain) == (pytest.approx(std, abs=6e-4), pytest.approx(gain, rel=6e-3))
    assert row.excess == pytest.approx(excess, abs=6e-3)


@pytest.mark.parametrize("guard", [False, True])
def test_a_step_counts_in_the_gradient_by_its_gain_times_its_weight(guard):
    """Against the gradient of the loss itself, for the same unit of noise in every step."""
    weights, velocity = torch.linspace(0.5, 1.5, 10), torch.ones(1, 1, requires_grad=True)
    table = checks.step_table(Sampling(SIGMAS, SdeSettings("flow", 0.7), 0), [1, 4, 7], weights, guard)
    assert len(table) == 3
    for row in table:
        levels = SIGMAS[row.step : row.step + 2].tolist()
        noise = {"kind": "flow", "noise_level": 0.7, "sigma_cap": float(SIGMAS[1])}
        step = sde.transition(velocity, torch.ones(1, 1), *levels, **noise)
        found = sde.log_prob(step.mean.detach() + step.std, step)[None]
        terms = GuardTerms(step.mean[None], step.mean[None].detach(), step.std) if guard else None
        weight = weights[row.step : row.step + 1]
        loss = grpo_loss(found, found, torch.ones(1), clip_range=0.1, step_weight=weight, guard=terms).per_sample
        (gradient,) = torch.autograd.grad(loss.sum(), velocity)
        assert abs(float(gradient)) == pytest.approx(row.gain * row.weight, rel=1e-5)


def test_a_sound_schedule_passes_and_prints_a_row_per_step():
    flow, weights = Sampling(SIGMAS, SdeSettings("flow", 0.7), 0), torch.full((10,), 2.0)
    found = checks.check_steps(checks.step_table(flow, [1, 2, 3], weights, False))
    assert found.status == "ok" and "gain: |d mean / d velocity| / std" in found.measured
    assert " ".join(found.measured.splitlines()[-3].split()) == "1 0.9643 0.0412 0.738 0.640 +6% 0.069 2.00"


@pytest.mark.parametrize(
    ("step", "noise", "wanted", "way_out"),
    [
        (2, ("constant", 0.3), "ok", ""),
        (8, ("flow", 1.0, 0.45), "warn", "leave grain"),
        (1, ("constant", 5.5), "fail", "lower sample.noise_level"),  # more noise than the latents have
        (2, ("flow", 1e-4), "fail", "raise sample.noise_level"),  # explores nothing
    ],
)
def test_steps_with_too_much_or_too_little_noise_come_with_the_knob_to_turn(step, noise, wanted, way_out):
    found = checks.check_steps(checks.step_table(Sampling(SIGMAS, SdeSettings(*noise), 0), [step], None, False))
    assert status(found) == wanted and way_out in found.way_out


@pytest.mark.parametrize(
    ("windows", "allowed", "wanted"),
    [
        ([(1, 2), (2, 3)], (1, 2, 3), "ok"),
        ([(8, 9)], (7, 8), "fail"),  # the last
        ([(5, 6)], (1, 2, 3), "fail"),
        ([()], (1, 2), "fail"),
    ],
)
def test_stochastic_steps_must_be_allowed(windows, allowed, wanted):
    assert status(checks.check_window(windows, allowed, 10)) == wanted


@pytest.mark.parametrize(
    ("kind", "level"), [("flow", 0.7), ("flow", 1.0), ("constant", 0.3), ("linear", 0.9), ("cps", 0.8)]
)
def test_every_kind_of_step_tends_to_the_ode_step(kind, level):
    assert status(checks.check_ode_limit(Sampling(SIGMAS, SdeSettings(kind, level, 0.45), 0), range(9))) == "ok"


@pytest.mark.parametrize("part", ["keep", "kappa"])
def test_a_step_that_goes_the_wrong_way_fails(part):
    given = sde.coefficients

    def wrong(*levels, **named):
        found = given(*levels, **named)
        return type(found)(**(vars(found) | {part: -getattr(found, part)}))

    with mock.patch.object(sde, "coefficients", wrong):
        assert status(checks.check_ode_limit(Sampling(SIGMAS, SdeSettings("flow", 0.7), 0), [1, 2])) == "fail"
