"""Weights & Biases, offline in `<run folder>/wandb` unless an API key or WANDB_MODE is set."""

from __future__ import annotations

import importlib
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from flow_grpo.reporting.metric_names import SECTIONS
from flow_grpo.reporting.sinks.sink import PROJECT, Opening

SUMMARIES = {1: "last,max", -1: "last,min", 0: "last"}  # direction of a held-out metric -> columns of the runs table
HOSTS = ("api.forge.coreweave.com", "api.wandb.ai")  # where `wandb login` logs in: since 0.31, and before


class Wandb:
    """A `Sink`. Sections of evaluations have the step axis `eval/epoch`, all others `train/epoch`."""

    def __init__(self, opening: Opening) -> None:
        self._library: Any = importlib.import_module("wandb")
        self._direction, self._defined = opening.direction, set[str]()
        offline = "WANDB_MODE" not in os.environ and not key_is_set()
        self._run = self._library.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=opening.folder.name,
            id=opening.run_id("wandb"),
            resume=None if offline else "allow",
            mode="offline" if offline else None,
            dir=str(opening.folder),
            config=dict(opening.config),
            # A console would record every redraw of the progress bars; the end is ours to sum up.
            settings=self._library.Settings(console="off", quiet=True),
        )
        for section in SECTIONS:
            self._run.define_metric(axis_of(section))
            self._run.define_metric(f"{section}/*", step_metric=axis_of(section))

    def scalars(self, metrics: Mapping[str, float], step: int) -> None:
        """Log numbers with their step axes; a held-out metric's last and best value are in the summary."""
        for name in metrics:
            if name.startswith("eval/") and name not in self._defined:
                self._defined.add(name)
                summary = SUMMARIES[self._direction(name)]
                self._run.define_metric(name, step_metric=axis_of(name), summary=summary)
        self._run.log({**metrics, **dict.fromkeys(map(axis_of, metrics), step)})

    def show(self, name: str, path: Path, caption: str, step: int) -> None:
        if path.suffix == ".mp4":
            media = self._library.Video(str(path), caption=caption, format="mp4")
        else:
            media = self._library.Image(str(path), caption=caption)
        self._run.log({name: media, axis_of(name): step})

    def table(self, name: str, columns: list[str], rows: list[list[object]], step: int) -> None:
        table = self._library.Table(columns=columns, data=rows, allow_mixed_types=True)  # numbers, or empty
        self._run.log({name: table, axis_of(name): step})

    def close(self) -> None:
        self._run.finish()


def axis_of(name: str) -> str:
    """Return the step axis of a metric or section: evaluations are rarer than epochs."""
    return "eval/epoch" if name.startswith(("eval", "fixed")) else "train/epoch"


def key_is_set() -> bool:
    """Return whether wandb can upload without prompting for a login."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    own = os.environ.get("WANDB_BASE_URL")
    try:
        logins = netrc.netrc(os.environ.get("NETRC"))
    except (FileNotFoundError, netrc.NetrcParseError):
        return False
    return any(logins.authenticators(host) for host in ([urlparse(own).hostname or ""] if own else HOSTS))
