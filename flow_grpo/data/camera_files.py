"""camera_extrinsics.json of a scene: the poses of its cameras, checked and in OpenCV's convention."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from flow_grpo.maths.poses import check_poses, multicam_to_opencv
from flow_grpo.runtime import json_files

MATRIX_TEXT = re.compile(r"(\s*\[[^\[\]]*\]){4}\s*")


def read_cameras(file: Path, cameras: Sequence[str], num_frames: int) -> Tensor:
    """Return absolute poses (cameras, num_frames, 4, 4): float64 OpenCV camera-to-world in metres.

    Raises:
        ValueError: unreadable file, missing frame or camera, text that is no 4x4 matrix, or a matrix that is no rigid
            pose; one line naming file, frame and camera.
    """
    frames = read_json_object(file)
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
    _check_rigid(poses, places)
    return rearrange(poses, "(camera frame) r c -> camera frame r c", camera=len(cameras))


def _parse_matrix(text: object, place: str) -> list[list[float]]:
    """Return the numbers of "[r r r 0] [r r r 0] [r r r 0] [x y z 1] "."""
    refusal = f"{place}: got {str(text)[:60]!r}, must be four rows of four numbers such as '[1 0 0 0]'; export it again"
    if not isinstance(text, str) or MATRIX_TEXT.fullmatch(text) is None:
        raise ValueError(refusal)
    rows = [row.split() for row in re.findall(r"\[([^\[\]]*)\]", text)]
    if any(len(row) != 4 for row in rows):
        raise ValueError(refusal)
    try:
        return [[float(entry) for entry in row] for row in rows]
    except ValueError as error:
        raise ValueError(refusal) from error


def _check_rigid(poses: Tensor, places: Sequence[str]) -> None:
    """Refuse converted poses (N, 4, 4) that are not rigid, naming the place of the first one."""
    try:
        check_poses(poses)
    except ValueError:
        for pose, place in zip(poses, places, strict=True):
            check_poses(pose, place)
        raise
    # The conversion turns the proper rotations of the file into improper ones.
    for number in (torch.linalg.det(poses[:, :3, :3]) > 0).nonzero().flatten().tolist():
        raise ValueError(
            f"{places[number]}: the rotation is a mirror image (determinant -1 in the file), must be +1; "
            "export it again"
        )


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; ValueError, naming the file, when it holds no object."""
    return json_files.read_json_object(file, "export it again or remove the scene")


def read_text(file: Path) -> str:
    """Return the text of a file; ValueError, naming the file, when it cannot be read."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"file {file} cannot be read ({error}); repair it or remove the scene") from error
