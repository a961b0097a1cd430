"""Console output of rank 0: progress bars on a terminal, one line per epoch, a table at the end."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Mapping
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table

from flow_grpo.maths.bootstrap import Interval
from flow_grpo.runtime.ranks.process_group import World

HEADLINE = (
    "policy/approx_kl",
    "policy/clip_fraction",
    "train/grad_norm",
    "eval/target_view_psnr_db",
    "eval/trans_err_m",
    "eval/rot_err_deg",
)


class Progress:
    """Progress output of a run, on rank 0 only; a context manager. Every rank reports progress to the watchdog.

    `finished` epochs were done before a resume; the run ends after so many `seconds` of training.
    """

    def __init__(
        self,
        num_epochs: int,
        world: World,
        *,
        finished: int = 0,
        seconds: float = math.inf,
        console: Console | None = None,
    ) -> None:
        self._world = world
        self._console = (console or Console()) if world.is_main else Console(quiet=True)
        self._num_epochs, self._finished, self._finished_before = num_epochs, finished, finished
        self._seconds = seconds
        self._begin = self._epoch_begin = 0.0  # of the first and the present epoch
        self._bars = Bars(
            TextColumn("{task.description:>8}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._epochs = self._bars.add_task("epochs", total=num_epochs, completed=finished, note="")
        self._rollouts = self._bars.add_task("rollouts", total=None, note="")
        self._updates = self._bars.add_task("updates", total=None, note="")

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def start_epoch(self, *, rollouts: int) -> None:
        """Reset the bars; `rollouts` samples are expected in this epoch."""
        self._epoch_begin = time.monotonic()
        if self._finished == self._finished_before:
            self._begin = self._epoch_begin
        self._bars.reset(self._rollouts, total=rollouts)
        self._bars.reset(self._updates, total=None)

    def more_rollouts(self, count: int) -> None:
        """Expect `count` more samples in this epoch."""
        total = self._bars.tasks[self._rollouts].total or 0
        self._bars.update(self._rollouts, total=total + count)

    def start_update(self, updates: int) -> None:
        """Set the number of micro-batches in the epoch's update."""
        self._bars.update(self._updates, total=updates)

    def rollout(self, count: int) -> None:
        """Count finished samples."""
        self._world.report_progress()
        self._bars.advance(self._rollouts, count)

    def update(self) -> None:
        """Count a finished micro-batch of the update."""
        self._world.report_progress()
        self._bars.advance(self._updates)

    def finish_epoch(self, metrics: Mapping[str, float]) -> None:
        """Print the epoch's line: rewards, the available headline metrics, its duration and the time left."""
        self._finished += 1
        spent = time.monotonic() - self._begin
        all_epochs = spent / (self._finished - self._finished_before) * (self._num_epochs - self._finished)
        seconds = datetime.timedelta(seconds=round(max(0.0, min(all_epochs, self._seconds - spent))))
        left = f"ETA {seconds}" + " by max_minutes" * (self._seconds - spent < all_epochs)
        self._bars.update(self._epochs, completed=self._finished, note=left)
        width = len(str(self._num_epochs))
        parts = [f"epoch {self._finished:>{width}}/{self._num_epochs}", *_rewards(metrics)]
        parts += [f"{name} {metrics[name]:<7.4g}" for name in HEADLINE if name in metrics]
        parts += [f"{time.monotonic() - self._epoch_begin:.1f} s", left]
        self.say("  ".join(parts))

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)


def _rewards(metrics: Mapping[str, float]) -> list[str]:
    # Mean of every reward with a weight, and its std within groups; their sum would mix units.
    parts = []
    for key, weight in metrics.items():
        name = key.removeprefix("reward/").removesuffix("_weight")
        mean, spread = (metrics.get(f"reward/{name}_{end}") for end in ("mean", "group_std"))
        if key == f"reward/{name}_weight" and weight and mean is not None:
            parts.append(f"{name} {mean:.4g}" + ("" if spread is None else f" +- {spread:.2g}"))
    return parts


def print_before_after(
    before: Mapping[str, float],
    after: Mapping[str, float],
    changes: Mapping[str, Interval],
    run_folder: Path,
    world: World,
    *,
    floor: Mapping[str, float],
    console: Console | None = None,
) -> None:
    """Print held-out metrics before and after training side by side, and the run's folder; on rank 0 only.

    The estimator's value on perfect videos, `floor` by `eval_floor/` name, stands in a row below the metric.
    """
    if not world.is_main:
        return
    console = console or Console()
    table = Table(title="held-out metrics", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("metric", overflow="fold")
    for column in ("before", "after", "change", "95 % interval", "%"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in before:
        if name in after:
            found = changes.get(name)
            change = after[name] - before[name] if found is None else found.mean
            interval = "" if found is None or math.isnan(found.low) else f"[{found.low:+.4f}, {found.high:+.4f}]"
            percent = f"{100 * change / abs(before[name]):+.1f}" if before[name] else ""
            table.add_row(name, f"{before[name]:.4f}", f"{after[name]:.4f}", f"{change:+.4f}", interval, percent)
            if (own := name.replace("eval/", "eval_floor/", 1)) in floor:
                table.add_row("  floor", "", f"{floor[own]:.4f}")
    console.print(table)
    console.print(f"run folder: {run_folder}", soft_wrap=True, markup=False, highlight=False)
