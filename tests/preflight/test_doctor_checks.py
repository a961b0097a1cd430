"""Checks of samples, gradients and updates: what passes, and the fault that each must find."""

from __future__ import annotations

import math

import pytest
import torch

from flow_grpo.preflight.doctor import checks
from flow_grpo.records import Guidance
from tests.doctor_cases import status

# --- residuals


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_the_kolmogorov_smirnov_distance_of_known_values():
    # n = 1: the empirical distribution jumps from 0 to 1 at the value, the normal one stands at 0.5 there.
    assert checks.kolmogorov_smirnov(torch.zeros(1)) == pytest.approx(0.5)
    assert checks.kolmogorov_smirnov(torch.tensor([-10.0, 10.0])) == pytest.approx(0.5 * math.sqrt(2))


def test_standard_normal_residuals_pass():
    assert status(checks.check_residuals(torch.tensor([[1, 2], [2, 3]]), normal(2, 2, 5, 500))) == "ok"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda z: 1.1 * z,  # drawn with another std
        lambda z: z + 0.1,  # around another mean
        lambda z: 0.0 * z,  # not drawn at all
        lambda z: z.sign(),  # of mean 0 and std 1, but not normal
        lambda z: z * torch.nan,
    ],
)
def test_residuals_of_another_distribution_fail(wrong):
    assert (
        status(checks.check_residuals(torch.tensor([[1, 2]]), torch.stack([normal(5000), wrong(normal(5000))])[None]))
        == "fail"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_latents_fail_at_any_step(dtype):
    states = normal(2, 3, 50)
    assert status(checks.check_latents_fp32(states)) == "ok"
    short = states.to(dtype)
    assert status(checks.check_latents_fp32(short)) == status(checks.check_latents_fp32(short.float())) == "fail"
    found = checks.check_latents_fp32(torch.cat([states[:, :2], short[:, 2:].float()], dim=1))
    assert (found.status, found.measured) == ("fail", f"1 of 3 stored latents per sample were rounded to {dtype}")


# --- ratio


def test_the_ratio_must_be_one_exactly_where_calls_are_exact():
    tiny, large = torch.tensor([[1e-7, 0.0]]), torch.tensor([[0.0, -2e-4]])
    assert status(checks.check_ratio(torch.zeros(2, 2), 1e-3, "auto", exact=True)) == "ok"
    assert status(checks.check_ratio(tiny, 1e-3, "auto", exact=True)) == "fail"
    assert status(checks.check_ratio(tiny, 1e-3, "auto", exact=False)) == "ok"
    assert status(checks.check_ratio(large, 1e-3, "auto", exact=False)) == "fail"
    assert status(checks.check_ratio(large * torch.nan, 1e-3, "auto", exact=False)) == "fail"
    found = checks.check_ratio(large, 1e-3, "auto", exact=False, layer="layer 3 differs first")
    assert "layer 3 differs first" in found.measured


def test_old_log_probs_detached_hide_rounding_but_nothing_more():
    rounding, more = torch.tensor([[5e-4]]), torch.tensor([[2e-3]])
    assert status(checks.check_ratio(rounding, 1e-3, "detach", exact=False)) == "warn"
    assert status(checks.check_ratio(more, 1e-3, "detach", exact=False)) == "fail"
    assert status(checks.check_ratio(rounding, 1e-3, "detach", exact=True)) == "fail"
    assert status(checks.check_ratio(rounding, 1e-3, "recompute", exact=False)) == "fail"


@pytest.mark.parametrize(
    ("gaps", "mode", "wanted"),
    [
        ({1: 1e-7, 4: 0.0}, "rollout", "ok"),
        ({1: 5e-4, 4: 0.0}, "auto", "warn"),
        ({1: 5e-4, 4: 0.0}, "rollout", "fail"),
        ({1: math.nan, 4: 0.0}, "rollout", "fail"),
        ({1: 0.0, 2: 5e-4, 4: 0.0}, "rollout", "warn"),  # not a shape of the update
    ],
)
def test_a_dependence_on_the_batch_size_fails_where_nothing_corrects_for_it(gaps, mode, wanted):
    assert status(checks.check_ratio_by_batch_size(gaps, 1e-3, 1, mode)) == wanted


def test_the_update_s_own_batch_size_must_be_measured():
    with pytest.raises(KeyError):
        checks.check_ratio_by_batch_size({4: 0.0}, 1e-3, 8, "rollout")


# --- noise


def test_equal_noise_of_two_samples_fails():
    gids, slots, own = [1, 1, 2, 2], [0, 1, 0, 1], [[1, 5], [2, 6], [3, 7], [4, 8]]
    assert status(checks.check_noise(gids, slots, own, same_initial_noise=False)) == "ok"
    for wrong in ([[1, 5], [1, 6], [3, 7], [4, 8]], [[1, 5], [2, 5], [3, 7], [4, 8]], [[1, 5], [2, 6], [1, 7], [4, 8]]):
        assert status(checks.check_noise(gids, slots, wrong, same_initial_noise=False)) == "fail"


def test_shared_initial_noise_is_allowed_within_a_group_only():
    gids, slots = [1, 1, 2, 2], [0, 1, 0, 1]
    within = [[1, 5], [1, 6], [2, 7], [2, 8]]
    assert status(checks.check_noise(gids, slots, within, same_initial_noise=True)) == "ok"
    across = [[1, 5], [1, 6], [1, 7], [1, 8]]
    assert status(checks.check_noise(gids, slots, across, same_initial_noise=True)) == "fail"


# --- what is trained


@pytest.mark.parametrize(
    ("mode", "adapted", "trained", "wanted"),
    [("lora", 8, 100, "ok"), ("lora", 0, 100, "fail"), ("full", 0, 100, "ok"), ("camera", 0, 0, "fail")],
)
def test_nothing_to_train_fails(mode, adapted, trained, wanted):
    assert status(checks.check_adapters(mode, adapted, trained)) == wanted


def test_a_factor_of_an_adapter_may_lack_a_gradient_in_the_first_update_only():
    first, second = {"a": 0.0, "b": 1.0}, {"a": 0.5, "b": 1.0}
    assert status(checks.check_gradient_coverage("lora", [first, second])) == "ok"
    assert status(checks.check_gradient_coverage("lora", [first, first])) == "fail"
    assert status(checks.check_gradient_coverage("full", [first, first])) == "warn"
    assert status(checks.check_gradient_coverage("full", [{"a": 0.0}, {"a": 0.0}])) == "fail"


@pytest.mark.parametrize(("below", "wanted"), [(0, "ok"), (50, "ok"), (51, "warn"), (1000, "warn")])
def test_more_than_a_twentieth_of_the_gradients_near_adam_s_eps_warns(below, wanted):
    found = checks.check_gradient_size(below, 1000, 1e-8)
    assert status(found) == wanted
    assert wanted == "ok" or "train.adam_eps=1e-12" in found.way_out


def test_no_gradient_at_all_is_not_a_matter_of_eps():
    assert status(checks.check_gradient_size(0, 0, 1e-8)) == "ok"


# --- from the rollout to the update


@pytest.mark.parametrize(
    ("gap", "probe_gap", "exact", "wanted"),
    [
        (0.0, 0.0, True, "ok"),
        (1e-9, 0.0, True, "fail"),
        (1e-5, 0.0, False, "ok"),
        (3e-4, 5e-5, False, "ok"),  # rounding, as in the probe batch
        (3e-4, 1e-5, False, "fail"),
        (math.nan, 1e-5, False, "fail"),
    ],
)
def test_samples_that_change_on_their_way_to_the_update_fail(gap, probe_gap, exact, wanted):
    assert status(checks.check_ratio_in_update(gap, probe_gap, 1e-4, exact=exact)) == wanted


# --- clip range, KL


@pytest.mark.parametrize(
    ("spread", "clip_range", "updates", "wanted"),
    [
        (1e-3, 1e-3, 2, "ok"),
        (1e-3, 0.2, 1, "warn"),  # as for a sum over elements
        (1e-2, 1e-4, 1, "warn"),  # nearly everything would be clipped, had the epoch a second update
        (1.0, 1e-4, 2, "fail"),  # it has: everything is clipped
        (1e-6, 1e-3, 2, "warn"),  # nothing ever clipped
        (1e-6, 1e-3, 1, "ok"),  # nor can it be
        (0.0, 1e-3, 1, "fail"),  # nothing moved
    ],
)
def test_the_clip_range_must_fit_a_mean_log_probability(spread, clip_range, updates, wanted):
    assert status(checks.check_clip(spread * normal(40, 2), clip_range, updates)) == wanted


@pytest.mark.parametrize(
    ("before", "after", "gradient", "exact", "wanted"),
    [
        (0.0, 1e-6, 1.0, True, "ok"),
        (1e-6, 2e-6, 1.0, False, "ok"),
        (1e-6, 2e-6, 1.0, True, "fail"),  # the reference is another policy
        (0.0, 0.0, 1.0, True, "fail"),  # the reference moves along
        (0.0, 1e-6, 0.0, True, "fail"),  # the KL carries no gradient
    ],
)
def test_the_kl_starts_at_zero_rises_and_has_a_gradient(before, after, gradient, exact, wanted):
    assert status(checks.check_kl(0.1, before, after, gradient, exact=exact)) == wanted


# --- guidance


@pytest.mark.parametrize(
    ("training", "evaluation", "expected"),
    [
        (Guidance(1.0, ""), Guidance(1.0, "blurry"), "ok"),  # without guidance nothing leads away from the prompt
        (Guidance(5.0, "blurry"), Guidance(5.0, "blurry"), "ok"),
        (Guidance(5.0, ""), Guidance(5.0, "blurry"), "warn"),
        (Guidance(1.0, ""), Guidance(5.0, ""), "warn"),
        (Guidance(5.0, ""), Guidance(1.0, ""), "warn"),
    ],
)
def test_an_evaluation_guided_otherwise_than_training_warns(training, evaluation, expected):
    assert status(checks.check_guidance(training, evaluation)) == expected


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [([], "ok"), ([0.004, 0.006, 90.0], "ok"), ([0.05], "warn"), ([0.3, 0.3, 0.001], "fail"), ([1e4], "fail")],
)
def test_a_rate_that_replaces_the_weights_fails(shares: list[float], wanted: str) -> None:
    assert status(checks.check_rate(shares, 1e-4)) == wanted
