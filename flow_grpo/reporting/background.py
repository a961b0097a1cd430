"""Work that training must not wait for, one piece after the other in a thread: trackers; videos, plots."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

MOST = 200  # pieces that may wait: an epoch makes a handful
_log = logging.getLogger(__name__)


class Background:
    """A thread that does what it is given; a piece that fails or is one too many is warned about, and left out."""

    def __init__(self, most: int = MOST) -> None:
        self._pieces: queue.Queue[tuple[str, Callable[[], object]]] = queue.Queue(most)
        self._failed: set[str] = set()
        self._thread: threading.Thread | None = None

    def add(self, what: str, piece: Callable[[], object]) -> None:
        """Do something later, in order. `what` names it in warnings, once for each name."""
        if self._thread is None:
            # A daemon: an upload that hangs must not keep a run from ending, see `finish`.
            self._thread = threading.Thread(target=self._work, name="reporting", daemon=True)
            self._thread.start()
        try:
            self._pieces.put_nowait((what, piece))
        except queue.Full:
            self._warn(what, f"{self._pieces.maxsize} reports wait already")

    def finish(self, seconds: float) -> None:
        """Wait until everything is done, at most so long; what is left then is warned about."""
        deadline = time.monotonic() + seconds
        while self._pieces.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)
        if left := self._pieces.unfinished_tasks:
            _log.warning("%d reports are not done after %g seconds and are left out", left, seconds)

    def _work(self) -> None:
        while True:
            what, piece = self._pieces.get()
            try:
                piece()
            except Exception as error:  # noqa: BLE001 - a report never ends a run
                self._warn(what, f"{type(error).__name__}: {error}")
            self._pieces.task_done()

    def _warn(self, what: str, why: str) -> None:
        if what not in self._failed:
            self._failed.add(what)
            _log.warning("%s does not get everything (%s); metrics.jsonl has all numbers", what, why)
