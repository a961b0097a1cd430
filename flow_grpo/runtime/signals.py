"""A signal asks for a stop: the run saves and exits after the current epoch; a second one kills it.

SIGTERM, SIGINT, and SIGUSR1, by which schedulers warn.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
REPEAT_S = 5.0  # a second signal within this time is a duplicate: batch systems and torchrun both send one


class EndRequest:
    """Context manager that records the first stop signal; enter it in the main thread only.

    Attributes:
        signal: name of the signal received, or "".
    """

    def __init__(self) -> None:
        self.signal, self._received_at = "", 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> EndRequest:
        """Install the signal handlers."""
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.signal:
            if time.monotonic() - self._received_at > REPEAT_S:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.signal, self._received_at = signal.Signals(number).name, time.monotonic()
        text = f"{self.signal}: the run ends after this epoch or evaluation, saved; after {REPEAT_S:.0f} s once more "
        text += "ends it at once"
        if "TORCHELASTIC_RUN_ID" in os.environ:
            patience = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
            text += f"; torchrun, if it was signalled, kills it after {patience} s"
        with contextlib.suppress(OSError):  # stderr may be closed
            os.write(2, f"{text}\n".encode())  # not print: the handler may have interrupted one
