"""Calls in processes: results, reasons, deadlines."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from flow_grpo.rewards import process_pool
from flow_grpo.rewards.process_pool import CallPool
from tests.limits import LIMIT_S


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


class Arriving:
    """A function that leaves a mark when a process receives it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.__dict__ |= state
        self.mark.touch()

    def __call__(self, number: int) -> int:
        time.sleep(0.5)
        return number


@pytest.mark.parametrize("workers", [0, 1])
def test_each_call_has_its_result_or_its_own_reason(workers):
    pool = CallPool(workers)
    outcomes = pool.run(double, [(1,), (-1,), (3,)], seconds=LIMIT_S, what="doubles")
    assert [outcome.value for outcome in outcomes] == [2, None, 6]
    assert [outcome.fault for outcome in outcomes] == ["", "ValueError: number is -1", ""]
    pool.close()


def test_a_process_that_dies_is_a_fault_and_the_next_batch_has_a_new_one():
    pool = CallPool(1)
    outcomes = pool.run(die, [(0,), (1,), (2,)], seconds=LIMIT_S, what="calls")
    assert [outcome.value for outcome in outcomes] == [0, None, None]
    assert "died" in outcomes[1].fault and "died" in outcomes[2].fault
    assert pool.run(die, [(5,)], seconds=LIMIT_S, what="calls")[0].value == 5
    pool.close()


def test_a_call_that_does_not_return_ends_at_the_deadline(monkeypatch):
    monkeypatch.setattr(process_pool, "GRACE", LIMIT_S)  # the process itself keeps the deadline
    pool = CallPool(1)
    outcomes = pool.run(sleep, [(3600.0,), (0.0,)], seconds=1, what="calls")
    assert [outcome.value for outcome in outcomes] == [None, None]
    assert "overran 1 s" in outcomes[0].fault
    pool.close()


def test_starting_the_processes_takes_no_time_from_the_batch(tmp_path, monkeypatch):
    mark = tmp_path / "started"
    # It is an hour later once the process has started.
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() - (0 if mark.exists() else 3600))
    monkeypatch.setattr(process_pool, "time", clock)
    pool = CallPool(1)
    (outcome,) = pool.run(Arriving(mark), [(7,)], seconds=LIMIT_S, what="calls")
    assert outcome.value == 7, outcome.fault
    pool.close()
