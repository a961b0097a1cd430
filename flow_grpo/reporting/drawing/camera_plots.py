"""Plot held-out metrics by kind of camera, before and after training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flow_grpo.reporting.drawing.plots import BETTER, Deciding, Direction, worth_a_panel
from flow_grpo.reporting.drawing.style import BLUE, GREY, new_figure, save_png, styled

Changes = Mapping[str, Mapping[str, Sequence[float]]]
"""Kind of camera -> `eval/` name -> [mean, low, high] of the paired change, where there is an interval."""

_PREFIX = "eval_by_camera/"


def shown_metrics(after: Mapping[str, float], deciding: Deciding) -> list[str]:
    """Return the `eval/` names worth a panel of metrics `eval_by_camera/<camera>/<name>`."""
    values: dict[str, set[float]] = {}
    for name, value in after.items():
        values.setdefault(f"eval/{name.split('/', 2)[2]}", set()).add(value)
    return worth_a_panel([name for name, own in values.items() if own != {1.0}], deciding)  # a share of 1 says nothing


@styled()
def draw_cameras(
    means: tuple[Mapping[str, float], Mapping[str, float]],
    changes: Changes,
    names: Sequence[str],
    path: Path,
    direction: Direction = lambda _: 0,
) -> None:
    """Write a PNG with one panel per metric: a pair of bars for each kind of camera, with the change's interval.

    `means` are by `eval_by_camera/<camera>/<name>`, before training and after it, `names` those to draw, `eval/...`.
    """
    cameras = sorted({name.split("/")[1] for name in means[1] if name.startswith(_PREFIX)})
    figure = new_figure(figsize=(3.9 * len(names) + 1.2, 0.42 * len(cameras) + 1.5), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        short = name.removeprefix("eval/")
        values = [[given.get(f"{_PREFIX}{camera}/{short}", np.nan) for given in means] for camera in cameras]
        own = [changes.get(camera, {}).get(name) for camera in cameras]
        draw_bars(axes, cameras, values, own)
        axes.set_title(f"{short}\n{BETTER[direction(name)]}".strip())
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    save_png(figure, path)


def draw_bars(
    axes: Any, cameras: Sequence[str], values: Sequence[Sequence[float]], changes: Sequence[Sequence[float] | None]
) -> None:
    """Draw a pair of bars for each kind of camera, from top to bottom.

    `values` are (before training, after it) of each, `changes` [mean, low, high] of each one's change, or None.
    """
    places = np.arange(len(cameras))
    before, after = zip(*values, strict=True)
    axes.barh(places - 0.19, before, 0.36, color=GREY, alpha=0.55, label="before training")
    axes.barh(places + 0.19, after, 0.36, color=BLUE, label="after, 95 % interval of the change")
    for place, start, change in zip(places, before, changes, strict=True):
        if change is not None:
            low, high = start + change[1], start + change[2]
            middle, half = (low + high) / 2, (high - low) / 2
            axes.errorbar(middle, place + 0.19, xerr=half, fmt="none", ecolor="#111827", capsize=2.5, lw=1.1)
    axes.set_yticks(places, cameras)
    axes.set_ylim(len(cameras) - 0.5, -0.5)  # the first above
    axes.grid(visible=False, axis="y")
    finite = [value for value in (*before, *after) if np.isfinite(value)]
    least, most = min(finite), max(finite)
    if least * most > 0 and most - least < 0.5 * min(abs(least), abs(most)):  # far from 0 and alike, such as decibels
        margin = 0.25 * (most - least) or abs(most)
        axes.set_xlim(least - margin, most + margin)
