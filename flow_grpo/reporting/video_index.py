"""videos/index.jsonl of a run: one line per video, what it shows and where its panels are.

    {"file": "eval_000060_....mp4", "kind": "eval", "step": 60, "condition": 17, "scene": "...", "camera": "cam05",
     "preset": "arc_left", "prompt": "",
     "panels": [{"name": "source", "x": 8, "y": 26, "width": 320, "height": 240}, ...],
     "scores": {"room_rot": -1.9}, "before": {"room_rot": -2.4}, "caption": "...",
     "paths": {"commanded": [[x, y, z], ...], "estimated": [...]}}

`kind` is eval, train, best, worst or group; `step` the number of finished epochs; `condition` the position in the data
set; `prompt` that of a condition without a camera; `before` the scores before training, where they are known; a panel
is called source, base (the policy before training), now, true view or copy N. `paths` holds camera centres in metres,
null where a frame could not be located; it is there where an estimator has located the frames.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flow_grpo.runtime.atomic_file import write_atomically

NAME = "index.jsonl"
Line = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Box:
    """Where a panel is within the whole picture, in pixels."""

    name: str
    x: int
    y: int
    width: int
    height: int

    def cut(self, picture: Any) -> Any:
        """Return the panel of a picture, whose last three dimensions are rows, columns and colours."""
        return picture[..., self.y : self.y + self.height, self.x : self.x + self.width, :]


def read(folder: Path, last: int = 0) -> list[dict[str, Any]]:
    """Return the lines of a folder of videos in their order, without those that cannot be read; [] without any.

    With `last`, those among so many at the end.
    """
    file = folder / NAME
    found = []
    for text in file.read_bytes().splitlines()[-last:] if file.is_file() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("file"), str) and type(line.get("step")) is int:
            found.append(line)
    return found


def add(folder: Path, line: Line) -> None:
    """Add a line, in place of one for the same file."""
    _write(folder, [*(known for known in read(folder) if known["file"] != line["file"]), line])


def cut(folder: Path, resumed_step: int | None) -> None:
    """Drop the lines after the step that a run resumes from; all of them for a run that begins, None."""
    lines = read(folder)
    kept = [line for line in lines if resumed_step is not None and line["step"] <= resumed_step]
    if len(kept) < len(lines):
        _write(folder, kept)


def panel(line: Line, *names: str) -> Box | None:
    """Return a line's panel of the first of these names that it has, or None."""
    found = {panel["name"]: panel for panel in line["panels"]}
    return next((Box(**found[name]) for name in names if name in found), None)


def _write(folder: Path, lines: list[Any]) -> None:
    write_atomically(folder / NAME, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
