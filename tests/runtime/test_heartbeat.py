"""Ranks that fall silent are named by the others, and nobody else is."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from flow_grpo.runtime.ranks import watchdog
from flow_grpo.runtime.ranks.watchdog import Heartbeat


class Watched:
    """A rank of two or three that share a store in memory."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, silent_s: float = 60.0, dead_s: float = 0.6):
        self.problem, self.ended = "", threading.Event()
        self.heart = Heartbeat(store, rank, world_size, dead_s=dead_s, silent_s=silent_s, end=self.end)

    def end(self, problem: str) -> None:
        self.problem = problem
        self.ended.set()

    def dies(self) -> None:
        """End without a word, as a killed process does."""
        self.heart._stopped.set()


@pytest.fixture
def ranks() -> Callable[..., list[Watched]]:
    made: list[Watched] = []

    def make(world_size: int, **settings: float) -> list[Watched]:
        store = dist.HashStore()
        made.extend(Watched(store, rank, world_size, **settings) for rank in range(world_size))
        return made

    yield make
    for watched in made:
        watched.heart._stopped.set()


def test_nobody_complains_of_ranks_that_work_and_leave(ranks):
    first, second = ranks(2)
    second.heart.stop()
    time.sleep(1.0)
    assert not first.problem and not second.problem


def test_a_rank_that_is_gone_is_named_with_its_phase(ranks):
    first, second = ranks(2)
    second.heart.enter("sampling")
    time.sleep(0.3)
    second.dies()
    assert first.ended.wait(5)
    assert "rank 1 has not been heard of" in first.problem and "it was in sampling" in first.problem


def test_a_rank_that_hangs_is_named_and_not_those_that_wait_for_it(ranks):
    first, second, third = ranks(3, silent_s=0.5)
    third.heart.enter("scoring")
    with first.heart.waiting(), second.heart.waiting():
        for watched in (first, second, third):
            assert watched.ended.wait(5)
    for watched in (first, second, third):
        assert "rank 2 has made no progress" in watched.problem and "in scoring" in watched.problem


def test_of_ranks_that_stand_still_together_the_one_that_came_least_far_is_named(ranks):
    """As in an exchange of gradients, of which nobody says that he waits in it."""
    first, second, third = ranks(3, silent_s=0.5)
    for watched in (first, second, third):
        watched.heart.enter("update")
    first.heart.tick()
    third.heart.tick()
    for watched in (first, second, third):
        assert watched.ended.wait(5)
        assert watched.problem.startswith("rank 1 has made no progress") and "rank 0" not in watched.problem


def test_a_process_ends_though_nobody_reads_what_it_says():
    done = subprocess.run([sys.executable, "-c", UNREAD], capture_output=True, timeout=100, check=False)
    assert done.returncode == watchdog.EXIT_CODE


UNREAD = """
import os, time
import flow_grpo
import torch.distributed as dist
from flow_grpo.runtime.ranks.watchdog import Heartbeat
heart = Heartbeat(dist.HashStore(), 0, 2, dead_s=0.3, silent_s=60)
os.close(2)
time.sleep(60)
"""


def test_progress_keeps_a_long_phase_alive(ranks):
    first, second = ranks(2, silent_s=0.5)
    for _ in range(12):
        first.heart.tick()
        second.heart.tick()
        time.sleep(0.1)
    assert not first.problem and not second.problem


def test_an_error_is_left_to_the_exchange_first_and_told_then(ranks, monkeypatch):
    monkeypatch.setattr(watchdog, "FAULT_GRACE_S", 0.5)
    first, second = ranks(2)
    second.heart.enter("sampling")
    begun = time.monotonic()
    second.heart.announce("OutOfMemoryError: 3 GiB")
    assert first.ended.wait(5)
    assert time.monotonic() - begun > 0.4
    assert first.problem == "rank 1 failed in sampling: OutOfMemoryError: 3 GiB"


def test_an_error_that_an_exchange_has_told_is_no_longer_one(ranks, monkeypatch):
    monkeypatch.setattr(watchdog, "FAULT_GRACE_S", 0.5)
    first, second = ranks(2)
    for _ in range(3):
        second.heart.announce("ValueError: a broken file")
        time.sleep(0.3)
        second.heart.withdraw()
        time.sleep(0.3)
    assert not first.problem and not second.problem


def test_a_rank_that_leaves_with_an_error_waits_until_the_others_know(ranks):
    first, second = ranks(2)
    second.heart.enter("update")
    second.heart.leave("OutOfMemoryError: 3 GiB")
    assert first.ended.is_set()
    assert first.problem == "rank 1 failed in update: OutOfMemoryError: 3 GiB"


def test_ranks_that_all_leave_with_errors_wait_for_nobody_and_tell_their_own(ranks):
    all_ranks = ranks(3, dead_s=30.0)
    leaving = [threading.Thread(target=watched.heart.leave, args=("ValueError",)) for watched in all_ranks]
    begun = time.monotonic()
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join()
    assert time.monotonic() - begun < 5.0  # a third of what they would wait for one that is gone
    assert not any(watched.problem for watched in all_ranks)


def test_a_rank_that_leaves_does_not_wait_long_for_one_that_is_gone(ranks):
    first, second = ranks(2)
    first.dies()
    begun = time.monotonic()
    second.heart.leave("RuntimeError: Connection closed by peer")
    assert time.monotonic() - begun < 1.0


class Unreachable(dist.Store):
    def set(self, key, value):
        raise RuntimeError("connection refused")

    def set_timeout(self, timeout):
        pass


def test_a_store_that_is_gone_ends_the_rank():
    watched = Watched(Unreachable(), 0, 2)
    assert watched.ended.wait(5)
    assert "store has not answered" in watched.problem and "connection refused" in watched.problem
    watched.heart.leave("ValueError")
