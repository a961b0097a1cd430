"""What in a run's metrics is not healthy, in words and with what to do: bounds and advice are the registry's."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

from flow_grpo.reporting.metric_names import Metric, healthy_text, metric_of
from tools.run_folder import Run
from tools.run_report.words import number, percent, tidy

RECENT = 10  # values that count as the present state
NOT_HERE = ("eval_change/", "eval_floor/", "reward_by_camera/")  # differences and parts of other metrics


def findings(run: Run, look_up: Callable[[str], Metric | None] = metric_of) -> tuple[list[dict[str, Any]], int]:
    """Return what is outside of its bounds, the present first, and how many metrics have bounds."""
    found, known = [], 0
    for name in sorted(name for name in run.columns if not name.startswith(NOT_HERE)):
        metric, series = look_up(name), run.series(name)
        if metric is None or metric.healthy is None or not series:
            continue
        known += 1
        outside = [step for step, value in series if not metric.is_fine(value)]
        if outside:
            found.append(_finding(name, metric, series, outside))
    return sorted(found, key=lambda finding: not finding["now"]), known


def _finding(name: str, metric: Metric, series: list[tuple[int, float]], outside: list[int]) -> dict[str, Any]:
    """Return in words, for the template, a metric that is `now`, in its last values, or was outside of its bounds."""
    mean = fmean([value for _, value in series[-RECENT:]])
    count = f"{len(outside)} of {len(series)} values"
    first = f"at epoch {outside[0]}" if len(outside) == 1 else f"first at epoch {outside[0]}, last at {outside[-1]}"
    unit = {"share": "", "count": ""}.get(metric.unit, f" {metric.unit}")
    return {
        "name": name,
        "value": percent(mean) if metric.unit == "share" else number(mean) + unit.rstrip(),
        "healthy": tidy(healthy_text(metric)),
        "when": f"{count} outside, {first}",
        "meaning": metric.meaning,
        "advice": metric.advice,
        "now": not metric.is_fine(mean),
    }
