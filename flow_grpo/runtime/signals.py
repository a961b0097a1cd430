"""SIGTERM and SIGINT as a request: the run ends after its epoch, saved; a second one is obeyed at once.

And the helper processes of a run, which such signals should not reach.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEAT_S = 5.0  # within which a second signal is the first one once more: batch systems and torchrun both send it


class EndRequest:
    """Whether the end was asked for. As a context manager it listens inside; only in a process's main thread.

    Attributes:
        signal: name of the signal that came, or "".
    """

    def __init__(self) -> None:
        self.signal, self._asked_at = "", 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> EndRequest:
        """Listen."""
        self._before = {number: signal.signal(number, self._asked) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave signals to whom they were left before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, _: FrameType | None) -> None:
        if self.signal:
            if time.monotonic() - self._asked_at > REPEAT_S:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.signal, self._asked_at = signal.Signals(number).name, time.monotonic()
        text = (
            f"{self.signal}: the run ends after this epoch, saved; after {REPEAT_S:.0f} s once more ends it at once\n"
        )
        with contextlib.suppress(OSError):  # nobody may read it
            os.write(2, text.encode())  # a handler may have interrupted a print


def live_as_long_as_the_parent() -> None:
    """Let this helper process be reached by no signal to its parent's group, and end when its parent does.

    Ctrl-C and the launcher signal the whole group, and the parent still needs its helpers to finish its epoch. A helper
    that waits for work would never learn that its parent was killed.
    """
    os.setpgid(0, 0)
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a process that another one started has a parent to follow"

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
