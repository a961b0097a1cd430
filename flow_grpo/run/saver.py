"""When a run's state becomes a checkpoint: written behind training, published before the next one."""

from __future__ import annotations

from pathlib import Path

from flow_grpo.run.run_state import RunState
from flow_grpo.runtime.checkpoints.saving import Saving
from flow_grpo.runtime.ranks.process_group import World

LINGER_S = 20.0  # after an error, for a checkpoint that is being written; torchrun kills peers after 30


class Saver:
    """Saves a run's state, each position in training once; `is_saved` says that it was read from this folder."""

    def __init__(self, state: RunState, folder: Path, keep: int, world: World, *, is_saved: bool) -> None:
        self._state, self._folder, self._keep, self._world = state, folder, keep, world
        self._saved = self._position() if is_saved else None
        self._saving: Saving | None = None

    @property
    def is_due(self) -> bool:
        """Whether the state differs from the latest checkpoint, by its position in training."""
        return self._saved != self._position()

    def begin(self, score: float | None) -> None:
        """Copy the state and begin to write it (collective call); `score` as `checkpoint.best` has it."""
        assert self._saving is None, "the checkpoint before is published first"
        self._saving = self._state.save(self._folder, keep=self._keep, world=self._world, score=score)
        self._saved = self._position()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is published (collective call)."""
        if self._saving is not None:
            begun, self._saving = self._saving, None
            begun.wait()

    def linger(self) -> None:
        """Give a checkpoint that is being written the time to be published, after an error of this rank.

        That is no collective call: other ranks may have failed.
        """
        if self._saving is not None:
            self._saving.linger(LINGER_S)

    def forget(self) -> None:
        """Let the state be saved again, which now knows more at the same position."""
        self._saved = None

    def _position(self) -> tuple[int, int]:
        return self._state.finished, self._state.sampler.next_step
