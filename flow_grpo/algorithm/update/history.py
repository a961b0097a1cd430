"""The optimizer steps so far: part of the run's state."""

from __future__ import annotations

import dataclasses
import statistics

LATEST, KNOWN = 20, 5  # norms that are remembered, and that must be known before one bounds the next


@dataclasses.dataclass
class UpdateHistory:
    """The optimizer steps of a run so far, the same on every rank.

    Attributes:
        taken: how many steps were taken.
        norms: norms of the gradient before clipping, in the latest 20 steps that had one.
        bad_steps: causes of the latest steps that were skipped in a row.
    """

    taken: int = 0
    norms: list[float] = dataclasses.field(default_factory=list)
    bad_steps: list[str] = dataclasses.field(default_factory=list)

    def bound(self, most: float, ratio: float) -> float:
        """Return the norm to clip the next gradient to.

        Args:
            most: largest norm in any case.
            ratio: largest multiple of the median of `norms`, once there are 5 of them; 0 for any.
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
