"""Plot held-out metrics by kind of camera, before and after training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flow_grpo.reporting.plots import BETTER, worth_a_panel
from flow_grpo.reporting.style import BLUE, GREY, new_figure, styled
from flow_grpo.runtime.atomic_file import atomic_path

Changes = Mapping[str, Mapping[str, Sequence[float]]]
"""Kind of camera -> `eval/` name -> [mean, low, high] of the paired change, where there is an interval."""

_PREFIX = "eval_by_camera/"


def shown_metrics(after: Mapping[str, float], deciding: Callable[[Iterable[str]], list[str]]) -> list[str]:
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
    direction: Callable[[str], int] = lambda _: 0,
) -> None:
    """Write a PNG with one panel per metric: a pair of bars for each kind of camera, with the change's interval.

    Args:
        means: `eval_by_camera/<camera>/<name>` -> mean, before training and after it.
        changes: of each kind of camera; the interval stands at the bar of "after".
        names: `eval/` names to draw.
        path: the PNG file, replaced atomically.
        direction: as in `plots.draw_curves`.
    """
    cameras = sorted({name.split("/")[1] for name in means[1] if name.startswith(_PREFIX)})
    figure = new_figure(figsize=(3.9 * len(names) + 1.2, 0.42 * len(cameras) + 1.5), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    places = np.arange(len(cameras))
    for axes, name in zip(panels, names, strict=True):
        short = name.removeprefix("eval/")
        first, last = ([given.get(f"{_PREFIX}{camera}/{short}", np.nan) for camera in cameras] for given in means)
        axes.barh(places - 0.19, first, 0.36, color=GREY, alpha=0.55, label="before training")
        axes.barh(places + 0.19, last, 0.36, color=BLUE, label="after, 95 % interval of the change")
        for place, camera, start in zip(places, cameras, first, strict=True):
            if (change := changes.get(camera, {}).get(name)) is not None:
                _whisker(axes, start + change[1], start + change[2], place + 0.19)
        axes.set_title(f"{short}\n{BETTER[direction(name)]}".strip())
        axes.grid(visible=False, axis="y")
        _fit(axes, [*first, *last])
    panels[0].set_yticks(places, cameras)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")


def _whisker(axes: Any, low: float, high: float, place: float) -> None:
    axes.errorbar((low + high) / 2, place, xerr=(high - low) / 2, fmt="none", ecolor="#111827", capsize=2.5, lw=1.1)


def _fit(axes: Any, values: Sequence[float]) -> None:
    """Let bars begin elsewhere than at 0 where all values are far from it and alike, such as decibels."""
    finite = [value for value in values if np.isfinite(value)]
    low, high = min(finite), max(finite)
    if low * high > 0 and high - low < 0.5 * min(abs(low), abs(high)):
        margin = 0.25 * (high - low) or abs(high)
        axes.set_xlim(low - margin, high + margin)
