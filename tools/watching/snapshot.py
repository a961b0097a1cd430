"""What a run's folder says at one moment, read without touching it: how far, how fast, alive or not, metrics."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import re
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flow_grpo.reporting import video_index
from flow_grpo.reporting.metric_files import Row, read_rows
from flow_grpo.reporting.metric_names import OUTSIDE_EPOCHS
from flow_grpo.runtime.checkpoints.run_lock import LOCK, is_held

LINES = "metrics.jsonl"
PUBLISHED = re.compile(r"checkpoint_(\d{6,})")  # as in checkpoint.py, which loads torch
MARKS = (LOCK, "starts", "config.json", LINES)  # any of them makes a folder a run's
ONCE = ("start", "finish", "close")  # not of the run's pace
OUTSIDE = tuple(f"time/{phase}_s" for phase in OUTSIDE_EPOCHS if phase not in ONCE)
RECENT = 20  # epochs that speed is measured over
START_S = 1800.0  # a start that wrote no metric for so long is suspicious: weights load for minutes
LEAST_QUIET_S = 120.0  # no shorter silence is suspicious


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A run at one moment.

    Attributes:
        folder: of the run.
        start: record of its latest start, with "config"; what is known of it in a run without one.
        rows: step (finished epochs) -> metrics; NaN where there was no number.
        summary: of a complete run, else {}.
        held: a process holds the run's lock; None where that cannot be seen from this machine.
        holder: "process 7 on HOST", the latest; "" where there is none.
        quiet_s: seconds since the latest start or record.
        video: the latest, or None.
        caption: of the video, or "".
        checkpoint: name of the latest, or "".
    """

    folder: Path
    start: Mapping[str, Any]
    rows: Mapping[int, Row]
    summary: Mapping[str, Any]
    held: bool | None
    holder: str
    quiet_s: float
    video: Path | None
    caption: str
    checkpoint: str

    @functools.cached_property
    def names(self) -> dict[str, None]:
        """Return the names of all metrics, in the order in which they came."""
        return {name: None for _, row in sorted(self.rows.items()) for name in row}

    @functools.cached_property
    def epochs(self) -> dict[int, Row]:
        """Return the finished epochs' metrics."""
        return {step: row for step, row in self.rows.items() if "time/epoch_s" in row}

    @property
    def latest(self) -> Row:
        """Return the metrics of the latest evaluation and of the latest epoch."""
        measured = max((step for step, row in self.rows.items() if "time/evaluation_s" in row), default=0)
        return {**self.rows.get(measured, {}), **self.epochs.get(self.finished, {})}

    @property
    def finished(self) -> int:
        """Return how many epochs are finished, those of another run that it began from included."""
        return max(self.epochs, default=int(self.start.get("epoch", 0)))

    @property
    def num_epochs(self) -> int:
        """Return how many epochs the run is to have; 0 where that is not known."""
        return int(self.knob("num_epochs", 0))

    def knob(self, path: str, default: Any) -> Any:
        """Return the value of a knob by its dotted path."""
        found = self.start.get("config", {})
        for name in path.split("."):
            found = found.get(name, default) if isinstance(found, Mapping) else default
        return found

    def series(self, name: str) -> list[float]:
        """Return the values of a metric by step."""
        return [row[name] for _, row in sorted(self.rows.items()) if not math.isnan(row.get(name, math.nan))]

    def mean(self, name: str) -> float:
        """Return a metric's mean over the recent epochs, NaN where it has no value."""
        return statistics.fmean(self.series(name)[-RECENT:] or [math.nan])

    @property
    def epoch_s(self) -> float:
        """Return the seconds from epoch to epoch: a recent epoch's, and its share of evaluating, saving, logging."""
        outside = sum(row.get(name, 0.0) for step, row in self.rows.items() if step for name in OUTSIDE)
        lengths = self.series("time/epoch_s")
        return statistics.median(lengths[-RECENT:]) + outside / len(lengths) if lengths else math.nan

    @property
    def left_s(self) -> float:
        """Return the seconds until the last epoch is finished or `max_minutes` are used up; NaN before the first."""
        left = self.epoch_s * (self.num_epochs - self.finished)
        limit = 60 * float(self.knob("max_minutes", 0)) or math.inf
        spent = self.epoch_s * len(self.epochs)
        return max(0.0, min(left, limit - spent) - self.quiet_s)

    @property
    def patience_s(self) -> float:
        """Return after how many seconds without a record a run looks dead or stuck."""
        longest = [max(self.series(name)[-RECENT:] or [0.0]) for name in ("time/epoch_s", *OUTSIDE)]
        return LEAST_QUIET_S + 3 * sum(longest) if self.epochs else START_S

    @property
    def verdict(self) -> str:
        """Return the verdict in words; "" unless the run is complete."""
        found = self.summary.get("verdict", {})
        return str(found.get("in_words", "no verdict on record")) if self.summary else ""

    @property
    def state(self) -> str:
        """Return "running", "starting", "quiet" (alive without a sign), "ended" or "stopped"."""
        if self.held or (self.held is None and not self.summary and self.quiet_s <= self.patience_s):
            if self.quiet_s > self.patience_s:
                return "quiet"
            return "running" if self.rows else "starting"
        return "ended" if self.summary else "stopped"


def take(folder: Path) -> Snapshot:
    """Return what a run's folder says now; files that are missing or half written count as not there yet."""
    start = _object(max((folder / "starts").glob("[0-9]*.json"), default=folder / "none"))
    start = start or {"config": _object(folder / "config.json")}
    summary = folder / "summary.json"
    video = _latest_video(folder)
    captions = {line["file"]: str(line.get("caption", "")) for line in video_index.read(folder / "videos")}
    return Snapshot(
        folder=folder,
        start=start,
        rows=_rows(folder, _changed(folder / LINES)),
        summary=_object(summary) if _changed(summary) >= _begun(start) else {},  # an older one is of an earlier start
        held=is_held(folder),
        holder=_text(folder / LOCK).strip(),
        quiet_s=max(0.0, time.time() - written(folder)),
        video=video,
        caption=captions.get(video.name, "") if video else "",
        checkpoint=_latest_checkpoint(folder / "checkpoints"),
    )


def find_run(folder: Path) -> tuple[Path, str]:
    """Return the folder of a run, and one line that says which it is where the given folder holds several.

    Raises:
        ValueError: there is no run.
    """
    if is_run(folder):
        return folder, ""
    runs = [found for found in folder.iterdir() if is_run(found)] if folder.is_dir() else []
    if not runs:
        what = "holds no run" if folder.is_dir() else "is no folder"
        raise ValueError(f"RUN: {folder} {what}, must be the folder of a run, such as outputs/first, or of several")
    newest = max(runs, key=written)
    return newest, f"the newest of {len(runs)} runs in {folder}"


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's."""
    return any((folder / name).exists() for name in MARKS)


def written(folder: Path) -> float:
    """Return when a run last began or recorded something, in seconds since 1970; 0 where that is not known."""
    return max((_changed(folder / name) for name in MARKS), default=0.0)


def _begun(start: Mapping[str, Any]) -> float:
    """Return when a start was recorded, in seconds since 1970; 0 where that is not known."""
    try:
        return datetime.datetime.strptime(str(start.get("time")), "%Y-%m-%d %H:%M:%S %z").timestamp()
    except ValueError:
        return 0.0


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


@functools.lru_cache(maxsize=1)  # a long run's file is large: it is read again only when it has changed
def _rows(folder: Path, changed: float) -> dict[int, Row]:  # noqa: ARG001 - part of the key
    try:
        return read_rows(folder / LINES)
    except ValueError:  # none yet
        return {}


def _latest_video(folder: Path) -> Path | None:
    return max((folder / "videos").glob("*.mp4"), key=_changed, default=None)


def _latest_checkpoint(folder: Path) -> str:
    found = (PUBLISHED.fullmatch(path.name) for path in folder.glob("checkpoint_*"))
    return max(((int(name[1]), name[0]) for name in found if name), default=(0, ""))[1]


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(file))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
