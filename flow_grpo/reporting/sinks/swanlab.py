"""SwanLab, offline in `<run folder>/swanlab` unless an API key or SWANLAB_MODE is set."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flow_grpo.reporting.sinks.gif import as_gif
from flow_grpo.reporting.sinks.sink import PROJECT, Opening, as_markdown

# `starts/` of the run folder has the rest; a login is never prompted for; every redraw of the bars would be recorded.
SETTINGS: Mapping[str, Any] = {
    "interactive": False,
    "terminal": {"proxy_type": "none"},
    "probe": {"runtime": False, "requirements": False, "git": False},
}


class Swanlab:
    """A `Sink`. SwanLab shows GIFs only, and makes a section of what stands before a metric's slash."""

    def __init__(self, opening: Opening) -> None:
        library: Any = importlib.import_module("swanlab")
        settings = library.Settings(**SETTINGS)
        online = settings.api_key is not None
        self._run = library.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", PROJECT),
            name=opening.folder.name,
            id=opening.run_id("swanlab"),
            resume="allow",
            mode=None if "SWANLAB_MODE" in os.environ else "online" if online else "offline",
            log_dir=str(opening.folder / "swanlab"),
            config=dict(opening.config),
            settings=settings,
            reinit=True,
        )

    def scalars(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def show(self, name: str, path: Path, caption: str, step: int) -> None:
        """Show a video as a GIF, a picture as it is."""
        if path.suffix == ".mp4":
            self._run.log_video(key=name, data=as_gif(path), caption=caption, step=step)
        else:
            self._run.log_image(key=name, data=str(path), caption=caption, step=step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        self._run.log_text(key=name, data=as_markdown(columns, rows), step=step)

    def close(self) -> None:
        self._run.finish()
