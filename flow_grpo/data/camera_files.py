"""Reader and writer of a scene's camera_extrinsics.json: camera poses, validated and in the OpenCV convention."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor

from flow_grpo.maths.poses import check_poses, multicam_to_opencv, opencv_to_multicam
from flow_grpo.runtime.json_files import read_json_object

BAD_JSON = "export it again or remove the scene"  # what to do about an unreadable JSON file of a scene

_MATRIX_TEXT = re.compile(r"(\s*\[[^\[\]_]*\]){4}\s*")  # Python would read 1_0 as 10


def camera_names(file: Path) -> tuple[str, ...]:
    """Read the names of the cameras that have a pose in a file's first frame, sorted; ValueError without one."""
    first = read_json_object(file, BAD_JSON).get("frame0")
    if not isinstance(first, dict):
        raise ValueError(f"camera file {file} has no frame0; {BAD_JSON}")
    return tuple(sorted(first))


def read_cameras(file: Path, cameras: Sequence[str], num_frames: int) -> Tensor:
    """Read absolute poses (cameras, num_frames, 4, 4): float64 OpenCV camera-to-world in metres.

    Raises:
        ValueError: unreadable file, missing frame or camera, malformed matrix, or a matrix that is not a rigid pose;
            one line naming file, frame and camera.
    """
    frames = read_json_object(file, BAD_JSON)
    matrices, places = [], []
    for camera in cameras:
        for number in range(num_frames):
            frame = f"frame{number}"
            if not isinstance(frames.get(frame), dict):
                raise ValueError(
                    f"camera file {file} has no {frame}, needs frame0..frame{num_frames - 1} for {camera}; "
                    "complete the file or lower num_frames"
                )
            if camera not in frames[frame]:
                raise ValueError(
                    f"camera file {file} has no {camera} in {frame}, it has {sorted(frames[frame])}; "
                    "complete the file or remove the video"
                )
            places.append(f"camera file {file}, {frame}, {camera}")
            matrices.append(_parse_matrix(frames[frame][camera], places[-1]))
    poses = multicam_to_opencv(torch.tensor(matrices, dtype=torch.float64))
    try:
        check_poses(poses)
    except ValueError:
        for pose, place in zip(poses, places, strict=True):
            check_poses(pose, place)  # names the first that is not rigid
        raise
    # The file's axes are left-handed, so its proper rotations have determinant -1 after conversion.
    for number in (torch.linalg.det(poses[:, :3, :3]) > 0).nonzero().flatten().tolist():
        raise ValueError(
            f"{places[number]}: the rotation is a mirror image (determinant -1 in the file), must be +1; "
            "export it again"
        )
    return rearrange(poses, "(camera frame) r c -> camera frame r c", camera=len(cameras))


def write_cameras(place: Path, names: Sequence[str], poses: Tensor, motions: Sequence[str] = ()) -> None:
    """Write `cameras/camera_extrinsics.json` below a folder, and `cameras/presets.json` where motions have names.

    Args:
        place: a scene's folder, or its folder of commands.
        names: of the cameras.
        poses: (cameras, T, 4, 4) as of `read_cameras`: OpenCV camera-to-world in metres, the world left-handed.
        motions: of each, such as a preset's name.
    """
    (place / "cameras").mkdir(parents=True)
    # As MultiCamVideo does: "[a b c d] [..] [..] [..] " with a trailing blank.
    texts = [
        ["".join("[" + " ".join(f"{value:.9g}" for value in row) + "] " for row in matrix) for matrix in path]
        for path in opencv_to_multicam(poses).tolist()
    ]
    frames = zip(*texts, strict=True)
    extrinsics = {f"frame{frame}": dict(zip(names, row, strict=True)) for frame, row in enumerate(frames)}
    (place / "cameras" / "camera_extrinsics.json").write_text(json.dumps(extrinsics))
    if motions:
        (place / "cameras" / "presets.json").write_text(json.dumps(dict(zip(names, motions, strict=True))))


def _parse_matrix(text: object, place: str) -> list[list[float]]:
    # Of the form "[r r r 0] [r r r 0] [r r r 0] [x y z 1] ".
    refusal = f"{place}: got {str(text)[:60]!r}, must be four rows of four numbers such as '[1 0 0 0]'; export it again"
    if not isinstance(text, str) or _MATRIX_TEXT.fullmatch(text) is None:
        raise ValueError(refusal)
    try:
        rows = [[float(entry) for entry in row.split()] for row in re.findall(r"\[([^\[\]]*)\]", text)]
    except ValueError as error:
        raise ValueError(refusal) from error
    if any(len(row) != 4 for row in rows):
        raise ValueError(refusal)
    return rows
