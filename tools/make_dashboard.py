"""Make a wandb workspace with a run's sections: what a healthy run shows first, then rewards, evaluation and the rest.

python tools/make_dashboard.py outputs/RUN                           # writes outputs/RUN/dashboard.json
python tools/make_dashboard.py outputs/RUN --project ENTITY/PROJECT  # also saves it to wandb; wants a network
python tools/make_dashboard.py dashboard.json --project ENTITY/PROJECT

wandb's own pages import no such file: the third command does, on a machine that reaches wandb, with an API key and
`pip install wandb-workspaces`. Other trackers sort metrics into sections by themselves.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from flow_grpo.reporting.metric_files import read_rows
from flow_grpo.reporting.metric_names import SECTIONS, healthy_text, metric_of
from flow_grpo.reporting.sinks.wandb import axis_of, key_is_set
from flow_grpo.runtime.atomic_file import write_atomically
from tools.common import command, make_parser

PARSER = make_parser(__doc__)
PARSER.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or a dashboard.json made from one")
PARSER.add_argument("--project", metavar="ENTITY/PROJECT", help="wandb project to save the workspace to")
NAME = "flow_grpo"  # of the workspace
FILE = "dashboard.json"
OPEN = ("health", "eval", "reward")  # sections that come first, unfolded


@command
def main(words: Sequence[str] | None = None) -> int:
    given = PARSER.parse_args(words)
    sections = _read(given.run)
    if given.run.is_dir():
        write_atomically(given.run / FILE, json.dumps({"name": NAME, "sections": sections}, indent=1))
        print(f"wrote {given.run / FILE}: {sum(len(one['panels']) for one in sections)} panels")
    if given.project:
        print(f"saved to {_save(sections, given.project)}")
    return 0


def dashboard(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return the sections of a workspace, of metrics as logged; those that are not registered are left out."""
    places: dict[str, dict[str, list[str]]] = {section: {} for section in (*OPEN, *SECTIONS)}
    for name in sorted(names):
        metric = metric_of(name)
        if metric is None:
            continue
        places[name.partition("/")[0]].setdefault(_panel_of(name), []).append(name)
        if metric.healthy is not None:
            title = f"{name}, healthy: {healthy_text(metric)}"
            places["health"][title] = [name]
    return [
        {
            "name": section,
            "open": section in OPEN,
            "panels": [{"title": title, "x": axis_of(own[0]), "metrics": own} for title, own in panels.items()],
        }
        for section, panels in places.items()
        if panels
    ]


def _panel_of(name: str) -> str:
    """Return the title of the panel that a metric shares with its interval, percentiles, cameras or phases."""
    section, _, rest = name.partition("/")
    if section.endswith("_by_camera"):
        return f"{section}: {rest.rpartition('/')[2]}"
    if section == "eval_change":
        return re.sub(r"_(low|high)$", "", name)
    if section == "time":
        return "time by phase, s"
    unit = getattr(metric_of(name), "unit", "")
    shared = re.sub(r"_p\d+(_s)?$", r" percentiles\1", name)
    return f"{shared}, {unit}" if unit else shared


def _read(place: Path) -> list[dict[str, Any]]:
    if place.is_dir():
        return dashboard({name for row in read_rows(place / "metrics.jsonl").values() for name in row})
    try:
        sections: list[dict[str, Any]] = json.loads(place.read_text(encoding="utf-8"))["sections"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place} is no dashboard: make one with tools/make_dashboard.py outputs/RUN") from error
    return sections


def _save(sections: Sequence[dict[str, Any]], project: str) -> str:
    entity, _, name = project.partition("/")
    if not entity or not name:
        raise ValueError(f"--project={project}: must be ENTITY/PROJECT, as in the address of the project's page")
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ValueError("wandb-workspaces is not installed: pip install wandb-workspaces")
    if not key_is_set():
        raise ValueError("there is no API key: wandb login, or set WANDB_API_KEY")
    workspaces: Any = importlib.import_module("wandb_workspaces.workspaces")
    reports: Any = importlib.import_module("wandb_workspaces.reports.v2")
    made = [
        workspaces.Section(
            name=one["name"],
            is_open=one["open"],
            panels=[reports.LinePlot(title=own["title"], x=own["x"], y=own["metrics"]) for own in one["panels"]],
        )
        for one in sections
    ]
    try:
        return str(workspaces.Workspace(entity=entity, project=name, name=NAME, sections=made).save().url)
    except Exception as error:
        raise ValueError(f"wandb did not take it ({type(error).__name__}: {error})") from error


if __name__ == "__main__":
    sys.exit(main())
