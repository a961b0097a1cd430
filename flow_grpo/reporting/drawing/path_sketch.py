"""A small drawing of a commanded camera path, frame by frame, for the corner of a video."""

from __future__ import annotations

from PIL import Image, ImageDraw
from torch import Tensor

from flow_grpo.maths.path_errors import LEAST_BASELINE_M, baseline_m
from flow_grpo.maths.poses import relative
from flow_grpo.reporting.drawing.style import FAINT, MARK, PLATE, SOFT, font

Point = tuple[float, float]
SMOOTH = 4  # drawn so much larger and shrunk, for smooth lines
STEEP = 2.0  # a path this many times higher than it is wide is drawn from behind, where its height can be seen


def flat_path(poses: Tensor) -> tuple[str, list[Point]]:
    """Return from where a path (T, 4, 4) is looked at, and its T points there, x to the right and y up.

    A moving camera's centres are seen from above (right, forward) or, where it rises or sinks, from behind (right, up),
    in metres. Of a camera that only turns the points are those at which it looks: the directions' right and up parts.
    """
    poses = relative(poses[0], poses)
    turns = baseline_m(poses) < LEAST_BASELINE_M
    right, down, forward = poses[:, :3, 2 if turns else 3].unbind(-1)
    if turns:
        name, across, along = "viewing direction", right, -down
    elif float(down.max() - down.min()) > STEEP * max(float(one.max() - one.min()) for one in (right, forward)):
        name, across, along = "from behind", right, -down
    else:
        name, across, along = "from above", right, forward
    return name, list(zip(across.tolist(), along.tolist(), strict=True))


def sketch(poses: Tensor, size: int) -> list[Image.Image]:
    """Return T square pictures, transparent: the path (T, 4, 4), its frames as dots, each frame's one marked.

    They have `size` pixels a side, at least 90 for legible words.
    """
    name, points = flat_path(poses)
    lettering = font(size // 9)
    top = int(lettering.size) + 6
    places = _fitted(points, SMOOTH * size, top=SMOOTH * top)
    ground, dot = Image.new("RGBA", (SMOOTH * size, SMOOTH * size)), SMOOTH * size / 50
    draw = ImageDraw.Draw(ground)
    edge = SMOOTH * size - 1
    draw.rounded_rectangle((0, SMOOTH * top, edge, edge), 2 * dot, fill=PLATE)
    if len(places) > 1:
        draw.line(places, fill=FAINT, width=round(dot))
    if len(places) <= size // 4:  # more would hide the line
        for place in places:
            draw.circle(place, dot, fill=FAINT)
    pictures = []
    for place in places:
        large = ground.copy()
        ImageDraw.Draw(large).circle(place, 2.5 * dot, fill=MARK)
        picture = large.resize((size, size), Image.Resampling.LANCZOS)
        ImageDraw.Draw(picture).text((size / 2, 0), name, font=lettering, fill=SOFT, anchor="ma")
        pictures.append(picture)
    return pictures


def _fitted(points: list[Point], size: int, top: int) -> list[Point]:
    # In pixels: the path fills the square below `top`, except a margin, at one scale for both axes.
    margin = size / 10
    low = [min(column) for column in zip(*points, strict=True)]
    high = [max(column) for column in zip(*points, strict=True)]
    span = max(high[0] - low[0], high[1] - low[1]) or 1.0
    scale = (size - top - 2 * margin) / span
    middle = size / 2, (top + size) / 2
    centre = (low[0] + high[0]) / 2, (low[1] + high[1]) / 2
    return [(middle[0] + scale * (x - centre[0]), middle[1] - scale * (y - centre[1])) for x, y in points]
