"""Calls in processes: results, reasons, deadlines."""

from __future__ import annotations

import os
import time

import pytest

from flow_grpo.rewards.process_pool import CallPool


def double(number: int) -> int:
    if number < 0:
        raise ValueError(f"number is {number}")
    return 2 * number


def die(number: int) -> int:
    if number == 1:
        os._exit(3)
    return number


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@pytest.mark.parametrize("workers", [0, 1])
def test_each_call_has_its_result_or_its_own_reason(workers):
    pool = CallPool(workers)
    outcomes = pool.run(double, [(1,), (-1,), (3,)], seconds=60, what="doubles")
    assert [outcome.value for outcome in outcomes] == [2, None, 6]
    assert [outcome.fault for outcome in outcomes] == ["", "ValueError: number is -1", ""]
    pool.close()


def test_a_process_that_dies_is_a_fault_and_the_next_batch_has_a_new_one():
    pool = CallPool(1)
    outcomes = pool.run(die, [(0,), (1,), (2,)], seconds=60, what="calls")
    assert [outcome.value for outcome in outcomes] == [0, None, None]
    assert "died" in outcomes[1].fault and "died" in outcomes[2].fault
    assert pool.run(die, [(5,)], seconds=60, what="calls")[0].value == 5
    pool.close()


def test_a_call_that_does_not_return_ends_at_the_deadline():
    pool = CallPool(1)
    assert pool.run(sleep, [(0.0,)], seconds=60, what="calls")[0].value == 0.0
    start = time.monotonic()
    outcomes = pool.run(sleep, [(0.0,), (300.0,), (0.0,)], seconds=2, what="calls")
    assert time.monotonic() - start < 30
    assert [outcome.value for outcome in outcomes] == [0.0, None, None]
    assert "overran 2 s" in outcomes[1].fault
    pool.close()


def test_a_negative_number_of_processes_is_refused():
    with pytest.raises(ValueError, match="workers is -1, must be at least 0"):
        CallPool(-1)
