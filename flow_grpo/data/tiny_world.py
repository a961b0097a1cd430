"""Small synthetic data sets: rendered rooms with exact cameras, written in MultiCamVideo layout.

A scene is one room and one start pose, which all its cameras leave. In a bare world they are ReCamMaster's ten presets
of random magnitude, each with a video. In a furnished world there are sources with a video and commands without, see
`ROLES`. `room.json` stores the room, so a reward can recover the camera of a generated frame exactly. Every scene is a
pure function of (seed, split, scene number).
"""

from __future__ import annotations

import csv
import dataclasses
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from flow_grpo.data import rooms
from flow_grpo.data.camera_files import write_cameras
from flow_grpo.data.depth_files import depth_file
from flow_grpo.data.multicam import COMMANDS, SENSOR_MM
from flow_grpo.maths.keys import generator
from flow_grpo.maths.room import Room, frame_times, pixel_rays, render_video, stack_rooms, trace
from flow_grpo.runtime.atomic_file import atomic_path
from flow_grpo.runtime.json_files import read_json
from flow_grpo.runtime.video_file import write_video

WALL_COLOURS = ("black", "blue", "green", "cyan", "red", "magenta", "yellow", "white")  # index = 4 r + 2 g + b


@dataclasses.dataclass(frozen=True)
class Roles:
    """What is filmed in the scenes of a split of a furnished world: names of `SHOTS`.

    Attributes:
        films: cameras with a video.
        commands: camera paths that are asked for; every second one in each scene, so that there can be more scenes.
        views: the commands have true views, for an evaluation.
        posed: the poses of the films are known.
        depths: the films have depths, as a model estimates them: see `_write_depths`.
    """

    films: tuple[str, ...]
    commands: tuple[str, ...] = ()
    views: bool = False
    posed: bool = True
    depths: bool = False


FOOTAGE = ("still", "panning")


ROLES = {
    "labelled": Roles((*rooms.SOURCES, *rooms.LABELLED)),
    "all_labelled": Roles((*rooms.SOURCES, *rooms.LABELLED, *rooms.UNLABELLED)),  # a bound for who trains without
    "train": Roles((*rooms.SOURCES,), (*rooms.LABELLED, *rooms.UNLABELLED)),
    "val": Roles((*rooms.SOURCES,), (*rooms.LABELLED, *rooms.UNLABELLED, *rooms.UNSEEN), views=True),
    "clips": Roles(FOOTAGE, (*rooms.UNLABELLED,), posed=False, depths=True),
    "held_out_clips": Roles(FOOTAGE, (*rooms.UNLABELLED,), views=True, depths=True),  # poses are for the judge
}


@dataclasses.dataclass(frozen=True)
class WorldSpec:
    """Parameters of a tiny world.

    Attributes:
        seed: seed of rooms, start poses and magnitudes.
        scenes: split name -> number of scenes.
        frames: video frames, 4n+1.
        height: in pixels.
        width: in pixels.
        translation: of a bare world, range of the factor on a preset's translation, drawn log-uniformly.
        rotation: likewise of the factor on its rotation, see `Shot`.
        focal_mm: focal length; 17 mm on MultiCamVideo's sensor is a field of view of 70 degrees.
        furnished: rooms have things in them, and splits have the roles of `ROLES`.
    """

    seed: int
    scenes: dict[str, int]
    frames: int = 5
    height: int = 24
    width: int = 32
    translation: tuple[float, float] = (0.35, 0.65)
    rotation: tuple[float, float] = (0.3, 1.0)
    focal_mm: float = 17.0
    furnished: bool = False

    def intrinsics(self) -> Tensor:
        """Focal lengths and centre fx, fy, cx, cy (4,), fp32, in pixels."""
        focal = self.focal_mm / SENSOR_MM * self.width
        return torch.tensor([focal, focal, self.width / 2, self.height / 2])


FURNISHED = WorldSpec(seed=41, scenes={"train": 48, "val": 16}, frames=9, height=64, width=96, furnished=True)
TINY_WORLDS = {
    "footage": dataclasses.replace(FURNISHED, scenes={"clips": 48, "held_out_clips": 16}),
    "furnished": FURNISHED,
    "furnished_labelled": dataclasses.replace(FURNISHED, scenes={"labelled": 48, "val": 2}),
    "furnished_all_labelled": dataclasses.replace(FURNISHED, scenes={"all_labelled": 48, "val": 2}),
    "tiny": WorldSpec(seed=1, scenes={"train": 48, "val": 16}),
    "unit_test": WorldSpec(seed=2, scenes={"train": 2, "val": 1}),
}


@dataclasses.dataclass(frozen=True)
class TinyScene:
    """One room and its camera paths.

    Attributes:
        room: the room.
        shots: the kind of each camera, those with a video first.
        films: how many have a video.
        poses: (cameras, T, 4, 4) float64 absolute OpenCV camera-to-world in metres, of each shot.
    """

    room: Room
    shots: tuple[str, ...]
    films: int
    poses: Tensor


def make_scene(spec: WorldSpec, split: str, number: int, films: tuple[str, ...] = ()) -> TinyScene:
    """Make scene `number` of a split, a pure function of the arguments; `films` are other shots than the split's."""
    draw = generator("tiny-world", spec.seed, split, number)
    if spec.furnished:
        room, place, spread, shots = rooms.furnished_room(draw), (-0.7, 0.0, 0.0), 0.4, rooms.SHOTS
        roles = Roles(films) if films else ROLES[split]
        films, commands = roles.films, roles.commands[number % 2 :: 2]
    else:
        room, place, spread, films, commands = rooms.bare_room(draw), (-0.6, 0.0, 0.0), 1.0, (*rooms.RECAMMASTER,), ()
        shots = {
            name: dataclasses.replace(shot, speed=spec.translation, turn=spec.rotation)
            for name, shot in rooms.RECAMMASTER.items()
        }
    start = _start_pose(draw, place, spread)
    names = (*films, *commands)
    paths = [start @ shots[name].path(draw, spec.frames) for name in names]
    return TinyScene(room, names, len(films), torch.stack(paths))


def _start_pose(draw: torch.Generator, place: tuple[float, float, float], spread: float) -> Tensor:
    # Before the far wall, for a spread of 1 within 0.3 m of `place`, facing it within 8 degrees of yaw and 4 of pitch.
    shift = spread * (2 * torch.rand(3, generator=draw, dtype=torch.float64) - 1) * torch.tensor([0.3, 0.2, 0.1])
    degrees = spread * (2 * torch.rand(2, generator=draw, dtype=torch.float64) - 1) * torch.tensor([8.0, 4.0])
    yaw, pitch = map(math.radians, degrees.tolist())
    pose = torch.eye(4, dtype=torch.float64)
    # Columns: the camera's right, down and forward in world axes (x forward, y right, z up).
    right = torch.tensor([-math.sin(yaw), math.cos(yaw), 0.0], dtype=torch.float64)
    forward = torch.tensor(
        [math.cos(pitch) * math.cos(yaw), math.cos(pitch) * math.sin(yaw), math.sin(pitch)], dtype=torch.float64
    )
    # In this left-handed world the camera's down axis is right x forward.
    down = torch.linalg.cross(right, forward)
    pose[:3, 0], pose[:3, 1], pose[:3, 2] = right, down, forward
    pose[:3, 3] = torch.tensor(place, dtype=torch.float64) + shift
    return pose


def render_views(spec: WorldSpec, scenes: list[TinyScene], cameras: list[int]) -> Tensor:
    """Render videos (scenes * cameras, 3, T, h, w) fp32 in [0, 1], scene-major."""
    each = stack_rooms([scene.room for scene in scenes for _ in cameras])
    poses = torch.stack([scene.poses[camera] for scene in scenes for camera in cameras]).float()
    return render_video(each, poses, spec.intrinsics(), spec.height, spec.width)


def caption(video: Tensor) -> str:
    """Describe a video (3, T, h, w) by the colour in the centre of its first frame."""
    height, width = video.shape[-2:]
    middle = video[:, 0, height // 3 : -(height // 3), width // 3 : -(width // 3)].mean(dim=(1, 2))
    red, green, blue = (middle > 0.5).long().tolist()
    return f"a room with a {WALL_COLOURS[4 * red + 2 * green + blue]} wall"


def write_tiny_world(root: str | Path, spec: WorldSpec) -> None:
    """Render and write every split below `root`, atomically; OSError if `root` is a file or a folder with content."""
    with atomic_path(Path(root)) as partial:
        for split, count in spec.scenes.items():
            for number in range(1, count + 1):
                folder = partial / split / f"f{spec.focal_mm:g}_aperture10" / f"scene{number}"
                roles = ROLES[split] if spec.furnished else Roles(())
                scene = make_scene(spec, split, number)
                _write_scene(folder, spec, scene, roles)
                if roles.depths:
                    _write_depths(folder, spec, scene, generator("depths", spec.seed, split, number))
        (partial / "world.json").write_text(json.dumps(dataclasses.asdict(spec), indent=1))


def _write_scene(folder: Path, spec: WorldSpec, scene: TinyScene, roles: Roles) -> None:
    names = [f"cam{camera + 1:02d}" for camera in range(len(scene.shots))]
    films, commands = names[: scene.films], names[scene.films :]
    folder.mkdir(parents=True)
    with (folder / "metadata.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["file_name", "text"])
        for name, video in zip(films, _write_videos(folder, spec, scene, range(scene.films)), strict=True):
            writer.writerow([f"{name}.mp4", caption(video)])
    if roles.posed:
        write_cameras(folder, films, scene.poses[: scene.films], scene.shots[: scene.films])
    if commands:
        write_cameras(folder / COMMANDS, commands, scene.poses[scene.films :], scene.shots[scene.films :])
    if commands and roles.views:
        list(_write_videos(folder / COMMANDS, spec, scene, range(scene.films, len(names))))
    (folder / "room.json").write_text(json.dumps(scene.room.to_dict()))


def _write_videos(folder: Path, spec: WorldSpec, scene: TinyScene, cameras: range) -> Iterator[Tensor]:
    (folder / "videos").mkdir()
    for camera in cameras:  # one by one: large clips are not all in memory
        (video,) = render_views(spec, [scene], [camera])
        write_video(folder / "videos" / f"cam{camera + 1:02d}.mp4", video, lossless=True)
        yield video


def _write_depths(folder: Path, spec: WorldSpec, scene: TinyScene, draw: torch.Generator) -> None:
    """Write the films' depths, a map of half the size for every frame: 10 % too far and 5 % uneven, in patches."""
    size = spec.height // 2, spec.width // 2
    rays = pixel_rays(spec.intrinsics() / 2, *size)
    times = frame_times(spec.frames)
    for camera, path in enumerate(scene.poses[: scene.films].float()):
        (depth,) = trace(stack_rooms([scene.room] * spec.frames).at(times), path[:, None], rays).depth.movedim(1, 0)
        uneven = interpolate(torch.randn(1, 1, 4, 6, generator=draw), size, mode="bicubic")[0, 0]
        maps = 1.1 * depth.unflatten(1, size) * (0.05 * uneven).exp()
        file = depth_file(folder / "videos" / f"cam{camera + 1:02d}.mp4")
        np.savez_compressed(file, depth=maps.half().numpy(), frames=np.arange(spec.frames))


def ensure_tiny_world(root: str | Path, name: str) -> None:
    """Write tiny world `name` at `root` unless it exists already; several processes may do so at once.

    Raises:
        ValueError: unknown name, or `root` holds something else.
        OSError: `root` cannot be written.
    """
    if name not in TINY_WORLDS:
        raise ValueError(f"data.tiny_world: got {name!r}, known are {sorted(TINY_WORLDS)}")
    root, spec = Path(root), TINY_WORLDS[name]
    own_videos = "for videos of your own pass --config.data.tiny_world="
    if not root.exists():
        logging.getLogger(__name__).warning("rendering the tiny world %r into %s; %s", name, root, own_videos)
        try:
            write_tiny_world(root, spec)
        except OSError:
            if not (root / "world.json").is_file():
                raise  # else another process was faster, and what it wrote is judged below
    record, way_out = root / "world.json", f"choose another --config.data.root; {own_videos}"
    if not record.is_file() or read_json(record, way_out) != json.loads(json.dumps(dataclasses.asdict(spec))):
        raise ValueError(f"data.root: {root} exists but is not the tiny world {name!r} of this version; {way_out}")
