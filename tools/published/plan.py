"""The plan of a benchmark's folder: which video follows which camera path, and the commands that generate them."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
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
    """One video to generate and to judge.

    Attributes:
        name: its file is videos/NAME.mp4.
        source: name of the source; its file is sources/SOURCE.mp4.
        camera: name of the path, which groups the tables.
        path: file of poses, relative to the folder: cameras/.../CAMERA.json.
        frames: how many.
        prompt: what the source shows; None for the default of tools/generate.py.
        focal_px: focal length of the generated video in pixels, None when not known.
    """

    name: str
    source: str
    camera: str
    path: str
    frames: int
    prompt: str | None = None
    focal_px: float | None = None


@dataclasses.dataclass(frozen=True)
class BenchmarkPlan:
    """What a folder of a benchmark holds.

    Attributes:
        benchmark: "davis" or "redirect4d".
        size: (height, width) of the generated videos in pixels.
        about: further facts of the benchmark that decide what its figures may be compared with.
        items: its videos.
    """

    benchmark: str
    size: tuple[int, int]
    about: dict[str, Any]
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
    lines = [_line(out.resolve(), plan, number, items) for number, items in _calls(plan)]
    write_atomically(out / SCRIPT, HEAD + "\n".join(lines) + "\n")
    write_atomically(out / PLAN, json.dumps(dataclasses.asdict(plan), indent=1, ensure_ascii=False) + "\n")


def _calls(plan: BenchmarkPlan) -> Iterator[tuple[int, list[Item]]]:
    """Yield what one call of tools/generate.py makes: neighbours that differ in their path only; with a number."""
    number = 0
    for _, group in groupby(plan.items, lambda item: (item.source, item.prompt, item.frames, item.focal_px)):
        items = list(group)
        yield number, items
        number += len(items)


def _line(out: Path, plan: BenchmarkPlan, number: int, items: Sequence[Item]) -> str:
    first = items[0]
    words = [GENERATE, "--source", out / SOURCES / f"{first.source}.mp4"]
    words += ["--camera", *(out / item.path for item in items)]
    words += ["--frames", first.frames, "--height", plan.size[0], "--width", plan.size[1]]
    words += ["--first-number", number, "--out", out / VIDEOS, "--overwrite"]
    words += [f"--prompt={first.prompt}"] if first.prompt is not None else []
    words += ["--focal-px", first.focal_px] if first.focal_px is not None else []
    last = out / VIDEOS / f"{items[-1].name}{BESIDE}"  # the file that is written last
    return f'[ -e {shlex.quote(str(last))} ] || "${{PYTHON:-python}}" {shlex.join(map(str, words))} "$@"'


def read_plan(out: Path) -> BenchmarkPlan:
    """Return the plan of a folder; ValueError unless `prepare` wrote it."""
    file, way_out = out / PLAN, "write it with tools/benchmark.py prepare"
    content = read_json_object(file, way_out)
    try:
        items = tuple(Item(**item) for item in content.pop("items"))
        return BenchmarkPlan(**content | {"items": items, "size": tuple(content["size"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is no plan of a benchmark ({error}); {way_out}") from error
