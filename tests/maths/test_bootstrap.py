"""Bootstrap intervals: known spreads, correlated groups, undefined cases."""

import math

import pytest
import torch

from flow_grpo.maths.bootstrap import mean_interval


def draws(rows: int, seed: int = 0) -> list[float]:
    return torch.randn(rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()


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


def test_about_95_of_100_intervals_hold_the_true_mean():
    intervals = [mean_interval(draws(40, seed), range(40)) for seed in range(200)]
    hits = sum(found.low <= 0 <= found.high for found in intervals)
    assert 180 <= hits <= 198


def test_groups_of_unequal_size_count_by_their_rows_one_group_has_no_interval_and_no_rows_no_mean():
    found = mean_interval([1.0, 1.0, 1.0, 5.0], ["a", "a", "a", "b"])
    assert (found.mean, found.low, found.high) == (2.0, 1.0, 5.0)
    middle = mean_interval([1.0, 1.0, 1.0, 5.0], ["a", "a", "a", "b"], level=0.2)
    assert (middle.low, middle.high) == (2.0, 2.0)  # one of each: four rows, not the mean of the groups' means
    found = mean_interval([1.0, 3.0], ["a", "a"])
    assert found.mean == 2 and math.isnan(found.low) and math.isnan(found.high)
    assert math.isnan(mean_interval([], []).mean)


def test_the_level_is_that_asked_for_and_equal_rows_give_equal_intervals():
    wide, narrow = (mean_interval(draws(50), range(50), level=level) for level in (0.95, 0.5))
    assert wide.low < narrow.low < narrow.high < wide.high
    assert wide == mean_interval(draws(50), [f"source {row}" for row in range(50)])


@pytest.mark.parametrize(
    ("values", "groups", "message"),
    [([1.0], [], "1 values and 0 groups"), ([1.0, math.nan], [0, 1], "not finite; leave those rows out")],
)
def test_bad_input_is_refused(values, groups, message):
    with pytest.raises(ValueError, match=message):
        mean_interval(values, groups)
