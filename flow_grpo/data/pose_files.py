"""One reader for camera poses of a video, whoever wrote them; `read_poses` returns OpenCV camera-to-world.

    path.json                      this project's: {"poses": [[[r r r x], ...], ...], "fps": 24, "relative": true,
                                   "focal_px": 840} or the bare list of poses, docs/camera_paths.md
    camera_extrinsics.json:cam03   one camera of a scene of MultiCamVideo
    pose/NAME.npz                  ViPE: `data` (N, 4, 4), `inds`; focal length from intrinsics/NAME.npz beside
    NAME.npz                       MegaSaM: `cam_c2w` (N, 4, 4), `intrinsic` (3, 3) at the size of `images`
    a folder                       COLMAP as text: world-to-camera in images.txt by name, the lens in cameras.txt
    NAME.txt                       TUM: a line "time tx ty tz qx qy qz qw" a frame, camera-to-world

Pose i is that of frame i. Files of a tracker begin anywhere: their poses count relative to the first.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation
from torch import Tensor

from flow_grpo.data.camera_files import camera_names, read_cameras
from flow_grpo.maths.poses import pose, relative
from flow_grpo.runtime.json_files import read_json, read_text

AGAIN = "write it again"
MULTICAM = "camera_extrinsics.json"
LENSES = {"SIMPLE_PINHOLE": 1, "PINHOLE": 2, "SIMPLE_RADIAL": 1, "RADIAL": 1, "OPENCV": 2}  # COLMAP's: focal lengths
MOST_DISTORTION = 0.02  # of a COLMAP lens: at the picture's edge about as much of a pixel's distance from the middle
UNIT_TOLERANCE = 1e-2  # of a quaternion's length
SQUARE = 0.02  # by which fx and fy may differ


@dataclasses.dataclass(frozen=True)
class PoseFile:
    """Cameras of the N frames of a video."""

    poses: Tensor  # of any shape where the file holds no (N, 4, 4); float64 OpenCV camera-to-world
    metres: bool  # whether the unit is the metre; else it is unknown
    from_first: bool = True  # whether the poses count relative to the first
    fps: float | None = None  # of the poses, where they are not one a frame
    focal_px: float | None = None  # in pixels of pictures `width` wide, or where that is None of the video's
    width: int | None = None


def names_pose_file(text: str) -> bool:
    """Return whether a word of a command line names a file or folder of poses."""
    place, _ = _camera_of(text)
    return place.suffix.lower() in (".json", ".npz", ".txt") or (place / "images.txt").is_file()


def label_of(text: str) -> str:
    """Return a short name of a pose file: that of its camera, else its own."""
    place, camera = _camera_of(text)
    return camera or place.stem


def read_poses(given: str | Path) -> PoseFile:
    """Read the poses of a file or folder; `camera_extrinsics.json:CAMERA` names one of several cameras.

    Raises:
        ValueError: unreadable, of no known form, or a frame without a pose; names the file. Whether the poses are rigid
            is checked where they are used.
    """
    place, camera = _camera_of(str(given))
    if place.is_dir():
        return _colmap(place)
    ending = place.suffix.lower()
    if place.name == MULTICAM or camera:
        return _multicam(place, camera)
    if ending == ".npz":
        return _arrays(place)
    return _tum(place) if ending == ".txt" else _ours(place)


def _camera_of(text: str) -> tuple[Path, str]:
    found = re.fullmatch(r"(.*\.json):(\w+)", text)
    return (Path(found[1]), found[2]) if found else (Path(text), "")


def _ours(file: Path) -> PoseFile:
    content = read_json(file, "write the trajectory again")
    entries: dict[str, Any] = content if isinstance(content, dict) else {"poses": content}
    if not {"poses"} <= set(entries) <= {"poses", "fps", "relative", "focal_px"}:
        raise ValueError(
            f"trajectory file {file} has {sorted(entries)!r:.200}, must have poses and may have fps, relative, focal_px"
        )
    from_first = entries.get("relative", False)
    if not isinstance(from_first, bool):
        raise ValueError(f"trajectory file {file}: relative is {from_first!r:.60}, must be true or false")
    numbers = {}
    for name, without in (("fps", "to stretch"), ("focal_px", "where it is not known")):
        value = numbers[name] = entries.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(
                f"trajectory file {file}: {name} is {value!r:.60}, must be a number above 0; leave it out {without}"
            )
    try:
        poses = torch.tensor(entries["poses"], dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"trajectory file {file}: poses are no list of 4x4 matrices of numbers ({error})") from error
    return PoseFile(poses, metres=True, from_first=from_first, **numbers)


def _multicam(file: Path, camera: str) -> PoseFile:
    names = camera_names(file)
    if not camera and len(names) == 1:
        (camera,) = names
    if camera not in names:
        raise ValueError(f"camera file {file} has {', '.join(names)}: name one as {file}:{names[0]}")
    count = len(read_json(file, AGAIN))
    (poses,) = read_cameras(file, [camera], count)
    return PoseFile(relative(poses[0], poses), metres=True)  # the file's world is left-handed, relative poses are not


def _arrays(file: Path) -> PoseFile:
    found = _load(file)
    if "cam_c2w" in found:
        focal, width = None, None
        if "intrinsic" in found and "images" in found:
            lens, width = found["intrinsic"], found["images"].shape[2]
            focal = _focal(file, [lens[0, 0], lens[1, 1]])
        return PoseFile(torch.from_numpy(found["cam_c2w"].astype(np.float64)), False, focal_px=focal, width=width)
    if "data" not in found:
        raise ValueError(f"pose file {file} has {sorted(found)}, must have data (ViPE) or cam_c2w (MegaSaM); {AGAIN}")
    _check_complete(file, found.get("inds", np.arange(len(found["data"]))))
    beside, focal = file.parent.parent / "intrinsics" / file.name, None
    if beside.is_file():
        focal = _focal(beside, np.median(_load(beside)["data"][:, :2], axis=0))
    return PoseFile(torch.from_numpy(found["data"].astype(np.float64)), True, focal_px=focal)


def _load(file: Path) -> dict[str, NDArray[Any]]:
    try:
        # numpy leaves a damaged file open that it has opened itself.
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays if name != "depths"}
    except Exception as error:  # of a damaged file zipfile, zlib and NumPy raise a dozen kinds
        raise ValueError(f"pose file {file} cannot be read ({error}); {AGAIN}") from error


def _focal(file: Path, lengths: Sequence[float]) -> float:
    first, last = float(lengths[0]), float(lengths[-1])
    if not (first > 0 and abs(last / first - 1) <= SQUARE):
        raise ValueError(f"{file}: focal lengths are {first:g} and {last:g}, must be equal: pixels must be square")
    return first


def _check_complete(file: Path, frames: NDArray[Any]) -> None:
    for expected, found in enumerate(frames):
        if found != expected:
            raise ValueError(
                f"{file} has no pose of frame {expected}; remove the frames without one from the video, or the file"
            )


def _colmap(folder: Path) -> PoseFile:
    file = folder / "images.txt"
    lines = [line for line in read_text(file, AGAIN).splitlines() if not line.startswith("#")][::2]
    try:
        rows = sorted((line.split(maxsplit=9) for line in lines), key=lambda row: row[9])
        numbers = np.array([row[1:8] for row in rows], np.float64).reshape(-1, 7)
        cameras = {row[8] for row in rows}
    except (ValueError, IndexError) as error:
        raise ValueError(f"{file} holds no images as COLMAP writes them ({error}); {AGAIN}") from error
    digits = [re.findall(r"\d+", row[9]) for row in rows]
    if all(digits):
        _check_complete(file, np.array([int(found[-1]) for found in digits]) - int(digits[0][-1]))
    turned = _rotations(file, numbers[:, [1, 2, 3, 0]]).mT  # the file's are world-to-camera
    poses = pose(turned, -(turned @ torch.from_numpy(numbers[:, 4:, None]))[..., 0])
    file = folder / "cameras.txt"
    lenses = [line.split() for line in read_text(file, AGAIN).splitlines() if line and not line.startswith("#")]
    used = [lens for lens in lenses if lens[0] in cameras]
    if len(used) != 1 or used[0][1] not in LENSES:
        raise ValueError(f"{file}: must have one camera of all images, {' or '.join(LENSES)}, has {len(used)}; {AGAIN}")
    model, width, *values = used[0][1], int(used[0][2]), *map(float, used[0][4:])
    if any(abs(value) > MOST_DISTORTION for value in values[LENSES[model] + 2 :]):
        raise ValueError(f"{file}: the lens distorts ({' '.join(used[0][4:])}); undistort the video first")
    return PoseFile(poses, False, focal_px=_focal(file, values[: LENSES[model]]), width=width)


def _tum(file: Path) -> PoseFile:
    lines = [line.split() for line in read_text(file, AGAIN).splitlines() if line.strip() and line[0] != "#"]
    try:
        rows = np.array(lines, np.float64).reshape(-1, 8)
    except ValueError as error:
        raise ValueError(f"{file} must hold lines of eight numbers, time tx ty tz qx qy qz qw; {AGAIN}") from error
    if (np.diff(rows[:, 0]) <= 0).any():
        raise ValueError(f"{file}: the times do not grow; {AGAIN}")
    return PoseFile(pose(_rotations(file, rows[:, 4:]), torch.from_numpy(rows[:, 1:4])), False)


def _rotations(file: Path, quaternions: NDArray[np.float64]) -> Tensor:
    """Return the rotations (N, 3, 3) of quaternions (N, 4), the real part last."""
    lengths = np.linalg.norm(quaternions, axis=1)
    if not len(lengths) or not (np.abs(lengths - 1) < UNIT_TOLERANCE).all():
        raise ValueError(f"{file}: quaternions have lengths {lengths.tolist()!r:.60}, must be 1; {AGAIN}")
    return torch.from_numpy(Rotation.from_quat(quaternions).as_matrix())
