"""Logging of a run: metrics to files always; metrics, videos, images and tables to the configured trackers.

Metrics are named `group/name`; trackers show groups as sections. Evaluation groups (`eval` and `eval_...`) have the
step axis `eval/epoch`, all others `train/epoch`.

Only the metric files are written at once. Trackers, videos and plots are served by a thread, so that nobody waits for
an encoder or a network, and a tracker that fails ends nothing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import itertools
import json
import math
import netrc
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import av
from PIL import Image

from flow_grpo.runtime.atomic_file import write_atomically
from flow_grpo.runtime.ranks.process_group import Ranks
from flow_grpo.runtime.reporting import plots, video_index
from flow_grpo.runtime.reporting.background import Background
from flow_grpo.runtime.reporting.metric_files import MetricFiles

GROUPS = (
    *("reward", "policy", "dyn", "eval", "train", "time", "system", "server"),
    *("reward_by_camera", "eval_by_camera", "eval_change", "eval_floor"),
)
CURVES = "curves.png"
GIF_FRAMES, GIF_ROWS = 24, 120  # of a video in tensorboard, which shows GIFs only
SUMMARY = "summary.json"  # its existence marks a run as complete
CLOSING_S = 120.0  # for what is left to report when a run ends


class Tracker:
    """Logs a run's metrics and media on rank 0; other ranks only check the metric names.

    A step is the number of finished epochs: 0 is before training, the first epoch's metrics have step 1. Resuming at
    step s removes everything logged after s from the files and tensorboard, but not from wandb.

    Attributes:
        direction: of held-out metrics, as in `plots.draw_curves`.
        deciding: returns those of the held-out metrics `eval/...` that decide the verdict.
    """

    def __init__(
        self,
        run_folder: Path,
        config: Mapping[str, Any],
        trackers: Iterable[str],
        ranks: Ranks,
        *,
        resumed_step: int | None = None,
        direction: Callable[[str], int] = lambda _: 0,
        deciding: Callable[[Iterable[str]], list[str]] = list,
    ) -> None:
        """Open the run's files and trackers.

        Args:
            run_folder: outputs/<run_name>; its name is the run's name.
            config: the whole configuration, nested.
            trackers: any of "wandb", "tensorboard".
            ranks: of the run; rank 0 writes.
            resumed_step: step of the checkpoint the run resumes from, or None.
            direction: of held-out metrics, as in `plots.draw_curves`.
            deciding: likewise.

        Raises:
            ValueError: a tracker is unknown or not installed.
        """
        libraries = list(trackers)
        for name in libraries:
            if name not in _SINKS:
                raise ValueError(f"trackers={name!r} is not known; use any of {', '.join(_SINKS)}")
            if importlib.util.find_spec(name) is None:
                raise ValueError(f"trackers={name!r} is not installed; pip install {name}, or leave it out")
        self._folder, self._is_main, self.direction, self.deciding = run_folder, ranks.is_main, direction, deciding
        self._sinks: dict[str, _Wandb | _Tensorboard] = {}
        self._background = Background()
        if self._is_main:
            run_folder.mkdir(parents=True, exist_ok=True)
            self._files = MetricFiles(run_folder, resumed_step)
            video_index.cut(run_folder / "videos", resumed_step)
            self._sinks = {name: _SINKS[name](run_folder, config, resumed_step) for name in libraries}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics of a step; if they include held-out metrics, redraw the curves.

        Args:
            metrics: `group/name` -> number or one-element tensor, NaN included.
            step: number of finished epochs.

        Raises:
            ValueError: a name has no known group.
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

    def log_video(self, name: str, path: Path, write: Callable[[Path], object], caption: str, step: int) -> None:
        """Write a video file and show it in the trackers; `write` makes it, behind training."""
        _check_names([name])
        self.later("videos", functools.partial(write, path))
        self._to_sinks(lambda sink: sink.video(name, path, caption, step))

    def log_image(self, name: str, path: Path, draw: Callable[[], object], caption: str, step: int) -> None:
        """Draw a picture to a file and show it in the trackers; `draw` makes it, behind training."""
        _check_names([name])
        self.later(path.name, draw)
        self._to_sinks(lambda sink: sink.image(name, path, caption, step))

    def later(self, what: str, piece: Callable[[], object]) -> None:
        """Do something behind training, in the order of calls; `what` names it in warnings."""
        if self._is_main:
            self._background.add(what, piece)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        """Log a table to the trackers."""
        _check_names([name])
        self._to_sinks(lambda sink: sink.table(name, columns, rows, step))

    def begin(self) -> None:
        """Delete `summary.json`: the run trains another epoch, so it is no longer complete."""
        if self._is_main:
            (self._folder / SUMMARY).unlink(missing_ok=True)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`: what a complete run reports, such as held-out metrics before and after training."""
        if self._is_main:
            write_atomically(self._folder / SUMMARY, json.dumps(summary, indent=1))

    def close(self) -> None:
        """Redraw the curves, report what is left, and close the trackers."""
        if self._is_main and self._files.rows:
            self._draw_curves(max(self._files.rows))
        self._to_sinks(lambda sink: sink.close())
        self._background.finish(CLOSING_S)

    def _draw_curves(self, step: int) -> None:
        path, rows = self._folder / CURVES, {step: dict(row) for step, row in self._files.rows.items()}
        draw = functools.partial(
            plots.draw_curves,
            rows,
            path,
            title=self._folder.name,
            direction=self.direction,
            deciding=self.deciding,
        )
        self.log_image("eval/curves", path, draw, "rewards and held-out metrics", step)

    def _to_sinks(self, report: Callable[[_Wandb | _Tensorboard], object]) -> None:
        for name, sink in self._sinks.items():
            self._background.add(name, functools.partial(report, sink))


class _Wandb:
    """Weights & Biases, offline unless an API key or WANDB_MODE is set."""

    def __init__(self, folder: Path, config: Mapping[str, Any], resumed_step: int | None) -> None:
        self._library: Any = importlib.import_module("wandb")
        id_file = folder / "wandb_run_id.txt"
        if resumed_step is None or not id_file.exists():
            write_atomically(id_file, uuid.uuid4().hex[:8])
        offline = "WANDB_MODE" not in os.environ and not _wandb_key_is_set()
        self._run = self._library.init(
            project=os.environ.get("WANDB_PROJECT", "flow_grpo"),
            name=folder.name,
            id=id_file.read_text(),
            resume=None if offline else "allow",
            mode="offline" if offline else None,
            dir=str(folder),
            config=dict(config),
            settings=self._library.Settings(console="off"),  # would record every redraw of the progress bars
        )
        for group in GROUPS:
            axis = _axis(group)
            self._run.define_metric(axis)
            self._run.define_metric(f"{group}/*", step_metric=axis)

    def scalars(self, metrics: Mapping[str, float], step: int) -> None:
        axes = {_axis(name.split("/")[0]) for name in metrics}
        self._run.log({**metrics, **dict.fromkeys(axes, step)})

    def video(self, name: str, path: Path, caption: str, step: int) -> None:
        self._show(name, self._library.Video(str(path), caption=caption, format="mp4"), step)

    def image(self, name: str, path: Path, caption: str, step: int) -> None:
        self._show(name, self._library.Image(str(path), caption=caption), step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        self._show(name, self._library.Table(columns=list(columns), data=[list(row) for row in rows]), step)

    def close(self) -> None:
        self._run.finish()

    def _show(self, name: str, media: object, step: int) -> None:
        self._run.log({name: media, _axis(name.split("/")[0]): step})


class _Tensorboard:
    """Event files in `<run folder>/tensorboard`; videos are logged as small animated GIFs."""

    def __init__(self, folder: Path, config: Mapping[str, Any], resumed_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resumed_step is None else resumed_step + 1
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)
        if resumed_step is None:
            self._writer.add_text("config", f"```\n{json.dumps(config, indent=1, default=str)}\n```", 0)

    def scalars(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def video(self, name: str, path: Path, caption: str, step: int) -> None:
        self._show(name, _as_gif(path), caption, step)

    def image(self, name: str, path: Path, caption: str, step: int) -> None:
        self._show(name, path.read_bytes(), caption, step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        self._writer.add_text(name, "\n".join("|".join(map(str, line)) for line in lines), step)

    def close(self) -> None:
        self._writer.close()

    def _show(self, name: str, encoded: bytes, caption: str, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        width, height = Image.open(io.BytesIO(encoded)).size
        picture = Summary.Image(encoded_image_string=encoded, width=width, height=height, colorspace=3)
        self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=picture)]), step)
        self._writer.add_text(f"{name}/caption", caption, step)


_SINKS: dict[str, type[_Wandb] | type[_Tensorboard]] = {"wandb": _Wandb, "tensorboard": _Tensorboard}


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        group, _, rest = name.partition("/")
        if group not in GROUPS or not rest:
            raise ValueError(f"{name!r} has no known group; name it <group>/<name> with one of {', '.join(GROUPS)}")


def _axis(group: str) -> str:
    return "eval/epoch" if group.startswith("eval") else "train/epoch"


def _wandb_key_is_set() -> bool:
    """Return whether wandb can upload without prompting for a login."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False


def _as_gif(path: Path) -> bytes:
    """Return a video file as an animated GIF of at most `GIF_FRAMES` of its frames, at most `GIF_ROWS` high.

    At full size a video of 480 rows took 18 seconds.
    """
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        every = math.ceil((stream.frames or 1) / GIF_FRAMES)
        milliseconds = every * 1000 / float(stream.average_rate or 15)
        smaller = min(1.0, GIF_ROWS / stream.height)
        size = {"width": max(1, round(smaller * stream.width)), "height": max(1, round(smaller * stream.height))}
        frames = itertools.islice(container.decode(stream), 0, None, every)
        first, *others = [Image.fromarray(frame.to_ndarray(format="rgb24", **size)) for frame in frames]
    encoded = io.BytesIO()
    first.save(encoded, format="GIF", save_all=True, append_images=others, duration=milliseconds, loop=0)
    return encoded.getvalue()
