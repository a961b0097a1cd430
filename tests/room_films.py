"""Rooms filmed along known paths, and conditions to match: the rewards' tests need no data set and no model."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from flow_grpo.data.rooms import bare_room
from flow_grpo.maths.pictures import blur
from flow_grpo.maths.poses import preset_path, rotation_matrix
from flow_grpo.maths.room import Room, render_video, stack_rooms
from flow_grpo.records import Condition
from flow_grpo.rewards.room.room_fit import Viewpoints, make_viewpoints

HEIGHT, WIDTH = 24, 32
FOCAL = 17 / 23.76 * WIDTH
INTRINSICS = torch.tensor([FOCAL, FOCAL, WIDTH / 2, HEIGHT / 2])
# x forward, y right, z up: a camera's right, down and forward axes stand in the columns.
LOOKING_FORWARD = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, -1.0, 0.0]], dtype=torch.float64)


@dataclasses.dataclass(frozen=True)
class Film:
    """B videos of rooms.

    Attributes:
        rooms: B rooms.
        references: (B, 4, 4) absolute pose of the first camera.
        commanded: (B, T, 4, 4) relative to it: the preset, at half size.
        true: (B, T, 4, 4) where the camera really was.
        videos: (B, 3, T, h, w).
    """

    rooms: Room
    references: Tensor
    commanded: Tensor
    true: Tensor
    videos: Tensor


def reference_pose(seed: int = 0) -> Tensor:
    """Stand 3.6 m before the far wall and look at it, a little aside."""
    turn = torch.randn(3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * math.radians(3)
    pose = torch.eye(4, dtype=torch.float64)
    pose[:3, :3] = LOOKING_FORWARD @ rotation_matrix(turn)
    pose[:3, 3] = torch.tensor([-0.6, 0.05, -0.05])
    return pose


def film(presets: Sequence[str], *, speed: float = 1.0, rooms: int = 1, frames: int = 5, supersample: int = 4) -> Film:
    """Film each of `rooms` rooms along each preset, at `speed` times the commanded motion."""
    draw = torch.Generator().manual_seed(11)
    filmed, references, commanded, true = [], [], [], []
    for number in range(rooms):
        room = bare_room(draw)
        for preset in presets:
            filmed.append(room)
            references.append(reference_pose(number))
            commanded.append(preset_path(preset, frames, translation_scale=0.5, rotation_scale=0.7))
            true.append(preset_path(preset, frames, translation_scale=0.5 * speed, rotation_scale=0.7 * speed))
    stacked, reference, path = stack_rooms(filmed), torch.stack(references), torch.stack(true)
    absolute = (reference[:, None] @ path).float()
    videos = render_video(stacked, absolute, INTRINSICS, HEIGHT, WIDTH, supersample)
    return Film(stacked, reference, torch.stack(commanded), path, videos)


def viewpoints(film: Film) -> Viewpoints:
    """Return where the videos were filmed."""
    return make_viewpoints(film.rooms, film.references, INTRINSICS)


def like_a_codec(videos: Tensor, *, sigma: float = 0.8, noise: float = 0.015, seed: int = 0) -> Tensor:
    """Blur and add noise, at about 27 dB."""
    draw = torch.Generator().manual_seed(seed)
    return (blur(videos, sigma) + noise * torch.randn(videos.shape, generator=draw)).clamp(0, 1)


def conditions(film: Film, *, source: Tensor | None = None, root: Path | None = None) -> list[Condition]:
    """Return a condition per video, whose target view is the video; rooms are written below `root`."""
    made = []
    for row, video in enumerate(film.videos):
        scene = f"val/f17_aperture10/scene{row + 1}"
        if root is not None:
            room = Room(**{f.name: getattr(film.rooms, f.name)[row] for f in dataclasses.fields(Room)})
            (root / scene).mkdir(parents=True, exist_ok=True)
            (root / scene / "room.json").write_text(json.dumps(room.to_dict()))
        made.append(
            Condition(
                index=row,
                gid=row,
                slot=0,
                prompt="a room",
                source_video=video if source is None else source[row],
                target_poses=film.commanded[row],
                scene=scene,
                source_camera="cam01",
                target_camera="cam02",
                reference_pose=film.references[row],
                intrinsics=INTRINSICS,
                target_video=video,
            )
        )
    return made
