"""Where a run's seconds go: phases of an epoch, queued device work included, and what lies outside of epochs."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

import torch

from flow_grpo.runtime import device as device_api


class Clock:
    """Adds up wall time per phase, from its creation on; the device is synchronised at both ends of a phase."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._begun = device, time.perf_counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.hidden: defaultdict[str, float] = defaultdict(float)  # of work that ran concurrently with other phases

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time under `name`."""
        device_api.synchronize(self._device)
        begun = time.perf_counter()
        yield
        device_api.synchronize(self._device)
        self.seconds[name] += time.perf_counter() - begun

    def metrics(self) -> dict[str, float]:
        """`time/` metrics in seconds: since the creation in all, in each phase and in none, and hidden ones."""
        total = time.perf_counter() - self._begun
        phases = {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}
        hidden = {f"time/{name}_hidden_s": seconds for name, seconds in self.hidden.items()}
        return phases | {"time/other_s": total - sum(self.seconds.values()), "time/epoch_s": total} | hidden


class Ledger:
    """Seconds of a run outside of its epochs; each entry begins where the one before ended, so that none is lost.

    The first begins with the run's program, by `time.perf_counter`, or now.
    """

    def __init__(self, begun: float | None = None) -> None:
        self._until = time.perf_counter() if begun is None else begun
        self._booked: defaultdict[str, float] = defaultdict(float)

    def since(self) -> float:
        """End an entry that the caller logs, and return its seconds."""
        now = time.perf_counter()
        seconds, self._until = now - self._until, now
        return seconds

    def book(self, name: str) -> None:
        """Enter the seconds since the last entry under the metric `name`."""
        self._booked[name] += self.since()

    def take(self) -> dict[str, float]:
        """Take out the booked seconds by metric."""
        booked, self._booked = dict(self._booked), defaultdict(float)
        return booked
