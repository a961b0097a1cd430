"""The plan of a benchmark's folder: which video follows which camera path, how it is generated, and which are there."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flow_grpo.data.trajectories import read_path
from flow_grpo.data.video_io import video_size
from flow_grpo.maths.poses import relative
from flow_grpo.runtime.atomic_file import write_atomically
from flow_grpo.runtime.json_files import read_json_object
from flow_grpo.runtime.video_file import write_video
from tools.evaluation.inputs import EvaluationTask
from tools.generation.records import AFTER, BESIDE, RECORD, VIDEO_NAMES, read_record

PLAN, SCRIPT, VIDEOS, SOURCES, CAMERAS = "benchmark.json", "generate.sh", "videos", "sources", "cameras"
GENERATE = Path(__file__).resolve().parents[1] / "generate.py"
SAME = ("model", "adapter", "steps", "shift", "guidance", "seed", "dtype")  # options that all videos must share
CLOSE = 1e-6  # metres, and entries of a rotation: a record's poses are those of the plan
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


def find_tasks(
    out: Path, plan: BenchmarkPlan, folder: Path, ending: str, focal_px: float | None
) -> list[EvaluationTask]:
    """Return the videos of a plan that are in `folder`, in its order; their focal length is NaN where none is known.

    Raises:
        ValueError: no video, one that is not in the plan, of another length, along another path, or made with other
            settings than the first.
    """
    known = {f"{item.name}{end}" for item in plan.items for end in VIDEO_NAMES}
    strange = sorted(file.name for file in folder.glob(f"*{AFTER}") if file.name not in known)
    if strange:
        raise ValueError(f"video {strange[0]} in {folder} is not in the list of {out}; move it away or rename it")
    items = [item for item in plan.items if (folder / f"{item.name}{ending}").is_file()]
    if not items:
        raise ValueError(f"{folder} has none of the {len(plan.items)} videos, such as {plan.items[0].name}{ending}")
    records = {item.name: read_record(folder / f"{item.name}{RECORD}") for item in items}
    made = {name: record for name, record in records.items() if record}
    for name, record in made.items():
        first = next(iter(made.values()))
        for option in SAME:
            if record.get(option) != first.get(option):
                raise ValueError(
                    f"video {name} was made with {option} {record.get(option)!r}, others with {first.get(option)!r}, "
                    "must be the same; generate it again"
                )
    return [_task(out, item, folder / f"{item.name}{ending}", records[item.name] or {}, focal_px) for item in items]


def _task(out: Path, item: Item, file: Path, record: Mapping[str, Any], focal_px: float | None) -> EvaluationTask:
    frames = video_size(file)[0]
    if frames != item.frames:
        raise ValueError(f"video {file} has {frames} frames, must have {item.frames}; generate it again")
    commanded = read_path(out / item.path, item.frames)  # as tools/generate.py reads it
    if record:
        poses = torch.tensor(record["poses"], dtype=torch.float64)
        if poses.shape != commanded.shape or (poses - commanded).abs().max() > CLOSE:
            raise ValueError(f"video {file} was generated along another path than {item.path}; generate it again")
    focal = item.focal_px or record.get("focal_px") or focal_px or math.nan
    return EvaluationTask(file, item.name, commanded, item.camera, item.source, focal)
