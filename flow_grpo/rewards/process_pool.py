"""Calls spread over processes, each with a result or a reason why there is none.

A call that raises, takes too long or takes its process down loses its own result only as far as can be told: results
that had come back stay, and the next batch starts with fresh processes. Nothing here turns a failure into a value.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import faulthandler
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

import torch

from flow_grpo.runtime.signals import live_as_long_as_the_parent

logger = logging.getLogger(__name__)

ResultType = TypeVar("ResultType")
GRACE = 5.0  # seconds after the deadline in which processes that overran it are expected to be gone
PROGRESS_EVERY = 20.0  # seconds


@dataclasses.dataclass(frozen=True)
class Outcome(Generic[ResultType]):
    """What became of a call.

    Attributes:
        value: what it returned, None if it returned nothing.
        fault: why there is no value, "" if there is one.
        lacking: what was given cannot be measured, and never could be; otherwise it is the measurement that failed.
    """

    value: ResultType | None
    fault: str = ""
    lacking: bool = False

    @property
    def failed(self) -> bool:
        """There could have been a value, and there is none."""
        return bool(self.fault) and not self.lacking


class CallPool:
    """Runs calls in `workers` processes, or one after the other in this one.

    Args:
        workers: processes; 0 runs in this process, where a call cannot be stopped and the deadline does not hold.

    Raises:
        ValueError: a negative number.
    """

    def __init__(self, workers: int = 0) -> None:
        if workers < 0:
            raise ValueError(f"workers is {workers}, must be at least 0 (0: score in this process)")
        self.workers = workers
        self._executor: ProcessPoolExecutor | None = None

    def run(
        self, function: Callable[..., ResultType], arguments: Sequence[tuple[Any, ...]], *, seconds: float, what: str
    ) -> list[Outcome[ResultType]]:
        """Call `function` with each tuple of arguments.

        Args:
            function: of a module, as processes have to find it.
            arguments: one tuple a call.
            seconds: after which calls that have not returned are given up.
            what: for messages, such as "anchors".
        """
        if not self.workers:
            return [_here(function, each) for each in arguments]
        deadline = time.time() + seconds
        try:
            futures = [self._processes().submit(_guarded, deadline, function, each) for each in arguments]
        except BrokenProcessPool as error:
            self.close()
            return [Outcome(None, f"{what}: the scoring processes could not be started: {error}")] * len(arguments)
        self._wait(futures, deadline, what)
        outcomes = [_outcome(future, seconds, what) for future in futures]
        if any(isinstance(_error(future), BrokenProcessPool) or not future.done() for future in futures):
            self.close()
        return outcomes

    def close(self) -> None:
        """Let the processes go; the next `run` starts new ones."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    def _processes(self) -> ProcessPoolExecutor:
        if self._executor is None:
            # Spawned: a forked child of a process that drives a device may hang.
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(self.workers, context, _prepare_worker)
        return self._executor

    def _wait(self, futures: Sequence[Future[ResultType]], deadline: float, what: str) -> None:
        """Wait for all, or until the deadline and its grace are over, and tell how far it is."""
        waiting, start = set(futures), time.time()
        while waiting and time.time() < deadline + GRACE:
            left = max(0.0, deadline + GRACE - time.time())
            _, waiting = concurrent.futures.wait(waiting, timeout=min(PROGRESS_EVERY, left))
            if waiting:
                done, spent = len(futures) - len(waiting), time.time() - start
                logger.info("%s: %d of %d after %.0f s", what, done, len(futures), spent)


def usable_cores() -> int:
    """Return how many cores this process may use, which in a container or under a batch system can be a few of many."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _prepare_worker() -> None:
    torch.set_num_threads(1)
    live_as_long_as_the_parent()


def _guarded(deadline: float, function: Callable[..., ResultType], arguments: tuple[Any, ...]) -> ResultType:
    """Run a call in a process that ends itself at the deadline, even inside a library that never returns to Python."""
    faulthandler.dump_traceback_later(max(0.01, deadline - time.time()), exit=True)
    try:
        return function(*arguments)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _here(function: Callable[..., ResultType], arguments: tuple[Any, ...]) -> Outcome[ResultType]:
    try:
        return Outcome(function(*arguments))
    except Exception as error:
        logger.exception("a measurement failed")
        return Outcome(None, f"{type(error).__name__}: {error}")


def _error(future: Future[ResultType]) -> BaseException | None:
    return future.exception() if future.done() and not future.cancelled() else None


def _outcome(future: Future[ResultType], seconds: float, what: str) -> Outcome[ResultType]:
    if not future.done() or future.cancelled():
        return Outcome(None, f"{what}: no result after {seconds:g} s")
    error = future.exception()
    if isinstance(error, BrokenProcessPool):
        return Outcome(None, f"{what}: a scoring process died, or overran {seconds:g} s: {error}")
    if error is not None:
        return Outcome(None, f"{type(error).__name__}: {error}")
    return Outcome(future.result())
