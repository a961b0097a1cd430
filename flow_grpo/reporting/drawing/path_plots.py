"""Plot a commanded and an estimated camera path in one figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flow_grpo.maths.path_errors import LEAST_BASELINE_M, baseline_m
from flow_grpo.maths.poses import relative
from flow_grpo.reporting.drawing.style import BLUE, ORANGE, new_figure, save_png, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COMMANDED: dict[str, Any] = {"color": BLUE, "lw": 5.0, "alpha": 0.35}
_ESTIMATED: dict[str, Any] = {"color": ORANGE, "lw": 1.3, "alpha": 0.9}
_SHOWN_VIEWS = 7  # viewing directions per path; more would hide it
_MARGIN = 1.15  # size of the axes relative to the paths' bounding box


@styled()
def draw_paths(commanded: Tensor, estimated: Tensor, path: Path, title: str = "") -> None:
    """Write a PNG of two paths in 3D, from above and from the side, all at the same scale.

    The estimate is aligned to the command at its first estimated frame, with the best-fitting scale. For a moving
    camera, camera centres are drawn, in 3D with viewing directions; for one that only rotates, the viewing directions'
    unit vectors. The file is replaced atomically.

    Both are camera-to-world (F, 4, 4), `commanded` in metres, `estimated` in any world frame and unit, NaN for frames
    without an estimate.
    """
    commanded = relative(commanded[0], commanded)
    turns_only = baseline_m(commanded) < LEAST_BASELINE_M
    aligned = _aligned(commanded, estimated)
    column = 2 if turns_only else 3
    box = _box(torch.cat([commanded, aligned])[:, :3, column])
    figure = new_figure(figsize=(13, 4.8), dpi=100)  # constrained layout would cut labels beside an axes in 3D
    figure.subplots_adjust(left=0.02, right=0.98, bottom=0.13, top=0.84, wspace=0.22)
    figure.suptitle(title, fontsize=11)
    space = figure.add_subplot(1, 3, 1, projection="3d")
    above, side = figure.add_subplot(1, 3, 2), figure.add_subplot(1, 3, 3)
    label = f"estimated, {len(aligned)} of {len(commanded)} frames"
    # The command is drawn first and wide, so that both are visible where they coincide.
    for poses, name, line in ((commanded, "commanded", _COMMANDED), (aligned, label, _ESTIMATED)):
        style = {"label": name, "marker": "o", "ms": line["lw"] + 1.5, **line}
        x, y, z = poses[:, :3, column].unbind(-1)
        space.plot(x, z, -y, **style)
        _draw_flat(above, side, poses[:, :3, column], **style)
        if len(poses) and not turns_only:
            chosen = torch.linspace(0, len(poses) - 1, min(_SHOWN_VIEWS, len(poses))).round().long()
            u, v, w = poses[chosen, :3, 2].unbind(-1)
            arrows = {"length": float(box[0, 1] - box[0, 0]) / 6, "lw": 0.8, "arrow_length_ratio": 0.25}
            space.quiver(x[chosen], z[chosen], -y[chosen], u, w, -v, color=line["color"], **arrows)
    what = "viewing direction" if turns_only else "camera centre, m"
    _finish_flat(above, side, box, f": {what}")
    right, forward, up = above.get_xlim(), above.get_ylim(), side.get_ylim()
    space.set(xlim=right, ylim=forward, zlim=up, xlabel="right", ylabel="forward", zlabel="up")
    space.legend(loc="upper left")
    _make_small(space)
    space.zaxis.label.set_fontsize(8)
    save_png(figure, path)


def small_paths(commanded: Tensor, estimated: Tensor) -> Figure | None:
    """Return a small figure of two paths from above and from the side; None for a camera that only turns.

    Both are camera centres (F, 3) in metres, x right, y down, z forward; NaN for frames without an estimate.
    """
    if not len(commanded) or (commanded - commanded[0]).norm(dim=1).max() < LEAST_BASELINE_M:
        return None
    figure = new_figure(figsize=(3.4, 1.9), layout="constrained")
    above, side = figure.subplots(1, 2)
    _draw_flat(above, side, commanded, **_COMMANDED)
    _draw_flat(above, side, estimated, **_ESTIMATED)
    _finish_flat(above, side, _box(torch.cat([commanded, estimated[estimated.isfinite().all(1)]])))
    for axes in (above, side):
        axes.locator_params(nbins=3)
    return figure


def _aligned(commanded: Tensor, estimated: Tensor) -> Tensor:
    # The n estimated poses with the first one placed on the command, at the least-squares scale. No rotation is fitted:
    # it would be arbitrary about a straight path, and would hide rotation errors.
    found = estimated.isfinite().flatten(1).all(1)
    if not found.any():
        return commanded[:0]
    target = commanded[found]
    steps = relative(target[0], target)[:, :3, 3]
    from_first = relative(estimated[found][0], estimated[found])
    centres = from_first[:, :3, 3]
    if float(centres.square().sum()) > 0:
        from_first[:, :3, 3] *= ((steps * centres).sum() / centres.square().sum()).clamp(min=0.0)
    aligned: Tensor = target[0] @ from_first
    return aligned


def _box(points: Tensor) -> Tensor:
    # Lower and upper bounds (3, 2) of a cube around points (n, 3).
    low, high = points.amin(0), points.amax(0)
    half = _MARGIN * float((high - low).max()) / 2 or 1.0
    return torch.stack([(low + high) / 2 - half, (low + high) / 2 + half], dim=1)


def _draw_flat(above: Any, side: Any, points: Tensor, **style: Any) -> None:
    x, y, z = points.unbind(-1)
    above.plot(x, z, **style)
    side.plot(z, -y, **style)


def _finish_flat(above: Any, side: Any, box: Tensor, what: str = "") -> None:
    right, forward, up = box[0].tolist(), box[2].tolist(), (-box[1].flip(0)).tolist()
    above.set(xlim=right, ylim=forward, xlabel="right", ylabel="forward", title=f"from above{what}")
    side.set(xlim=forward, ylim=up, xlabel="forward", ylabel="up", title=f"from the side{what}")
    for axes in (above, side):
        axes.set_aspect("equal")
        _make_small(axes)


def _make_small(axes: Any) -> None:
    axes.locator_params(nbins=5)
    axes.tick_params(labelsize=7)
    axes.xaxis.label.set_fontsize(8)
    axes.yaxis.label.set_fontsize(8)
    axes.title.set_fontsize(9)
