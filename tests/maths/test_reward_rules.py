"""Weight schedules and gates against numbers computed by hand; failing a gate never pays."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flow_grpo.maths.advantages import combine_rewards
from flow_grpo.maths.reward_rules import Gated, gate, weight_at, weights_at

RAMP = ((10, 0.0), (20, 1.0), (40, 0.5))
FLOOR = 0.01


@pytest.mark.parametrize(
    ("epoch", "weight"),
    [(0, 0.0), (10, 0.0), (11, 0.1), (15, 0.5), (20, 1.0), (25, 0.875), (39, 0.525), (40, 0.5), (10**6, 0.5)],
)
def test_a_weight_is_linear_between_its_points_and_constant_outside(epoch: int, weight: float) -> None:
    assert weight_at(RAMP, epoch) == pytest.approx(weight, abs=1e-12)


def test_a_reward_without_a_schedule_keeps_its_weight() -> None:
    assert [weight_at(((0, 0.1), (3, 0.7), (9, 0.3)), epoch) for epoch in (0, 3, 9)] == [0.1, 0.7, 0.3]  # exactly
    weights = {"first": 1.0, "second": 0.25}
    assert weights_at(weights, {"first": RAMP}, 15) == {"first": 0.5, "second": 0.25}
    assert weights_at(weights, {}, 15) == weights


def gated(values: list[float], holder: list[float], ids: list[int] | None = None) -> Gated:
    """Return the reward behind a gate at 0.5; NaN is not valid."""
    own, other = torch.tensor(values), torch.tensor(holder)
    groups = torch.zeros(len(values), dtype=torch.int64) if ids is None else torch.tensor(ids)
    return gate(own, own.isfinite(), other, other.isfinite(), groups, threshold=0.5, floor=FLOOR)


ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def advantages(of: Gated) -> Tensor:
    """Return the advantages of a group of the gated reward, next to another reward."""
    rewards = {"gated": of.values, "other": torch.arange(4, dtype=torch.float64)}
    valid = {"gated": of.valid, "other": torch.ones(4, dtype=torch.bool)}
    both = combine_rewards(rewards, valid, {"gated": 1.0, "other": 1.0}, ONE_GROUP, k=4, floors={"gated": FLOOR})
    other = combine_rewards(rewards, valid, {"gated": 0.0, "other": 1.0}, ONE_GROUP, k=4, floors={}, adv_eps=0.0)
    return both.advantages - other.advantages


def test_a_copy_that_fails_takes_the_lowest_value_of_its_own_group_minus_two_floors() -> None:
    found = gated([0.9, 0.2, 0.4, 5.0, 7.0, 6.0], [0.1, 0.9, 0.5, 0.9, 0.9, 0.4], [3, 3, 3, 8, 8, 8])
    assert found.values.tolist() == pytest.approx([0.18, 0.2, 0.4, 5.0, 7.0, 4.98], abs=1e-6)
    assert found.failed.tolist() == [True, False, False, False, False, True]
    assert found.valid.all()
    # The lowest value may be that of a copy that fails; else a copy that is bad at both would be lifted.
    found = gated([-3.0, 0.2, 0.4, 0.9], [0.0, 1.0, 1.0, 0.0])
    assert found.values.tolist() == pytest.approx([-3.02, 0.2, 0.4, -3.02], abs=1e-6)


def test_a_gate_alone_separates_copies_of_equal_reward() -> None:
    """Two floors make the group count; its normaliser is the floor, so one of four that fails has -1.5."""
    found = gated([0.5] * 4, [0.9, 0.9, 0.0, 0.9])
    values, valid = {"gated": found.values}, {"gated": found.valid}
    alone = combine_rewards(values, valid, {"gated": 1.0}, ONE_GROUP, k=4, floors={"gated": FLOOR})
    assert not alone.flat.any() and not alone.incomplete.any()
    assert advantages(found).tolist() == pytest.approx([0.5, 0.5, -1.5, 0.5], rel=1e-6)


def test_a_group_in_which_all_fail_gets_exactly_nothing_from_the_reward() -> None:
    found = gated([0.1, 0.7, 0.3, 0.9], [0.0, 0.2, 0.4, -1.0])
    assert found.failed.all()
    assert len(found.values.unique()) == 1
    assert advantages(found).abs().max() < 1e-12


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_without_the_holder_s_value_a_copy_has_no_value_and_bounds_no_other(broken: float) -> None:
    found = gated([-9.0, 0.2, 0.4, 0.9], [broken, 1.0, 1.0, 0.0])
    assert found.valid.tolist() == [False, True, True, True]
    assert found.values[0].isnan() and not found.failed[0]
    assert found.values[1:].tolist() == pytest.approx([0.2, 0.4, 0.18], abs=1e-6)
    assert advantages(found)[0] == 0


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_copy_that_fails_stays_invalid_without_its_own_value(broken: float) -> None:
    found = gated([broken, 0.2, 0.4, 0.9], [0.0, 1.0, 1.0, 1.0])
    assert found.valid.tolist() == [False, True, True, True] and found.values[0].isnan()
    found = gated([math.nan, math.nan, 1.0, 2.0], [0.0, 1.0, 1.0, 0.0], [1, 1, 2, 2])  # nor has its group any
    assert found.values[:2].isnan().all() and found.values[2:].tolist() == [1.0, 0.98]


def test_values_behind_a_mask_do_not_count() -> None:
    values, holder = torch.tensor([-9.0, 0.2, 0.4]), torch.tensor([1.0, 1.0, 1.0])
    valid, ids = torch.tensor([False, True, True]), torch.zeros(3, dtype=torch.int64)
    assert gate(values, valid, holder, ~valid, ids, threshold=2.0, floor=0.0).valid.tolist() == [False] * 3
    found = gate(values, valid, holder, valid, ids, threshold=2.0, floor=0.0)
    assert found.values[1:].tolist() == pytest.approx([0.2, 0.2])


def test_the_order_of_samples_changes_nothing() -> None:
    draw = torch.Generator().manual_seed(0)
    values, holder = torch.randn(24, generator=draw), torch.rand(24, generator=draw)
    ids = torch.arange(6).repeat_interleave(4) + 2**40
    fine = torch.ones(24, dtype=torch.bool)
    order = torch.randperm(24, generator=draw)
    first = gate(values, fine, holder, fine, ids, threshold=0.5, floor=FLOOR)
    second = gate(values[order], fine, holder[order], fine, ids[order], threshold=0.5, floor=FLOOR)
    assert torch.equal(first.values[order], second.values) and torch.equal(first.failed[order], second.failed)


NUMBERS = st.lists(st.integers(-20, 20), min_size=4, max_size=4)


@given(values=NUMBERS, holder=NUMBERS, own=st.integers(0, 3))
def test_failing_never_pays(values: list[int], holder: list[int], own: int) -> None:
    """Below every copy that passes, and no better off than with the same value and the gate passed."""
    scaled = [value / 10 for value in values]
    holds = [value / 20 + 0.5 for value in holder]
    holds[own] = 0.0
    failing = gated(scaled, holds)
    with_gate = advantages(failing)
    for row in range(4):
        if not failing.failed[row]:
            assert with_gate[own] <= with_gate[row] + 1e-12
            assert failing.values[own] < failing.values[row]
    holds[own] = 1.0
    assert with_gate[own] <= advantages(gated(scaled, holds))[own] + 1e-12
