"""Whether a cheaper way ranks copies as the exact one: group by group, with the groups that pooling would hide."""

import math

import pytest
import torch

from flow_grpo.maths.certificate import LEAST_GROUPS, Certificate, certify

NAN = torch.nan


def rewards(groups: int = 24, k: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randn((groups, k), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_equal_ranks_hold_whatever_the_mean_and_the_spread_of_a_group() -> None:
    exact = rewards()
    scale = torch.logspace(-2, 2, 24, dtype=torch.float64)[:, None]
    found = certify(3 + 2 * scale * exact, exact)
    assert found.correlation == found.low == pytest.approx(1) and found.ends == 1 and found.groups == 24
    assert found.holds


def test_one_wide_group_does_not_hide_that_the_others_are_ranked_at_random() -> None:
    exact, other = rewards(), rewards(seed=1)
    exact[0] *= 1000
    other[0] = exact[0]
    pooled = torch.corrcoef(torch.stack([one - one.mean(1, keepdim=True) for one in (exact, other)]).flatten(1))[0, 1]
    found = certify(other, exact)
    assert pooled > 0.99 and found.correlation < 0.3 and not found.holds


def test_the_correlation_is_the_mean_of_pearsons_over_copies_with_both_values() -> None:
    exact = torch.tensor([[1.0, 2.0, 3.0, NAN], [4.0, 2.0, 3.0, 9.0]])
    other = torch.tensor([[1.0, 3.0, 2.0, 7.0], [4.0, 2.0, 3.0, NAN]])
    found = certify(other, exact)
    assert found.correlation == pytest.approx((0.5 + 1.0) / 2)
    assert found.ends == 3 / 4  # the best copy of the first group is not found again
    assert found.groups == 2


def test_flat_groups_are_left_out_and_a_way_that_makes_all_copies_equal_agrees_in_nothing() -> None:
    exact = torch.tensor([[1.0, 1.1], [1.0, 1.5]])
    assert certify(exact, exact, floor=0.2).groups == 1
    assert certify(torch.zeros(2, 2), exact).correlation == 0
    one = torch.tensor([[1.0, 1.6, 1.5]])
    assert certify(one, torch.tensor([[1.0, 1.4, 1.5]]), floor=0.2).ends == 1
    assert certify(one, torch.tensor([[1.0, 1.2, 1.5]])).ends == 0.5
    none = certify(exact, torch.full((2, 2), NAN))
    assert none.groups == 0 and math.isnan(none.correlation) and not none.holds


@pytest.mark.parametrize(
    ("change", "holds"),
    [({}, True), ({"low": 0.89}, False), ({"ends": 0.79}, False), ({"groups": LEAST_GROUPS - 1}, False)],
)
def test_a_certificate_holds_by_its_bound_its_ends_and_enough_groups(change, holds) -> None:
    numbers = {"correlation": 0.95, "low": 0.9, "high": 0.97, "ends": 0.8, "pooled": 0.9, "groups": LEAST_GROUPS}
    assert Certificate(**numbers | change).holds == holds


@pytest.mark.parametrize(("odd", "groups", "short"), [(0, 8, False), (2, 8, False), (6, 8, True), (6, 7, False)])
def test_a_way_falls_short_where_most_of_a_few_groups_say_so(odd, groups, short) -> None:
    exact = rewards(groups)
    other = exact.clone()
    other[:odd] = rewards(groups, seed=1)[:odd]
    assert certify(other, exact).falls_short == short
