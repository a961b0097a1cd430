"""Run a function on several ranks: CPU processes joined by gloo on the loopback interface.

    def sum_of_ranks(world: World, offset: int) -> int:      # at the top level of a test module
        return int(world.data.all_gather(torch.tensor([world.data.rank + offset])).sum())

    assert run_ranks(sum_of_ranks, 4, 10) == [46, 46, 46, 46]

Imports take seconds, so ranks are forked from a server process with all imports done (not from the test session, whose
threads would not survive), and the ranks of one world size are reused for the whole session. A failed or late call ends
its ranks, and the next call starts new ones. Use `fresh=True` for a function that changes its process for good
(backends, environment).
"""

import atexit
import contextlib
import dataclasses
import faulthandler
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.ranks import process_group
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.schema import DistributedConfig
from tests.limits import LIMIT_S

ROOT = Path(__file__).parents[1]
GRACE_S = 3.0  # for the other ranks to report after one has failed


@dataclasses.dataclass
class _Pool:
    processes: list[BaseProcess]
    pipes: list[Connection]
    folder: str  # of the rendezvous file, which every new process group uses again


_POOLS: dict[int, _Pool] = {}


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: object, timeout: float = LIMIT_S, fresh: bool = False
) -> list[Any]:
    """Call `function(ranks, *args)` on `world_size` ranks and return their results in rank order.

    Args:
        function: importable by name (top level of a module); `world` is a `process_group.World`.
        world_size: number of processes.
        *args: sent to every rank by pickle.
        timeout: wall-clock limit of the call in seconds, start-up excluded.
        fresh: start new processes for this call and check that they leave with exit code 0.

    Raises:
        AssertionError: a rank raised (tracebacks of all ranks are in the message), died, or was too late.
    """
    idle = None if fresh else _POOLS.pop(world_size, None)
    pool = idle or _start(world_size)
    try:
        for pipe in pool.pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        results = _collect(pool, timeout, function.__name__)
    except BaseException:
        _end(pool)
        raise
    if fresh:
        _leave(pool)
    else:
        _POOLS[world_size] = pool
    return results


def close_pools() -> None:
    """Shut all idle ranks down and check their exit codes."""
    while _POOLS:
        _leave(_POOLS.popitem()[1])


atexit.register(close_pools)


def context() -> multiprocessing.context.ForkServerContext:
    """Return a multiprocessing context with preloaded imports; its environment is that of the first call."""
    made = multiprocessing.get_context("forkserver")
    ours = sorted(module for module in sys.modules if module.startswith("flow_grpo"))
    lazily_imported = ["accelerate", "torch._dynamo"]  # the latter by DistributedDataParallel
    made.set_forkserver_preload([*ours, *lazily_imported, "pytest"])
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with mock.patch.dict(os.environ, environment):  # before torch is imported there
        multiprocessing.forkserver.ensure_running()
    return made


@contextlib.contextmanager
def already_met(program: ModuleType, world: World) -> Iterator[None]:
    """Let a program's main() run on a rank whose process group is there and stays."""
    with (
        mock.patch.object(program, "set_up_rank", return_value=(torch.device("cpu"), world)),
        mock.patch.object(process_group, "shut_down"),
    ):
        yield


def without_npu() -> ProcessPoolExecutor:
    """Return a pool of one new process, which finds no torch_npu even if that is installed."""
    spawned = multiprocessing.get_context("spawn")  # the server that forks ranks may have loaded it
    return ProcessPoolExecutor(1, mp_context=spawned, initializer=device_api.hide_plug_in, initargs=("not tested",))


def _start(world_size: int) -> _Pool:
    folder = tempfile.mkdtemp(prefix="flow_grpo_ranks_")
    pool = _Pool([], [], folder)
    for rank in range(world_size):
        ours, theirs = multiprocessing.Pipe()
        process = context().Process(target=_serve, args=(theirs, rank, world_size, f"file://{folder}/rendezvous"))
        process.start()
        theirs.close()
        pool.processes.append(process)
        pool.pipes.append(ours)
    try:
        _collect(pool, LIMIT_S, "start-up")
    except BaseException:
        _end(pool)
        raise
    return pool


def _collect(pool: _Pool, timeout: float, what: str) -> list[Any]:
    """Receive one answer per rank; the first failure shortens the wait for the rest."""
    deadline = time.monotonic() + timeout
    answers: dict[int, tuple[bool, Any]] = {}
    while len(answers) < len(pool.pipes):
        missing = [pipe for rank, pipe in enumerate(pool.pipes) if rank not in answers]
        ready = wait(missing, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pool.pipes.index(pipe)  # type: ignore[arg-type]
            answers[rank] = _receive(pool, rank)
            if not answers[rank][0]:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    late = [rank for rank in range(len(pool.pipes)) if rank not in answers]
    failures = [f"rank {rank}: {answer}" for rank, (passed, answer) in sorted(answers.items()) if not passed]
    if late:
        failures.append(f"no answer within {timeout:g} s, or {GRACE_S:g} s after a failure, from rank(s) {late}")
    assert not failures, f"{what} failed\n" + "\n".join(failures)
    return [answers[rank][1] for rank in range(len(pool.pipes))]


def _receive(pool: _Pool, rank: int) -> tuple[bool, Any]:
    try:
        passed, answer = pickle.loads(pool.pipes[rank].recv_bytes())
    except (EOFError, ConnectionResetError):
        pool.processes[rank].join(LIMIT_S)
        return False, f"process ended with exit code {pool.processes[rank].exitcode}"
    return bool(passed), answer


def _leave(pool: _Pool) -> None:
    for pipe in pool.pipes:
        pipe.send_bytes(pickle.dumps(None))
    for process in pool.processes:
        process.join(LIMIT_S)
    codes = [process.exitcode for process in pool.processes]
    _end(pool)
    assert codes == [0] * len(codes), f"exit codes of the ranks: {codes}"


def _end(pool: _Pool) -> None:
    for process in pool.processes:
        if process.is_alive():
            process.kill()
        process.join()
    for pipe in pool.pipes:
        pipe.close()
    shutil.rmtree(pool.folder, ignore_errors=True)


def _serve(pipe: Connection, rank: int, world_size: int, rendezvous: str) -> None:
    """Main function of a rank: initialise, answer calls, shut down. Always ends by `os._exit`, without teardown."""
    faulthandler.enable()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in names.items()})
    code = 1
    try:
        torch.set_num_threads(1)
        waits = DistributedConfig(LIMIT_S, dead_s=0.0)
        world = process_group.init_ranks(torch.device("cpu"), waits, init_method=rendezvous)
        pipe.send_bytes(pickle.dumps((True, None)))
        while (call := pickle.loads(pipe.recv_bytes())) is not None:
            os.chdir(ROOT)  # the call before may have left it
            function, args = call
            pipe.send_bytes(pickle.dumps((True, function(world, *args))))
        process_group.shut_down(world)
        code = 0
    except EOFError:
        pass  # the session is gone
    except BaseException:  # noqa: BLE001 - any error belongs in the test's report
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
