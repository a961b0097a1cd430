"""Finds the videos that `tools/evaluate.py` measures and the camera path each one was asked to follow.

Two formats of camera files, distinguished by their keys:

    {"dog.mp4": POSES, "sub/cat.mp4": {"poses": POSES, "camera_type": "arc_left", "source": "cat",
     "focal_px": 630.3, "shares_estimator": false}}
        POSES: one OpenCV camera-to-world 4x4 matrix in metres per frame; the other keys are optional
    {"frame0": {"cam01": "[r r r 0] ...", ...}, ...}
        MultiCamVideo's camera_extrinsics.json: cam01.mp4 follows its cam01, and video0.mp4 in a folder cam_type1, too

Videos of `tools/generate.py` need none: their records hold the poses.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flow_grpo.data.camera_files import camera_names, read_cameras
from flow_grpo.data.trajectories import VIDEO_ENDINGS
from flow_grpo.data.video_io import video_size
from flow_grpo.maths.poses import PRESETS, check_poses, preset_path, relative, rot_err
from flow_grpo.run.starts import LEAST_ROWS
from flow_grpo.runtime.json_files import read_json_object
from tools.generation.records import AFTER, BEFORE, BESIDE, RECORD, read_record, record_of

FRAME_KEY = re.compile(r"frame\d+")
TYPE_FOLDER = re.compile(r"cam_type(\d+)")  # of ReCamMaster's inference_recammaster.py
ENTRIES = {"poses", "camera_type", "source", "focal_px", "shares_estimator"}
OTHER_TYPE = "other"  # of a path that matches no preset
SAME_METRES, SAME_DEG = 0.02, 0.2  # tolerance for matching a preset: camera files are printed with few digits


@dataclasses.dataclass(frozen=True)
class EvaluationTask:
    """One video to measure."""

    file: Path
    name: str  # relative to the folder of videos, with forward slashes
    commanded: Tensor  # (T, 4, 4) float64 camera-to-world in metres, relative to the first frame
    camera_type: str  # groups the tables
    source: str  # source video; confidence intervals resample sources
    focal_px: float
    shares_estimator: bool = False  # the model's rewards used the estimator that judges it


def find_tasks(folder: Path, cameras: Path, focal_px: float | None) -> list[EvaluationTask]:
    """Return the videos below a folder, sorted by name, each with its path; `focal_px` is of those without their own.

    ValueError for anything missing, matrices that are not rigid, or another number of them than of frames.
    """
    if not folder.is_dir():
        raise ValueError(f"--videos {folder} is no folder, must hold videos ending in {', '.join(VIDEO_ENDINGS)}")
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in VIDEO_ENDINGS)
    files = [file for file in files if not any(part[0] == "." for part in file.relative_to(folder).parts)]
    files = [file for file in files if not (file.name.endswith(BESIDE) and record_of(file))]
    if not files:
        raise ValueError(f"--videos {folder} holds no video, must hold files ending in {', '.join(VIDEO_ENDINGS)}")
    content = read_json_object(cameras, "write it again")
    if content and all(FRAME_KEY.fullmatch(key) for key in content):
        return [_from_extrinsics(file, folder, cameras, len(content), focal_px) for file in files]
    return [_from_poses(file, folder, cameras, content, focal_px) for file in files]


def find_generated(folder: Path, focal_px: float | None) -> tuple[list[EvaluationTask], list[EvaluationTask]]:
    """Return the videos below a folder that tools/generate.py made, and those of them made before training.

    Both carry the same names. `focal_px` is of videos whose record has none. ValueError for an unusable one.
    """
    after, before = [], []
    for file in sorted(folder.rglob(f"*{RECORD}")):
        record = read_record(file)
        if record is None:
            continue
        video = file.with_suffix(AFTER)
        name = video.relative_to(folder).as_posix()
        place = f"record {file}"
        if record.get("poses") is None:
            raise ValueError(f"{place} has no poses: no camera was commanded, so none can be measured; watch the video")
        poses = _read_matrices(record["poses"], place)
        kind = record.get("camera_name", record.get("camera"))  # records of earlier versions have no camera_name
        source, focal = record.get("source"), record.get("focal_px")
        if not isinstance(kind, str) or not isinstance(source, str):
            raise ValueError(f"{place} names no camera or no source; generate the video again")
        made = [(video, after)] + [(file.with_name(f"{file.stem}{BEFORE}"), before)] * bool(record.get("before"))
        for result, found in made:
            if not result.is_file():
                raise ValueError(
                    f"{place} has no {result.name}; generate it again with --overwrite, or remove the record"
                )
            _check_count(result, result.name, len(poses), file)
            if (rows := video_size(result)[1]) < LEAST_ROWS:
                raise ValueError(
                    f"{result} is {rows} rows high, must be at least {LEAST_ROWS} for structure from motion: watch it "
                    f"beside its source ({result.stem}{BESIDE}); a run as small is judged by its own estimator, in its "
                    "summary.json"
                )
            lens = _focal(focal, f"{place}: focal_px", focal_px)
            found.append(EvaluationTask(result, name, relative(poses[0], poses), kind, source, lens))
    if not after:
        raise ValueError(
            f"{folder} holds no record of tools/generate.py; for other videos give --videos and --cameras, see --help"
        )
    return after, before


def _from_extrinsics(file: Path, folder: Path, cameras: Path, frames: int, focal_px: float | None) -> EvaluationTask:
    # The name of the video's folder (cam_type3) or of the video (cam03.mp4) says which of the file's cameras it is.
    name = file.relative_to(folder).as_posix()
    in_folder = TYPE_FOLDER.fullmatch(file.resolve().parent.name)
    if in_folder is None and file.stem not in (known := camera_names(cameras)):
        raise ValueError(
            f"video {name}: no camera of {cameras} is named so, it has {_first_few(known)}; rename the video, complete "
            "the file, or put it into a folder such as cam_type3"
        )
    camera = f"cam{int(in_folder[1]):02d}" if in_folder else file.stem
    _check_count(file, name, frames, cameras)
    poses = read_cameras(cameras, [camera], frames)[0]
    # In cam_type folders videos of the same number were generated from the same source.
    kind, source = (in_folder[0], file.stem) if in_folder else (camera, file.parent.as_posix())
    return EvaluationTask(file, name, relative(poses[0], poses), kind, source, _focal(None, "", focal_px))


def _from_poses(
    file: Path, folder: Path, cameras: Path, content: dict[str, Any], focal_px: float | None
) -> EvaluationTask:
    name = file.relative_to(folder).as_posix()
    key = name if name in content else file.name
    if key not in content:
        raise ValueError(
            f"camera file {cameras} has no cameras of video {name}, it has {_first_few(sorted(content))}; add them or "
            "move the video away"
        )
    place = f"camera file {cameras}, {key}"
    entry = content[key] if isinstance(content[key], dict) else {"poses": content[key]}
    if not {"poses"} <= set(entry) <= ENTRIES:
        raise ValueError(f"{place} has {sorted(entry)}, must have poses and may have {_first_few(sorted(ENTRIES))}")
    poses = _read_matrices(entry["poses"], place)
    _check_count(file, name, len(poses), cameras)
    commanded = relative(poses[0], poses)
    values = {"camera_type": _matching_preset(commanded), "source": name, "shares_estimator": False} | entry
    for word in ("camera_type", "source"):
        if not isinstance(values[word], str) or not values[word]:
            raise ValueError(f"{place}: {word} is {values[word]!r}, must be a text")
    shares = values["shares_estimator"]
    if not isinstance(shares, bool):
        raise ValueError(f"{place}: shares_estimator is {shares!r}, must be true or false")
    focal = _focal(entry.get("focal_px"), f"{place}: focal_px", focal_px)
    return EvaluationTask(file, name, commanded, values["camera_type"], values["source"], focal, shares)


def _focal(own: object, name: str, given: object) -> float:
    """Return a video's own focal length or the one given, checked; there is no default: a wrong one distorts paths."""
    value, name = (given, "--focal-px") if own is None else (own, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}, must be the focal length in pixels, above 0, such as 630.3")
    return float(value)


def _read_matrices(poses: object, place: str) -> Tensor:
    """Return (T, 4, 4) float64 matrices; ValueError unless all are rigid motions with determinant +1."""
    try:
        matrices = torch.tensor(poses, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{place}: no list of 4x4 matrices of numbers ({error})") from error
    if matrices.ndim != 3 or not len(matrices):
        raise ValueError(f"{place} has shape {tuple(matrices.shape)}, must be (T, 4, 4), one matrix a frame")
    check_poses(matrices, place)
    for number in (torch.linalg.det(matrices[:, :3, :3]) < 0).nonzero().flatten().tolist():
        raise ValueError(f"{place}: matrix {number} is a mirror image (determinant -1), must be +1; use OpenCV's axes")
    return matrices


def _check_count(file: Path, name: str, matrices: int, cameras: Path) -> None:
    frames = video_size(file)[0]
    if frames != matrices:
        raise ValueError(f"video {name} has {frames} frames and {matrices} matrices in {cameras}, must be one a frame")


def _matching_preset(commanded: Tensor) -> str:
    """Return the preset that a path (T, 4, 4), relative to its first frame, follows in every frame, or "other"."""
    for preset in PRESETS:
        path = preset_path(preset, len(commanded))
        away = torch.linalg.vector_norm(path[:, :3, 3] - commanded[:, :3, 3], dim=-1).max()
        if away <= SAME_METRES and rot_err(path, commanded).max().rad2deg() <= SAME_DEG:
            return preset
    return OTHER_TYPE


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
