"""Bootstrap intervals: known spreads, correlated groups, undefined cases."""

import math

import pytest
import torch

from flow_grpo.maths.bootstrap import Interval, mean_interval, widening


def draws(rows: int, seed: int = 0) -> list[float]:
    return torch.randn(rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()


def ends(found: Interval) -> tuple[float, float]:
    """Return the ends before they are moved apart for the small number of groups."""
    low, high = ((end - found.mean) / widening(found.groups) + found.mean for end in (found.low, found.high))
    return low, high


def test_the_interval_of_independent_rows_is_that_of_a_normal_distribution():
    values = draws(400)
    found = mean_interval(values, range(400))
    assert found.mean == pytest.approx(sum(values) / 400) and (found.rows, found.groups) == (400, 400)
    width = 2 * 1.96 * float(torch.tensor(values).std()) / 20
    assert found.high - found.low == pytest.approx(width, rel=0.05)
    assert found.low < found.mean < found.high


def test_correlated_rows_widen_the_interval():
    values = [value for value in draws(50) for _ in range(8)]
    alone = mean_interval(values, range(400))
    together = mean_interval(values, [row // 8 for row in range(400)])
    assert together.mean == alone.mean and (together.rows, together.groups) == (400, 50)
    assert together.high - together.low == pytest.approx(math.sqrt(8) * (alone.high - alone.low), rel=0.1)


@pytest.mark.parametrize(("scenes", "skewed"), [(5, 0.85), (8, 0.85), (16, 0.9), (48, 0.9)])
def test_95_percent_intervals_hold_the_true_mean_so_often_for_few_groups_too(scenes, skewed):
    random = torch.Generator().manual_seed(scenes)
    sizes = 400, scenes
    normal = torch.randn(sizes, generator=random, dtype=torch.float64)
    exponential = torch.empty(sizes, dtype=torch.float64).exponential_(generator=random) - 1

    def coverage(samples: torch.Tensor) -> float:
        found = [mean_interval(values, range(scenes)) for values in samples.tolist()]
        return sum(one.low <= 0 <= one.high for one in found) / len(found)

    assert 0.93 <= coverage(normal) <= 0.97
    assert skewed <= coverage(exponential) <= 0.97


def test_groups_of_unequal_size_count_by_their_rows_one_group_has_no_interval_and_no_rows_no_mean():
    found = mean_interval([1.0, 1.0, 1.0, 5.0], ["a", "a", "a", "b"])
    assert found.mean == 2.0 and ends(found) == pytest.approx((1.0, 5.0))
    middle = mean_interval([1.0, 1.0, 1.0, 5.0], ["a", "a", "a", "b"], level=0.2)
    assert ends(middle) == (2.0, 2.0)  # one of each: four rows, not the mean of the groups' means
    found = mean_interval([1.0, 3.0], ["a", "a"])
    assert found.mean == 2 and math.isnan(found.low) and math.isnan(found.high)
    assert math.isnan(mean_interval([], []).mean)


def test_the_level_is_that_asked_for_and_equal_rows_give_equal_intervals():
    wide, narrow = (mean_interval(draws(50), range(50), level=level) for level in (0.95, 0.5))
    assert wide.low < narrow.low < narrow.high < wide.high
    assert wide == mean_interval(draws(50), [f"source {row}" for row in range(50)])


@pytest.mark.parametrize(("values", "groups"), [([1.0], []), ([1.0, math.nan], [0, 1])])
def test_bad_input_is_refused(values, groups):
    with pytest.raises(AssertionError):
        mean_interval(values, groups)
