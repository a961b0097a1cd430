"""The change of every held-out metric since training began: paired by condition, with its interval."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from flow_grpo.judging.table import EQUAL, Table, common_rows
from flow_grpo.maths.bootstrap import LEVEL, Interval, mean_interval

LEAST_SCENES = 5  # for an interval
TRAVEL = "camera_travel"  # metres
OF_TRAVEL = ("residual", "found_path_psnr_db")  # what a picture loses as the camera goes farther


def at_equal_travel(before: Table, after: Table) -> Table:
    """Return `after` with columns `equal_travel_<name>`: what its videos were worth if cameras went as far as before.

    The farther a camera goes, the worse its picture, of the same model too: a run that teaches a camera to go where it
    is told would be blamed for what every farther view costs. The change of each of OF_TRAVEL is regressed on the
    change of the distance from the first view, over the conditions, and what the line explains is taken off: analysis
    of covariance. Without `camera_travel` in both tables nothing is added.
    """
    both = before.values.keys() & after.values.keys()
    if TRAVEL not in both:
        return after
    then, now = common_rows(before, after)
    moved = after.values[TRAVEL][now] - before.values[TRAVEL][then]
    values = dict(after.values)
    for name in [name for name in OF_TRAVEL if name in both]:
        change = after.values[name][now] - before.values[name][then]
        known = (moved + change).isfinite()
        around = moved[known] - moved[known].mean()
        slope = (around @ change[known]) / (around @ around).clamp_min(1e-12)
        values[EQUAL + name] = torch.full_like(after.values[name], math.nan)
        values[EQUAL + name][now] = after.values[name][now] - slope * moved
    return dataclasses.replace(after, values=values)


def paired_changes(before: Table, after: Table, level: float = LEVEL) -> dict[str, Interval]:
    """Return `eval/` name -> mean of after - before over the conditions with a value both times.

    The interval is a bootstrap over scenes, whose conditions share a source and are correlated. Its ends are NaN with
    fewer than `LEAST_SCENES`, of which a bootstrap gives intervals that are far too narrow. `eval/<name>_valid` are the
    changes of the shares of conditions with a value. Those at equal travel are as uncertain as the line that was
    fitted to these rows.
    """
    then, now = common_rows(before, after)
    found: dict[str, Interval] = {}
    for name in (name for name in after.values if name in before.values):
        old, new = before.values[name][then], after.values[name][now]
        valid = new.isfinite().float() - old.isfinite().float()
        for ending, differences in (("", new - old), ("_valid", valid)):
            rows = [row for row, known in enumerate(differences.isfinite().tolist()) if known]
            if rows:
                scenes, own = [after.scenes[now[row]] for row in rows], differences[rows]
                if name.startswith(EQUAL) and not ending:  # their mean varies as if the line were fitted anew each time
                    moved = (after.values[TRAVEL][now] - before.values[TRAVEL][then])[rows]
                    around, mean = moved - moved.mean(), own.mean()
                    own = mean + (1 - moved.mean() * around / around.square().mean().clamp_min(1e-12)) * (own - mean)
                change = mean_interval(own.tolist(), scenes, level=level, least=LEAST_SCENES)
                found[f"eval/{name}{ending}"] = change
    return found


def changes_by_camera(before: Table, after: Table) -> dict[str, dict[str, list[float]]]:
    """Return kind of camera -> `eval/` name -> [mean, low, high] of the paired change, where there is an interval.

    Of a metric the intervals of all kinds hold together with 95 % (Bonferroni): of ten that did not change none looks
    changed.
    """
    parts = {kind: part for kind, part in after.by_camera().items() if len(set(part.scenes)) >= LEAST_SCENES}
    level = 1 - (1 - LEVEL) / max(1, len(parts))
    found = {}
    for kind, part in parts.items():
        changes = paired_changes(before, at_equal_travel(before, part), level)  # with a line of its own
        found[kind] = {name: [one.mean, one.low, one.high] for name, one in changes.items() if math.isfinite(one.low)}
    return {kind: known for kind, known in found.items() if known}


def as_metrics(changes: Mapping[str, Interval], names: Sequence[str]) -> dict[str, float]:
    """Return `eval_change/` name, name_low and name_high of those of the `eval/` names that have an interval."""
    metrics: dict[str, float] = {}
    for name in names:
        if name in changes and math.isfinite(changes[name].low):
            own, change = name.replace("eval/", "eval_change/", 1), changes[name]
            metrics |= {own: change.mean, f"{own}_low": change.low, f"{own}_high": change.high}
    return metrics


def with_intervals(metrics: Mapping[str, float], changes: Mapping[str, Interval]) -> dict[str, float | list[float]]:
    """Return every metric followed by `<name>_ci95`, the [low, high] of its paired change, where that is known."""
    found: dict[str, float | list[float]] = {}
    for name, value in metrics.items():
        found[name] = value
        if name in changes and math.isfinite(changes[name].low):
            found[f"{name}_ci95"] = [changes[name].low, changes[name].high]
    return found
