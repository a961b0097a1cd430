"""The optimizer steps so far: part of the run's state."""

from __future__ import annotations

import dataclasses
import statistics

LATEST, KNOWN = 20, 5  # norms that are remembered, and that must be known before one bounds the next


@dataclasses.dataclass
class UpdateHistory:
    """The optimizer steps of a run so far, the same on every rank."""

    taken: int = 0
    norms: list[float] = dataclasses.field(default_factory=list)  # before clipping, in the latest 20 steps that had one
    bad_steps: list[str] = dataclasses.field(default_factory=list)  # why the latest steps in a row were skipped

    def bound(self, most: float, ratio: float) -> float:
        """Return the norm to clip the next gradient to: `most`, or less by `ratio`, if that is not 0.

        Once 5 norms are known, it is at most `ratio` times their median.
        """
        if not ratio or len(self.norms) < KNOWN:
            return most
        return min(most, ratio * statistics.median(self.norms))

    def warm_up(self, steps: int) -> float:
        """Return the factor of the next step's learning rate: (n + 1) / steps after n steps, at most 1."""
        return min(1.0, (self.taken + 1) / steps) if steps else 1.0

    def stepped(self, norm: float) -> None:
        """Remember a step that was taken and the norm of its gradient before clipping."""
        self.taken += 1
        if norm > 0:  # a median of 0 would stop the learning
            self.norms = [*self.norms, norm][-LATEST:]
        self.bad_steps.clear()
