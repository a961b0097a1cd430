"""The watchdog blames the rank that died, hangs or failed, and no other."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from flow_grpo.runtime.ranks import watchdog
from flow_grpo.runtime.ranks.watchdog import Heartbeat, Monitor
from tests.limits import LIMIT_S

DEAD_S, SILENT_S = 6.0, 60.0


def monitors(world_size: int) -> list[Monitor]:
    store = dist.HashStore()
    return [Monitor(store, r, world_size, dead_s=DEAD_S, silent_s=SILENT_S, now=0.0) for r in range(world_size)]


def first_problem(ranks: list[Monitor], *, until: float, start: float = 0.0) -> tuple[float, list[str]]:
    """Let ranks check once a second; return when the first problem is found, and what each rank finds then or next."""
    now = start
    while now < until:
        now += 1.0
        problems = [rank.check(now) for rank in ranks]
        if any(problems):
            return now, [problem or rank.check(now + 1) for problem, rank in zip(problems, ranks, strict=True)]
    return now, []


def test_ranks_that_make_progress_are_not_blamed():
    ranks = monitors(2)
    for now in range(200):
        for rank in ranks:
            rank.report_progress()
            assert rank.check(float(now)) == ""


def test_a_dead_rank_is_named_with_its_phase():
    first, second = monitors(2)
    second.begin_phase("sampling")
    assert first_problem([second, first], until=3) == (3, [])
    now, (problem,) = first_problem([first], start=3, until=60)
    assert 3 + DEAD_S < now <= 3 + DEAD_S + 1
    assert "rank 1 has not been heard of" in problem and "it was in sampling" in problem


def test_a_hanging_rank_is_named_and_not_those_that_wait_for_it():
    first, second, third = ranks = monitors(3)
    third.begin_phase("scoring")
    with first.waiting_for_peers(), second.waiting_for_peers():
        now, problems = first_problem(ranks, until=200)
    assert SILENT_S < now < 1.2 * SILENT_S
    for problem in problems:
        assert problem.startswith("rank 2 has made no progress") and "in scoring" in problem
        assert "rank 0" not in problem and "rank 1" not in problem


def test_ranks_that_all_wait_for_each_other_are_all_named_later():
    first, second = ranks = monitors(2)
    with first.waiting_for_peers(), second.waiting_for_peers():
        now, problems = first_problem(ranks, until=200)
    assert now > 1.5 * SILENT_S and "rank 0" in problems[0] and "rank 1" in problems[0]


def test_of_ranks_stuck_in_gradient_synchronisation_the_one_with_least_progress_is_named():
    ranks = monitors(3)
    for rank in ranks:
        rank.begin_phase("update")
    ranks[0].report_progress()
    ranks[2].report_progress()
    _, problems = first_problem(ranks, until=200)
    for problem in problems:
        assert problem.startswith("rank 1 has made no progress") and "rank 0" not in problem


def test_an_announced_error_is_reported_after_the_grace_period():
    first, second = monitors(2)
    second.begin_phase("sampling")
    second.announce("OutOfMemoryError: 3 GiB")
    now, (problem,) = first_problem([first], until=60)  # the silence of the failed rank is no problem of its own
    assert now > watchdog.FAULT_GRACE_S
    assert problem == "rank 1 failed in sampling: OutOfMemoryError: 3 GiB"


def test_a_withdrawn_error_is_not_reported_and_the_next_one_has_its_own_grace_period():
    ranks = monitors(2)
    for start in (0.0, 10.0, 20.0):
        ranks[1].announce("ValueError: a broken file")
        assert first_problem(ranks, start=start, until=start + 10)[1] == []
        ranks[1].withdraw()
        assert [rank.check(start + 10) for rank in ranks] == ["", ""]


class Unreachable(dist.Store):
    def set(self, key, value):
        raise RuntimeError("connection refused")

    def set_timeout(self, timeout):
        pass


def test_a_store_that_does_not_answer_ends_the_rank():
    rank = Monitor(Unreachable(), 0, 2, dead_s=DEAD_S, silent_s=SILENT_S, now=100.0)
    now, (problem,) = first_problem([rank], start=100.0, until=160)
    assert now == 100 + DEAD_S + 1 and "store has not answered" in problem and "connection refused" in problem


class Ending(Heartbeat):
    def __init__(self, *args, **settings):
        self.problem, self.ended = "", threading.Event()
        super().__init__(*args, silent_s=SILENT_S, **settings)

    def end_process(self, problem):
        self.problem = problem
        self.ended.set()


def test_a_rank_that_stops_in_the_orderly_way_is_not_missed():
    store = dist.HashStore()
    Heartbeat(store, 1, 2, dead_s=DEAD_S, silent_s=SILENT_S).stop()
    first = Monitor(store, 0, 2, dead_s=DEAD_S, silent_s=SILENT_S, now=0.0)
    for now in (1.0, 50.0, 100.0):
        first.report_progress()
        assert first.check(now) == ""


def test_a_rank_that_fails_waits_until_its_peers_know_the_cause():
    store = dist.HashStore()
    first, second = (Ending(store, rank, 2, dead_s=DEAD_S) for rank in range(2))
    second.begin_phase("update")
    assert second.fail("OutOfMemoryError: 3 GiB") == []  # the first rank left or gave a sign
    assert first.ended.wait(30)
    assert first.problem == "rank 1 failed in update: OutOfMemoryError: 3 GiB" and not second.problem


def test_ranks_that_all_fail_do_not_wait_for_each_other():
    store = dist.HashStore()
    ranks = [Ending(store, rank, 3, dead_s=600.0) for rank in range(3)]
    failing = [threading.Thread(target=rank.fail, args=("ValueError",)) for rank in ranks]
    begun = time.monotonic()
    for thread in failing:
        thread.start()
    for thread in failing:
        thread.join()
    assert time.monotonic() - begun < 2 * ranks[0].interval_s  # they would wait three intervals for a dead peer
    assert not any(rank.problem for rank in ranks)


@pytest.mark.parametrize("store", [dist.HashStore, Unreachable])
def test_a_rank_that_fails_does_not_wait_for_dead_peers(store):
    rank = Ending(store(), 1, 2, dead_s=0.6)
    gone = rank.fail("RuntimeError: Connection closed by peer")
    assert gone == ([0] if store is dist.HashStore else [])  # it gave no sign


FROZEN_KEEPER = """
import sys, time
import flow_grpo
import torch.distributed as dist
from flow_grpo.runtime.ranks.watchdog import Heartbeat
rank, port = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
heart = Heartbeat(store, rank, 2, dead_s=3, silent_s=600, keeper="rank 0")
print("up", flush=True)
sys.stdin.readline()
heart.fail("RuntimeError: x")
time.sleep(600)
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_store_whose_process_is_frozen_ends_the_others_with_its_name_also_one_that_fails(fails):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with contextlib.ExitStack() as stack:
        both = []
        for rank in "01":
            command = [sys.executable, "-c", FROZEN_KEEPER, rank, str(port)]
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            both.append(stack.enter_context(subprocess.Popen(command, text=True, **pipes)))
            stack.callback(both[-1].kill)
        assert [process.stdout.readline() for process in both] == ["up\n", "up\n"]
        both[0].send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        if fails:
            print(file=both[1].stdin, flush=True)
        assert both[1].wait(LIMIT_S) == watchdog.EXIT_CODE
        assert time.monotonic() - begun < 3 + 1  # dead_s, and to leave
        last = both[1].stderr.read().splitlines()[-1]
    assert last.startswith("error: rank 1 ends in start-up: rank 0, which holds the ranks' store, has not answered for")


CLOSED_STDERR = """
import os, time
import flow_grpo
import torch.distributed as dist
from flow_grpo.runtime.ranks.watchdog import Heartbeat
heart = Heartbeat(dist.HashStore(), 0, 2, dead_s=0.3, silent_s=60)
os.close(2)
time.sleep(600)
"""


def test_a_process_with_closed_stderr_is_ended_too():
    done = subprocess.run([sys.executable, "-c", CLOSED_STDERR], capture_output=True, check=False)
    assert done.returncode == watchdog.EXIT_CODE
