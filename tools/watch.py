"""Watch a run, from its first file to its verdict: progress, time left, rewards, held-out metrics, health.

    python tools/watch.py outputs/first           # until q or Ctrl-C
    python tools/watch.py outputs                 # the newest run there
    python tools/watch.py outputs/first --once    # one look, also for a file or a mail

It reads the run's folder and changes nothing in it, so any number may watch, also from another machine that sees the
folder. Exit code: 0, or 2 where there is no run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import math
import re
import select
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

import flow_grpo  # noqa: F401, I001 - before what might load torch

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flow_grpo.reporting.metric_files import Row
from flow_grpo.reporting.metric_names import HEALTH, OUTSIDE_EPOCHS, healthy_text, metric_of, phase_of
from flow_grpo.runtime.checkpoints.run_lock import LOCK, is_held
from tools.common import command, make_parser
from tools.run_folder import CONFIG, METRICS, STARTS, SUMMARY, VIDEOS, Run, changed, read_run

PARSER = make_parser(__doc__)
PARSER.add_argument("run", type=Path, metavar="RUN", help="folder of a run, or of several: then its newest")
PARSER.add_argument("--once", action="store_true", help="print it once and end, as without a terminal")
PARSER.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between looks, default 2")
PARSER.add_argument("--ascii", action="store_true", help="plain characters, as where the terminal is not UTF-8")
BLOCKS, LETTERS = "▁▂▃▄▅▆▇█", "_.-~=+*#"  # of a sparkline, the second where the terminal knows ASCII alone
BAR = 24  # characters
WIDE = 100  # columns of a terminal from which on curves are twice as long
TRUE_VIEW = "eval/target_view_psnr_db"  # to the true view, beside what the reference estimator measures
WARNINGS = 6  # shown at most
COLOURS = {"running": "green", "starting": "green", "ended": "bold green", "stopped": "bold red"}  # others yellow
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
        measured = max(self.columns.get("time/evaluation_s", ()), default=0)
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
        outside = sum(value for name in OUTSIDE for step, value in self.series(name) if step)
        lengths = self.values("time/epoch_s")
        return statistics.median(lengths[-RECENT:]) + outside / len(lengths) if lengths else math.nan

    @property
    def time_left(self) -> str:
        """How long the run takes until its last epoch is finished or `max_minutes` are used up, in words."""
        left = self.epoch_s * (self.knob("num_epochs", 0) - self.finished)
        of_limit = (60 * float(self.knob("max_minutes", 0)) or math.inf) - self.epoch_s * len(self.epochs)
        return f"ETA {span(max(0.0, min(left, of_limit) - self.quiet_s))}" + " by max_minutes" * (of_limit < left)

    @property
    def state(self) -> str:
        """One of "running", "starting", "quiet" (alive without a sign), "ended", "left" (with a reason), "stopped"."""
        longest = [max(self.values(name)[-RECENT:] or [0.0]) for name in ("time/epoch_s", *OUTSIDE)]
        suspicious = self.quiet_s > (LEAST_QUIET_S + 3 * sum(longest) if self.epochs else START_S)
        if self.held or (self.held is None and not self.summary and not self.ended and not suspicious):
            return "quiet" if suspicious else "running" if self.rows else "starting"
        return "ended" if self.summary else "left" if self.ended else "stopped"


def take(folder: Path) -> Snapshot:
    """Return what a run's folder says now; files that are missing or half written count as not there yet."""
    run = read_run(folder, live=True)
    if run.starts:
        begun = datetime.datetime.strptime(run.start.time, "%Y-%m-%d %H:%M:%S %z")
        if changed(folder / SUMMARY) < begun.timestamp():  # of an earlier start
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


@command
def main(words: Sequence[str] | None = None) -> int:
    args = PARSER.parse_args(words)
    if not 0.1 <= args.every < math.inf:
        raise ValueError(f"--every: got {args.every:g}, must be at least 0.1 seconds")
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr] # a scene's name may be no ASCII
    for number in (signal.SIGINT, signal.SIGTERM):  # the first is ignored where a script started us in the background
        signal.signal(number, signal.default_int_handler)  # leaves the terminal as it was
    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else 120, markup=False, highlight=False)
    plain = args.ascii or console.options.ascii_only
    with contextlib.suppress(KeyboardInterrupt):
        run, which = find_run(args.run)
        if args.once or not terminal:
            for part in picture(take(run), which, console.width, plain=plain):
                console.print(part, soft_wrap=isinstance(part, Text))  # lines keep their length: paths stay whole
        else:
            show_live(run, f"{which}  (q: leave)".strip(), console, every=args.every, plain=plain)
    return 0


def show_live(run: Path, which: str, console: Console, *, every: float, plain: bool) -> None:
    def screen() -> Group:
        return Group(*picture(take(run), which, console.width, plain=plain))

    with Live(screen(), console=console, screen=True, auto_refresh=False) as live, keys() as pressed:
        while pressed(every) not in ("q", "Q"):
            live.update(screen(), refresh=True)


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Give a function that waits so many seconds for a key and returns it, "" where none was pressed."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds) or ""  # no keyboard, no key
        return
    import termios  # here: Windows has none, and --once needs none
    import tty

    before = termios.tcgetattr(sys.stdin)

    def pressed(seconds: float) -> str:
        return sys.stdin.read(1) if select.select([sys.stdin], [], [], seconds)[0] else ""

    try:
        tty.setcbreak(sys.stdin)
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def picture(run: Snapshot, which: str, width: int, *, plain: bool) -> list[RenderableType]:
    title = Text.assemble((str(run.folder), "bold"), f"  {which}".rstrip())
    about = []
    if run.starts:
        device = run.start.device.partition(";")[0].removeprefix("device ")
        about = [Text(f"{run.start.recipe}, {run.start.ranks} rank(s) on {device}")]
    parts = *progress(run, plain), *metrics(run, width, plain), *files(run)
    return [title, *about, state(run), *warnings(run), *parts]


def state(run: Snapshot) -> Text:
    quiet = f"{span(run.quiet_s)} ago"
    who = f", {run.holder}" if run.holder else ""
    verdict = run.summary.verdict.in_words if run.summary and run.summary.verdict else "no verdict on record"
    message = {
        "running": f"running{who}; last record {quiet}",
        "starting": f"starting{who}, begun {quiet}: it loads, or evaluates the start; no metrics yet",
        "quiet": f"running{who}, but its last record was {quiet}: it may hang",
        "ended": f"{run.ended or 'ended'}: verdict {verdict}",
        "left": f"{run.ended}, without a verdict; last record {quiet}",
        "stopped": f"stopped or crashed after epoch {run.finished}, without a verdict; last record {quiet}",
    }[run.state]
    if run.held is None and run.state in ("running", "starting"):
        message += " (from its files alone: its lock cannot be seen from here)"
    if run.state in ("left", "stopped") and run.starts:
        # In two lines, since a terminal breaks a longer one, which then cannot be pasted.
        command = run.start.go_on.replace(" --config.resume", " \\\n  --config.resume")
        message += f"\n  go on from {run.checkpoint or 'the beginning (nothing is saved)'}:\n{command}"
    return Text(message, style=COLOURS.get(run.state, "yellow"))


def progress(run: Snapshot, plain: bool) -> Iterator[RenderableType]:
    if num_epochs := run.knob("num_epochs", 0):
        line = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=num_epochs, completed=run.finished, width=BAR)
        speed = "" if math.isnan(run.epoch_s) else f"{run.epoch_s:.3g} s an epoch"
        left = run.time_left if run.state == "running" and speed else ""
        shown: RenderableType = bar
        if plain:
            done = min(BAR, BAR * run.finished // num_epochs)
            shown = "#" * done + "." * (BAR - done)
        line.add_row("epochs", shown, f"{run.finished}/{num_epochs}", speed, left)
        yield line
    if run.epochs:
        whole = run.mean("time/epoch_s")
        found = ((phase_of(name), name) for name in run.epochs[run.finished])
        phases = {phase: run.mean(name) for phase, name in found if phase and phase not in OUTSIDE_EPOCHS}
        largest = sorted(phases.items(), key=lambda phase: -phase[1])
        shown_phases = [f"{name} {100 * s / whole:.0f} %" for name, s in largest if s > whole / 100 > 0]
        yield Text(f"time    {'  '.join(shown_phases)}")
        memory = [run.mean(f"system/memory_{name}_gib") for name in ("peak", "total")]
        yield Text(f"memory  {memory[0]:.3g} of {memory[1]:.3g} GiB at the peak")


def files(run: Snapshot) -> Iterator[Text]:
    if run.checkpoint:
        yield Text(f"saved   {run.folder}/checkpoints/{run.checkpoint}")
    if (strip := run.folder / "filmstrip.png").exists():
        yield Text(f"strip   {strip}")
    for video in run.videos[-1:]:
        yield Text(f"video   {run.folder}/{VIDEOS}/{video.file}" + (f"\n        {video.caption}" * bool(video.caption)))


def metrics(run: Snapshot, width: int, plain: bool) -> Iterator[RenderableType]:
    if not run.rows:
        return
    letters, length = LETTERS if plain else BLOCKS, 24 if width >= WIDE else 10
    table = Table("metric", box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.columns[0].min_width = 24
    table.add_column("first", justify="right", min_width=9)
    table.add_column("last", justify="right", min_width=9)
    table.add_column("curve", min_width=length)
    table.add_column("", no_wrap=True)  # is cut where the terminal is too narrow
    for name in (*rewards(run), *held_out(run), *HEALTH):
        values = run.values(name)
        if values:
            curve = sparkline(values, letters, length)
            table.add_row(name, f"{values[0]:.4g}", f"{values[-1]:.4g}", Text(curve, style="cyan"), note(run, name))
    yield table


def rewards(run: Snapshot) -> list[str]:
    weights = [name for name in run.columns if name.startswith("reward/") and name.endswith("_weight")]
    return [f"{name.removesuffix('_weight')}_mean" for name in weights if any(run.values(name)[-1:])]


def held_out(run: Snapshot) -> list[str]:
    """Return the held-out metrics that say most: the reference estimator's, else the rewards', and PSNR."""
    measured = [name for name in run.columns if name.startswith("eval/")]
    gold = [name for name in measured if name.replace("eval/", "eval_floor/", 1) in run.columns]
    trained = [name.replace("reward/", "eval/").removesuffix("_mean") for name in rewards(run)]
    return [name for name in measured if name in (gold or trained) or name == TRUE_VIEW]


def note(run: Snapshot, name: str) -> str:
    """Return what belongs beside a metric: a reward's spread within groups, a held-out metric's change."""
    spread = run.values(f"{name.removesuffix('_mean')}_group_std")
    if name.startswith("reward/") and spread:
        return f"+- {spread[-1]:.2g} within groups"
    change = [run.values(name.replace("eval/", "eval_change/", 1) + end)[-1:] for end in ("", "_low", "_high")]
    if name.startswith("eval/") and all(change):
        (mean,), (low,), (high,) = change
        return f"{mean:+.2g} [{low:+.2g}, {high:+.2g}]"
    return ""


def sparkline(values: Sequence[float], letters: str, length: int) -> str:
    """Return a curve in one line of text, at most `length` characters: the first letter is the lowest value."""
    count = min(length, len(values))
    edges = [len(values) * place // count for place in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if math.isclose(low, high):  # a level, whose means differ by rounding
        return letters[0] * count
    return "".join(letters[round((len(letters) - 1) * (mean - low) / (high - low))] for mean in means)


def warnings(run: Snapshot) -> Iterator[Text]:
    """Yield a line for every metric of the latest epoch or evaluation that is out of its healthy bounds."""
    found = []
    for name, value in run.latest.items():
        metric = metric_of(name)
        if metric is not None and not math.isnan(value) and not metric.is_fine(value):
            advice = re.sub(r"\[[^]]*\]\(([^)]*)\)", r"docs/\1", metric.advice)  # links of a page
            found.append(f"! {name} is {value:.4g}, healthy: {healthy_text(metric)}; {advice}")
    yield from (Text(line, style="yellow") for line in found[:WARNINGS])
    if len(found) > WARNINGS:
        yield Text(f"! and {len(found) - WARNINGS} more metrics out of their bounds", style="yellow")


def span(seconds: float) -> str:
    """Return a length of time in words, such as "3 s" or "1:02:03"."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else str(datetime.timedelta(seconds=whole))


if __name__ == "__main__":
    sys.exit(main())
