"""The plots over epochs that show a run's health, each with the metrics that it is drawn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flow_grpo.reporting.drawing.series import Rows, points, values_at
from flow_grpo.reporting.drawing.style import BLUE, CYCLE, GREEN, GREY, ORANGE, PURPLE
from flow_grpo.reporting.metric_names import LEAST_SPREAD

PHASES = ("rollout", "update", "score", "encode", "fetch", "gather", "other")
_WIDE = 50.0  # ratio of the largest to the smallest norm from which the axis is logarithmic


def _draw_signal(rows: Rows, axes: Any) -> None:
    for name, colour in (("policy/credit_share", GREEN), ("train/zero_std_ratio", GREY)):
        steps, values = points(rows, name)
        if len(steps):
            axes.plot(steps, values, color=colour, marker="o" if len(steps) < 20 else "", ms=4, label=name)
    steps, values = points(rows, "policy/spread_over_floor")
    axes.set_ylim(-0.03, 1.7)  # room for the legend
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_ylabel("share")
    if len(steps):
        other = _right(axes, "spread / floor", BLUE)
        other.plot(steps, values, color=BLUE, marker="s", ms=4, label="policy/spread_over_floor (right)")
        other.axhline(LEAST_SPREAD, color=BLUE, ls=":", lw=1)
        other.set_ylim(0, 1.7 * max(1.0, values.max()))
    _legend(axes, *([other] if len(steps) else []), loc="upper left")


def _draw_ratio(rows: Rows, axes: Any) -> None:
    steps, mean = points(rows, "policy/ratio_mean")
    if len(steps):
        low, lower, higher, high = (
            values_at(rows, steps, f"policy/ratio_{end}") - 1 for end in ("min", "p10", "p90", "max")
        )
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.15, lw=0, label="ratio - 1, smallest to largest")
        if np.isfinite(lower).any():  # runs of earlier versions have no percentiles
            axes.fill_between(steps, lower, higher, color=BLUE, alpha=0.3, lw=0, label="its middle 80 %")
        axes.plot(steps, mean - 1, color=BLUE, lw=1.2, label="policy/ratio_mean - 1")
    moved, values = points(rows, "policy/ratio_after_max_abs_log")
    if len(moved):
        axes.plot(moved, values, color=GREEN, ls="", marker="^", ms=5, label="policy/ratio_after_max_abs_log")
    axes.yaxis.set_major_formatter("{x:g}")
    clipped, share = points(rows, "policy/clip_fraction")
    if len(clipped):
        other = _right(axes, "clip fraction", ORANGE)
        other.plot(clipped, share, color=ORANGE, lw=1.2, label="policy/clip_fraction (right)")
        other.set_ylim(-0.05, 1.75)
        other.set_yticks([0, 0.25, 0.5, 0.75, 1])
    low_end, high_end = axes.get_ylim()
    axes.set_ylim(low_end, high_end + 0.65 * (high_end - low_end))  # room for the legend
    _legend(axes, *([other] if len(clipped) else []), loc="upper left")


def _draw_advantages(rows: Rows, axes: Any) -> None:
    steps, median = points(rows, "reward/advantage_p50")
    low, high = (values_at(rows, steps, f"reward/advantage_p{percent}") for percent in (10, 90))
    axes.fill_between(steps, low, high, color=PURPLE, alpha=0.2, lw=0, label="middle 80 %")
    axes.plot(steps, median, color=PURPLE, lw=1.2, label="median")
    axes.axhline(0, color=GREY, ls=":", lw=1)
    _legend(axes)


def _draw_gradient(rows: Rows, axes: Any) -> None:
    _, all_norms = points(rows, "train/grad_norm_max")
    steps, norms = points(rows, "train/grad_norm")
    if len(all_norms) == len(norms) and (all_norms > norms).any():
        axes.fill_between(steps, norms, all_norms, color=BLUE, alpha=0.2, lw=0, step="mid", label="train/grad_norm_max")
    axes.plot(steps, norms, color=BLUE, lw=1.2, drawstyle="steps-mid", label="train/grad_norm")
    if norms.min() > 0 and norms.max() > _WIDE * norms.min():
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.1 * (float(np.concatenate([norms, all_norms]).max()) or 1.0))
    _legend(axes)


def _draw_time(rows: Rows, axes: Any) -> None:
    phases = [phase for phase in PHASES if len(points(rows, f"time/{phase}_s")[0])]
    steps = sorted({int(step) for phase in phases for step in points(rows, f"time/{phase}_s")[0]})
    seconds = np.array([[rows[step].get(f"time/{phase}_s", 0.0) for step in steps] for phase in phases])
    colours = CYCLE[: len(phases)]
    if len(steps) > 1:
        axes.stackplot(steps, seconds, labels=phases, colors=colours, alpha=0.85, lw=0)
    else:
        below = seconds.cumsum(axis=0) - seconds
        for phase, heights, colour, base in zip(phases, seconds, colours, below, strict=True):
            axes.bar(steps, heights, 0.6, bottom=base, color=colour, label=phase)
    totals = seconds.sum(axis=0)
    common = max(2 * float(np.median(totals)), float(np.percentile(totals, 95)))
    axes.set_ylim(0, 1.5 * min(float(totals.max()), common))  # a single slow epoch, often the first, is cut off
    axes.set_ylabel("s")
    axes.legend(ncols=3, loc="upper right", fontsize=7, columnspacing=1.0, handlelength=1.2)


# The metrics any of which a plot needs, its title, what is healthy, and what draws it.
Plot = tuple[tuple[str, ...], str, str, Callable[[Rows, Any], None]]
_WIDE_BAND = "healthy: a wide band (flat groups have none)"
ADVANTAGES: Plot = (("reward/advantage_p50",), "advantages", _WIDE_BAND, _draw_advantages)
HEALTH: tuple[Plot, ...] = (
    (
        ("policy/credit_share", "policy/spread_over_floor", "train/zero_std_ratio"),
        *("signal", f"healthy: credit above 0.2, spread above the dotted {LEAST_SPREAD}", _draw_signal),
    ),
    (
        ("policy/ratio_mean", "policy/clip_fraction"),
        *("ratio and clip fraction", "clipped: 0 with one update an epoch, else < 0.5", _draw_ratio),
    ),
    (("train/grad_norm",), "gradient norm", "steady is healthy", _draw_gradient),
    (tuple(f"time/{phase}_s" for phase in PHASES), "time of an epoch", "by phase", _draw_time),
)


def _right(axes: Any, label: str, colour: str) -> Any:
    other = axes.twinx()
    other.grid(visible=False)
    other.spines["right"].set_visible(True)
    other.set_ylabel(label, color=colour)
    other.tick_params(axis="y", colors=colour)
    return other


def _legend(*all_axes: Any, loc: str = "best") -> None:
    handles = [handle for axes in all_axes for handle in axes.get_legend_handles_labels()[0]]
    if handles:
        all_axes[-1].legend(handles=handles, loc=loc, fontsize=7)
