"""A run at one moment: how far it is, how fast, and whether it lives, read without touching its folder."""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
import statistics
import time
from pathlib import Path
from typing import Any

from flow_grpo.reporting.metric_files import Row
from flow_grpo.reporting.metric_names import OUTSIDE_EPOCHS
from flow_grpo.runtime.checkpoints.run_lock import LOCK, is_held
from tools.run_folder import CONFIG, METRICS, STARTS, SUMMARY, Run, changed, read_run

PUBLISHED = re.compile(r"checkpoint_(\d{6,})")  # as in checkpoint.py, which loads torch
MARKS = (LOCK, STARTS, CONFIG, METRICS)  # any of them makes a folder a run's
ONCE = ("start", "finish", "close")  # not of the run's pace
OUTSIDE = tuple(f"time/{phase}_s" for phase in OUTSIDE_EPOCHS if phase not in ONCE)
RECENT = 20  # epochs that speed is measured over
START_S = 1800.0  # a start that wrote no metric for so long is suspicious: weights load for minutes
LEAST_QUIET_S = 120.0  # no shorter silence is suspicious


@dataclasses.dataclass(frozen=True)
class Snapshot(Run):
    """A run at one moment; its summary is of a complete run alone."""

    held: bool | None  # whether a process holds the run's lock; None where this machine cannot see that
    holder: str  # "process 7 on HOST", the latest; "" where there is none
    quiet_s: float  # seconds since the latest start or record
    checkpoint: str  # name of the latest, or ""

    @property
    def latest(self) -> Row:
        """Metrics of the latest evaluation and of the latest epoch."""
        measured = max((step for step, row in self.rows.items() if "time/evaluation_s" in row), default=0)
        return {**self.rows.get(measured, {}), **self.epochs.get(self.finished, {})}

    def knob(self, name: str, default: Any) -> Any:
        """Return the value of a knob without section, as the latest start has it."""
        return (self.start.config if self.starts else self.plain).get(name, default)

    def mean(self, name: str) -> float:
        """Return a metric's mean over the recent epochs, NaN where it has no value."""
        return statistics.fmean(self.values(name)[-RECENT:] or [math.nan])

    @property
    def epoch_s(self) -> float:
        """Seconds from epoch to epoch: a recent epoch's, and its share of evaluating, saving, logging."""
        outside = sum(row.get(name, 0.0) for step, row in self.rows.items() if step for name in OUTSIDE)
        lengths = self.values("time/epoch_s")
        return statistics.median(lengths[-RECENT:]) + outside / len(lengths) if lengths else math.nan

    @property
    def left_s(self) -> float:
        """Seconds until the last epoch is finished or `max_minutes` are used up; NaN before the first."""
        left = self.epoch_s * (self.knob("num_epochs", 0) - self.finished)
        limit = 60 * float(self.knob("max_minutes", 0)) or math.inf
        spent = self.epoch_s * len(self.epochs)
        return max(0.0, min(left, limit - spent) - self.quiet_s)

    @property
    def state(self) -> str:
        """One of "running", "starting", "quiet" (alive without a sign), "ended" and "stopped"."""
        longest = [max(self.values(name)[-RECENT:] or [0.0]) for name in ("time/epoch_s", *OUTSIDE)]
        suspicious = self.quiet_s > (LEAST_QUIET_S + 3 * sum(longest) if self.epochs else START_S)
        if self.held or (self.held is None and not self.summary and not suspicious):
            return "quiet" if suspicious else "running" if self.rows else "starting"
        return "ended" if self.summary else "stopped"


def take(folder: Path) -> Snapshot:
    """Return what a run's folder says now; files that are missing or half written count as not there yet."""
    run = read_run(folder, live=True)
    try:
        begun = datetime.datetime.strptime(run.start.time if run.starts else "", "%Y-%m-%d %H:%M:%S %z").timestamp()
    except ValueError:
        begun = 0.0
    if changed(folder / SUMMARY) < begun:  # of an earlier start
        run = dataclasses.replace(run, summary=None)
    lock = folder / LOCK
    saved = (PUBLISHED.fullmatch(path.name) for path in (folder / "checkpoints").glob("checkpoint_*"))
    return Snapshot(
        **vars(run),
        held=is_held(folder),
        holder=lock.read_text(encoding="utf-8", errors="replace").strip() if lock.exists() else "",
        quiet_s=max(0.0, time.time() - written(folder)),
        checkpoint=max(((int(name[1]), name[0]) for name in saved if name), default=(0, ""))[1],
    )


def find_run(folder: Path) -> tuple[Path, str]:
    """Return the folder of a run, and a line that names it where `folder` holds several; ValueError for no run."""

    def is_run(place: Path) -> bool:
        return any((place / name).exists() for name in MARKS)

    if is_run(folder):
        return folder, ""
    runs = [found for found in folder.iterdir() if is_run(found)] if folder.is_dir() else []
    if not runs:
        what = "holds no run" if folder.is_dir() else "is no folder"
        raise ValueError(f"RUN: {folder} {what}, must be the folder of a run, such as outputs/first, or of several")
    newest = max(runs, key=written)
    return newest, f"the newest of {len(runs)} runs in {folder}"


def written(folder: Path) -> float:
    """Return when a run last began or recorded something, in seconds since 1970; 0 where that is not known."""
    return max(changed(folder / name) for name in MARKS)
