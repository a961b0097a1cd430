"""What every tracker is asked to do, what it is opened with, and what several of them share."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from flow_grpo.runtime.atomic_file import write_atomically

PROJECT = "flow_grpo"  # that runs are filed under, unless the tracker's own environment variable names another


@dataclasses.dataclass(frozen=True)
class Opening:
    """What a tracker is opened with."""

    folder: Path  # folder of the run, whose name is the run's; everything a tracker writes lies inside
    config: Mapping[str, Any]  # the whole configuration, nested
    resumed_step: int | None = None  # step of the checkpoint the run resumes from, or None
    # 1 where more of a held-out metric `eval/...` is better, -1 where less is, 0 where that is not known
    direction: Callable[[str], int] = lambda _: 0

    def run_id(self, library: str) -> str:
        """Return the run's id in a tracker: that of before when the run is resumed, else a new one."""
        file = self.folder / f"{library}_run_id.txt"
        if self.resumed_step is None or not file.exists():
            write_atomically(file, uuid.uuid4().hex[:8])
        return file.read_text(encoding="utf-8")


class Sink(Protocol):
    """An open tracker. It may fail: whoever calls it warns, and the run continues."""

    def scalars(self, metrics: Mapping[str, float], step: int) -> None:
        """Log numbers, NaN included, by `group/name`."""

    def show(self, name: str, path: Path, caption: str, step: int) -> None:
        """Show a file: a video (.mp4) or a picture (.png)."""

    def table(self, name: str, columns: list[str], rows: list[list[object]], step: int) -> None:
        """Show a table."""

    def close(self) -> None:
        """Write or send what is left."""


def as_markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    return "\n".join("|".join(map(str, line)) for line in [columns, ["---"] * len(columns), *rows])
