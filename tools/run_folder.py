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
from flow_grpo.reporting.metric_files import Row, read_rows
from flow_grpo.runtime.json_files import read_json_object

if TYPE_CHECKING:
    from flow_grpo.settings.schema import Config

# As in flow_grpo.run.starts and others, which load torch.
METRICS, SUMMARY, CONFIG, STARTS, VIDEOS = "metrics.jsonl", "summary.json", "config.json", "starts", "videos"
WAY_OUT = "restore the file, or give another run"
adapter = functools.cache(TypeAdapter)


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
    checkpoint: str = ""


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The verdict in a summary, as of `flow_grpo.judging.verdict.Verdict`, and what got worse by camera."""

    overall: str
    in_words: str
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
    def names(self) -> dict[str, None]:
        """Names of all metrics, in the order in which they came."""
        return {name: None for row in self.rows.values() for name in row}

    @functools.cached_property
    def epochs(self) -> dict[int, Row]:
        return {step: row for step, row in self.rows.items() if "time/epoch_s" in row}

    @property
    def finished(self) -> int:
        """Number of finished epochs, those of another run that it began from included."""
        return max(self.epochs, default=self.start.epoch if self.starts else 0)

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of a metric, finite values only."""
        return [(step, row[name]) for step, row in self.rows.items() if math.isfinite(row.get(name, math.nan))]

    def values(self, name: str) -> list[float]:
        return [value for _, value in self.series(name)]


def read_run(folder: Path, *, live: bool = False) -> Run:
    """Read a run's folder; with `live`, as while it is watched, what is missing or damaged is not there yet.

    Raises:
        ValueError: the folder is no run's, or a file of it is damaged. Never if `live`.
    """
    files = sorted((folder / STARTS).glob("[0-9]*.json"))
    if not live and not (folder / METRICS).is_file():
        raise ValueError(f"{folder} holds no {METRICS}, must be the folder of a run; for example outputs/first")
    if not live and not files:
        raise ValueError(f"{folder / STARTS} holds no record of a start; restore it, or give another run")
    summary, (videos, without) = folder / SUMMARY, _videos(folder / VIDEOS)
    return Run(
        folder=folder,
        plain=_found(live, read_json_object, folder / CONFIG, WAY_OUT) or {},
        starts=[start for file in files if (start := _found(live, read_as, Start, file))],
        rows=_found(live, _rows, folder / METRICS, changed(folder / METRICS)) or {},
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


@functools.lru_cache(maxsize=1)  # a long run's file is large: it is read again only when it has changed
def _rows(file: Path, _changed: float) -> dict[int, Row]:
    return read_rows(file)


def _videos(folder: Path) -> tuple[list[IndexedVideo], list[str]]:
    index = folder / video_index.NAME
    if not index.is_file():
        return [], [f"The run has no {VIDEOS}/{index.name}, so no video is shown here; those it made are in {VIDEOS}/."]
    found, bad, gone = [], 0, 0
    for line in video_index.read(folder):
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
