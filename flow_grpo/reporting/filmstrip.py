"""The film strip of training: what the policy made of the same held-out conditions, evaluation by evaluation."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image, ImageDraw

from flow_grpo.reporting import video_index
from flow_grpo.reporting.clips import BASE, NOW, TRUE
from flow_grpo.reporting.drawing.style import GROUND, SOFT, TEXT, font
from flow_grpo.runtime.atomic_file import atomic_path
from flow_grpo.runtime.video_file import read_frames

CONDITIONS, EVALUATIONS = 4, 6  # rows and columns, at most; the first and the last evaluation are always shown
ROWS = 200  # pixels of a picture
GAP, LETTERS = 8, 15  # pixels
Line = dict[str, Any]


def draw_filmstrip(videos: Path, path: Path) -> None:
    """Write a PNG with the last frames of evaluations, one row per condition; nothing where there is no video.

    In the last frame a path has led furthest, so policies differ most. The folder of videos has their index.
    """
    lines = [line for line in video_index.read(videos) if line.get("kind") == "eval"]
    steps = chosen_steps(sorted({line["step"] for line in lines}))
    by_condition: dict[int, dict[int, Line]] = {}
    for line in lines:
        by_condition.setdefault(line["condition"], {})[line["step"]] = line
    rows = []
    for own in list(by_condition.values())[:CONDITIONS]:
        made = [_last(videos, own[step], NOW, BASE) if step in own else None for step in steps]
        latest = own[max(own)]
        camera = latest["preset"] or latest["camera"]
        words = f"{latest['scene']} {camera}" if camera else latest["caption"].partition(":")[0]
        rows.append((words, [*made, _last(videos, latest, TRUE)]))
    if any(picture for _, pictures in rows for picture in pictures):
        started = any(video_index.panel(line, BASE) and not video_index.panel(line, NOW) for line in lines)
        names = [f"epoch {step}" for step in steps]
        names[0] += " (before training)" * started
        with atomic_path(path) as temporary:
            _drawn(rows, [*names, "true view"]).save(temporary, format="PNG")


def chosen_steps(steps: Sequence[int], most: int = EVALUATIONS) -> list[int]:
    """Return at most so many of the steps, evenly spread, with the first and the last."""
    places = np.linspace(0, len(steps) - 1, min(most, len(steps))).round().astype(int)
    return [steps[place] for place in places]


def _drawn(rows: Sequence[tuple[str, list[Image.Image | None]]], names: Sequence[str]) -> Image.Image:
    used = [place for place in range(len(names)) if any(pictures[place] for _, pictures in rows)]
    widths = [max(picture.width for _, pictures in rows if (picture := pictures[place])) for place in used]
    line = ROWS + LETTERS + 3 * GAP
    sheet = Image.new("RGB", (sum(widths) + GAP * (len(used) + 1), LETTERS + 2 * GAP + line * len(rows)), GROUND)
    draw, x = ImageDraw.Draw(sheet), GAP
    for place, width in zip(used, widths, strict=True):
        draw.text((x, GAP), names[place], font=font(LETTERS, bold=True), fill=TEXT)
        for number, (_, pictures) in enumerate(rows):
            if picture := pictures[place]:
                sheet.paste(picture, (x, LETTERS + 3 * GAP + line * number))
        x += width + GAP
    for number, (words, _) in enumerate(rows):
        draw.text((GAP, LETTERS + 4 * GAP + line * number + ROWS - 2), words, font=font(LETTERS - 2), fill=SOFT)
    return sheet


def _last(videos: Path, line: Line, *names: str) -> Image.Image | None:
    box = video_index.panel(line, *names)
    try:
        frames = collections.deque(read_frames(videos / line["file"]), maxlen=1) if box else ()
    except (OSError, av.FFmpegError):
        return None
    if not box or not frames:
        return None
    (frame,) = frames
    part = Image.fromarray(box.cut(frame))
    return part.resize((round(part.width * ROWS / part.height), ROWS), Image.Resampling.LANCZOS)
