"""Ranks: collectives, synchronised errors, start-up and shut-down."""

import contextlib
import functools
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flow_grpo.runtime.ranks import process_group
from flow_grpo.runtime.ranks.process_group import Group, InputError, RankError, World
from flow_grpo.runtime.ranks.start_up import raise_on_all_ranks
from flow_grpo.runtime.ranks.watchdog import Heartbeat
from flow_grpo.settings.schema import DistributedConfig
from tests.limits import LIMIT_S
from tests.workers import run_ranks

WORLD = 3
DTYPES = [torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16]
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
waits = functools.partial(DistributedConfig, dead_s=0.0)


def test_devices_wait_for_each_other_at_least_as_long_as_cpus() -> None:
    device = torch.device("meta")
    assert process_group.group_s(waits(10.0, device_s=20.0), CPU) == 10.0
    assert process_group.group_s(waits(10.0, device_s=20.0), device) == 20.0
    assert process_group.group_s(waits(30.0, device_s=20.0), device) == 30.0


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_rows_are_dealt_evenly_each_to_one_of_the_ranks_that_share_them(size: int, count: int) -> None:
    sharing = [World(sample=Group(rank, size)) for rank in range(size)]
    dealt = [0] * size
    for number in range(5):
        rows = [list(range(count))[world.dealt_rows(number, count)] for world in sharing]
        assert [row for own in rows for row in own] == list(range(count)), "consecutive, in the order of the ranks"
        dealt = [total + len(own) for total, own in zip(dealt, rows, strict=True)]
        assert dealt[0] == max(dealt) <= min(dealt) + 1


def gather_of_each_dtype(world: World) -> list[torch.Tensor]:
    rows = torch.arange(4).view(2, 2) + 10 * world.data.rank
    gathered = [world.data.all_gather(rows.to(dtype)) for dtype in DTYPES]
    odd = torch.tensor([float("nan"), float("inf"), -0.0])[: 3 * world.data.rank or 3]
    return gathered + [world.data.all_gather(other) for other in (odd, rows.T, torch.empty(0, 5))]


def test_all_gather_returns_the_rows_of_all_ranks_in_rank_order() -> None:
    expected = torch.cat([torch.arange(4).view(2, 2) + 10 * rank for rank in range(WORLD)])
    for results in run_ranks(gather_of_each_dtype, WORLD):
        for result in results[:5]:
            assert torch.equal(result, expected.to(result.dtype))
        assert [result.dtype for result in results[:5]] == DTYPES
        odd = results[5].view(WORLD, 3)
        assert odd[:, 0].isnan().all() and odd[:, 1].isposinf().all() and torch.signbit(odd[:, 2]).all()
        assert torch.equal(results[6], torch.cat([torch.arange(4).view(2, 2).T + 10 * rank for rank in range(WORLD)]))
        assert results[7].shape == (0, 5)


def gather_errors(world: World) -> list[str]:
    mine = {0: torch.zeros(16, 3), 1: torch.zeros(14, 3), 2: torch.zeros(16, 3)}[world.data.rank]
    cases = [mine, torch.zeros(4, dtype=torch.float32 if world.data.rank else torch.float64), torch.tensor(1.0)]
    texts = []
    for tensor in cases:
        with pytest.raises(ValueError, match="all_gather needs") as caught:
            world.data.all_gather(tensor)
        texts.append(str(caught.value))
    return texts


def test_all_gather_of_different_shapes_or_dtypes_is_one_error_on_every_rank() -> None:
    results = run_ranks(gather_errors, WORLD)
    assert results[0] == results[1] == results[2]
    shapes, dtypes, scalar = results[0]
    assert "(16, 3) torch.float32 cpu on rank 0, (14, 3) torch.float32 cpu on rank 1" in shapes
    assert "torch.float64 cpu on rank 0, (4,) torch.float32 cpu on rank 1" in dtypes
    assert "() torch.float32 cpu on rank 0" in scalar


def exchange_texts(world: World) -> tuple[list[str], str, list[str]]:
    gathered = world.data.gather_text("ü" * world.data.rank)
    return gathered, world.broadcast_text(f"from {world.data.rank}"), world.data.gather_text("")


def test_texts_of_different_lengths_are_gathered_unchanged() -> None:
    for result in run_ranks(exchange_texts, WORLD):
        assert result == (["", "ü", "üü"], "from 0", ["", "", ""])


def compare_fingerprints(world: World) -> str:
    world.data.check_equal("same", "dataset")
    with pytest.raises(ValueError, match="dataset must be the same") as caught:
        world.data.check_equal("other" if world.data.rank == 2 else "same", "dataset")
    return str(caught.value)


def test_unequal_fingerprints_are_refused_on_every_rank() -> None:
    results = run_ranks(compare_fingerprints, WORLD)
    assert set(results) == {results[0]}
    assert "dataset must be the same on all ranks, got same on rank 0, same on rank 1, other on rank 2" in results[0]


def score(world: World, failing: tuple[int, ...]) -> None:
    with world.sync_errors("score"):
        if world.data.rank in failing:
            raise KeyError(f"no video {world.data.rank}")


def fail_in_phase(world: World, failing: tuple[int, ...]) -> tuple[str, str]:
    with pytest.raises(RuntimeError, match="failed in score") as caught:
        score(world, failing)
    cause = caught.value.__cause__
    with world.sync_errors("next"):  # the ranks are still in step
        pass
    return str(caught.value), type(cause).__name__


@pytest.mark.parametrize("failing", [(2,), (0, 1)])
def test_an_error_is_raised_on_every_rank_with_the_name_of_each_failing_rank(failing: tuple[int, ...]) -> None:
    results = run_ranks(fail_in_phase, WORLD, failing)
    said = "; ".join(f"rank {rank} failed in score: KeyError: 'no video {rank}'" for rank in failing)
    assert {text for text, _ in results} == {said}
    assert [cause for _, cause in results] == ["KeyError" if rank in failing else "NoneType" for rank in range(WORLD)]


def input_or_bug(world: World, errors: tuple[Exception | None, ...]) -> tuple[str, str]:
    with pytest.raises((InputError, RuntimeError)) as caught:
        world.raise_if_any_failed(errors[world.data.rank], "phase")
    return type(caught.value).__name__, str(caught.value)


def test_bad_input_is_raised_as_such_on_every_rank_unless_a_rank_fails_otherwise() -> None:
    unfit = InputError("video a is short")
    assert set(run_ranks(input_or_bug, WORLD, (unfit, None, unfit))) == {("InputError", "video a is short")}
    both = "rank 0 failed in phase: InputError: video a is short; rank 1 failed in phase: KeyError: 'x'"
    assert set(run_ranks(input_or_bug, WORLD, (unfit, KeyError("x"), None))) == {("RankError", both)}


class RecordingHeartbeat:
    phase, way_on = "sampling", "; go on"

    def __init__(self, gone: tuple[int, ...] = ()) -> None:
        self.published: list[str] = []
        self.gone = gone

    def announce(self, text: str) -> None:
        self.published.append(text)

    def withdraw(self) -> None:
        self.published.append("withdrawn")

    def fail(self, text: str) -> tuple[int, ...]:
        self.published.append(f"fail: {text}")
        return self.gone

    def begin_phase(self, phase: str) -> None:
        self.phase = phase

    def waiting_for_peers(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()


@pytest.mark.parametrize(
    ("error", "peer_comes", "published", "raised"),
    [
        (KeyError("x"), True, ["KeyError: 'x'", "withdrawn"], r"^rank 1 failed in update: KeyError: 'x'$"),
        (KeyError("x"), False, ["KeyError: 'x'"], r"^rank 1 failed in update: KeyError: 'x'$"),
        (InputError("video a is short"), True, [], "^video a is short$"),
    ],
)
def test_an_error_is_published_while_the_peers_are_waited_for(error, peer_comes, published, raised, monkeypatch):
    def all_reduce(*_: object, **__: object) -> None:
        if not peer_comes:
            raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(Group, "gather_text", lambda _, text: ["", text])
    world = World.of(Group(1, 2, object(), RecordingHeartbeat()))
    with pytest.raises((InputError, RankError), match=raised), world.sync_errors("update"):
        raise error
    assert world.all.heartbeat.published == published


def test_an_error_outside_collectives_is_published_unless_every_rank_has_it() -> None:
    world = World.of(Group(1, 2, None, RecordingHeartbeat()))
    with pytest.raises(RankError, match=r"^rank 1 failed in sampling: KeyError: 'x'$"), world.broadcast_failure():
        raise KeyError("x")
    with pytest.raises(RankError, match="rank 0 failed"), world.broadcast_failure():
        raise RankError("rank 0 failed in update: KeyError: 'y'")
    assert world.all.heartbeat.published == ["fail: KeyError: 'x'"]
    with pytest.raises(KeyError), World().broadcast_failure():
        raise KeyError("x")


def test_a_lost_connection_is_told_in_one_line_by_the_rank_that_is_gone(capsys) -> None:
    world = World.of(Group(0, 2, None, RecordingHeartbeat(gone=(1,))))
    with pytest.raises(RankError) as caught, world.broadcast_failure():
        raise RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert caught.value.last_line.startswith("rank 1 is gone: killed, or its machine is lost; so rank 0 failed in samp")
    assert caught.value.last_line.endswith("; go on") and capsys.readouterr().err == ""


@pytest.mark.parametrize("size", [1, 2])
def test_an_exit_inside_of_a_run_is_an_error_with_its_place(size, monkeypatch) -> None:
    world = World.of(Group(0, size, None, RecordingHeartbeat()))
    monkeypatch.setattr(RecordingHeartbeat, "stop", lambda _: None, raising=False)
    with (
        pytest.raises(RuntimeError, match=r"sys.exit\(0\) was called at .*test_process_group.py:"),
        world.broadcast_failure(),
    ):
        sys.exit(0)
    with pytest.raises(RankError, match=r"rank 0 failed in scoring: sys.exit\(0\)"), World().sync_errors("scoring"):
        sys.exit(0)


def test_a_launcher_that_is_gone_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "LAUNCHER_S", 0.5)
    given = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in {**given, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"rank 1 .*launcher is gone"):
        process_group.init_ranks(CPU, waits(1800.0))


FAILS_AT_START = """
import os
import flow_grpo
import torch
from flow_grpo.runtime.ranks import process_group
from flow_grpo.settings.schema import DistributedConfig
if os.environ["RANK"] == "1":
    def broken(*_): raise RuntimeError("no room for a communicator")
    process_group.dist.all_reduce = broken
process_group.init_ranks(torch.device("cpu"), DistributedConfig(600.0, dead_s=12.0))
"""


def test_a_rank_that_fails_at_start_up_ends_its_peers_with_its_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        started = []
        for rank in ("0", "1"):
            environment = os.environ | given | {"RANK": rank, "LOCAL_RANK": rank}
            command = [sys.executable, "-c", FAILS_AT_START]
            process = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)
            started.append(stack.enter_context(process))
            stack.callback(started[-1].kill)
        said = [rank.communicate()[1] for rank in started]
    assert [rank.returncode for rank in started] == [1, 1]
    assert "rank 1 failed in start-up: RuntimeError: no room for a communicator" in said[0]


def test_without_a_launcher_there_is_one_rank_whose_collectives_are_identities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    world = process_group.init_ranks(CPU, waits(1800.0))
    rows = torch.randn(2, 3)
    gathered = world.data.all_gather(rows)
    assert world == World() and world.is_main and not dist.is_initialized()
    assert torch.equal(gathered, rows) and gathered.data_ptr() != rows.data_ptr()
    assert world.broadcast_text("x") == "x"
    world.data.check_equal("x", "y")
    world.raise_if_any_failed(None, "phase")
    with pytest.raises(RuntimeError, match="rank 0 failed in phase: OSError: disk"):
        world.raise_if_any_failed(OSError("disk"), "phase")
    with pytest.raises(ValueError, match="rows"):
        world.data.all_gather(torch.tensor(1.0))
    process_group.shut_down(world)


def _leave(world: World) -> float:
    """Return the seconds that a rank waits at the end for rank 1, which comes late."""
    time.sleep(1.0 * (world.all.rank == 1))
    begun = time.monotonic()
    with mock.patch.object(dist, "destroy_process_group"):  # the workers' own
        process_group.shut_down(world)
    return time.monotonic() - begun


def test_no_rank_leaves_before_the_last_one_is_done() -> None:
    early, late = run_ranks(_leave, 2)
    assert early > 0.5 > late


def test_a_single_process_that_hangs_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    ended: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(Heartbeat, "end_process", lambda _, problem: ended.put(problem))
    world = process_group.init_ranks(CPU, waits(1800.0, dead_s=0.6, silent_s=3.0))
    with world.sync_errors("removing stale checkpoints"), raise_on_all_ranks(world):
        world.calls_reward("my_rewards.py:warmth")
    problem = ended.get(timeout=LIMIT_S)
    assert "rank 0 has made no progress for" in problem
    assert "in start-up, inside reward my_rewards.py:warmth: it hangs" in problem
    process_group.shut_down(world)


@pytest.mark.parametrize("error", [KeyError("x"), RankError("rank 0 failed in update: x")])
def test_an_error_of_a_single_process_is_raised_unchanged_and_ends_its_watchdog(error, monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    world = process_group.init_ranks(CPU, waits(1800.0, dead_s=0.6))
    assert any(thread.name == "heartbeat" for thread in threading.enumerate())
    with pytest.raises(type(error)) as caught, world.broadcast_failure():
        raise error
    assert caught.value is error
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate())


def group_facts(world: World) -> tuple[bool, str, float, float, str]:
    default, control = dist.group.WORLD, world.all.gloo
    timeouts = [group._get_backend(CPU).options._timeout.total_seconds() for group in (default, control)]
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    return default is not control, dist.get_backend(control), timeouts[0], timeouts[1], interface


def test_the_control_group_is_a_separate_gloo_group_with_the_given_timeout_over_loopback() -> None:
    assert run_ranks(group_facts, WORLD) == [(True, "gloo", LIMIT_S, LIMIT_S, "lo")] * WORLD


def die_in_the_middle(world: World) -> None:
    if world.data.rank == 1:
        os._exit(7)
    world.data.all_gather(torch.zeros(1))


def say_rank(world: World) -> int:
    return world.data.rank


def hang(world: World) -> None:
    time.sleep(60 * world.data.rank)


def process_of(world: World) -> int:
    assert world.data.size == 2
    return os.getpid()


def test_a_dead_or_late_rank_fails_the_call_and_the_next_call_works() -> None:
    with pytest.raises(AssertionError, match="rank 1: process ended with exit code 7"):
        run_ranks(die_in_the_middle, 2)
    with pytest.raises(AssertionError, match=r"no answer within 0.3 s.* from rank\(s\) \[(0, )?1\]"):
        run_ranks(hang, 2, timeout=0.3)
    assert run_ranks(say_rank, 2) == [0, 1]


def test_ranks_serve_many_calls_and_fresh_ones_leave_with_exit_code_zero() -> None:
    first = run_ranks(process_of, 2)
    assert run_ranks(process_of, 2) == first
    assert set(run_ranks(process_of, 2, fresh=True)).isdisjoint(first)
