"""Trackio: a database in `<run folder>/trackio`, or in TRACKIO_DIR; no account, no server, no network."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flow_grpo.reporting.sinks.sink import PROJECT, Opening

_OWN_PLACE = ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")  # set by a user who wants the data elsewhere
_REMOTE = _OWN_PLACE[1:]


class Trackio:
    """A `Sink`. Sections are what stands before a metric's slash."""

    def __init__(self, opening: Opening) -> None:
        self._library = _load(opening.folder / "trackio")
        self._run = self._library.init(
            project=PROJECT,
            name=opening.folder.name,
            config=dict(opening.config),
            resume="never" if opening.resumed_step is None else "allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def scalars(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def show(self, name: str, path: Path, caption: str, step: int) -> None:
        kind = self._library.Video if path.suffix == ".mp4" else self._library.Image
        self._run.log({name: kind(path, caption=caption)}, step=step)

    def table(self, name: str, columns: list[str], rows: list[list[object]], step: int) -> None:
        self._run.log({name: self._library.Table(columns=columns, data=rows)}, step=step)

    def close(self) -> None:
        self._run.finish()


def _load(folder: Path) -> Any:
    # The library reads where to write when it is imported. It asks sys.modules for this module's Figure at every log,
    # and would drop the metrics with a warning while another thread, the one that draws, is importing it.
    importlib.import_module("matplotlib.figure")
    own_place = any(name in os.environ for name in _OWN_PLACE)
    if not own_place:
        os.environ["TRACKIO_DIR"] = str(folder)
    try:
        library: Any = importlib.import_module("trackio")
    finally:
        if not own_place:
            del os.environ["TRACKIO_DIR"]
    if not own_place and folder != library.TRACKIO_DIR:
        raise RuntimeError(f"a process has one folder for Trackio, and this one writes to {library.TRACKIO_DIR}")
    if not any(name in os.environ for name in _REMOTE):
        # Would ask Hugging Face for the name of the user where there is a token.
        library.Run._get_username = lambda _: None
    return library
