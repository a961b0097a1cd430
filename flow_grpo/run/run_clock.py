"""Where a run's seconds go: by phase of the epoch in progress, and those that count as training."""

from __future__ import annotations

import time

import torch

from flow_grpo.run.run_state import RunState
from flow_grpo.runtime.clock import Clock


class RunClock:
    """The clocks of one run: `epoch` by phase, and the seconds of training in `state`."""

    def __init__(self, device: torch.device, state: RunState) -> None:
        self._device, self._state = device, state
        self.epoch = Clock(device)
        self.start_training()

    def begin_epoch(self) -> None:
        """Let `epoch` count from zero."""
        self.epoch = Clock(self._device)

    def start_training(self) -> None:
        """Count what follows as training, and what came since the last count as none."""
        self._counted_until = time.perf_counter()

    def count_training(self) -> None:
        """Add the seconds since the last count to the run's seconds of training."""
        now = time.perf_counter()
        self._state.train_seconds += now - self._counted_until
        self._counted_until = now
