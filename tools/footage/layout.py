"""Clips laid out as data to train on: scenes of one video with camera paths that nobody filmed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flow_grpo.data.camera_files import write_cameras
from flow_grpo.data.depth_files import depth_file
from flow_grpo.data.multicam import COMMANDS, SENSOR_MM
from flow_grpo.data.pose_files import PoseFile, names_pose_file, read_poses
from flow_grpo.data.trajectories import camera_path, label, read_source_path
from flow_grpo.data.video_io import Size, frame_rate, video_size
from flow_grpo.maths.keys import key
from flow_grpo.maths.poses import multicam_to_opencv
from flow_grpo.runtime.atomic_file import atomic_path


def lay_out(clips: Sequence[Path], args: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    """Write the data set `args.out` and return the clips that are held out, and those of unknown focal length.

    `args` are the options of tools/prepare_clips.py.

    Raises:
        ValueError: options, clips or files beside them that cannot work; nothing is left then.
    """
    sizes = {clip: video_size(clip) for clip in clips}
    check(args, sizes)
    one_width(sizes, args.focal_px)
    known = {clip: poses_beside(clip) for clip in clips}
    lenses = {clip: lens_of(known[clip], args.focal_px, sizes[clip][2]) for clip in clips}
    paths = {
        clip: torch.stack([camera_path(path, args.frames, frame_rate(clip)) for path in args.camera]) for clip in clips
    }
    order = sorted(clips, key=lambda clip: key("held-out clip", clip.name))
    held_out = order[: round(args.val * len(clips))]
    with atomic_path(args.out) as partial:
        for clip in clips:
            scene = partial / ("val" if clip in held_out else "train") / lenses[clip] / clip.stem
            write_scene(scene, clip, paths[clip], args.camera, args.depth)
            if beside := known[clip]:
                poses = source_path(*beside, args.frames, args.unit)
                write_cameras(scene, [clip.stem], left_handed(poses[None]))
    return held_out, [clip for clip in clips if not lenses[clip]]


def check(args: argparse.Namespace, sizes: Mapping[Path, Size]) -> None:
    """Raise ValueError for options and clips that cannot work."""
    if args.out.exists():
        raise ValueError(f"--out {args.out} exists; choose another")
    if not 0 <= args.val < 1:
        raise ValueError(f"--val is {args.val:g}, must be a share from 0 to below 1")
    for option, value in (("--focal-px", args.focal_px), ("--unit", args.unit), ("--depth", args.depth)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{option} is {value:g}, must be above 0; leave it out where it is not known")
    if len(names := {clip.stem for clip in sizes}) < len(sizes):
        raise ValueError(f"{len(sizes)} clips have {len(names)} names without endings; give each its own")
    for clip, (frames, _, _) in sizes.items():
        if frames < args.frames:
            raise ValueError(f"{clip} has {frames} frames, needs {args.frames}; remove it or lower --frames")


def one_width(sizes: Mapping[Path, Size], focal_px: float | None) -> None:
    """Raise ValueError where one focal length in pixels is meant for clips of several widths."""
    widths = {columns: clip.name for clip, (_, _, columns) in sizes.items()}
    if focal_px and len(widths) > 1:
        examples = ", ".join(f"{width} ({name})" for width, name in sorted(widths.items()))
        raise ValueError(
            f"--focal-px {focal_px:g} is in pixels of one width, the clips have {examples}; put those of each width in "
            "a folder of their own, and copy the laid-out train and val folders together"
        )


def poses_beside(clip: Path) -> tuple[Path, PoseFile] | None:
    """Return the file or folder with the poses of a clip's camera, and what it holds; ValueError for several."""
    names = [f"{clip.stem}{ending}" for ending in (".json", ".npz", ".txt", "")] + [f"pose/{clip.stem}.npz"]
    found = [place for name in names if names_pose_file(str(place := clip.parent / name)) and place.exists()]
    if len(found) > 1:
        raise ValueError(f"poses of {clip} are in both {found[0]} and {found[1]}; remove one of them")
    return (found[0], read_poses(found[0])) if found else None


def lens_of(beside: tuple[Path, PoseFile] | None, focal_px: float | None, columns: int) -> str:
    """Return the name of the folder that tells a clip's focal length; empty where nothing does."""
    if focal_px is None and beside and beside[1].focal_px:
        focal_px = beside[1].focal_px * columns / (beside[1].width or columns)
    return "" if focal_px is None else f"f{focal_px * SENSOR_MM / columns:.6g}_aperture1"


def source_path(file: Path, found: PoseFile, frames: int, unit: float | None) -> Tensor:
    """Return the poses (frames, 4, 4) of a clip's camera in metres, relative to the first."""
    poses = read_source_path(file, frames, found)
    if not found.metres:
        if unit is None:
            raise ValueError(
                f"{file} does not know the metre: pass --unit, or remove it to have the clip judged without"
            )
        poses[:, :3, 3] *= unit
    return poses


def left_handed(poses: Tensor) -> Tensor:
    """Return poses in a world as that of MultiCamVideo's files."""
    return multicam_to_opencv(torch.eye(4)) @ poses


def write_scene(scene: Path, clip: Path, paths: Tensor, texts: list[str], metres: float | None) -> None:
    """Write a scene's folder: the clip and what stands beside it, and the commands (paths, T, 4, 4)."""
    (scene / "videos").mkdir(parents=True)
    video = scene / "videos" / f"{clip.stem}.mp4"
    video.symlink_to(clip.absolute())
    names = [f"path{number:02d}" for number in range(1, 1 + len(texts))]
    motions = [label(text) for text in texts]
    write_cameras(scene / COMMANDS, names, left_handed(paths), motions)
    if (known := depth_file(clip)).is_file():
        depth_file(video).symlink_to(known.absolute())
    elif metres is not None:
        np.savez(depth_file(video), depth=np.full((1, 1, 1), metres))
