"""Logging of a run: metrics to files always; metrics, videos, images and tables to the configured trackers.

Metrics are named `group/name`; trackers show groups as sections.

Only the metric files are written at once. One thread makes videos and plots, another one serves the trackers: nobody
waits for an encoder, no file for a network, and a tracker that does not start or fails later ends nothing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flow_grpo.reporting import video_index
from flow_grpo.reporting.background import Background
from flow_grpo.reporting.drawing import plots
from flow_grpo.reporting.metric_files import MetricFiles
from flow_grpo.reporting.metric_names import SECTIONS
from flow_grpo.reporting.sinks.sink import Opening, Sink
from flow_grpo.runtime.atomic_file import write_atomically
from flow_grpo.runtime.checkpoints.resume import SUMMARY
from flow_grpo.runtime.ranks.process_group import World

CURVES = "curves.png"
CLOSING_S = 300.0  # for what is left to report when a run ends: a dozen videos of 81x480x3368 take two minutes


class Tracker:
    """Logs a run's metrics and media on rank 0; other ranks only check the metric names.

    A step is the number of finished epochs: 0 is before training, the first epoch's metrics have step 1. Resuming at
    step s removes everything logged after s from the files and tensorboard, but not from other trackers.

    `config` is the whole configuration, nested; `trackers` are libraries, each with a module of its name in `sinks/`;
    ValueError for one that is not installed.
    """

    def __init__(
        self,
        run_folder: Path,
        config: Mapping[str, Any],
        trackers: Sequence[str],
        world: World,
        *,
        resumed_step: int | None = None,
        direction: plots.Direction = lambda _: 0,
        deciding: plots.Deciding = list,
    ) -> None:
        for name in trackers:
            if importlib.util.find_spec(name) is None:
                raise ValueError(f"trackers={name!r} is not installed; pip install {name}, or leave it out")
        self._folder, self._is_main, self.direction, self.deciding = run_folder, world.is_main, direction, deciding
        self._sinks: dict[str, Sink] = {}  # that have been opened
        self._names = trackers if world.is_main else ()
        self._making, self._serving = Background(), Background()
        if self._is_main:
            run_folder.mkdir(parents=True, exist_ok=True)
            self._files = MetricFiles(run_folder, resumed_step)
            video_index.cut(run_folder / "videos", resumed_step)
            opening = Opening(run_folder, config, resumed_step, direction)
            for name in trackers:
                self._serving.add(name, functools.partial(self._open, name, opening))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log numbers or one-element tensors of a step, NaN included; with held-out ones, redraw the curves.

        ValueError for a name without a known group.
        """
        _check_names(metrics)
        if not self._is_main:
            return
        numbers = {name: float(value) for name, value in metrics.items()}
        if self._files.append(numbers, step):
            self._to_sinks(lambda sink: sink.scalars(numbers, step))
        if any(name.startswith("eval/") for name in numbers):
            self._draw_curves(step)

    def recorded(self, step: int) -> set[str]:
        """Return the names of a step's logged metrics; empty on ranks other than 0."""
        return set(self._files.rows.get(step, ())) if self._is_main else set()

    def log_file(self, name: str, path: Path, make: Callable[[], object], caption: str, step: int) -> None:
        """Write a video (.mp4) or picture (.png) and show it in the trackers; `make` writes it, behind training."""
        _check_names([name])

        def work() -> None:
            make()
            self._to_sinks(lambda sink: sink.show(name, path, caption, step))

        self.later("videos" if path.suffix == ".mp4" else path.name, work)

    def later(self, what: str, piece: Callable[[], object]) -> None:
        """Do something behind training, in the order of calls; `what` names it in warnings."""
        if self._is_main:
            self._making.add(what, piece)

    def log_table(self, name: str, rows: Sequence[Mapping[str, object]], step: int) -> None:
        """Log rows with named columns as one table to the trackers; cells that a row lacks are empty."""
        _check_names([name])
        columns = list(dict.fromkeys(column for row in rows for column in row))
        cells = [[row.get(column, "") for column in columns] for row in rows]
        if rows:
            self._to_sinks(lambda sink: sink.table(name, columns, cells, step))

    def begin(self) -> None:
        """Delete `summary.json`: the run trains another epoch, so it is no longer complete."""
        if self._is_main:
            (self._folder / SUMMARY).unlink(missing_ok=True)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`: what a complete run reports, such as held-out metrics before and after training."""
        if self._is_main:
            write_atomically(self._folder / SUMMARY, json.dumps(summary, indent=1))

    def close(self) -> None:
        """Redraw the curves, report what is left, and close the trackers; the files still take metrics."""
        if self._is_main and self._files.rows:
            self._draw_curves(max(self._files.rows))
        self._making.finish(CLOSING_S)
        self._to_sinks(lambda sink: sink.close())
        self._serving.finish(CLOSING_S)
        self._names = ()

    def _draw_curves(self, step: int) -> None:
        path, rows = self._folder / CURVES, {step: dict(row) for step, row in self._files.rows.items()}
        title, direction, deciding = self._folder.name, self.direction, self.deciding
        draw = functools.partial(plots.draw_curves, rows, path, title=title, direction=direction, deciding=deciding)
        self.log_file("eval/curves", path, draw, "rewards and held-out metrics", step)

    def _open(self, name: str, opening: Opening) -> None:
        module = importlib.import_module(f"flow_grpo.reporting.sinks.{name}")
        self._sinks[name] = getattr(module, name.capitalize())(opening)

    def _to_sinks(self, report: Callable[[Sink], object]) -> None:
        def work(name: str) -> None:
            if name in self._sinks:  # else it has not been opened, which was warned about
                report(self._sinks[name])

        for name in self._names:
            self._serving.add(name, functools.partial(work, name))


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        group, _, rest = name.partition("/")
        if group not in SECTIONS or not rest:
            raise ValueError(f"{name!r} has no known group; name it <group>/<name> with one of {', '.join(SECTIONS)}")
