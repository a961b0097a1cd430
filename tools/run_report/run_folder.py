"""What a run's folder holds: its configuration, starts, metrics, summary and videos, checked when they are read."""

from __future__ import annotations

import dataclasses
import math
import shlex
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from flow_grpo.judging.verdict import LIKENESS, deciding, direction
from flow_grpo.reporting import video_index
from flow_grpo.reporting.metric_files import read_rows
from flow_grpo.run.starts import CONFIG, STARTS, start_files
from flow_grpo.runtime.checkpoints.resume import SUMMARY
from flow_grpo.runtime.json_files import read_json_object
from flow_grpo.settings.checks import largest_weights
from flow_grpo.settings.loading import from_dict, load_config
from flow_grpo.settings.schema import Config

METRICS, VIDEOS = "metrics.jsonl", "videos"


@dataclasses.dataclass(frozen=True)
class Start:
    """The record of one start, as `flow_grpo.run.starts.record` writes it."""

    time: str
    command: str
    recipe: str
    ranks: int
    device: str
    commit: str
    python: str
    versions: dict[str, str]
    config: dict[str, Any]
    epoch: int = 0
    checkpoint: str = ""


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The verdict in a summary: one word for the run, a sentence, one word a metric, what got worse by camera."""

    overall: str
    in_words: str
    metrics: dict[str, str]
    worse_by_camera: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a complete run reports."""

    before: dict[str, float | None]
    after: dict[str, float | list[float] | None]
    verdict: Judgement | None = None
    change_by_camera: dict[str, dict[str, list[float]]] = dataclasses.field(default_factory=dict)
    floor: dict[str, float | None] = dataclasses.field(default_factory=dict)
    measured_on: dict[str, Any] = dataclasses.field(default_factory=dict)
    train_seconds: float = math.nan


@dataclasses.dataclass(frozen=True)
class Panel:
    """A part of a video's picture, in pixels: "source", "base", "now", "true view" or "copy 1"."""

    name: str
    x: int
    y: int
    width: int
    height: int


@dataclasses.dataclass(frozen=True)
class Paths:
    """Camera centres in metres, x right, y down, z forward; None for a frame without an estimate."""

    commanded: list[tuple[float, float, float]]
    estimated: list[tuple[float, float, float] | None]


@dataclasses.dataclass(frozen=True)
class Video:
    """One line of videos/index.jsonl."""

    file: str
    kind: str
    step: int
    panels: list[Panel]
    scene: str = ""
    camera: str = ""
    preset: str = ""
    scores: dict[str, float | None] = dataclasses.field(default_factory=dict)
    before: dict[str, float | None] = dataclasses.field(default_factory=dict)
    caption: str = ""
    paths: Paths | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as its folder tells it.

    Attributes:
        folder: of the run.
        config: that it trained with last.
        starts: at least one, in order.
        rows: step -> metrics; a step is the number of finished epochs.
        summary: None of a run that is still training or broke off.
        videos: lines of videos/index.jsonl whose file is there.
        without: sentences about what is missing or unreadable.
    """

    folder: Path
    config: Config
    starts: list[Start]
    rows: dict[int, dict[str, float]]
    summary: Summary | None
    videos: list[Video]
    without: list[str]

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    @property
    def start(self) -> Start:
        """The latest start."""
        return self.starts[-1]

    @property
    def epochs(self) -> int:
        """Finished epochs on record."""
        return max(self.rows)

    @property
    def rewards(self) -> list[str]:
        """Rewards with a weight in any epoch of training."""
        return [name for name, weight in largest_weights(self.config).items() if weight]

    @property
    def began_elsewhere(self) -> bool:
        """Whether "before training" was measured by the run whose checkpoint this one began from.

        A run that measures it by itself does so at its first start.
        """
        measured = (step for step, row in self.rows.items() if any(name.startswith("eval/") for name in row))
        return next(measured, 0) > self.starts[0].epoch

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of a metric, finite values only."""
        return [(step, row[name]) for step, row in self.rows.items() if math.isfinite(row.get(name, math.nan))]

    def direction(self, name: str) -> int:
        """Return 1 where more of a held-out metric `eval/...` is better, -1 where less is, 0 where not known."""
        return direction(name, self._measured)

    def deciding(self, names: Iterable[str]) -> list[str]:
        """Return those of the held-out metrics `eval/...` that decide the verdict."""
        weights, gold = largest_weights(self.config), bool(self.config.eval.gold)
        return deciding(names, self._measured, weights, gold=gold)

    @property
    def _measured(self) -> list[str]:
        """Everything with a value of its own in an evaluation."""
        return [*self.config.reward.weights, self.config.eval.gold, LIKENESS]


def read_run(folder: Path) -> Run:
    """Return a run.

    Raises:
        ValueError: the folder is no run's, or a file of it is damaged; the message names the file.
    """
    if not (folder / METRICS).is_file():
        raise ValueError(f"{folder} holds no {METRICS}, must be the folder of a run; for example outputs/first")
    starts = read_starts(folder)
    if not starts:
        raise ValueError(f"{folder / STARTS} holds no record of a start; restore it, or give another run")
    plain = read_json_object(folder / CONFIG, "restore it, or give another run")
    summary = folder / SUMMARY
    videos, without = _videos(folder / VIDEOS)
    return Run(
        folder=folder,
        config=from_dict(plain),
        starts=starts,
        rows=read_rows(folder / METRICS),
        summary=checked(Summary, read_json_object(summary, "remove it"), summary) if summary.exists() else None,
        videos=videos,
        without=without,
    )


def read_starts(folder: Path) -> list[Start]:
    """Return the records of a run's starts, [] where there are none; ValueError for a damaged one."""
    return [checked(Start, read_json_object(file, "remove it"), file) for file in start_files(folder)]


def started_by(spec: str, overrides: Sequence[str]) -> Path:
    """Return the folder of the run that a command line `--config SPEC OVERRIDES` started last.

    Raises:
        ValueError: there is none, or the command line cannot work.
    """
    root = Path(load_config(spec, overrides).output_root)
    words = ["--config", spec, *overrides]
    found = []
    for file in root.glob(f"*/{STARTS}/[0-9]*.json"):
        start = checked(Start, read_json_object(file, "remove it"), file)
        if shlex.split(start.command)[1:] == words:
            found.append((time.strptime(start.time, "%Y-%m-%d %H:%M:%S %z"), file))
    if not found:
        raise ValueError(f"no run in {root} was started with {shlex.join(words)}; give the folder of a run instead")
    return max(found)[1].parent.parent


def checked(kind: type, content: object, file: Path) -> Any:
    """Return a file's content as a dataclass.

    Raises:
        ValueError: in one line, for content that does not have its form.
    """
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{file}: {place}: {first['msg']}; restore the file, or give another run") from None


def _videos(folder: Path) -> tuple[list[Video], list[str]]:
    """Return the lines of an index whose video is there, and sentences about what is not."""
    index = folder / video_index.NAME
    if not index.is_file():
        return [], [f"The run has no {VIDEOS}/{index.name}, so no video is shown here; those it made are in {VIDEOS}/."]
    found, bad, gone = [], 0, 0
    for line in video_index.read(folder):
        try:
            video = checked(Video, line, index)
        except ValueError:
            bad += 1
            continue
        file = folder / video.file
        if Path(video.file).name == video.file and file.is_file() and not file.is_symlink():
            found.append(video)
        else:
            gone += 1
    without = [f"{bad} lines of {VIDEOS}/{index.name} cannot be read."] if bad else []
    return found, [*without, *([f"{gone} videos of {VIDEOS}/{index.name} are not there."] if gone else [])]
