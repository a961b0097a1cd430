"""What a run's folder holds: its configuration, starts, metrics, summary and videos, checked as they are read.

The report and the live view read it here. Nothing in the folder is changed, and torch is not loaded.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from flow_grpo.reporting import video_index
from flow_grpo.reporting.metric_files import MetricReader, Row
from flow_grpo.runtime.json_files import read_json_object

if TYPE_CHECKING:
    from flow_grpo.settings.schema import Config

# As in flow_grpo.run.starts and others, which load torch.
METRICS, SUMMARY, CONFIG, STARTS, VIDEOS = "metrics.jsonl", "summary.json", "config.json", "starts", "videos"
WAY_OUT = "restore the file, or give another run"
LATEST = 4  # videos that are looked at of a live run, whose index grows long
adapter = functools.cache(TypeAdapter)
_followed = functools.lru_cache(maxsize=1)(MetricReader)  # goes on where the look before has ended


@dataclasses.dataclass(frozen=True)
class Start:
    """The record of one start, as `flow_grpo.run.starts.record` writes it."""

    time: str
    recipe: str
    ranks: int
    device: str
    config: dict[str, Any]
    command: str = ""
    commit: str = ""
    python: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    epoch: int = 0
    go_on: str = ""  # the command that goes on with the run
    ended_by: str = ""  # max_minutes, a signal, an error; "" while it runs, and where it was killed


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The verdict in a summary, as of `flow_grpo.judging.verdict.Verdict`, and what got worse by camera."""

    overall: str
    in_words: str
    aspects: dict[str, str] = dataclasses.field(default_factory=dict)
    metrics: dict[str, str] = dataclasses.field(default_factory=dict)
    deciding: list[str] = dataclasses.field(default_factory=list)  # empty in runs of earlier versions
    worse_by_camera: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a complete run reports."""

    before: dict[str, float | None] = dataclasses.field(default_factory=dict)
    after: dict[str, float | list[float] | None] = dataclasses.field(default_factory=dict)
    verdict: Judgement | None = None
    change_by_camera: dict[str, dict[str, list[float]]] = dataclasses.field(default_factory=dict)
    measured_on: dict[str, Any] = dataclasses.field(default_factory=dict)
    train_seconds: float = math.nan
    ended_by: str = ""


@dataclasses.dataclass(frozen=True)
class Paths:
    """Camera centres in metres, x right, y down, z forward; None for a frame without an estimate."""

    commanded: list[tuple[float, float, float]]
    estimated: list[tuple[float, float, float] | None]


@dataclasses.dataclass(frozen=True)
class IndexedVideo:
    """One line of videos/index.jsonl."""

    file: str
    step: int
    kind: str = ""
    condition: int | None = None
    prompt: str = ""  # of a condition without a camera
    panels: list[video_index.Box] = dataclasses.field(default_factory=list)
    scene: str = ""
    camera: str = ""
    preset: str = ""
    scores: dict[str, float | None] = dataclasses.field(default_factory=dict)
    before: dict[str, float | None] = dataclasses.field(default_factory=dict)
    caption: str = ""
    paths: Paths | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as its folder tells it."""

    folder: Path
    plain: dict[str, Any]  # configuration that it trained with last
    starts: list[Start]  # in order
    rows: dict[int, Row]  # step -> metrics; a step is the number of finished epochs
    columns: dict[str, dict[int, float]]  # metric, in the order in which they came -> its finite values by step
    summary: Summary | None  # None of a run that is still training or broke off
    videos: list[IndexedVideo]  # lines of videos/index.jsonl whose file is there
    without: list[str]  # sentences about videos that are missing or unreadable

    @functools.cached_property
    def config(self) -> Config:
        """Configuration that the run trained with last; ConfigError for a value out of its knob's bounds."""
        from flow_grpo.settings.loading import from_dict  # loads torch, which takes seconds

        return from_dict(self.plain)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def start(self) -> Start:
        return self.starts[-1]

    @functools.cached_property
    def epochs(self) -> dict[int, Row]:
        return {step: self.rows[step] for step in self.columns.get("time/epoch_s", ())}

    @property
    def finished(self) -> int:
        """Number of finished epochs, those of another run that it began from included."""
        return max(self.epochs, default=self.start.epoch if self.starts else 0)

    @property
    def ended(self) -> str:
        """Why and when the run ended, in words; "" where that is not on record."""
        by = (self.summary.ended_by if self.summary else "") or (self.start.ended_by if self.starts else "")
        return by and f"ended by {by} after epoch {self.finished} of {self.plain.get('num_epochs', '?')}"

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of a metric, finite values only."""
        return list(self.columns.get(name, {}).items())

    def values(self, name: str) -> list[float]:
        return list(self.columns.get(name, {}).values())


def read_run(folder: Path, *, live: bool = False) -> Run:
    """Read a run's folder; ValueError for one that is no run's, or for a damaged file of it.

    With `live`, as while it is watched, what is missing or damaged is not there yet.
    """
    files = sorted((folder / STARTS).glob("[0-9]*.json"))
    if not live and not (folder / METRICS).is_file():
        raise ValueError(f"{folder} holds no {METRICS}, must be the folder of a run; for example outputs/first")
    if not live and not files:
        raise ValueError(f"{folder / STARTS} holds no record of a start; restore it, or give another run")
    summary, (videos, without) = folder / SUMMARY, _videos(folder / VIDEOS, LATEST if live else 0)
    metrics = (_followed if live else MetricReader)(folder / METRICS)
    _found(live, metrics.look)
    return Run(
        folder=folder,
        plain=_found(live, read_json_object, folder / CONFIG, WAY_OUT) or {},
        starts=[start for file in files if (start := _found(live, read_as, Start, file))],
        rows=metrics.rows,
        columns=metrics.columns,
        summary=_found(live, read_as, Summary, summary) if summary.exists() else None,
        videos=videos,
        without=without,
    )


def read_as(kind: type, file: Path) -> Any:
    """Return a JSON file's object as a dataclass; ValueError for a damaged one."""
    return checked(kind, read_json_object(file, WAY_OUT), file)


def changed(path: Path) -> float:
    """Return when a file was written last, in seconds since 1970; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def checked(kind: type, content: object, file: Path) -> Any:
    """Return a file's content as a dataclass; ValueError, in one line, for content of another form."""
    try:
        return adapter(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{file}: {place}: {first['msg']}; {WAY_OUT}") from None


def _found(live: bool, read: Callable[..., Any], *words: Any) -> Any:
    try:
        return read(*words)
    except ValueError:
        if live:
            return None
        raise


def _videos(folder: Path, last: int) -> tuple[list[IndexedVideo], list[str]]:
    index = folder / video_index.NAME
    if not index.is_file():
        return [], [f"The run has no {VIDEOS}/{index.name}, so no video is shown here; those it made are in {VIDEOS}/."]
    found, bad, gone = [], 0, 0
    for line in video_index.read(folder, last):
        try:
            video = checked(IndexedVideo, line, index)
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
