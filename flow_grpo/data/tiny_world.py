"""A small synthetic dataset: rendered rooms with exact cameras, written in MultiCamVideo layout.

A scene is one room and one start pose; its ten cameras leave that pose, each along a different ReCamMaster preset of
random magnitude. `room.json` stores the room, so a reward can recover the camera of a generated frame exactly. Every
scene is a pure function of (seed, split, scene number).
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from flow_grpo.data.multicam import SENSOR_MM
from flow_grpo.maths.keys import generator
from flow_grpo.maths.poses import PRESETS, opencv_to_multicam, preset_path
from flow_grpo.maths.room import RAYS_AT_ONCE, SUPERSAMPLE, Room, random_room, render_video, stack_rooms
from flow_grpo.runtime.atomic_file import atomic_path
from flow_grpo.runtime.json_files import read_json
from flow_grpo.runtime.video_file import write_video

LENS_FOLDER = "f{focal:g}_aperture10"
WALL_COLOURS = ("black", "blue", "green", "cyan", "red", "magenta", "yellow", "white")  # index = 4 r + 2 g + b


@dataclasses.dataclass(frozen=True)
class WorldSpec:
    """Parameters of a tiny world.

    Attributes:
        seed: seed of rooms, start poses and magnitudes.
        scenes: split name -> number of scenes.
        frames: video frames, 4n+1.
        height: in pixels.
        width: in pixels.
        translation: range of the factor on a preset's translation, drawn log-uniformly.
        rotation: range of the factor on a preset's rotation, drawn uniformly and independently of the translation, so
            that the model cannot infer the translation's unit from the rotation.
        focal_mm: focal length; 17 mm on MultiCamVideo's sensor is a field of view of 70 degrees.
    """

    seed: int
    scenes: dict[str, int]
    frames: int = 5
    height: int = 24
    width: int = 32
    translation: tuple[float, float] = (0.35, 0.65)
    rotation: tuple[float, float] = (0.3, 1.0)
    focal_mm: float = 17.0

    def intrinsics(self) -> Tensor:
        """Focal lengths and centre fx, fy, cx, cy (4,), fp32, in pixels."""
        focal = self.focal_mm / SENSOR_MM * self.width
        return torch.tensor([focal, focal, self.width / 2, self.height / 2])


TINY_WORLDS = {
    "tiny": WorldSpec(seed=1, scenes={"train": 48, "val": 16}),
    "unit_test": WorldSpec(seed=2, scenes={"train": 2, "val": 1}),
}


@dataclasses.dataclass(frozen=True)
class TinyScene:
    """One room and its camera paths.

    Attributes:
        room: the room.
        poses: (cameras, T, 4, 4) float64 absolute OpenCV camera-to-world in metres, a camera for each of `PRESETS`.
    """

    room: Room
    poses: Tensor


def make_scene(spec: WorldSpec, split: str, number: int) -> TinyScene:
    """Make scene `number` of a split, a pure function of the arguments."""
    draw = generator("tiny-world", spec.seed, split, number)
    room = random_room(draw)
    start = _start_pose(draw)
    low, high = map(math.log, spec.translation)
    paths = []
    for name in PRESETS:
        first, second = torch.rand(2, generator=draw, dtype=torch.float64).tolist()
        translation = math.exp(low + (high - low) * first)
        rotation = spec.rotation[0] + (spec.rotation[1] - spec.rotation[0]) * second
        path = preset_path(name, spec.frames, translation_scale=translation, rotation_scale=rotation)
        paths.append(start @ path)
    return TinyScene(room, torch.stack(paths))


def _start_pose(draw: torch.Generator) -> Tensor:
    # 3.3 to 3.9 m from the far wall, facing it within 8 degrees of yaw and 4 of pitch.
    shift = (2 * torch.rand(3, generator=draw, dtype=torch.float64) - 1) * torch.tensor([0.3, 0.2, 0.1])
    degrees = (2 * torch.rand(2, generator=draw, dtype=torch.float64) - 1) * torch.tensor([8.0, 4.0])
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
    pose[:3, 3] = torch.tensor([-0.6, 0.0, 0.0], dtype=torch.float64) + shift
    return pose


def render_views(spec: WorldSpec, scenes: list[TinyScene], cameras: list[int]) -> Tensor:
    """Render videos (scenes * cameras, 3, T, h, w) fp32 in [0, 1], scene-major."""
    rooms = stack_rooms([scene.room for scene in scenes for _ in cameras])
    poses = torch.stack([scene.poses[camera] for scene in scenes for camera in cameras]).float()
    return render_video(rooms, poses, spec.intrinsics(), spec.height, spec.width)


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
                folder = partial / split / LENS_FOLDER.format(focal=spec.focal_mm) / f"scene{number}"
                _write_scene(folder, spec, make_scene(spec, split, number))
        (partial / "world.json").write_text(json.dumps(dataclasses.asdict(spec), indent=1))


def _write_scene(folder: Path, spec: WorldSpec, scene: TinyScene) -> None:
    names = [f"cam{camera + 1:02d}" for camera in range(len(PRESETS))]
    rays = spec.frames * spec.height * spec.width * SUPERSAMPLE**2
    at_once = max(1, RAYS_AT_ONCE // rays)  # cameras: large clips are not all in memory
    (folder / "videos").mkdir(parents=True)
    (folder / "cameras").mkdir()
    with (folder / "metadata.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["file_name", "text"])
        for first in range(0, len(names), at_once):
            cameras = range(len(names))[first : first + at_once]
            for camera, video in zip(cameras, render_views(spec, [scene], list(cameras)), strict=True):
                write_video(folder / "videos" / f"{names[camera]}.mp4", video, lossless=True)
                writer.writerow([f"{names[camera]}.mp4", caption(video)])
    # As MultiCamVideo does: "[a b c d] [..] [..] [..] " with a trailing blank.
    texts = [
        ["".join("[" + " ".join(f"{value:.9g}" for value in row) + "] " for row in matrix) for matrix in path]
        for path in opencv_to_multicam(scene.poses).tolist()
    ]
    frames = zip(*texts, strict=True)
    extrinsics = {f"frame{frame}": dict(zip(names, row, strict=True)) for frame, row in enumerate(frames)}
    (folder / "cameras" / "camera_extrinsics.json").write_text(json.dumps(extrinsics))
    (folder / "cameras" / "presets.json").write_text(json.dumps(dict(zip(names, PRESETS, strict=True))))
    (folder / "room.json").write_text(json.dumps(scene.room.to_dict()))


def ensure_tiny_world(root: str | Path, name: str) -> None:
    """Write tiny world `name` at `root` unless it exists already; several processes may do so at once.

    Raises:
        ValueError: unknown name, or `root` holds something else.
        OSError: `root` cannot be written.
    """
    if name not in TINY_WORLDS:
        raise ValueError(f"data.tiny_world: got {name!r}, known are {sorted(TINY_WORLDS)}")
    root, spec = Path(root), TINY_WORLDS[name]
    if not root.exists():
        try:
            write_tiny_world(root, spec)
        except OSError:
            if not (root / "world.json").is_file():
                raise  # else another process was faster, and what it wrote is judged below
    record, way_out = root / "world.json", "delete the folder or choose another --config.data.root"
    if not record.is_file() or read_json(record, way_out) != json.loads(json.dumps(dataclasses.asdict(spec))):
        raise ValueError(f"data.root: {root} exists but is not the tiny world {name!r} of this version; {way_out}")
