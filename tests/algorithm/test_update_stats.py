"""The update's own statistics."""

from __future__ import annotations

import math

import pytest
import torch

from flow_grpo.algorithm.update.statistics import UpdateStats, gather_stats
from flow_grpo.maths.loss import LossTerms
from flow_grpo.runtime.ranks.process_group import Ranks
from tests.workers import run_ranks


def terms(ratio: list[float], loss: float) -> LossTerms:
    rows = len(ratio)
    return LossTerms(
        per_sample=torch.full((rows,), loss),
        policy=torch.zeros(rows),
        kl=torch.full((rows,), 0.5),
        ratio=torch.tensor(ratio)[:, None],
        clipped=torch.tensor(ratio)[:, None] > 1.1,
    )


def _two_unlike_ranks(ranks: Ranks) -> dict[str, float]:
    stats = UpdateStats()
    ratios = [[1.0, 1.2], [0.9]][ranks.rank]
    stats.add(terms(ratios, loss=2.0), torch.full((len(ratios),), 1 / 3), torch.full((len(ratios),), -0.1 * ranks.rank))
    stats.stepped(torch.tensor(4.0))
    return gather_stats(stats, ranks)


def test_statistics_are_those_of_all_samples_on_all_ranks():
    first, second = run_ranks(_two_unlike_ranks, 2)
    assert first == second
    assert first["policy/ratio_mean"] == pytest.approx(3.1 / 3)
    assert (first["policy/ratio_min"], first["policy/ratio_max"]) == pytest.approx((0.9, 1.2))
    assert first["policy/clip_fraction"] == pytest.approx(1 / 3)
    assert first["policy/kl"] == pytest.approx(0.5)
    assert first["policy/approx_kl"] == pytest.approx((math.log(1.2) ** 2 + math.log(0.9) ** 2) / 6)
    assert first["policy/ratio_first_max_abs_log"] == pytest.approx(0.1)
    assert first["train/loss"] == pytest.approx(2.0)
    assert first["train/grad_norm"] == 4.0
    assert first["train/updates"] == 1.0


def test_the_loss_is_the_mean_over_optimizer_steps():
    stats = UpdateStats()
    for loss in (1.0, 3.0):
        stats.add(terms([1.0, 1.0], loss), torch.full((2,), 0.5), None)
        stats.stepped(torch.tensor(loss))
    metrics = gather_stats(stats, Ranks())
    assert metrics["train/loss"] == 2.0
    assert (metrics["train/grad_norm"], metrics["train/grad_norm_max"]) == (2.0, 3.0)
