"""The update's own statistics."""

import math

import pytest
import torch

from flow_grpo.algorithm.update.statistics import UpdateStats, gather_stats
from flow_grpo.maths.loss import GuardTerms, LossTerms, grpo_loss
from flow_grpo.maths.sde import Transition, gaussian_kl, log_prob
from flow_grpo.runtime.ranks.process_group import World
from tests.workers import run_ranks


def terms(ratio: list[float], loss: float) -> LossTerms:
    rows = len(ratio)
    return LossTerms(
        per_sample=torch.full((rows,), loss),
        kl=torch.full((rows,), 0.5),
        log_ratio=torch.tensor(ratio)[:, None].log(),
        ratio=torch.tensor(ratio)[:, None],
        clipped=torch.tensor(ratio)[:, None] > 1.1,
    )


def _two_unlike_ranks(world: World) -> dict[str, float]:
    stats = UpdateStats()
    ratios = [[1.0, 1.2], [0.9]][world.data.rank]
    ones = torch.ones(len(ratios))
    stats.add(terms(ratios, loss=2.0), ones / 3, -0.1 * world.data.rank * ones)
    stats.stepped(torch.tensor(4.0), 10.0)
    return gather_stats(stats, world)


def test_statistics_are_those_of_all_samples_on_all_ranks():
    first, second = run_ranks(_two_unlike_ranks, 2)
    assert first == second
    assert first["policy/ratio_mean"] == pytest.approx(3.1 / 3)
    assert (first["policy/ratio_min"], first["policy/ratio_max"]) == pytest.approx((0.9, 1.2))
    percentiles = [first[f"policy/ratio_p{percent}"] for percent in (10, 50, 90)]
    assert percentiles == pytest.approx([0.92, 1.0, 1.16])  # of 0.9, 1.0, 1.2: the ranks hold unlike numbers of them
    assert first["policy/clip_fraction"] == pytest.approx(1 / 3)
    assert first["policy/kl"] == pytest.approx(0.5)
    assert first["policy/approx_kl"] == pytest.approx(-(math.log(1.2) + math.log(0.9)) / 3)
    assert first["policy/ratio_first_max_abs_log"] == pytest.approx(0.1)
    assert first["train/loss"] == pytest.approx(2.0)
    assert first["train/grad_norm"] == 4.0
    assert first["train/updates"] == 1.0


def test_an_epoch_of_two_steps_with_two_micro_batches_each_has_the_values_computed_by_hand():
    """Step 2 follows an update, so it does not count for `ratio_first_max_abs_log`."""
    stats = UpdateStats()
    share = torch.full((2,), 0.25)  # of 4 samples in one pass
    stats.add(terms([1.0, 1.0], loss=1.0), share, torch.tensor([0.0, -2e-7]))
    stats.add(terms([1.0, 1.0], loss=3.0), share, torch.tensor([1e-7, 0.0]))
    stats.stepped(torch.tensor(1.0), 10.0)
    stats.add(terms([0.8, 1.0], loss=-2.0), share, None)
    stats.add(terms([1.25, 1.5], loss=4.0), share, None)
    stats.stepped(torch.tensor(3.0), 2.0)
    metrics = gather_stats(stats, World())
    assert metrics == pytest.approx(
        {
            "train/updates": 2.0,
            "train/skipped_updates": 0.0,
            "train/bad_steps": 0.0,
            "policy/ratio_mean": (4 * 1.0 + 0.8 + 1.0 + 1.25 + 1.5) / 8,
            "policy/ratio_min": 0.8,
            "policy/ratio_max": 1.5,
            "policy/ratio_p10": 0.94,
            "policy/ratio_p50": 1.0,
            "policy/ratio_p90": 1.325,
            "policy/ratio_first_max_abs_log": 2e-7,
            "policy/clip_fraction": 2 / 8,  # above 1.1
            "policy/approx_kl": -math.log(1.5) / 8,  # log 1.25 = -log 0.8
            "policy/kl": 0.5,
            "train/loss": ((1.0 + 3.0) / 2 + (-2.0 + 4.0) / 2) / 2,
            "train/grad_norm": 2.0,
            "train/grad_norm_max": 3.0,
            "train/grad_clipped": 0.5,
        },
        rel=1e-6,
        abs=1e-9,
    )


@pytest.mark.parametrize("guarded", [False, True])
def test_approx_kl_is_the_kl_per_latent_element_whatever_the_ratio(guarded):
    z, std = torch.randn(8, 20_000, generator=torch.Generator().manual_seed(0)), torch.tensor(0.3)
    old, new = (Transition(mean, std) for mean in (torch.zeros_like(z), torch.full_like(z, 0.06)))
    after, before = (log_prob(std * z, step)[:, None] for step in (new, old))
    guard = GuardTerms(new.mean[:, None], old.mean[:, None], std) if guarded else None
    stats = UpdateStats()
    stats.add(grpo_loss(after, before, torch.ones(8), guard=guard, clip_range=0.1), torch.ones(8) / 8, None)
    stats.stepped(torch.tensor(1.0), 10.0)
    exact = gaussian_kl(new.mean, old.mean, std).mean().item()
    assert exact == pytest.approx(0.02)
    assert gather_stats(stats, World())["policy/approx_kl"] == pytest.approx(exact, rel=0.05)


def test_a_step_that_is_not_finite_leaves_no_trace_in_the_statistics_but_its_count():
    stats, clean = UpdateStats(), UpdateStats()
    for each in (stats, clean):
        each.add(terms([1.0, 1.2], loss=1.0), torch.full((2,), 0.5), torch.tensor([0.0, 0.1]))
        each.stepped(torch.tensor(1.0), 10.0)
    stats.add(terms([math.nan, 9.0], loss=math.nan), torch.full((2,), 0.5), None)
    stats.forget(1)
    stats.skipped += 1
    counts = {"train/bad_steps": 1.0, "train/skipped_updates": 1.0}
    assert gather_stats(stats, World()) == gather_stats(clean, World()) | counts
