"""The plots of a page, drawn by matplotlib and inlined as SVG: curves over epochs, kinds of camera, camera paths."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from markupsafe import Markup

from flow_grpo.reporting.drawing.camera_plots import draw_bars
from flow_grpo.reporting.drawing.path_plots import small_paths
from flow_grpo.reporting.drawing.plots import EpochPlot, draw_panel, panel_of_metric, panels_of_run
from flow_grpo.reporting.drawing.style import as_svg, new_figure, styled
from flow_grpo.reporting.metric_names import HEALTH
from flow_grpo.settings.checks import trained_rewards
from tools.run_folder import Paths, Run
from tools.run_report.held_out import Change, deciding, direction, judged

SIZE = 3.4, 2.4  # inches of a plot: at the width of a phone its letters are still legible


def curves(runs: Sequence[Run], alike: Sequence[Run]) -> list[tuple[EpochPlot, Markup]]:
    """Return the plots of one run, as in its curves.png, or of several on top of one another.

    Rewards and held-out metrics are drawn of those that were measured `alike`, health of all.
    """
    judge = functools.partial(direction, runs[0])
    if len(runs) == 1:
        panels = list(itertools.chain(*panels_of_run(runs[0].rows, judge, functools.partial(deciding, runs[0]))))
    else:
        names = [name for run in alike for name in judged(run)]
        names += [f"reward/{name}_mean" for run in alike for name in trained_rewards(run.config)]
        known = [run.rows if run in alike else {} for run in runs]  # in its place, which says its colour
        panels = [panel_of_metric(known, name, judge) for name in dict.fromkeys(names)]
        panels += [panel_of_metric([run.rows for run in runs], name, judge) for name in HEALTH]
    shown = [panel for panel in panels if any(len(run.values(name)) > 1 for run in runs for name in panel.names)]
    return [(panel, _curve(panel, f"curve {place}")) for place, panel in enumerate(shown)]


@styled()
def _curve(panel: EpochPlot, name: str) -> Markup:
    figure = new_figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    draw_panel(axes, panel)
    axes.set_xlabel("epoch")
    return Markup(as_svg(figure, name))


@styled()
def by_camera(changes: Sequence[Change], name: str) -> Markup:
    """Return bars before and after training for every kind of camera, with the intervals of the changes."""
    figure = new_figure(figsize=(SIZE[0], 0.5 + 0.3 * len(changes)), layout="constrained")
    values = [(change.before, change.after) for change in changes]
    own = [(change.change, change.low, change.high) for change in changes]
    draw_bars(figure.add_subplot(), [change.name.replace("_", " ") for change in changes], values, own)
    return Markup(as_svg(figure, name))


@styled()
def camera_path(paths: Paths, name: str) -> Markup:
    """Return a camera path, commanded and estimated, from above and from the side; "" where the camera only turns."""
    commanded = torch.tensor(paths.commanded)
    estimated = torch.tensor([point or (torch.nan,) * 3 for point in paths.estimated]).reshape(-1, 3)
    figure = small_paths(commanded, estimated)
    return Markup(as_svg(figure, name) if figure else "")
