"""A process pool with deadlines: every call ends in a value or in the reason why there is none.

A call that raises loses only its own result. One that overruns the deadline or kills its process also loses the results
that were not back yet; the next batch starts new processes.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import faulthandler
import logging
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

import torch

from flow_grpo.runtime.processes import live_as_long_as_the_parent

logger = logging.getLogger(__name__)

ResultType = TypeVar("ResultType")
OtherType = TypeVar("OtherType")
START_S = 600.0  # to wait for the first process: it may read its libraries from a cold file system
GRACE = 5.0  # seconds after the deadline until processes that overran it are given up
PROGRESS_EVERY = 20.0  # seconds


@dataclasses.dataclass(frozen=True)
class Outcome(Generic[ResultType]):
    """Result of a call."""

    value: ResultType | None  # what the call returned; None without a value
    fault: str = ""  # why there is no value, or ""
    # the input cannot be measured, now or later; otherwise a fault means that the measurement failed
    lacking: bool = False

    @property
    def failed(self) -> bool:
        """Measuring failed, although the input could be measured."""
        return bool(self.fault) and not self.lacking

    def then(self, function: Callable[[ResultType], OtherType]) -> Outcome[OtherType]:
        """Apply a function to the value; without one the outcome stays as it is."""
        return Outcome(None if self.value is None else function(self.value), self.fault, self.lacking)


class CallPool:
    """Runs calls in `workers` processes; with 0 sequentially in this one, where none can be stopped at a deadline."""

    def __init__(self, workers: int = 0) -> None:
        self.workers = workers
        self._executor: ProcessPoolExecutor | None = None

    def run(
        self, function: Callable[..., ResultType], arguments: Sequence[tuple[Any, ...]], *, seconds: float, what: str
    ) -> list[Outcome[ResultType]]:
        """Call `function`, which can be pickled, with each tuple of arguments; return the outcomes in the same order.

        `seconds` limit the whole batch, but for starting the processes; `what` names it in messages.
        """
        if not self.workers or not arguments:
            return [_run_here(function, each) for each in arguments]
        try:
            executor = self._executor or self._start(function, min(self.workers, len(arguments)))
            # One clock for all processes of a machine, and unlike the wall clock it never jumps.
            deadline = time.monotonic() + seconds
            futures = [executor.submit(_run_guarded, deadline, function, each) for each in arguments]
        except BrokenProcessPool as error:
            self.close()
            return [Outcome(None, f"{what}: the scoring processes could not be started: {error}")] * len(arguments)
        self._wait(futures, deadline, what)
        outcomes = [_outcome(future, seconds, what) for future in futures]
        if any(not f.done() or (not f.cancelled() and isinstance(f.exception(), BrokenProcessPool)) for f in futures):
            self.close()
        return outcomes

    def close(self) -> None:
        """Stop the processes; the next `run` starts new ones."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    def _start(self, function: Callable[..., Any], processes: int) -> ProcessPoolExecutor:
        """Start processes and wait for the first: its imports take seconds, on a busy machine more than a minute."""
        # Spawned: a forked child of a process that drives a device may hang.
        context = multiprocessing.get_context("spawn")
        executor = self._executor = ProcessPoolExecutor(self.workers, context, _prepare_worker)
        # These calls do nothing, but to receive one a process has to start and to import the function's module.
        calls = [executor.submit(callable, function) for _ in range(processes)]
        concurrent.futures.wait(calls, START_S, concurrent.futures.FIRST_COMPLETED)
        return executor

    def _wait(self, futures: Sequence[Future[ResultType]], deadline: float, what: str) -> None:
        waiting, start = set(futures), time.monotonic()
        while waiting and (left := deadline + GRACE - time.monotonic()) > 0:
            _, waiting = concurrent.futures.wait(waiting, timeout=min(PROGRESS_EVERY, left))
            if waiting:
                done, spent = len(futures) - len(waiting), time.monotonic() - start
                logger.info("%s: %d of %d after %.0f s", what, done, len(futures), spent)


def _prepare_worker() -> None:
    torch.set_num_threads(1)
    live_as_long_as_the_parent()


def _run_guarded(deadline: float, function: Callable[..., ResultType], arguments: tuple[Any, ...]) -> ResultType:
    """Run a call; at the deadline the process exits, even from inside a library that never returns to Python."""
    faulthandler.dump_traceback_later(max(0.01, deadline - time.monotonic()), exit=True)
    try:
        return function(*arguments)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _run_here(function: Callable[..., ResultType], arguments: tuple[Any, ...]) -> Outcome[ResultType]:
    try:
        return Outcome(function(*arguments))
    except Exception as error:
        logger.exception("a measurement failed")
        return Outcome(None, f"{type(error).__name__}: {error}")


def _outcome(future: Future[ResultType], seconds: float, what: str) -> Outcome[ResultType]:
    if not future.done() or future.cancelled():
        return Outcome(None, f"{what}: no result after {seconds:g} s")
    error = future.exception()
    if isinstance(error, BrokenProcessPool):
        return Outcome(None, f"{what}: a scoring process died, or overran {seconds:g} s: {error}")
    if error is not None:
        return Outcome(None, f"{type(error).__name__}: {error}")
    return Outcome(future.result())
