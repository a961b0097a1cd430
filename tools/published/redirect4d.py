"""Redirect4D-Bench: its cases as sources and paths, and results under the names and keys that its scorer reads.

A case is a source video, called a track, and a trajectory. `cases.jsonl` names it TRACK__TRAJECTORY; a method's folder
of videos has one underscore, as tools/generate.py names them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

from flow_grpo.data.trajectories import SURE_TURN_DEG, resample
from flow_grpo.data.video_io import read_video
from flow_grpo.maths.benchmarks import from_world_to_camera
from flow_grpo.maths.poses import check_poses, pose, rot_err
from flow_grpo.runtime.json_files import read_json_object, read_text
from tools.published.plan import CAMERAS, BenchmarkPlan, Item, item_name, write_path, write_source

FRAMES = 45  # of every case; 4 * 11 + 1
SEPARATOR = "__"
DAMAGED = "fetch the benchmark again"


def prepare_redirect4d(root: Path, sources: Path, out: Path, size: tuple[int, int], frames: int) -> BenchmarkPlan:
    """Write sources and paths of every case, and return their plan.

    Raises:
        ValueError: a missing or damaged list, trajectory, prompt or source.
    """
    cases = list(read_cases(root / "cases.jsonl"))
    items, paths = [], {}
    for track, trajectory in cases:
        folder = root / "tracks" / track / "redirected" / trajectory
        content = read_json_object(folder / "trajectory.json", DAMAGED)
        item = item_name(track, trajectory)
        place = f"{CAMERAS}/{track}/{trajectory}.json"
        paths[place] = target_path(content, frames, folder / "trajectory.json")
        prompt = " ".join(read_text(folder / "prompt.txt", DAMAGED).split())  # a command stays one line
        items.append(Item(item, track, trajectory, place, frames, prompt, _focal(content, size)))
    name, count = Counter(item.name for item in items).most_common(1)[0]
    if count > 1:
        raise ValueError(f"video {name} is {count} times in the list, must be there once")
    files = {track: _source(sources, track) for track, _ in cases}
    for track, file in files.items():
        write_source(out, track, read_video(file, frames))
    for place, poses in paths.items():
        write_path(out, place, poses)
    return BenchmarkPlan("redirect4d", size, {"frames": frames}, tuple(items))


def read_cases(file: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(read_text(file, DAMAGED).splitlines(), 1):
        try:
            row = json.loads(line) if line.strip() else None
            if row is not None:
                track, trajectory = row["case"].split(SEPARATOR, 1)
                if not all(name and Path(name).name == name for name in (track, trajectory)):
                    raise ValueError  # they become parts of paths
                yield track, trajectory
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f'{file}, line {number} names no case: needs "case": "TRACK__TRAJECTORY"') from error


def target_path(content: dict[str, Any], frames: int, file: Path) -> Tensor:
    """Return the target path (frames, 4, 4), camera-to-world in metres, of a trajectory file's content.

    `camera_path` holds a world-to-camera matrix a frame; a longer one is cut, of a shorter one the last pose stays.
    Without it the path runs through `keyframes`, from the identity at frame 0 unless there is a keyframe.
    """
    try:
        if content.get("camera_path"):
            matrices = torch.tensor([entry["extrinsic"] for entry in content["camera_path"]], dtype=torch.float64)
            poses = from_world_to_camera(matrices[:frames])
            return poses[torch.arange(frames).clamp(max=len(poses) - 1)]
        return _through_keyframes(content["keyframes"], frames)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"{file} has no usable camera_path or keyframes ({error}); {DAMAGED}") from error


def _through_keyframes(keyframes: Sequence[dict[str, Any]], frames: int) -> Tensor:
    start = {"timestep": 0, "position": [0.0, 0.0, 0.0], "wxyz": [1.0, 0.0, 0.0, 0.0]}
    by_time = {int(frame["timestep"]): frame for frame in [start, *keyframes]}  # the last one of a time counts
    times = sorted(by_time)
    positions = torch.tensor([by_time[time]["position"] for time in times], dtype=torch.float64)
    turns = torch.tensor([by_time[time]["wxyz"] for time in times], dtype=torch.float64)
    if not torch.linalg.vector_norm(turns, dim=-1).min() > 0:
        raise ValueError("a keyframe's wxyz is no quaternion")
    poses = pose(torch.from_numpy(Rotation.from_quat(turns.numpy(), scalar_first=True).as_matrix()), positions)
    check_poses(poses, "keyframes")
    if len(poses) == 1:
        return poses.repeat(frames, 1, 1)
    if rot_err(poses[:-1], poses[1:]).max().rad2deg() > SURE_TURN_DEG:
        raise ValueError(f"keyframes turn by more than {SURE_TURN_DEG:g} degrees at once: which way is not known")
    places = np.interp(np.arange(frames), times, np.arange(len(times)))  # the last pose stays
    return resample(poses, torch.from_numpy(places))


def _focal(content: dict[str, Any], size: tuple[int, int]) -> float | None:
    """Return the focal length of a video of `size` whose target pictures have the trajectory's intrinsics."""
    try:
        matrix = content["camera_path"][0]["intrinsic"]
        rows, columns = 2 * matrix[1][2], 2 * matrix[0][2]
        return float(matrix[0][0] * max(size[0] / rows, size[1] / columns))
    except (KeyError, TypeError, IndexError, ZeroDivisionError):
        return None


def _source(sources: Path, track: str) -> Path:
    places = [sources / track / "video.mp4", sources / "tracks" / track / "video.mp4"]
    for place in places:
        if place.is_file():
            return place
    raise ValueError(
        f"no source video of {track}: neither {places[0]} nor {places[1]}; the public set has none, see the "
        "benchmark's own page, and give their folder with --sources"
    )


def case_name(item: Item) -> str:
    return f"{item.source}{SEPARATOR}{item.camera}"
