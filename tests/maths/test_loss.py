"""The clipped surrogate: clip table, golden ratios, weights and refusals."""

import math

import pytest
import torch
from torch import Tensor

from flow_grpo.maths.loss import GuardTerms, grpo_loss
from flow_grpo.maths.sde import Transition, coefficients, gaussian_kl, log_prob, sample, transition

CLIP = {"clip_range": 1e-3}


def one_step(velocity: float, *, requires_grad: bool = False) -> tuple[Transition, Tensor]:
    """Return golden row 1 with another velocity, and that velocity (1, 1) float64."""
    v = torch.tensor([[velocity]], dtype=torch.float64, requires_grad=requires_grad)
    x = torch.tensor([[0.5]], dtype=torch.float64)
    return transition(v, x, 0.9, 0.8, kind="flow", noise_level=0.7), v


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient_on"),
    [
        (1.0, 1.0, -1.0, True),
        (1.0, 1.002, -1.001, False),
        (1.0, 0.998, -0.998, True),
        (-1.0, 1.002, 1.002, True),
        (-1.0, 0.998, 0.999, False),
    ],
)
def test_clip_table(advantage: float, ratio: float, loss: float, gradient_on: bool) -> None:
    log_ratio = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    terms = grpo_loss(log_ratio, torch.zeros(1, 1, dtype=torch.float64), advantages, **CLIP)
    terms.per_sample.sum().backward()
    assert terms.per_sample.item() == pytest.approx(loss, abs=1e-12)
    assert terms.ratio.item() == pytest.approx(ratio, abs=1e-12)
    assert log_ratio.grad.item() == pytest.approx(-advantage * ratio if gradient_on else 0.0, abs=1e-12)
    assert terms.clipped.item() is not gradient_on


def test_golden_ratio_and_guard_ratio_of_a_moved_velocity() -> None:
    (old, _), (new, _) = one_step(-0.3), one_step(-0.25)
    x_next = torch.tensor([[0.55]], dtype=torch.float64)
    before, after = log_prob(x_next, old)[:, None], log_prob(x_next, new)[:, None]
    terms = grpo_loss(after, before, torch.ones(1), **CLIP)
    assert terms.ratio.log().item() == pytest.approx(-0.00195166454, abs=1e-11)
    assert gaussian_kl(new.mean, old.mean, old.std).item() == pytest.approx(4.39349490e-05, rel=1e-8)
    residual = ((x_next - old.mean) / old.std).item()
    assert residual == pytest.approx(0.20351516, abs=5e-9)
    guard = GuardTerms(means=new.mean[:, None], old_means=old.mean[:, None], std=old.std)
    guarded = grpo_loss(after, before, torch.ones(1), guard=guard, **CLIP).ratio.log().item()
    assert guarded == pytest.approx(-0.00126688184, abs=1e-11)
    assert guarded == pytest.approx(residual * -0.006225, abs=1e-11)  # the old residual times the move of the mean


def test_guard_keeps_the_bias_of_every_sample_and_step_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    means, old_means, drawn = (torch.randn(3, 2, 4, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    std = torch.tensor([0.3, 0.7], dtype=torch.float64)
    wide = std[:, None, None]

    def density(centre: Tensor) -> Tensor:
        return (-((drawn - centre) ** 2) / (2 * wide**2) - wide.log() - 0.5 * math.log(2 * math.pi)).mean((2, 3))

    expected = ((drawn - old_means) / wide * (means - old_means)).mean((2, 3))
    for given in (std, std.expand(3, 2)):
        guard = GuardTerms(means=means, old_means=old_means, std=given)
        terms = grpo_loss(density(means), density(old_means), torch.ones(3), guard=guard, **CLIP)
        assert torch.allclose(terms.ratio.log(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("std", [0.05, 0.7])
@pytest.mark.parametrize("move", [0.0, 0.02])
def test_guard_gradient_is_the_old_residual_on_every_step_and_after_every_move(std, move):
    # d log_r / d mean = z_old / D: neither the step std nor a one-sided bias is left in it.
    z = torch.randn(1, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    old_mean, level = torch.zeros(1, 6, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)
    mean = (move * z).requires_grad_()
    new = log_prob(std * z, Transition(mean, level))[:, None]
    old = log_prob(std * z, Transition(old_mean, level))[:, None]
    guard = GuardTerms(means=mean[:, None], old_means=old_mean[:, None], std=level)
    terms = grpo_loss(new, old, -torch.ones(1), guard=guard, **CLIP)
    terms.per_sample.sum().backward()
    assert torch.allclose(mean.grad / terms.ratio, z / 6, rtol=1e-9, atol=1e-12)


def test_step_weights_multiply_the_policy_and_never_the_kl() -> None:
    kl = torch.tensor([[0.1, 0.3]])
    weight = torch.tensor([0.5, 1.5])
    zeros, advantages = torch.zeros(1, 2), torch.ones(1)
    plain = grpo_loss(zeros, zeros, advantages, step_weight=weight, kl=kl, kl_coef=2.0, **CLIP)
    assert plain.kl.item() == pytest.approx(0.2)
    assert plain.per_sample.item() == pytest.approx(-1.0 + 2.0 * 0.2)
    uneven = grpo_loss(zeros, zeros, advantages, step_weight=torch.tensor([0.0, 1.0]), **CLIP)
    assert uneven.per_sample.item() == pytest.approx(-0.5)


def test_the_kl_term_carries_gradient_and_is_zero_at_the_reference() -> None:
    reference, _ = one_step(-0.3)
    gain = coefficients(0.9, 0.8, kind="flow", noise_level=0.7).gain.item()
    for velocity, expected in ((-0.3, 0.0), (-0.25, 4.39349490e-05)):
        step, v = one_step(velocity, requires_grad=True)
        kl = gaussian_kl(step.mean, reference.mean, step.std)[:, None]
        zeros = torch.zeros(1, 1, dtype=torch.float64)
        new = zeros.clone().requires_grad_()
        terms = grpo_loss(new, zeros, torch.zeros(1), kl=kl, kl_coef=0.5, **CLIP)
        terms.per_sample.sum().backward()
        assert new.grad is not None and new.grad.item() == 0  # no policy gradient without an advantage
        assert terms.kl.item() == pytest.approx(expected, abs=1e-12)
        # d/dv of gain^2 / 2 * (v - v_ref)^2
        assert v.grad.item() == pytest.approx(0.5 * gain**2 * (velocity + 0.3), abs=1e-10)


def test_no_gradient_flows_into_the_old_policy_or_the_advantages() -> None:
    new, old, advantages = (torch.zeros(shape, requires_grad=True) for shape in ((2, 3), (2, 3), (2,)))
    terms = grpo_loss(new, old, advantages + 1, **CLIP)
    terms.per_sample.sum().backward()
    assert new.grad is not None and old.grad is None and advantages.grad is None
    assert not any(t.requires_grad for t in (terms.kl, terms.ratio, terms.clipped))


def test_the_ratio_is_exactly_one_before_the_first_update() -> None:
    x, v, z = (torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(i)) for i in range(3))
    step, again = (transition(v.clone(), x.clone(), 0.9, 0.8, kind="flow", noise_level=0.7) for _ in range(2))
    drawn = sample(step, z)
    terms = grpo_loss(log_prob(drawn, again)[:, None], log_prob(drawn, step)[:, None], torch.ones(4), **CLIP)
    assert (terms.ratio == 1).all() and not terms.clipped.any()


def test_values_that_are_not_finite_reach_the_caller() -> None:
    terms = grpo_loss(torch.tensor([[math.nan], [0.0]]), torch.zeros(2, 1), torch.ones(2), **CLIP)
    assert terms.ratio.isnan().tolist() == [[True], [False]]
    assert terms.per_sample.isfinite().tolist() == [False, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"old_log_prob": torch.zeros(4)}, r"old_log_prob has shape \(4,\), must be \(4, 1\)"),
        ({"advantages": torch.zeros(4, 1)}, r"advantages has shape \(4, 1\), must be \(4,\)"),
        ({"log_prob": torch.zeros(4)}, r"log_prob has shape \(4,\), must be \(B, K\)"),
        ({"kl": torch.zeros(4)}, r"kl has shape \(4,\), must be \(4, 1\)"),
        ({"kl_coef": 0.1}, "kl_coef is 0.1, must be >= 0, and 0 without the KL"),
        ({"kl": torch.zeros(4, 1), "kl_coef": -0.1}, "kl_coef is -0.1"),
        ({"clip_range": 0.0}, "clip_range is 0.0"),
        ({"clip_range": 1.0}, "clip_range is 1.0"),
        ({"step_weight": torch.ones(4)}, r"step_weight has shape \(4,\), must be \(1,\)"),
        ({"guard": GuardTerms(torch.zeros(4, 3), torch.zeros(4, 3), torch.ones(()))}, r"guard.means has shape"),
        ({"guard": GuardTerms(torch.zeros(4, 1, 3), torch.zeros(4, 1, 3), torch.ones(4))}, r"guard.std has shape"),
        ({"guard": GuardTerms(torch.zeros(4, 1, 3), torch.zeros(4, 1, 1), torch.ones(1))}, "reference_mean"),
    ],
)
def test_input_that_would_broadcast_or_mislead_is_refused(changes: dict[str, object], message: str) -> None:
    given: dict[str, object] = {
        "log_prob": torch.zeros(4, 1),
        "old_log_prob": torch.zeros(4, 1),
        "advantages": torch.zeros(4),
        **CLIP,
    }
    with pytest.raises(ValueError, match=message):
        grpo_loss(**(given | changes))
