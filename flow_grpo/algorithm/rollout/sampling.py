"""How an epoch is sampled: sizes, noise levels, and which steps of a group are stochastic."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from flow_grpo.algorithm.rollout.denoise import RolloutSettings
from flow_grpo.maths.schedule import window_of, windows
from flow_grpo.records import Condition
from flow_grpo.settings.schema import SampleConfig


@dataclasses.dataclass(frozen=True)
class SampleSettings:
    """How an epoch is sampled.

    Attributes:
        sample: sizes, steps and window.
        rollout: noise levels, SDE and seed.
        debug: print the group structure.
        offload: move finished samples to CPU memory, for a pool that grows over several rounds.
        overlap: score a batch while the next one is sampled, see `ScoringQueue`.
    """

    sample: SampleConfig
    rollout: RolloutSettings
    debug: bool
    offload: bool = False
    overlap: bool = True

    def window_of(self, gid: int) -> tuple[int, ...]:
        """Return the stochastic steps of a group, the same on every rank; none where the ODE is sampled."""
        if self.rollout.sde.kind == "ode":
            return ()
        return window_of(gid, windows(self.sample.sde_steps, self.sample.sde_window), seed=self.rollout.seed)

    def windows(self, conditions: Sequence[Condition]) -> list[tuple[int, ...]]:
        """Return the stochastic steps of every condition's group."""
        return [self.window_of(condition.gid) for condition in conditions]

    @property
    def last_step(self) -> int:
        """The last stochastic step of any group."""
        return max(block[-1] for block in windows(self.sample.sde_steps, self.sample.sde_window))
