"""Checks of samples, gradients and updates: what passes, and the fault that each must find."""

from __future__ import annotations

import functools
import math

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


def residuals(change=lambda z: z):
    return functools.partial(
        probe.check_residuals, torch.tensor([[1, 2]]), torch.stack([normal(5000), change(normal(5000))])[None]
    )


def ratio(value, mode="auto", *, exact):
    return functools.partial(probe.check_ratio, torch.tensor([[0.0, value]]), 1e-3, mode, exact=exact)


def by_batch_size(gaps, mode):
    return functools.partial(probe.check_ratio_by_batch_size, gaps, 1e-3, 1, mode)


def noise(initial, steps, *, shared):
    rows = list(zip([1, 1, 2, 2], [0, 1, 0, 1], initial, steps, strict=True))
    return functools.partial(probe.check_noise, rows, same_initial_noise=shared)


def in_update(gap, probe_gap, *, exact):
    return functools.partial(epoch.check_ratio_in_update, gap, probe_gap, 1e-4, exact=exact)


def clip(spread, clip_range, updates):
    return functools.partial(epoch.check_clip, spread * normal(40, 2), clip_range, updates)


def kl(before, after, gradient, *, exact):
    return functools.partial(epoch.check_kl, 0.1, before, after, gradient, exact=exact)


def adapters(mode, adapted, trained):
    return functools.partial(weights.check_adapters, mode, adapted, trained)


def coverage(mode, first, second):
    return functools.partial(weights.check_gradient_coverage, mode, [first, second])


def size(below, present=1000):
    return functools.partial(weights.check_gradient_size, below, present, 1e-8)


def rate(*shares):
    return functools.partial(weights.check_rate, shares, 1e-4)


def guidance(training, evaluation):
    return functools.partial(schedule.check_guidance, Guidance(*training), Guidance(*evaluation))


@pytest.mark.parametrize(
    ("check", "wanted"),
    [
        (residuals(), "ok"),
        (residuals(lambda z: 1.1 * z), "fail"),  # drawn with another std
        (residuals(lambda z: z + 0.1), "fail"),  # around another mean
        (residuals(lambda z: 0.0 * z), "fail"),  # not drawn at all
        (residuals(lambda z: z.sign()), "fail"),  # of mean 0 and std 1, but not normal
        (residuals(lambda z: z * torch.nan), "fail"),
        (ratio(0.0, exact=True), "ok"),
        (ratio(1e-7, exact=True), "fail"),
        (ratio(1e-7, exact=False), "ok"),
        (ratio(-2e-4, exact=False), "fail"),
        (ratio(math.nan, exact=False), "fail"),
        (ratio(5e-4, "recompute", exact=False), "fail"),
        (ratio(5e-4, "detach", exact=False), "warn"),  # detached, rounding hides, but nothing more
        (ratio(2e-3, "detach", exact=False), "fail"),
        (ratio(5e-4, "detach", exact=True), "fail"),
        (by_batch_size({1: 1e-7, 4: 0.0}, "rollout"), "ok"),
        (by_batch_size({1: 5e-4, 4: 0.0}, "auto"), "warn"),
        (by_batch_size({1: 5e-4, 4: 0.0}, "rollout"), "fail"),
        (by_batch_size({1: math.nan, 4: 0.0}, "rollout"), "fail"),
        (by_batch_size({1: 0.0, 2: 5e-4, 4: 0.0}, "rollout"), "warn"),  # not a shape of the update
        (noise([1, 2, 3, 4], [5, 6, 7, 8], shared=False), "ok"),
        (noise([1, 1, 3, 4], [5, 6, 7, 8], shared=False), "fail"),
        (noise([1, 2, 3, 4], [5, 5, 7, 8], shared=False), "fail"),
        (noise([1, 2, 1, 4], [5, 6, 7, 8], shared=False), "fail"),
        (noise([1, 1, 2, 2], [5, 6, 7, 8], shared=True), "ok"),
        (noise([1, 1, 2, 2], [5, 5, 7, 8], shared=True), "fail"),
        (noise([1, 1, 1, 1], [5, 6, 7, 8], shared=True), "fail"),  # across groups
        (in_update(0.0, 0.0, exact=True), "ok"),
        (in_update(1e-9, 0.0, exact=True), "fail"),
        (in_update(1e-5, 0.0, exact=False), "ok"),
        (in_update(3e-4, 5e-5, exact=False), "ok"),  # rounding, as in the probe batch
        (in_update(3e-4, 1e-5, exact=False), "fail"),
        (in_update(math.nan, 1e-5, exact=False), "fail"),
        (clip(1e-3, 1e-3, 2), "ok"),
        (clip(1e-3, 0.2, 1), "warn"),  # as for a sum over elements
        (clip(1e-2, 1e-4, 1), "warn"),  # nearly everything would be clipped, had the epoch a second update
        (clip(1.0, 1e-4, 2), "fail"),  # it has: everything is clipped
        (clip(1e-6, 1e-3, 2), "warn"),  # nothing ever clipped
        (clip(1e-6, 1e-3, 1), "ok"),  # nor can it be
        (clip(0.0, 1e-3, 1), "fail"),  # nothing moved
        (kl(0.0, 1e-6, 1.0, exact=True), "ok"),
        (kl(1e-6, 2e-6, 1.0, exact=False), "ok"),
        (kl(1e-6, 2e-6, 1.0, exact=True), "fail"),  # the reference is another policy
        (kl(0.0, 0.0, 1.0, exact=True), "fail"),  # the reference moves along
        (kl(0.0, 1e-6, 0.0, exact=True), "fail"),  # the KL carries no gradient
        (adapters("lora", 8, 100), "ok"),
        (adapters("lora", 0, 100), "fail"),
        (adapters("full", 0, 100), "ok"),
        (adapters("camera", 0, 0), "fail"),
        (coverage("lora", {"a": 0.0, "b": 1.0}, {"a": 0.5, "b": 1.0}), "ok"),  # a factor of an adapter moves second
        (coverage("lora", {"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 1.0}), "fail"),
        (coverage("full", {"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 1.0}), "warn"),
        (coverage("full", {"a": 0.0}, {"a": 0.0}), "fail"),
        (size(0), "ok"),
        (size(50), "ok"),
        (size(51), "warn"),  # more than a twentieth is near Adam's eps
        (size(0, 0), "ok"),  # no gradient at all is not a matter of eps
        (rate(), "ok"),
        (rate(0.004, 0.006, 90.0), "ok"),
        (rate(0.05), "warn"),
        (rate(0.3, 0.3, 0.001), "fail"),
        (rate(1e4), "fail"),
        (guidance((1.0, ""), (1.0, "blurry")), "ok"),  # without guidance nothing leads away from the prompt
        (guidance((5.0, "blurry"), (5.0, "blurry")), "ok"),
        (guidance((5.0, ""), (5.0, "blurry")), "warn"),
        (guidance((1.0, ""), (5.0, "")), "warn"),
        (guidance((5.0, ""), (1.0, "")), "warn"),
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


def test_the_update_s_own_batch_size_must_be_measured():
    with pytest.raises(KeyError):
        probe.check_ratio_by_batch_size({4: 0.0}, 1e-3, 8, "rollout")


def test_the_way_out_of_gradients_near_adam_s_eps_is_a_smaller_one():
    assert "train.adam_eps=1e-12" in size(1000)().way_out
