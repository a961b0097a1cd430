"""Plots as shapes for inline SVG: curves of metrics over epochs, changes by kind of camera, camera paths."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flow_grpo.judging.verdict import word_of
from flow_grpo.maths.path_errors import LEAST_BASELINE_M
from flow_grpo.reporting.plots import BETTER
from flow_grpo.reporting.series import SMOOTH_FROM, running_mean
from tools.run_report.run_folder import Paths, Run
from tools.run_report.words import mark, number, pair, span

WIDTH, HEIGHT = 360, 190  # of a plot, in units of its view box
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 24
SIDE = 150  # of a square plot of a camera path
FILLED = 1 / 1.32  # of that, by the largest extent of the path
Point = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Line:
    """One run's curve in a plot: `faint` and `bold` are SVG paths, `band` a polygon, `dots` centres of marks."""

    label: str
    colour: int
    bold: str
    faint: str = ""
    band: str = ""
    dots: Sequence[Point] = ()


@dataclasses.dataclass(frozen=True)
class Plot:
    """A plot of one metric.

    Attributes:
        name: of the metric.
        note: what is drawn, or which values are healthy.
        lines: one per run.
        across: (place, label) of the marks of the horizontal axis.
        upright: likewise of the vertical axis.
        floor: height of a dashed line, and its label; None without one.
        said: what a reader who cannot see the plot is told.
        points: [place, [height of each line's mark], text], for the values under the pointer.
    """

    name: str
    note: str
    lines: list[Line]
    across: list[tuple[float, str]]
    upright: list[tuple[float, str]]
    floor: tuple[float, str] | None
    said: str
    points: list[list[Any]]


def ticks(low: float, high: float, count: int = 4, least: float = 0.0) -> list[tuple[float, str]]:
    """Return about `count` round numbers within [low, high], at least `least` apart, each with its label."""
    rough = max((high - low) / count, least) or 1.0
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(place * step, mark(place * step, step)) for place in range(first, last + 1)]


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the linear map that takes low to start and high to end."""
    return lambda value: round(start + (value - low) / ((high - low) or 1.0) * (end - start), 2)


def constant(runs: Sequence[Run], name: str) -> float | None:
    """Return the value of a metric that never changes in any of the runs; else None."""
    values = {value for run in runs for _, value in run.series(name)}
    return values.pop() if len(values) == 1 else None


def plot(runs: Sequence[Run], name: str, note: str = "") -> Plot | None:
    """Return the plot of a metric over the epochs of one or several runs; None where no run has two values."""
    drawn = [(colour, run, run.series(name)) for colour, run in enumerate(runs)]
    drawn = [(colour, run, series) for colour, run, series in drawn if len(series) > 1]
    if not drawn:
        return None
    bands = [_band(run, name, series) for _, run, series in drawn]
    floors = [value for run in runs for _, value in run.series(name.replace("eval/", "eval_floor/", 1))[:1]]
    floor = floors[0] if floors and name.startswith("eval/") else None
    heights = [value for _, _, series in drawn for _, value in series]
    heights += [end for band in bands for _, low, high in band for end in (low, high)]
    heights += [] if floor is None else [floor]
    low, high = min(heights), max(heights)
    margin = 0.06 * (high - low) or abs(low) * 0.1 or 1.0
    last = max(step for _, _, series in drawn for step, _ in series)
    place = scale(0, last, LEFT, WIDTH - RIGHT)
    height = scale(low - margin, high + margin, HEIGHT - BOTTOM, TOP)
    marks = ticks(low - margin, high + margin)
    return Plot(
        name=name,
        note=note,
        lines=[
            _line(run, colour, series, band, (place, height))
            for (colour, run, series), band in zip(drawn, bands, strict=True)
        ],
        across=[(place(step), label) for step, label in ticks(0, last, 5, least=1)],
        upright=[(height(value), label) for value, label in marks],
        floor=None if floor is None else (height(floor), f"floor {number(floor)}"),
        said="; ".join(_said(run, name, series, len(runs)) for _, run, series in drawn),
        points=_points([series for *_, series in drawn], bands, [run for _, run, _ in drawn], (place, height)),
    )


def _band(run: Run, name: str, series: Sequence[tuple[int, float]]) -> list[tuple[int, float, float]]:
    """Return (step, low, high): of a held-out metric the interval of its change, of a reward its std in groups."""
    found = []
    for step, value in series:
        row = run.rows[step]
        if name.startswith("eval/"):
            change = name.replace("eval/", "eval_change/", 1)
            middle, low, high = (row.get(change + end, math.nan) for end in ("", "_low", "_high"))
            ends = (value - middle + low, value - middle + high)
        else:
            spread = row.get(name.removesuffix("mean") + "group_std", math.nan) if name.endswith("_mean") else math.nan
            ends = (value - spread, value + spread)
        if math.isfinite(ends[0]):
            found.append((step, *ends))
    if found and name.startswith("eval/") and found[0][0] != series[0][0]:
        found.insert(0, (series[0][0], series[0][1], series[0][1]))  # before training the change is 0
    return found


def _line(
    run: Run,
    colour: int,
    series: Sequence[tuple[int, float]],
    band: Sequence[tuple[int, float, float]],
    axes: tuple[Callable[[float], float], Callable[[float], float]],
) -> Line:
    place, height = axes
    path = _path([(place(step), height(value)) for step, value in series])
    edge = [(place(step), height(high)) for step, _, high in band]
    edge += [(place(step), height(low)) for step, low, _ in reversed(band)]
    shape = " ".join(f"{x:g},{y:g}" for x, y in edge)
    if len(series) < SMOOTH_FROM:
        dots = [(place(step), height(value)) for step, value in series]
        return Line(run.name, colour, bold=path, band=shape, dots=dots)
    smooth = running_mean(np.array([value for _, value in series]))
    bold = _path([(place(step), height(value)) for (step, _), value in zip(series, smooth, strict=True)])
    return Line(run.name, colour, bold=bold, faint=path, band=shape)


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)


def _said(run: Run, name: str, series: Sequence[tuple[int, float]], runs: int) -> str:
    (first, before), (last, after) = series[0], series[-1]
    whose = f"{run.name}: " if runs > 1 else ""
    start, end = pair(before, after)
    return f"{whose}{name} from {start} at epoch {first} to {end} at epoch {last}"


def _points(
    series: Sequence[Sequence[tuple[int, float]]],
    bands: Sequence[Sequence[tuple[int, float, float]]],
    runs: Sequence[Run],
    axes: tuple[Callable[[float], float], Callable[[float], float]],
) -> list[list[Any]]:
    place, height = axes
    values, ends = [dict(own) for own in series], [{step: (low, high) for step, low, high in band} for band in bands]
    every = [value for own in series for _, value in own]
    write = functools.partial(number, differ=max(every) - min(every))
    found = []
    for step in sorted({step for own in values for step in own}):
        texts, marks = [], []
        for own, band, run in zip(values, ends, runs, strict=True):
            if step in own:
                around = f" ({write(band[step][0])} to {write(band[step][1])})" if step in band else ""
                texts.append((f"{run.name} " if len(runs) > 1 else "") + write(own[step]) + around)
                marks.append(height(own[step]))
        found.append([place(step), marks, f"epoch {step}: {' · '.join(texts)}"])
    return found


@dataclasses.dataclass(frozen=True)
class CameraRow:
    """One kind of camera in a plot of changes: places of the value before and after, of the interval, and in words."""

    camera: str
    height: float
    before: float
    after: float
    interval: tuple[float, float] | None
    word: str
    said: str


@dataclasses.dataclass(frozen=True)
class CameraPlot:
    """The change of one metric for every kind of camera."""

    name: str
    better: str
    tall: float
    rows: list[CameraRow]
    across: list[tuple[float, str]]


CAMERA_LEFT, CAMERA_ROW = 104, 20


def by_camera(run: Run, name: str) -> CameraPlot | None:
    """Return the plot of a held-out metric `eval/...` before and after, by kind of camera; None where none has both."""
    short, changes = name.removeprefix("eval/"), run.summary.change_by_camera if run.summary else {}
    kinds = sorted({key.split("/")[1] for row in run.rows.values() for key in row if key.startswith("eval_by_camera/")})
    found, sign = [], run.direction(name)
    for camera in kinds:
        change = changes.get(camera, {}).get(name)
        series = [value for _, value in run.series(f"eval_by_camera/{camera}/{short}")]
        before, after = _before_after(series, change, began_elsewhere=run.began_elsewhere)
        if math.isfinite(before) and math.isfinite(after):
            ends, word = None, "unclear"
            if change and len(change) == 3:
                ends, word = (before + change[1], before + change[2]), word_of(sign, change[1], change[2])
            found.append((camera, before, after, ends, word))
    if not found:
        return None
    values = [value for _, before, after, ends, _ in found for value in (before, after, *(ends or ()))]
    low, high = min(values), max(values)
    low = 0.0 if 0 <= low < 0.5 * high else low - 0.05 * (high - low)
    place = scale(low, high, CAMERA_LEFT, WIDTH - RIGHT)
    rows = []
    for line, (camera, before, after, ends, word) in enumerate(found):
        said = f"{camera}: {' to '.join(pair(before, after))}"
        said += f"; 95 % interval of the change {span(ends[0] - before, ends[1] - before)}, {word}" if ends else ""
        interval = (place(ends[0]), place(ends[1])) if ends else None
        height = TOP + CAMERA_ROW * (line + 0.5)
        rows.append(CameraRow(camera, height, place(before), place(after), interval, word, said))
    tall = TOP + CAMERA_ROW * len(rows) + BOTTOM
    return CameraPlot(name, BETTER[sign], tall, rows, [(place(value), label) for value, label in ticks(low, high)])


def _before_after(
    series: Sequence[float], change: Sequence[float] | None, *, began_elsewhere: bool
) -> tuple[float, float]:
    """Return a metric before training and at the last evaluation, NaN for what is not known.

    Of a run that began from another's checkpoint, the mean change tells what was before that one's training.
    """
    if not series:
        return math.nan, math.nan
    if began_elsewhere:
        return series[-1] - change[0] if change else math.nan, series[-1]
    return series[0], series[-1] if len(series) > 1 else math.nan


@dataclasses.dataclass(frozen=True)
class PathView:
    """A camera path from above or from the side.

    Attributes:
        title: from where.
        commanded: SVG path.
        estimated: SVG path, in pieces where frames are missing.
        start: of the command.
        bar: SVG path of a line as long as the largest extent.
        size: that extent in metres.
        found: how many frames are located.
    """

    title: str
    commanded: str
    estimated: str
    start: Point
    bar: str
    size: str
    found: str


def path_views(paths: Paths) -> list[PathView]:
    """Return a camera path from above (right, forward) and from the side (forward, up), both at one scale.

    There is none to show for a camera that only turns: [].
    """
    estimated = [point for point in paths.estimated if point is not None]
    every = np.array([*paths.commanded, *estimated], dtype=float).reshape(-1, 3)
    command = np.array(paths.commanded, dtype=float).reshape(-1, 3)
    turns_only = not len(command) or np.linalg.norm(command - command[0], axis=1).max() < LEAST_BASELINE_M
    if turns_only or not np.isfinite(every).all():
        return []
    low, high = every.min(0), every.max(0)
    extent = float((high - low).max())
    middle, half = (low + high) / 2, extent / 2 / FILLED
    size = f"{number(extent, 2)} m"
    found = f"{len(estimated)} of {len(paths.estimated)} frames"
    margin = SIDE * (1 - FILLED) / 2
    bar = f"M{margin:.1f} {SIDE - 4}H{SIDE - margin:.1f}"
    views = []
    for title, (column, across_sign), (row, up_sign) in (
        ("from above", (0, 1), (2, 1)),
        ("from the side", (2, 1), (1, -1)),
    ):

        def project(
            point: Sequence[float],
            column: int = column,
            row: int = row,
            signs: tuple[int, int] = (across_sign, up_sign),
        ) -> Point:
            right = signs[0] * (point[column] - middle[column]) / half
            up = signs[1] * (point[row] - middle[row]) / half
            return round(SIDE / 2 * (1 + float(right)), 2), round(SIDE / 2 * (1 - float(up)), 2)

        asked = [project(point) for point in paths.commanded]
        pieces = _pieces([None if point is None else project(point) for point in paths.estimated])
        views.append(PathView(title, _path(asked), "".join(map(_path, pieces)), asked[0], bar, size, found))
    return views


def _pieces(points: Sequence[Point | None]) -> list[list[Point]]:
    """Return the runs of neighbouring points that are there."""
    found: list[list[Point]] = [[]]
    for point in points:
        if point is None:
            found.append([])
        else:
            found[-1].append(point)
    return [piece for piece in found if piece]
