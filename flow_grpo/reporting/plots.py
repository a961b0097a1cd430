"""Plot a run's curves: what held-out conditions say, the rewards in use, and the run's health."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flow_grpo.reporting.health_plots import HEALTH, draw_advantages
from flow_grpo.reporting.series import SMOOTH_FROM, Rows, names_of, points, running_mean, values_at
from flow_grpo.reporting.style import BLUE, GREY, ORANGE, new_figure, round_ticks, styled
from flow_grpo.runtime.atomic_file import atomic_path

_ACROSS = 4  # panels
BETTER = {1: "higher is better", -1: "lower is better", 0: ""}
_LIKENESS = "eval/target_view_psnr_db"
_SHOWN_BY = {"eval/target_psnr", "eval/target_view", "eval/target_view_ssim"}  # where the likeness is drawn
Panel = Callable[[Any], None]


@styled()
def draw_curves(
    rows: Rows,
    path: Path,
    title: str = "",
    direction: Callable[[str], int] = lambda _: 0,
    deciding: Callable[[Iterable[str]], list[str]] = list,
) -> None:
    """Write a PNG: held-out metrics that decide the verdict, rewards with a weight and advantages, the run's health.

    Args:
        rows: step -> metrics.
        path: of the PNG, which is replaced atomically.
        title: of the figure.
        direction: returns 1 where more of a held-out metric `eval/...` is better, -1 where less is, 0 where that is not
            known.
        deciding: returns those of the held-out metrics that decide the verdict.
    """
    names = names_of(rows)
    held_out = _distinct(rows, worth_a_panel([name for name in names if name.startswith("eval/")], deciding))
    lines: list[list[Panel]] = [
        [lambda axes, name=name: _draw_held_out(axes, rows, name, BETTER[direction(name)]) for name in held_out],  # type: ignore[misc]
        [lambda axes, name=name: _draw_reward(axes, rows, name) for name in _rewards(rows, names)]
        + [lambda axes: draw_advantages(axes, rows)] * ("reward/advantage_p50" in names),
        [lambda axes, draw=draw: draw(axes, rows) for needs, draw in HEALTH if any(need in names for need in needs)],  # type: ignore[misc]
    ]
    lines = [line[first : first + _ACROSS] for line in lines for first in range(0, len(line), _ACROSS)]
    across = max(map(len, lines), default=1)
    figure = new_figure(figsize=(4.3 * across, 3.1 * max(1, len(lines)) + 0.5), dpi=100, layout="constrained")
    figure.suptitle(title, fontsize=12)
    figure.supxlabel(_label(rows), fontsize=9)
    for number, line in enumerate(lines):
        for place, draw in enumerate(line):
            axes = figure.add_subplot(len(lines), across, number * across + place + 1)
            draw(axes)
            axes.xaxis.set_major_locator(round_ticks(integer=True, steps=[1, 2, 5, 10]))
            if number == 0:
                _add_minutes(axes, rows)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")


def worth_a_panel(names: Iterable[str], deciding: Callable[[Iterable[str]], list[str]]) -> list[str]:
    """Return the held-out metrics `eval/...` to draw: those that decide the verdict, the likeness in decibels only."""
    found = deciding([name for name in names if not name.endswith("_valid")])
    return [name for name in found if not (_LIKENESS in found and name in _SHOWN_BY)]


def _distinct(rows: Rows, names: Sequence[str]) -> list[str]:
    """Return the metrics that are not the same numbers as an earlier one, nor one constant such as a share of 1."""
    found: dict[bytes, str] = {}
    for name in sorted(names, key=lambda name: name != _LIKENESS):
        steps, values = points(rows, name)
        if len(values) < 2 or np.ptp(values) > 0:
            found.setdefault(steps.tobytes() + values.tobytes(), name)
    return sorted(found.values())


def _rewards(rows: Rows, names: Sequence[str]) -> list[str]:
    """Return `reward/...mean` of the rewards that have had a weight; all where weights are not logged."""
    means = [name for name in names if name.startswith("reward/") and name.endswith("_mean")] or [
        name for name in names if name == "reward/mean"
    ]
    weights = {name: f"{name.removesuffix('_mean')}_weight" for name in means}
    used = [name for name in means if weights[name] in names and points(rows, weights[name])[1].any()]
    return used or means


def _label(rows: Rows) -> str:
    """Return the label of all horizontal axes: epochs, and what they cost."""
    minutes, (_, forwards) = _minutes(rows)[1], points(rows, "system/forward_equivalents")
    costs = [f"{minutes[-1]:.3g} minutes of training"] if len(minutes) else []
    costs += [f"{forwards[-1]:,.0f} forward equivalents of the network"] if len(forwards) else []
    return "epoch" + (f"   ({max(rows)} epochs: {', '.join(costs)})" if costs else "")


def _minutes(rows: Rows) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the epochs whose duration is known, and the minutes of training up to each one's end."""
    steps, seconds = points(rows, "time/epoch_s")
    return steps, seconds.cumsum() / 60


def _add_minutes(axes: Any, rows: Rows) -> None:
    """Add a second axis above, in minutes of training."""
    steps, minutes = _minutes(rows)
    if len(steps) < 2:
        return
    low, high = axes.get_xlim()
    ticks = [
        tick for tick in round_ticks(5, steps=[1, 2, 5, 10]).tick_values(0, minutes[-1]) if 0 <= tick <= minutes[-1]
    ]
    places = np.interp(ticks, [0, *minutes], [steps[0] - 1, *steps])
    shown = [(place, tick) for place, tick in zip(places, ticks, strict=True) if low <= place <= high]
    above = axes.secondary_xaxis("top")
    above.set_xticks([place for place, _ in shown], [f"{tick:g}" for _, tick in shown])
    above.set_xlabel("minutes of training", fontsize=8, color=GREY)
    above.tick_params(labelsize=7, colors=GREY, length=2)
    above.spines["top"].set_visible(False)


def _draw_reward(axes: Any, rows: Rows, name: str) -> None:
    steps, means = points(rows, name)
    band = name.removesuffix("mean") + "group_std"
    spread = values_at(rows, steps, band)
    if np.isfinite(spread).any():
        axes.fill_between(steps, means - spread, means + spread, color=BLUE, alpha=0.15, lw=0, label="± group std")
    smooth = len(means) >= SMOOTH_FROM
    axes.plot(steps, means, color=BLUE, lw=0.8 if smooth else 1.8, alpha=0.45 if smooth else 1.0, label="mean")
    if smooth:
        axes.plot(steps, running_mean(means), color=BLUE, label="running mean")
    _set_title(axes, name, BETTER[1])
    axes.legend(loc="best")


def _draw_held_out(axes: Any, rows: Rows, name: str, better: str) -> None:
    steps, values = points(rows, name)
    change = name.replace("eval/", "eval_change/", 1)
    middle, low, high = (values_at(rows, steps, f"{change}{end}") for end in ("", "_low", "_high"))
    if np.isfinite(middle).any():
        if math.isnan(middle[0]):  # the evaluation before training, where the change is 0
            middle[0] = low[0] = high[0] = 0.0
        start = values - middle
        label = "95 % interval of the change"
        axes.fill_between(steps, start + low, start + high, color=ORANGE, alpha=0.18, lw=0, label=label)
    axes.plot(steps, values, color=ORANGE, marker="o", ms=4)
    _, floor = points(rows, name.replace("eval/", "eval_floor/", 1))
    if len(floor):
        axes.axhline(floor[-1], color=GREY, ls="--", lw=1.2, label="floor: the judge on true videos")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")
    _set_title(axes, f"{name}: {values[0]:.4g} → {values[-1]:.4g}", better)


def _set_title(axes: Any, text: str, note: str) -> None:
    axes.set_title(f"{text}\n{note}" if note else text)
