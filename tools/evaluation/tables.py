"""Summarises evaluation rows with confidence intervals, compares them with a baseline, and writes JSON, CSV, Markdown.

Errors are means over registered videos, so a model that fails on hard videos looks better than it is: the failure rate
is reported next to every mean, and baseline differences are taken over videos registered in both.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flow_grpo.maths.bootstrap import DRAWS, LEVEL, mean_interval
from flow_grpo.maths.path_errors import CONVENTIONS
from flow_grpo.runtime.atomic_file import write_atomically
from flow_grpo.runtime.json_files import read_json_object
from tools.common import markdown_table

Row = Mapping[str, Any]

METRICS = (*CONVENTIONS, "drift_parallax_deg")
READING = (
    "Errors are means over registered videos only; read them beside failure_rate. Numbers of conventions A and B may "
    "not be compared with each other. Translation errors have no unit and cannot see speed, except trans_m_mean."
)


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    # By numbers in the names: cam_type9 before cam_type10.
    parts = {row["camera_type"]: re.findall(r"(\D*)(\d*)", row["camera_type"]) for row in rows}
    kinds = sorted(parts, key=lambda kind: [(word, int(number or 0)) for word, number in parts[kind]])
    return {
        "reading": READING,
        "interval": f"{LEVEL:.0%} bootstrap over sources, {DRAWS} draws",
        **_group(rows),
        "camera_types": {kind: _group([row for row in rows if row["camera_type"] == kind]) for kind in kinds},
    }


def _group(rows: Sequence[Row]) -> dict[str, Any]:
    registered = [row for row in rows if row["registered"]]
    failures = _interval(rows, lambda row: float(not row["registered"]))
    return {
        "videos": len(rows),
        "sources": len({row["source"] for row in rows}),
        "registered": len(registered),
        "failure_rate": failures["mean"],
        "failure_rate_interval": [
            end if end is None else min(1, max(0, end)) for end in (failures["low"], failures["high"])
        ],
        "partly_registered": sum(row["frames_registered"] < row["frames"] for row in registered),
        "frames_registered_share": sum(row["frames_registered"] for row in rows) / sum(row["frames"] for row in rows),
        "estimator_faults": sum(bool(row["fault"]) for row in rows),
        "shares_estimator": sum(row["shares_estimator"] for row in rows),
        "metrics": _metrics(registered),
    }


def _metrics(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    found = {name: _interval(rows, lambda row, name=name: row[name]) for name in METRICS}
    return {name: interval for name, interval in found.items() if interval["rows"]}


def _interval(rows: Sequence[Row], read: Callable[[Row], float | None]) -> dict[str, Any]:
    """Return mean and bootstrap interval (None where undefined) of the rows with a value, and how many these are."""
    found = [(value, row["source"]) for row in rows if (value := read(row)) is not None]
    interval = mean_interval([value for value, _ in found], [source for _, source in found])
    ends = {"mean": interval.mean, "low": interval.low, "high": interval.high}
    plain: dict[str, Any] = {name: value if math.isfinite(value) else None for name, value in ends.items()}
    return plain | {"rows": interval.rows, "sources": interval.groups}


def read_baseline(file: Path, settings: Mapping[str, Any], rows: Sequence[Row]) -> list[Row]:
    """Return the rows of another evaluation for the videos in `rows`, in that order; ValueError if not comparable."""
    content = read_json_object(file, "evaluate the baseline again")
    if not isinstance(content.get("rows"), list) or not isinstance(content.get("settings"), dict):
        raise ValueError(f"--baseline {file} has no rows and settings, must be a metrics.json of this tool")
    if content["settings"] != settings:
        raise ValueError(
            f"--baseline {file} was measured with {content['settings']}, these videos with {dict(settings)}, must be "
            "the same; evaluate the baseline again"
        )
    theirs = {row["video"]: row for row in content["rows"]}
    common = [row for row in rows if row["video"] in theirs]
    if not common:
        raise ValueError(f"--baseline {file} has no video of the same name; both folders must have the same layout")
    for row in common:
        if row["asked"] != theirs[row["video"]]["asked"]:
            raise ValueError(
                f"--baseline {file} has other cameras, frames or focal length for {row['video']}, must be the same; "
                "give both evaluations one camera file"
            )
    return [theirs[row["video"]] for row in common]


def compare(rows: Sequence[Row], baseline: Sequence[Row], against: str) -> dict[str, Any]:
    """Return the paired differences, rows minus baseline, with intervals over sources; negative is better."""
    ours = {row["video"]: row for row in rows}
    changes = []
    for theirs in baseline:
        mine = ours[theirs["video"]]
        missing = {name for name in METRICS if mine[name] is None or theirs[name] is None}
        errors = {name: None if name in missing else mine[name] - theirs[name] for name in METRICS}
        failed = float(theirs["registered"]) - float(mine["registered"])
        changes.append({"source": mine["source"], "failed": failed, **errors})
    return {
        "against": against,
        "videos": len(changes),
        "only_registered_here": sum(change["failed"] < 0 for change in changes),
        "only_registered_in_baseline": sum(change["failed"] > 0 for change in changes),
        "failure_rate": _interval(changes, lambda change: change["failed"]),
        "metrics": _metrics(changes),
    }


def write_tables(folder: Path, settings: Mapping[str, Any], rows: Sequence[Row], summary: Mapping[str, Any]) -> None:
    """Write metrics.json, rows.csv, summary.csv and summary.md into a folder, each atomically."""
    content = {"settings": dict(settings), "rows": list(rows), "summary": dict(summary)}
    write_atomically(folder / "metrics.json", json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    write_atomically(folder / "rows.csv", _csv(list(rows[0]), [list(row.values()) for row in rows]))
    head = ["camera_type", "videos", "sources", "registered", "failure_rate"]
    ends = [f"{name}{end}" for name in METRICS for end in ("", "_low", "_high", "_rows")]
    lines = []
    for kind, group in _groups(summary):
        cells = [group["metrics"].get(name, {}) for name in METRICS]
        values = [cell.get(part) for cell in cells for part in ("mean", "low", "high", "rows")]
        lines.append([kind, *(group[name] for name in head[1:]), *values])
    write_atomically(folder / "summary.csv", _csv([*head, *ends], lines))
    write_atomically(folder / "summary.md", as_markdown(settings, rows, summary))


def as_markdown(settings: Mapping[str, Any], rows: Sequence[Row], summary: Mapping[str, Any]) -> str:
    shown = [name for name in METRICS if name in summary["metrics"]]
    named = [f"{name} ({CONVENTIONS[name]})" if name in CONVENTIONS else name for name in shown]
    lines = [
        "# Camera evaluation",
        "",
        f"{settings['estimator']}, {settings['most_frames']} frames of a video at most; mean [{summary['interval']}].",
        READING,
        "",
        *markdown_table(
            ["camera type", "videos", "failed", "frames found", *named],
            [_group_cells(kind, group, shown) for kind, group in _groups(summary)],
        ),
        "",
        f"{summary['partly_registered']} of {summary['registered']} registered videos miss frames; sums are left out "
        f"there. The estimator itself failed (time limit, crash, unreadable file) on {summary['estimator_faults']} "
        f"videos, which count as failures. {summary['shares_estimator']} videos come from a model whose rewards used "
        "this estimator.",
    ]
    if "baseline" in summary:
        lines += ["", *baseline_lines(summary["baseline"])]
    head = ["video", "camera type", "registered", "frames found", *shown, "cause"]
    table = []
    for row in rows:
        frames = f"{row['frames_registered']} of {row['frames']}"
        cells = [row["video"], row["camera_type"], "yes" if row["registered"] else "no", frames]
        table.append([*cells, *(_number(row[name]) for name in shown), row["cause"]])
    return "\n".join([*lines, "", *markdown_table(head, table)]) + "\n"


def baseline_lines(compared: Mapping[str, Any]) -> list[str]:
    found = {"failure_rate": compared["failure_rate"]} | compared["metrics"]
    head = (
        f"Minus {compared['against']}, over {compared['videos']} common videos; below 0 is better, and an interval "
        f"without 0 tells the two apart. Registered here only: {compared['only_registered_here']}, there only: "
        f"{compared['only_registered_in_baseline']}."
    )
    rows = [[name, _with_interval(cell), str(cell["rows"])] for name, cell in found.items()]
    return [head, "", *markdown_table(["metric", "difference", "videos in both"], rows)]


def _groups(summary: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [*summary["camera_types"].items(), ("all", summary)]


def _group_cells(kind: str, group: Mapping[str, Any], shown: Sequence[str]) -> list[str]:
    cells = []
    for name in shown:
        cell = group["metrics"].get(name)
        few = cell is not None and cell["rows"] < group["registered"]
        cells.append("–" if cell is None else _with_interval(cell) + (f" (n={cell['rows']})" if few else ""))
    failed = f"{group['videos'] - group['registered']} ({group['failure_rate']:.0%})"
    return [kind, str(group["videos"]), failed, f"{group['frames_registered_share']:.0%}", *cells]


def _with_interval(cell: Mapping[str, Any]) -> str:
    ends = "" if cell["low"] is None else f" [{_number(cell['low'])}, {_number(cell['high'])}]"
    return _number(cell["mean"]) + ends


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _csv(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()
