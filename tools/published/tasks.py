"""The videos of a benchmark's folder as the evaluation takes them, checked against the plan and their records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flow_grpo.data.trajectories import read_path
from flow_grpo.data.video_io import video_size
from tools.evaluation.inputs import EvaluationTask
from tools.generation.records import AFTER, RECORD, VIDEO_NAMES, read_record
from tools.published.plan import BenchmarkPlan, Item

SAME = ("model", "adapter", "steps", "shift", "guidance", "seed", "dtype")  # options that all videos must share
CLOSE = 1e-6  # metres, and entries of a rotation: a record's poses are those of the plan


def find_tasks(
    out: Path, plan: BenchmarkPlan, folder: Path, ending: str, focal_px: float | None
) -> list[EvaluationTask]:
    """Return the videos of a plan that are there, in its order.

    Args:
        out: folder of the benchmark.
        plan: its plan.
        folder: folder of the videos.
        ending: ending of their files after the name, such as ".mp4".
        focal_px: focal length of videos whose own is not known; NaN in the task if there is neither.

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
    _check_settings({name: record for name, record in records.items() if record})
    return [_task(out, item, folder / f"{item.name}{ending}", records[item.name] or {}, focal_px) for item in items]


def _check_settings(records: Mapping[str, Mapping[str, Any]]) -> None:
    for name, record in records.items():
        first = next(iter(records.values()))
        for option in SAME:
            if record.get(option) != first.get(option):
                raise ValueError(
                    f"video {name} was made with {option} {record.get(option)!r}, others with {first.get(option)!r}, "
                    "must be the same; generate it again"
                )


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
