"""The plan of a benchmark's folder: which video follows which camera path, and the commands that generate them."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from flow_grpo.maths.poses import relative
from flow_grpo.runtime.atomic_file import write_atomically
from flow_grpo.runtime.json_files import read_json_object
from flow_grpo.runtime.video_file import write_video
from tools.generation.records import BESIDE

PLAN, SCRIPT, VIDEOS, SOURCES, CAMERAS = "benchmark.json", "generate.sh", "videos", "sources", "cameras"
GENERATE = Path(__file__).resolve().parents[1] / "generate.py"
HEAD = """#!/bin/sh
# Generates the videos of a benchmark: sh generate.sh OPTIONS, with OPTIONS of tools/generate.py such as --run
# outputs/first, or --model FOLDER --adapter FOLDER. What is complete is left as it is. Lines may run side by side.
set -e
"""


@dataclasses.dataclass(frozen=True)
class Item:
    """One video to generate and to judge."""

    name: str  # its file is videos/NAME.mp4
    source: str  # its file is sources/SOURCE.mp4
    camera: str  # name of the path, which groups the tables
    path: str  # file of poses, relative to the folder: cameras/.../CAMERA.json
    frames: int
    prompt: str | None = None  # what the source shows; None for the default of tools/generate.py
    focal_px: float | None = None  # of the generated video, None when not known


@dataclasses.dataclass(frozen=True)
class BenchmarkPlan:
    """What a folder of a benchmark holds."""

    benchmark: str  # "davis" or "redirect4d"
    size: tuple[int, int]  # (height, width) of the generated videos in pixels
    about: dict[str, Any]  # further facts that decide what its figures may be compared with
    items: tuple[Item, ...]


def item_name(source: str, camera: str) -> str:
    """Return the name that tools/generate.py gives to a source along a path of a file."""
    return f"{source}_{camera}"


def check_names(items: Sequence[Item]) -> None:
    name, count = Counter(item.name for item in items).most_common(1)[0]
    if count > 1:
        raise ValueError(f"video {name} is {count} times in the list, must be there once")


def write_source(out: Path, source: str, video: Tensor) -> None:
    """Write a source video (3, T, h, w) uint8, every value kept."""
    write_video(out / SOURCES / f"{source}.mp4", video, lossless=True)


def write_path(out: Path, path: str, poses: Tensor) -> None:
    """Write poses (T, 4, 4) relative to the first as a camera file."""
    write_atomically(out / path, json.dumps({"poses": relative(poses[0], poses).tolist()}))


def write_plan(out: Path, plan: BenchmarkPlan) -> None:
    lines, number, place = [], 0, out.resolve()
    # One call of tools/generate.py makes neighbours that differ in their path only.
    for _, group in groupby(plan.items, lambda item: (item.source, item.prompt, item.frames, item.focal_px)):
        items = list(group)
        first = items[0]
        words = [GENERATE, "--source", place / SOURCES / f"{first.source}.mp4"]
        words += ["--camera", *(place / item.path for item in items)]
        words += ["--frames", first.frames, "--height", plan.size[0], "--width", plan.size[1]]
        words += ["--first-number", number, "--out", place / VIDEOS, "--overwrite"]
        words += [f"--prompt={first.prompt}"] if first.prompt is not None else []
        words += ["--focal-px", first.focal_px] if first.focal_px is not None else []
        last = place / VIDEOS / f"{items[-1].name}{BESIDE}"  # the file that is written last
        lines.append(f'[ -e {shlex.quote(str(last))} ] || "${{PYTHON:-python}}" {shlex.join(map(str, words))} "$@"')
        number += len(items)
    write_atomically(out / SCRIPT, HEAD + "\n".join(lines) + "\n")
    write_atomically(out / PLAN, json.dumps(dataclasses.asdict(plan), indent=1, ensure_ascii=False) + "\n")


def read_plan(out: Path) -> BenchmarkPlan:
    """Return the plan of a folder; ValueError unless `prepare` wrote it."""
    file, way_out = out / PLAN, "write it with tools/benchmark.py prepare"
    content = read_json_object(file, way_out)
    try:
        items = tuple(Item(**item) for item in content.pop("items"))
        return BenchmarkPlan(**content | {"items": items, "size": tuple(content["size"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is no plan of a benchmark ({error}); {way_out}") from error
