"""The change of every held-out metric since training began: paired by condition, with its interval."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TypedDict

from flow_grpo.algorithm.groups.metrics import pooled
from flow_grpo.maths.bootstrap import Interval, mean_interval

LEAST_SCENES = 5  # for an interval


class ConditionRow(TypedDict):
    """What an evaluation measured on one condition.

    Attributes:
        scene: scene folder relative to the data set's root.
        camera: name of the target camera; with the scene it names the condition.
        preset: name of the camera's motion, "" where there is none.
        values: metric -> value, NaN where it could not be measured.
    """

    scene: str
    camera: str
    preset: str
    values: dict[str, float]


def paired_changes(before: Sequence[ConditionRow], after: Sequence[ConditionRow]) -> dict[str, Interval]:
    """Return `eval/` name -> mean of after - before over the conditions with a value both times.

    The interval is a bootstrap over scenes, whose conditions share a source and are correlated. Its ends are NaN with
    fewer than `LEAST_SCENES`, of which a bootstrap gives intervals that are far too narrow. `eval/<name>_valid` are the
    changes of the shares of conditions with a value.
    """
    pairs = [
        (row["scene"], _with_validity(old), _with_validity(row["values"]))
        for old, row in zip(earlier_values(before, after), after, strict=True)
        if old is not None
    ]
    found: dict[str, Interval] = {}
    for name in pairs[0][1].keys() & pairs[0][2].keys() if pairs else ():
        differences = [(scene, new[name] - old[name]) for scene, old, new in pairs]
        finite = [(scene, difference) for scene, difference in differences if math.isfinite(difference)]
        if finite:
            change = mean_interval([value for _, value in finite], [scene for scene, _ in finite])
            few = change.groups < LEAST_SCENES
            found[f"eval/{name}"] = dataclasses.replace(change, low=math.nan, high=math.nan) if few else change
    return found


def earlier_values(before: Sequence[ConditionRow], after: Sequence[ConditionRow]) -> list[dict[str, float] | None]:
    """Return per row of `after` the values of the same condition in `before`; None where it was not measured."""
    first = {(row["scene"], row["camera"]): row["values"] for row in before}
    return [first.get((row["scene"], row["camera"])) for row in after]


def rows_by_camera(rows: Sequence[ConditionRow]) -> dict[str, list[ConditionRow]]:
    """Return kind of camera (its preset, else its name; see `pooled`) -> its rows, sorted by kind; "" is left out."""
    found: dict[str, list[ConditionRow]] = {}
    filmed = [row for row in rows if row["camera"]]
    for row, kind in zip(filmed, pooled([row["preset"] or row["camera"] for row in filmed]), strict=True):
        found.setdefault(kind, []).append(row)
    return dict(sorted(found.items()))


def changes_by_camera(
    before: Sequence[ConditionRow], after: Sequence[ConditionRow]
) -> dict[str, dict[str, list[float]]]:
    """Return kind of camera -> `eval/` name -> [mean, low, high] of the paired change, where there is an interval."""
    found: dict[str, dict[str, list[float]]] = {}
    for kind, own in rows_by_camera(after).items():
        changes = {
            name: [change.mean, change.low, change.high]
            for name, change in paired_changes(before, own).items()
            if math.isfinite(change.low)
        }
        if changes:
            found[kind] = changes
    return found


def as_metrics(changes: Mapping[str, Interval], names: Sequence[str]) -> dict[str, float]:
    """Return `eval_change/` name, name_low and name_high of those of the `eval/` names that have an interval."""
    metrics: dict[str, float] = {}
    for name in names:
        change = changes.get(name)
        if change is not None and math.isfinite(change.low):
            short = name.removeprefix("eval/")
            ends = {"": change.mean, "_low": change.low, "_high": change.high}
            metrics |= {f"eval_change/{short}{end}": value for end, value in ends.items()}
    return metrics


def with_intervals(metrics: Mapping[str, float], changes: Mapping[str, Interval]) -> dict[str, float | list[float]]:
    """Return every metric followed by `<name>_ci95`, the [low, high] of its paired change, where that is known."""
    found: dict[str, float | list[float]] = {}
    for name, value in metrics.items():
        found[name] = value
        change = changes.get(name)
        if change is not None and math.isfinite(change.low):
            found[f"{name}_ci95"] = [change.low, change.high]
    return found


def _with_validity(values: Mapping[str, float]) -> dict[str, float]:
    return {**values, **{f"{name}_valid": float(math.isfinite(value)) for name, value in values.items()}}
