"""Plot a run's curves: held-out metrics, the rewards in use, and the run's health."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flow_grpo.reporting.drawing.health_plots import ADVANTAGES, HEALTH
from flow_grpo.reporting.drawing.series import Rows, points, values_at
from flow_grpo.reporting.drawing.style import BLUE, CYCLE, GREY, ORANGE, new_figure, round_ticks, save_png, styled
from flow_grpo.reporting.metric_names import healthy_text, metric_of

_ACROSS = 4  # panels
_SMOOTH_FROM = 20  # number of points from which a running mean is drawn
_MOST_BANDS = 2  # runs in one plot; more bands would hide one another
BETTER = {1: "higher is better", -1: "lower is better", 0: ""}
_PSNR = "eval/target_view_psnr_db"
_SHOWN_BY = {"eval/target_psnr", "eval/target_view", "eval/target_view_ssim"}  # where that PSNR is drawn
Direction = Callable[[str], int]
"""1 where more of a held-out metric `eval/...` is better, -1 where less is, 0 where that is not known."""
Deciding = Callable[[Iterable[str]], list[str]]
"""Those of the held-out metrics that decide the verdict."""


@dataclasses.dataclass(frozen=True)
class EpochPlot:
    """One plot over epochs."""

    title: str
    note: str  # which values are good, or ""
    names: Sequence[str]  # metrics that are drawn
    draw: Callable[[Any], None]  # into matplotlib's axes, without title


@styled()
def draw_curves(
    rows: Rows, path: Path, title: str = "", direction: Direction = lambda _: 0, deciding: Deciding = list
) -> None:
    """Write `panels_of_run` as one PNG, replaced atomically."""
    panels = panels_of_run(rows, direction, deciding)
    lines = [line[first : first + _ACROSS] for line in panels for first in range(0, len(line), _ACROSS)]
    across = max(map(len, lines), default=1)
    figure = new_figure(figsize=(4.3 * across, 3.1 * max(1, len(lines)) + 0.5), dpi=100, layout="constrained")
    figure.suptitle(title, fontsize=12)
    minutes, (_, forwards) = _minutes(rows)[1], points(rows, "system/forward_equivalents")
    costs = [f"{minutes[-1]:.3g} minutes of training"] if len(minutes) else []
    costs += [f"{forwards[-1]:,.0f} forward equivalents of the network"] if len(forwards) else []
    figure.supxlabel("epoch" + (f"   ({max(rows)} epochs: {', '.join(costs)})" if costs else ""), fontsize=9)
    for number, line in enumerate(lines):
        for place, panel in enumerate(line):
            axes = figure.add_subplot(len(lines), across, number * across + place + 1)
            axes.set_title(f"{panel.title}\n{panel.note}" if panel.note else panel.title)
            draw_panel(axes, panel)
            if number == 0:
                _add_minutes(axes, rows)
    save_png(figure, path)


def draw_panel(axes: Any, panel: EpochPlot) -> None:
    """Draw a plot over whole epochs."""
    panel.draw(axes)
    axes.xaxis.set_major_locator(round_ticks(integer=True, steps=[1, 2, 5, 10]))


def panels_of_run(rows: Rows, direction: Direction, deciding: Deciding) -> list[list[EpochPlot]]:
    """Return the plots of a run: held-out metrics that decide, rewards in use and advantages, health."""
    names = sorted({name for row in rows.values() for name in row if math.isfinite(row[name])})
    held_out = [panel_of_metric([rows], name, direction) for name in _held_out(rows, names, deciding)]
    # The means of rewards that have had a weight; of all where weights are not logged.
    means = [name for name in names if name.startswith("reward/") and name.endswith("_mean")]
    used = [name for name in means if points(rows, f"{name.removesuffix('_mean')}_weight")[1].any()]
    shown = used or means or [name for name in names if name == "reward/mean"]
    rewards = [panel_of_metric([rows], name, direction) for name in shown]
    advantages, health = (
        [
            EpochPlot(title, note, needs, functools.partial(draw, rows))
            for needs, title, note, draw in plots
            if not set(needs).isdisjoint(names)
        ]
        for plots in ([ADVANTAGES], HEALTH)
    )
    return [held_out, [*rewards, *advantages], health]


def panel_of_metric(runs: Sequence[Rows], name: str, direction: Direction) -> EpochPlot:
    """Return the plot of a metric: of one run, which has values, or of several in the colours of `CYCLE`."""
    if name.startswith("eval/"):
        note = BETTER[direction(name)]
        if len(runs) == 1:
            values = points(runs[0], name)[1]
            note = f"{values[0]:.4g} → {values[-1]:.4g}" + f", {note}" * bool(note)  # below: a name may fill the width
        elif len(runs) <= _MOST_BANDS:
            note += "; band: 95 % interval of the change"
    elif name.startswith("reward/"):
        note = BETTER[1] + "; band: ± group std" * (1 < len(runs) <= _MOST_BANDS)
    else:
        known = metric_of(name)
        note = f"healthy: {healthy}" if known and (healthy := healthy_text(known)) else "steady is healthy"
    return EpochPlot(name, note, [name], functools.partial(_draw_metric, runs=runs, name=name))


def worth_a_panel(names: Iterable[str], deciding: Deciding) -> list[str]:
    """Return the held-out metrics `eval/...` to draw: those that decide the verdict.

    Other measures of the distance from the true view are left out where its PSNR is among them.
    """
    found = deciding([name for name in names if not name.endswith("_valid")])
    return [name for name in found if not (_PSNR in found and name in _SHOWN_BY)]


def _held_out(rows: Rows, names: Iterable[str], deciding: Deciding) -> list[str]:
    # Without copies of one another and constants such as a share of 1.
    found: dict[bytes, str] = {}
    shown = worth_a_panel([name for name in names if name.startswith("eval/")], deciding)
    for name in sorted(shown, key=lambda name: name != _PSNR):
        steps, values = points(rows, name)
        if len(values) < 2 or np.ptp(values) > 0:
            found.setdefault(steps.tobytes() + values.tobytes(), name)
    return sorted(found.values())


def _minutes(rows: Rows) -> tuple[NDArray[Any], NDArray[Any]]:
    steps, seconds = points(rows, "time/epoch_s")
    return steps, seconds.cumsum() / 60


def _add_minutes(axes: Any, rows: Rows) -> None:
    steps, minutes = _minutes(rows)
    if len(steps) < 2:
        return
    low, high = axes.get_xlim()
    ticks = np.array(round_ticks(5, steps=[1, 2, 5, 10]).tick_values(0, minutes[-1]))
    places = np.interp(ticks, [0, *minutes], [steps[0] - 1, *steps])
    shown = (ticks >= 0) & (ticks <= minutes[-1]) & (low <= places) & (places <= high)
    above = axes.secondary_xaxis("top")
    above.set_xticks(places[shown], [f"{tick:g}" for tick in ticks[shown]])
    above.set_xlabel("minutes of training", fontsize=8, color=GREY)
    above.tick_params(labelsize=7, colors=GREY, length=2)
    above.spines["top"].set_visible(False)


def _draw_metric(axes: Any, runs: Sequence[Rows], name: str) -> None:
    held_out, alone = name.startswith("eval/"), len(runs) == 1
    for rows, colour in zip(runs, itertools.cycle(CYCLE)):
        steps, values = points(rows, name)
        if not len(values):
            continue
        if alone:
            colour = ORANGE if held_out else BLUE
        if held_out:
            low, high, meaning = *_interval(rows, name), "95 % interval of the change"
        else:
            spread = values_at(rows, steps, name.removesuffix("mean") + "group_std")
            low, high, meaning = values - spread, values + spread, "± group std"
        if np.isfinite(low).any() and len(runs) <= _MOST_BANDS:
            axes.fill_between(steps, low, high, color=colour, alpha=0.16, lw=0, label=meaning if alone else None)
        if held_out:
            axes.plot(steps, values, color=colour, marker="o", ms=4)
            continue
        smooth = len(values) >= _SMOOTH_FROM
        thin: dict[str, Any] = {"lw": 0.8, "alpha": 0.45} if smooth else {}
        axes.plot(steps, values, color=colour, label="mean" if alone else None, **thin)
        _draw_fixed(axes, runs, name)
        if smooth:  # a centred window of a tenth of the points, truncated at the ends
            window = np.ones(max(3, len(values) // 10) | 1)
            means = np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")
            axes.plot(steps, means, color=colour, label="running mean" if alone else None)
    floors = [points(rows, name.replace("eval/", "eval_floor/", 1))[1] for rows in runs if held_out]
    for floor in [floor for floor in floors if len(floor)][:1]:
        axes.axhline(floor[-1], color=GREY, ls="--", lw=1.2, label="floor: the estimator on true videos")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")


def _draw_fixed(axes: Any, runs: Sequence[Rows], name: str) -> None:
    # Of one run: its reward on conditions that stay the same, now and at the start, without the luck of an epoch's.
    if len(runs) > 1 or not name.startswith("reward/"):
        return
    fixed = name.replace("reward/", "fixed/", 1).removesuffix("_mean")
    now, start = points(runs[0], fixed), points(runs[0], f"{fixed}_start")
    if len(now[0]) > 1:
        axes.plot(*now, color=ORANGE, marker="o", ms=4, lw=1.2, label="fixed conditions")
        axes.plot(*start, color=GREY, ls="--", lw=1.2, label="the same, at the start")


def _interval(rows: Rows, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    # Of a held-out metric's change, on top of the value before training.
    steps, values = points(rows, name)
    change = name.replace("eval/", "eval_change/", 1)
    middle, low, high = (values_at(rows, steps, f"{change}{end}") for end in ("", "_low", "_high"))
    if np.isfinite(middle).any() and math.isnan(middle[0]):  # the evaluation before training, where the change is 0
        middle[0] = low[0] = high[0] = 0.0
    return values - middle + low, values - middle + high
