"""A run as one row: device, recipe, steps, reward, independent measurements, speed, memory, versions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from flow_grpo.settings.checks import trained_rewards
from tools.common import markdown_table
from tools.run_folder import Run
from tools.run_report.held_out import held_out, judged, verdict_word
from tools.run_report.words import duration, number, pair, percent, span
from tools.run_report.work import device, largest, seconds_of, typical, versions

ENDS = 10  # epochs at the beginning and at the end over which a reward is averaged


def record(run: Run) -> dict[str, Any]:
    """Return the row as plain data; None where a value is not known."""
    changes = {change.name: change for change in held_out(run)}

    def ends(name: str) -> list[float | None]:
        values = run.values(name)
        return [fmean(part) if part else None for part in (values[:ENDS], values[-ENDS:])]

    return {
        "run": run.name,
        "device": device(run),
        "ranks": run.start.ranks,
        "recipe": run.start.recipe,
        "commit": run.start.commit,
        "epochs": run.finished,
        "optimizer_steps": round(sum(run.values("train/updates"))),
        "epoch_seconds": _known(seconds_of(run)),
        "rewards": {name: ends(f"reward/{name}_mean") for name in trained_rewards(run.config)},
        "held_out": {
            name: {
                "before": _known(changes[name].before),
                "after": _known(changes[name].after),
                "change": _known(changes[name].change),
                "change_ci95": [changes[name].low, changes[name].high] if math.isfinite(changes[name].low) else None,
                "floor": _known(changes[name].floor),
            }
            for name in judged(run)
        },
        "verdict": verdict_word(run),
        "samples_per_s": _known(typical(run, "system/samples_per_s")),
        "mfu": _known(typical(run, "system/mfu")),
        "memory_peak_gib": _known(largest(run, "system/memory_peak_gib")),
        "versions": versions(run),
    }


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    head = ["run", "device", "recipe", "steps", f"reward, first and last {ENDS} epochs", "held out: before → after"]
    head += ["verdict", "samples/s", "MFU", "peak memory", "versions"]
    return "\n".join(markdown_table(head, [_cells(row) for row in rows]))


def _cells(row: dict[str, Any]) -> list[str]:
    trained = [f"{name} {' → '.join(pair(*ends))}" for name, ends in row["rewards"].items()]
    measured = []
    for name, found in row["held_out"].items():
        interval = f" [{span(*found['change_ci95'])}]" if found["change_ci95"] else ""
        measured.append(f"{name.removeprefix('eval/')} {' → '.join(pair(found['before'], found['after']))}{interval}")
    return [
        row["run"],
        f"{row['device']} x {row['ranks']}",
        f"{row['recipe']} at {row['commit'] or 'no commit'}",
        f"{row['epochs']} epochs, {row['optimizer_steps']} updates, {duration(row['epoch_seconds'] or math.nan)}",
        "; ".join(trained) or "–",
        "; ".join(measured) or "–",
        row["verdict"],
        number(row["samples_per_s"]),
        percent(math.nan if row["mfu"] is None else row["mfu"]),
        f"{number(row['memory_peak_gib'])} GiB",
        ", ".join(f"{name} {version}" for name, version in row["versions"].items()),
    ]


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
