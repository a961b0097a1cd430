"""Checks of samples, gradients and updates: what passes, and the fault that each must find."""

import math
from functools import partial

import pytest
import torch

from flow_grpo.preflight.doctor import epoch, probe, schedule, weights
from flow_grpo.records import Guidance
from tests.doctor_cases import status


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_the_kolmogorov_smirnov_distance_of_known_values():
    # n = 1: the empirical distribution jumps from 0 to 1 at the value, the normal one stands at 0.5 there.
    assert probe.kolmogorov_smirnov(torch.zeros(1)) == pytest.approx(0.5)
    assert probe.kolmogorov_smirnov(torch.tensor([-10.0, 10.0])) == pytest.approx(0.5 * math.sqrt(2))


def gap(value: float) -> torch.Tensor:
    return torch.tensor([[0.0, value]])


def residuals(change=lambda z: z):
    return partial(
        probe.check_residuals, torch.tensor([[1, 2]]), torch.stack([normal(5000), change(normal(5000))])[None]
    )


def noise(initial, steps, *, shared):
    rows = list(zip([1, 1, 2, 2], [0, 1, 0, 1], initial, steps, strict=True))
    return partial(probe.check_noise, rows, same_initial_noise=shared)


@pytest.mark.parametrize(
    ("check", "wanted"),
    [
        (residuals(), "ok"),
        (residuals(lambda z: 1.1 * z), "fail"),  # drawn with another std
        (residuals(lambda z: z + 0.1), "fail"),  # around another mean
        (residuals(lambda z: 0.0 * z), "fail"),  # not drawn at all
        (residuals(lambda z: z.sign()), "fail"),  # of mean 0 and std 1, but not normal
        (residuals(lambda z: z * torch.nan), "fail"),
        (partial(probe.check_ratio, gap(0.0), 1e-3, "auto", exact=True), "ok"),
        (partial(probe.check_ratio, gap(1e-7), 1e-3, "auto", exact=True), "fail"),
        (partial(probe.check_ratio, gap(1e-7), 1e-3, "auto", exact=False), "ok"),
        (partial(probe.check_ratio, gap(-2e-4), 1e-3, "auto", exact=False), "fail"),
        (partial(probe.check_ratio, gap(math.nan), 1e-3, "auto", exact=False), "fail"),
        (partial(probe.check_ratio, gap(5e-4), 1e-3, "recompute", exact=False), "fail"),
        # Detached, rounding hides, but nothing more
        (partial(probe.check_ratio, gap(5e-4), 1e-3, "detach", exact=False), "warn"),
        (partial(probe.check_ratio, gap(2e-3), 1e-3, "detach", exact=False), "fail"),
        (partial(probe.check_ratio, gap(5e-4), 1e-3, "detach", exact=True), "fail"),
        (partial(probe.check_ratio_by_batch_size, {1: 1e-7, 4: 0.0}, 1e-3, 1, "rollout"), "ok"),
        (partial(probe.check_ratio_by_batch_size, {1: 5e-4, 4: 0.0}, 1e-3, 1, "auto"), "warn"),
        (partial(probe.check_ratio_by_batch_size, {1: 5e-4, 4: 0.0}, 1e-3, 1, "rollout"), "fail"),
        (partial(probe.check_ratio_by_batch_size, {1: math.nan, 4: 0.0}, 1e-3, 1, "rollout"), "fail"),
        # Not a shape of the update
        (partial(probe.check_ratio_by_batch_size, {1: 0.0, 2: 5e-4, 4: 0.0}, 1e-3, 1, "rollout"), "warn"),
        (noise([1, 2, 3, 4], [5, 6, 7, 8], shared=False), "ok"),
        (noise([1, 1, 3, 4], [5, 6, 7, 8], shared=False), "fail"),
        (noise([1, 2, 3, 4], [5, 5, 7, 8], shared=False), "fail"),
        (noise([1, 2, 1, 4], [5, 6, 7, 8], shared=False), "fail"),
        (noise([1, 1, 2, 2], [5, 6, 7, 8], shared=True), "ok"),
        (noise([1, 1, 2, 2], [5, 5, 7, 8], shared=True), "fail"),
        (noise([1, 1, 1, 1], [5, 6, 7, 8], shared=True), "fail"),  # across groups
        (partial(epoch.check_ratio_in_update, 0.0, 0.0, 1e-4, exact=True), "ok"),
        (partial(epoch.check_ratio_in_update, 1e-9, 0.0, 1e-4, exact=True), "fail"),
        (partial(epoch.check_ratio_in_update, 1e-5, 0.0, 1e-4, exact=False), "ok"),
        (partial(epoch.check_ratio_in_update, 3e-4, 5e-5, 1e-4, exact=False), "ok"),  # rounding, as in the probe batch
        (partial(epoch.check_ratio_in_update, 3e-4, 1e-5, 1e-4, exact=False), "fail"),
        (partial(epoch.check_ratio_in_update, math.nan, 1e-5, 1e-4, exact=False), "fail"),
        (partial(epoch.check_clip, 1e-3 * normal(40, 2), 1e-3, 2), "ok"),
        (partial(epoch.check_clip, 1e-3 * normal(40, 2), 0.2, 1), "warn"),  # as for a sum over elements
        # Nearly everything would be clipped, had the epoch a second update
        (partial(epoch.check_clip, 1e-2 * normal(40, 2), 1e-4, 1), "warn"),
        (partial(epoch.check_clip, 1.0 * normal(40, 2), 1e-4, 2), "fail"),  # it has: everything is clipped
        (partial(epoch.check_clip, 1e-6 * normal(40, 2), 1e-3, 2), "warn"),  # nothing ever clipped
        (partial(epoch.check_clip, 1e-6 * normal(40, 2), 1e-3, 1), "ok"),  # nor can it be
        (partial(epoch.check_clip, 0.0 * normal(40, 2), 1e-3, 1), "fail"),  # nothing moved
        (partial(epoch.check_kl, 0.1, 0.0, 1e-6, 1.0, exact=True), "ok"),
        (partial(epoch.check_kl, 0.1, 1e-6, 2e-6, 1.0, exact=False), "ok"),
        (partial(epoch.check_kl, 0.1, 1e-6, 2e-6, 1.0, exact=True), "fail"),  # the reference is another policy
        (partial(epoch.check_kl, 0.1, 0.0, 0.0, 1.0, exact=True), "fail"),  # the reference moves along
        (partial(epoch.check_kl, 0.1, 0.0, 1e-6, 0.0, exact=True), "fail"),  # the KL carries no gradient
        (partial(weights.check_adapters, "lora", 8, 100), "ok"),
        (partial(weights.check_adapters, "lora", 0, 100), "fail"),
        (partial(weights.check_adapters, "full", 0, 100), "ok"),
        (partial(weights.check_adapters, "camera", 0, 0), "fail"),
        # A factor of an adapter moves second
        (partial(weights.check_gradient_coverage, "lora", [{"a": 0.0, "b": 1.0}, {"a": 0.5, "b": 1.0}]), "ok"),
        (partial(weights.check_gradient_coverage, "lora", [{"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 1.0}]), "fail"),
        (partial(weights.check_gradient_coverage, "full", [{"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 1.0}]), "warn"),
        (partial(weights.check_gradient_coverage, "full", [{"a": 0.0}, {"a": 0.0}]), "fail"),
        (partial(weights.check_gradient_size, 0, 1000, 1e-8), "ok"),
        (partial(weights.check_gradient_size, 50, 1000, 1e-8), "ok"),
        (partial(weights.check_gradient_size, 51, 1000, 1e-8), "warn"),  # more than a twentieth is near Adam's eps
        (partial(weights.check_gradient_size, 0, 0, 1e-8), "ok"),  # no gradient at all is not a matter of eps
        (partial(weights.check_rate, (), 1e-4), "ok"),
        (partial(weights.check_rate, (0.004, 0.006, 90.0), 1e-4), "ok"),
        (partial(weights.check_rate, (0.05,), 1e-4), "warn"),
        (partial(weights.check_rate, (0.3, 0.3, 0.001), 1e-4), "fail"),
        (partial(weights.check_rate, (1e4,), 1e-4), "fail"),
        # Without guidance nothing leads away from the prompt
        (partial(schedule.check_guidance, Guidance(1.0, ""), Guidance(1.0, "blurry")), "ok"),
        (partial(schedule.check_guidance, Guidance(5.0, "blurry"), Guidance(5.0, "blurry")), "ok"),
        (partial(schedule.check_guidance, Guidance(5.0, ""), Guidance(5.0, "blurry")), "warn"),
        (partial(schedule.check_guidance, Guidance(1.0, ""), Guidance(5.0, "")), "warn"),
        (partial(schedule.check_guidance, Guidance(5.0, ""), Guidance(1.0, "")), "warn"),
    ],
    ids=lambda given: getattr(getattr(given, "func", None), "__name__", given),
)
def test_what_is_sound_passes_and_every_fault_is_found(check, wanted):
    assert status(check()) == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_latents_fail_at_any_step(dtype):
    states = normal(2, 3, 50)
    assert status(probe.check_latents_fp32(states)) == "ok"
    short = states.to(dtype)
    assert status(probe.check_latents_fp32(short)) == status(probe.check_latents_fp32(short.float())) == "fail"
    found = probe.check_latents_fp32(torch.cat([states[:, :2], short[:, 2:].float()], dim=1))
    assert (found.status, found.measured) == ("fail", f"1 of 3 stored latents per sample were rounded to {dtype}")


def test_the_way_out_of_gradients_near_adam_s_eps_is_a_smaller_one():
    assert "train.adam_eps=1e-12" in weights.check_gradient_size(1000, 1000, 1e-8).way_out


@pytest.mark.parametrize(
    ("spread", "conditions", "scenes", "expected"),
    [(0.6, 160, 16, "ok"), (0.6, 48, 48, "ok"), (0.6, 16, 16, "warn"), (0.1, 10, 1, "warn")],
)
def test_an_evaluation_that_sees_only_large_changes_is_warned_of(spread, conditions, scenes, expected):
    found = schedule.check_power({"eval/trans_err_m": spread}, conditions, scenes)
    assert status(found) == expected
