"""The frames of a video for people: labelled panels side by side, below them a caption and the camera's path.

Everything is drawn at the resolution of the file, so that text is sharp however small the panels' videos are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from einops import rearrange
from PIL import Image, ImageDraw
from torch import Tensor

from flow_grpo.reporting.drawing.path_sketch import sketch
from flow_grpo.reporting.drawing.style import GROUND, SOFT, TEXT, font
from flow_grpo.reporting.video_index import Box

LEAST_ROWS = 240  # pixels of a panel: smaller videos are enlarged by a whole factor
LEAST_SECONDS = 2.0  # of a file: a clip of a few frames is shown slowly
MOST_COLUMNS = 4096  # pixels: wider videos cannot be decoded by much hardware; panels go into several rows
GAP = 8  # pixels around panels


@dataclasses.dataclass(frozen=True)
class Panel:
    """One video among those side by side."""

    name: str  # label, such as "now"
    video: Tensor  # (3, T, rows, columns) uint8, all panels alike
    note: str = ""  # text after the name, where there is room for it


def draw_labelled(panels: Sequence[Panel], caption: Sequence[str], poses: Tensor | None) -> tuple[Tensor, list[Box]]:
    """Return a video (3, T, height, width) uint8, of even width and height, and where its panels are.

    The caption's lines stand below the panels, the first emphasised, and the commanded path (T, 4, 4) beside them.
    """
    count, rows, columns = panels[0].video.shape[1:]
    factor = enlargement(rows)
    size = max(15, factor * rows // 24)
    strip = 2 * (size * 5 // 6)
    boxes = _boxes([panel.name for panel in panels], factor * columns, factor * rows, strip)
    width = _even(max(box.x + box.width for box in boxes) + GAP)
    below = max(box.y + box.height for box in boxes) + GAP
    corner = 0 if poses is None else 7 * size
    lines = _wrapped(caption, size, width - 2 * GAP - corner)
    height = _even(below + max(corner, len(lines) * (size + 5)) + GAP)
    ground = Image.new("RGB", (width, height), GROUND)
    draw = ImageDraw.Draw(ground)
    for panel, box in zip(panels, boxes, strict=True):
        place, strong, plain = (box.x + 1, box.y - 4), font(size, bold=True), font(size - 1)
        draw.text(place, panel.name, font=strong, fill=TEXT, anchor="ls")
        after = strong.getlength(panel.name + " ")
        if panel.note and after + plain.getlength(panel.note) <= box.width:
            draw.text((place[0] + after, place[1]), panel.note, font=plain, fill=SOFT, anchor="ls")
    for number, (text, bold) in enumerate(lines):
        place = (GAP, below + number * (size + 5))
        draw.text(place, text, font=font(size - 1, bold=bold), fill=TEXT if bold else SOFT)
    made = np.broadcast_to(np.asarray(ground), (count, height, width, 3)).copy()
    for panel, box in zip(panels, boxes, strict=True):
        large = rearrange(panel.video, "c t h w -> t h w c").numpy().repeat(factor, axis=1).repeat(factor, axis=2)
        box.cut(made)[:] = large
    if poses is not None:
        for frame, picture in zip(made, sketch(poses, corner), strict=True):
            part = frame[below : below + corner, width - GAP - corner : width - GAP]
            under = Image.fromarray(part)
            under.paste(picture, mask=picture)
            part[:] = np.asarray(under)
    return rearrange(torch.from_numpy(made), "t h w c -> c t h w"), boxes


def enlargement(rows: int) -> int:
    """Return the factor by which a video of so many rows is enlarged."""
    return -(-LEAST_ROWS // rows)


def rate(frames: int, fps: float) -> float:
    """Return `fps`, or less for a video of so few frames that it would be over before it is seen."""
    return min(fps, frames / LEAST_SECONDS)


def _boxes(names: Sequence[str], width: int, height: int, strip: int) -> list[Box]:
    # Each below a strip for its label; even places keep their colours apart.
    step = _even(width + GAP)
    across = max(1, min(len(names), (MOST_COLUMNS - GAP) // step))
    return [
        Box(name, GAP + place % across * step, strip + place // across * _even(height + strip + GAP), width, height)
        for place, name in enumerate(names)
    ]


def _wrapped(lines: Sequence[str], size: int, width: int) -> list[tuple[str, bool]]:
    # Lines that fit, each with whether it is emphasised.
    found = []
    for number, line in enumerate(lines):
        bold = number == 0
        wide = font(size - 1, bold=bold).getlength
        held: list[str] = []
        for word in line.split(" "):
            if held and wide(" ".join([*held, word])) > width:
                found.append((" ".join(held), bold))
                held = []
            held.append(word)
        found.append((" ".join(held), bold))
    return found


def _even(pixels: int) -> int:
    return pixels + pixels % 2
