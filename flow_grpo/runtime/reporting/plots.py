"""Plot a run's curves: rewards with their within-group standard deviation, held-out metrics, and the run's health."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flow_grpo.runtime.atomic_file import atomic_path

Rows = Mapping[int, Mapping[str, float]]

_COLUMNS = 3
_SMOOTH_FROM = 20  # number of points from which a running mean is drawn
_REWARD, _EVAL, _LEVEL = "#1f5fa8", "#b5472f", "#4a7a3a"
_SUM = "reward/mean"  # weighted, in no unit: of the rewards the last
_BETTER = {1: "higher is better", -1: "lower is better", 0: ""}
_LEVELS = {  # not negative; metric -> what a healthy run shows, as in docs/healthy_run.md
    "policy/ratio_first_max_abs_log": "near 0 is healthy",
    "policy/clip_fraction": "below 0.5 is healthy",
    "train/grad_norm": "steady is healthy",
    "train/zero_std_ratio": "below 0.5 is healthy",
    "dyn/valid_groups_ratio_initial": "",
    "dyn/resample_rounds": "",
    "dyn/fallback_rate": "",
}
_SAME = {"eval/target_psnr": "eval/target_view_psnr_db"}  # drawn once where both are measured


def draw_curves(rows: Rows, path: Path, title: str = "", direction: Callable[[str], int] = lambda _: 0) -> None:
    """Write a PNG with one panel per reward and held-out metric, and more for the run's health, of what is logged.

    A reward is a metric `reward/...mean`; its band is the metric of the same name ending in `group_std`, if present.
    Held-out metrics are named `eval/...`.

    Args:
        rows: step -> metrics.
        path: of the PNG, which is replaced atomically.
        title: of the figure.
        direction: returns 1 where more of a held-out metric is better, -1 where less is, 0 where that is not known.
    """
    names = sorted({name for row in rows.values() for name in row if math.isfinite(row[name])})
    rewards = [name for name in names if name.startswith("reward/") and name.endswith("mean")]
    rewards.sort(key=lambda name: (name == _SUM, name))
    held_out = [name for name in names if name.startswith("eval/") and _SAME.get(name) not in names]
    levels = [name for name in _LEVELS if name in names]
    count = len(rewards) + len(held_out) + len(levels)
    columns = max(1, min(_COLUMNS, count))
    lines = max(1, math.ceil(count / columns))
    figure = Figure(figsize=(4.6 * columns, 3.2 * lines), dpi=110, layout="constrained")
    if title:
        figure.suptitle(title, fontsize=12)
    for position, name in enumerate([*held_out, *rewards, *levels], start=1):
        axes = figure.add_subplot(lines, columns, position)
        if name in held_out:
            _draw_held_out(axes, rows, name, _BETTER[direction(name)])
        else:
            (_draw_reward if name in rewards else _draw_level)(axes, rows, name)
        axes.set_xlabel("epoch", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")


def _draw_reward(axes: Any, rows: Rows, name: str) -> None:
    steps, means = _points(rows, name)
    band = name.removesuffix("mean") + "group_std"
    spread = np.array([rows[step].get(band, math.nan) for step in steps])
    if np.isfinite(spread).any():
        axes.fill_between(steps, means - spread, means + spread, color=_REWARD, alpha=0.15, lw=0, label="± group std")
    smooth = len(means) >= _SMOOTH_FROM
    axes.plot(steps, means, color=_REWARD, lw=1.0 if smooth else 1.8, alpha=0.45 if smooth else 1.0, label="mean")
    if smooth:
        axes.plot(steps, _running_mean(means), color=_REWARD, lw=2.0, label="running mean")
    _set_title(axes, name, _BETTER[1] + " (weighted sum)" * (name == _SUM))
    axes.legend(fontsize=7, frameon=False, loc="best")


def _draw_held_out(axes: Any, rows: Rows, name: str, better: str) -> None:
    steps, values = _points(rows, name)
    change = name.replace("eval/", "eval_change/", 1)
    middle, low, high = (
        np.array([rows[step].get(f"{change}{end}", math.nan) for step in steps]) for end in ("", "_low", "_high")
    )
    if np.isfinite(middle).any():
        if math.isnan(middle[0]):  # the evaluation before training, where the change is 0
            middle[0] = low[0] = high[0] = 0.0
        start = values - middle
        label = "95 % interval of the change"
        axes.fill_between(steps, start + low, start + high, color=_EVAL, alpha=0.15, lw=0, label=label)
        axes.legend(fontsize=7, frameon=False, loc="best")
    axes.plot(steps, values, color=_EVAL, lw=1.6, marker="o", ms=4)
    _set_title(axes, f"{name}: {values[0]:.4g} → {values[-1]:.4g}", better)


def _draw_level(axes: Any, rows: Rows, name: str) -> None:
    steps, values = _points(rows, name)
    axes.plot(steps, values, color=_LEVEL, lw=1.2, drawstyle="steps-mid")
    top = values.max() or 1.0
    axes.set_ylim(-0.03 * top, 1.05 * top)  # a line along 0 stays visible
    _set_title(axes, name, _LEVELS[name])


def _set_title(axes: Any, text: str, note: str) -> None:
    axes.set_title(f"{text}\n{note}" if note else text, fontsize=10)


def _points(rows: Rows, name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    steps = np.array([step for step in sorted(rows) if math.isfinite(rows[step].get(name, math.nan))], dtype=int)
    return steps, np.array([rows[int(step)][name] for step in steps])


def _running_mean(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the mean over a centred window of a tenth of the points, truncated at the ends."""
    width = max(3, len(values) // 10) | 1
    window = np.ones(width)
    weights = np.convolve(np.ones_like(values), window, mode="same")
    return np.asarray(np.convolve(values, window, mode="same") / weights)
