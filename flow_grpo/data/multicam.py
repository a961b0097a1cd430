"""Data sets in MultiCamVideo layout: several synchronised cameras per scene, one item per (scene, target camera).

    <root>/<split>/f18_aperture10/scene12/videos/cam01.mp4 ...       focal length in mm is part of the folder name
                                          cameras/camera_extrinsics.json
                                          metadata.csv               optional captions, here or beside the videos
                                          cameras/presets.json       optional {"cam01": "pan_right", ...}
    <root>/val/10basic_trajectories/{videos,cameras}                 a scene without lens folder: no intrinsics

A camera's number is that of its file; its poses are those under the file's name in camera_extrinsics.json.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flow_grpo.data.buckets import Size, bucket_of_file
from flow_grpo.data.camera_files import read_cameras, read_json_object, read_text
from flow_grpo.data.conditions import Conditions
from flow_grpo.data.dynamic_batch import video_tokens
from flow_grpo.data.exclude import Verdicts
from flow_grpo.data.video_io import VideoCache, fitted_size
from flow_grpo.maths.keys import key
from flow_grpo.maths.poses import relative
from flow_grpo.records import Condition

SENSOR_MM = 23.76  # MultiCamVideo's square sensor; its whole width is the width of the original video
LENS_FOLDER = re.compile(r"f(\d+(?:\.\d+)?)_aperture\d+(?:\.\d+)?")
CAMERA_FILE = re.compile(r"cam(\d+)\.mp4")
CAMERAS_JSON = Path("cameras", "camera_extrinsics.json")
PRESETS_JSON = Path("cameras", "presets.json")
CAPTION_FILES = (Path("videos", "metadata.csv"), Path("metadata.csv"))


@dataclasses.dataclass(frozen=True)
class Scene:
    """One scene of a data set.

    Attributes:
        folder: holds videos/ and cameras/.
        name: the folder relative to the dataset root, with forward slashes.
        cameras: names of its cameras in the order of their numbers.
        focal_mm: focal length in millimetres, or None when no folder above names it.
    """

    folder: Path
    name: str
    cameras: tuple[str, ...]
    focal_mm: float | None

    def video(self, camera: str) -> Path:
        """Return the file of a camera."""
        return self.folder / "videos" / f"{camera}.mp4"


class MultiCamDataset(Conditions):
    """Conditions of a folder in MultiCamVideo layout.

    Every (scene, target camera) is one index. Its source camera is another camera of the scene, chosen by a hash of
    both names, so neither other scenes nor a seed can change it.
    """

    def __init__(  # noqa: PLR0913 - independent knobs of one data set
        self,
        root: str | Path,
        split: str,
        *,
        num_frames: int,
        height: int,
        width: int,
        prompt: str,
        reference: str = "source",
        buckets: Sequence[Size] = (),
        exclude: Verdicts | None = None,
        cache_bytes: int = 2**28,
    ) -> None:
        """List the scenes of `<root>/<split>`; videos and cameras are read when asked for.

        Args:
            root: dataset folder.
            split: folder below the root, such as "train".
            num_frames: T, the first frames of every video.
            height: rows of the delivered videos, in pixels.
            width: columns.
            prompt: caption of scenes that have no metadata.csv.
            reference: whose first frame is the origin of the poses, "source" (training) or "target" (presets).
            buckets: sizes to deliver instead of the one above, see `nearest_bucket`; a scene's go by its first video.
            exclude: items with a verdict other than "" are left out.
            cache_bytes: memory for decoded videos, per process.

        Raises:
            ValueError: missing or empty folder, scene without camera file or with fewer than two cameras, bad value,
                everything excluded.
        """
        if reference not in ("source", "target"):
            raise ValueError(f"reference camera is {reference!r}, must be 'source' or 'target'")
        if min(num_frames, height, width) < 1:
            raise ValueError(f"dataset got num_frames={num_frames}, height={height}, width={width}; must be at least 1")
        self.root = Path(root)
        self.num_frames, self.height, self.width = num_frames, height, width
        self.prompt = prompt
        self.reference = reference
        self.scenes = find_scenes(self.root, split)
        everything = [(scene, camera) for scene in self.scenes for camera in scene.cameras]
        self._items = [(s, camera) for s, camera in everything if not (exclude or {}).get(s.name, {}).get(camera)]
        if not self._items:
            raise ValueError(
                f"all {len(everything)} items of {self.root / split} are excluded; give data that can be measured, or "
                "empty data.exclude"
            )
        self._buckets = {s.name: bucket_of_file(s.video(s.cameras[0]), buckets) for s in self.scenes if buckets}
        self._cache = VideoCache(cache_bytes)
        self._fingerprint = ""

    def __len__(self) -> int:
        return len(self._items)

    def make(self, index: int, gid: int, slot: int) -> Condition:
        """Return the condition at an index, see `condition`."""
        scene, target = self._items[index]
        source = self._source_camera(scene, target)
        frames, height, width = fitted = self.structure(index)
        poses = read_cameras(scene.folder / CAMERAS_JSON, (source, target), frames)
        reference_pose = poses[0 if self.reference == "source" else 1, 0]
        source_poses, target_poses = relative(reference_pose, poses)
        source_video, source_size = self._video(scene, source, fitted)
        target_video, size = self._video(scene, target, fitted)
        if source_size != size:
            raise ValueError(
                f"scene {scene.folder}: {source} is {source_size} and {target} is {size} pixels (rows, columns); "
                "the cameras of a scene must share one size, encode them again"
            )
        return Condition(
            index=index,
            gid=gid,
            slot=slot,
            prompt=self.prompt_of(index),
            source_video=source_video,
            target_poses=target_poses,
            scene=scene.name,
            source_camera=source,
            target_camera=target,
            source_poses=source_poses,
            reference_pose=reference_pose,
            intrinsics=None if scene.focal_mm is None else fitted_intrinsics(scene.focal_mm, size, height, width),
            target_video=target_video,
            preset=_read_presets(scene.folder / PRESETS_JSON).get(target),
            source_id=self.source_id(index),
        )

    def name_of(self, index: int) -> tuple[str, str]:
        """Return the scene and the target camera of an item."""
        scene, camera = self._items[index]
        return scene.name, camera

    def source_file(self, index: int) -> Path:
        """Return the file of a condition's source video."""
        scene, target = self._items[index]
        return scene.video(self._source_camera(scene, target))

    def source_video(self, index: int) -> Tensor:
        """Return (3, T, height, width) fp32 in [0, 1] of a condition's source."""
        scene, target = self._items[index]
        return self._video(scene, self._source_camera(scene, target), self.structure(index))[0]

    def prompt_of(self, index: int) -> str:
        """Return a condition's prompt."""
        return self._caption(*self._items[index])

    def cameras(self) -> list[str]:
        """Return the kind of camera that every condition asks for, as in `Condition.camera`; no video is read."""
        presets = {scene.name: _read_presets(scene.folder / PRESETS_JSON) for scene in self.scenes}
        return [presets[scene.name].get(camera) or camera for scene, camera in self._items]

    def structure(self, index: int) -> Size:
        """Return the (frames, rows, columns) that a condition's videos are delivered in."""
        return self._buckets.get(self._items[index][0].name, (self.num_frames, self.height, self.width))

    def cost(self, index: int) -> int:
        """Return the latent tokens of a condition's target video in Wan's codec and patches."""
        return video_tokens(*self.structure(index))

    def fingerprint(self) -> str:
        """Return a hash of the names of all cameras and conditions: what a drawn number means; alike anywhere."""
        if not self._fingerprint:  # asked for several times an epoch, with the sampler's state
            names = [f"{scene.name}/{camera}" for scene in self.scenes for camera in scene.cameras]
            text = "\n".join([*names, "", *("/".join(self.name_of(index)) for index in range(len(self)))])
            self._fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return self._fingerprint

    def contents(self) -> str:
        """Return a hash of the names and sizes of all files of the split; alike anywhere."""
        names = {}
        for scene in self.scenes:
            videos = [Path("videos", f"{camera}.mp4") for camera in scene.cameras]
            for part in (*videos, CAMERAS_JSON, PRESETS_JSON, *CAPTION_FILES):
                if (scene.folder / part).is_file():
                    names[f"{scene.name}/{part.as_posix()}"] = (scene.folder / part).stat().st_size
        text = "\n".join(f"{name}\t{size}" for name, size in sorted(names.items()))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _source_camera(self, scene: Scene, target: str) -> str:
        others = [camera for camera in scene.cameras if camera != target]
        return others[key("source camera", scene.name, target) % len(others)]

    def _caption(self, scene: Scene, camera: str) -> str:
        for part in CAPTION_FILES:
            file = scene.folder / part
            if file.is_file():
                return _read_caption(file, f"{camera}.mp4")
        return self.prompt

    def _video(self, scene: Scene, camera: str, fitted: Size) -> tuple[Tensor, tuple[int, int]]:
        """Return (3, T, height, width) fp32 in [0, 1] and the (rows, columns) of the file."""
        video, size = self._cache.read(scene.video(camera), *fitted)
        return video.float() / 255, size


def find_scenes(root: Path, split: str) -> list[Scene]:
    """Return the scenes of a split, ordered by name.

    Raises:
        ValueError: missing or empty folder, scene without camera file or with fewer than two cameras.
    """
    if not root.is_dir():
        raise ValueError(f"dataset folder {root} does not exist; set data.root to a folder in MultiCamVideo layout")
    folder = root / split
    if not folder.is_dir():
        splits = sorted(child.name for child in root.iterdir() if child.is_dir())
        raise ValueError(f"dataset {root} has no split {split!r}, it has {splits}; set the split to one of them")
    scenes = [_scene(root, scene) for scene in _scene_folders(folder)]
    if not scenes:
        raise ValueError(
            f"dataset split {folder} holds no scene; expected {folder}/<lens>/<scene>/videos/cam01.mp4, "
            "is the archive unpacked?"
        )
    return scenes


def _scene_folders(folder: Path) -> Iterator[Path]:
    if (folder / "videos").is_dir():
        yield folder
        return
    for child in sorted(folder.iterdir()):
        if child.is_dir():
            if child.is_symlink() and folder.resolve().is_relative_to(child.resolve()):
                raise ValueError(f"dataset folder {child} links to a folder that holds it, must not; remove the link")
            yield from _scene_folders(child)


def _scene(root: Path, folder: Path) -> Scene:
    numbers = {}
    for file in folder.joinpath("videos").glob("[!.]*.mp4"):
        # The number comes from the file's own name: digits elsewhere in the path (f18, scene3) are no cameras.
        match = CAMERA_FILE.fullmatch(file.name)
        if match is None:
            raise ValueError(f"video {file} is not named like a camera (cam01.mp4); rename or move it")
        numbers[file.stem] = int(match.group(1))
    if len(numbers) < 2:
        raise ValueError(
            f"scene {folder} has {len(numbers)} camera video(s), needs at least 2 (source and target); "
            "complete or remove the scene"
        )
    if not (folder / CAMERAS_JSON).is_file():
        raise ValueError(f"scene {folder} has no {CAMERAS_JSON.as_posix()}; complete or remove the scene")
    name = folder.relative_to(root).as_posix()
    lenses = [match for part in name.split("/") if (match := LENS_FOLDER.fullmatch(part))]
    focal = float(lenses[-1].group(1)) if lenses else None
    return Scene(folder, name, tuple(sorted(numbers, key=lambda camera: numbers[camera])), focal)


def fitted_intrinsics(focal_mm: float, size: tuple[int, int], height: int, width: int) -> Tensor:
    """Return (4,) fp32 fx, fy, cx, cy in pixels after `fit_video` of a video of `size` (rows, columns).

    The sensor's width is the width of the original video and its pixels are square. The principal point counts from
    the outer corner of the first pixel, so pixel centres lie at +0.5.
    """
    rows, columns = fitted_size(size, height, width)
    focal = focal_mm / SENSOR_MM * size[1]
    return torch.tensor([focal * columns / size[1], focal * rows / size[0], width / 2, height / 2])


def _read_presets(file: Path) -> dict[str, str]:
    presets = read_json_object(file) if file.is_file() else {}
    for camera, name in presets.items():
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"presets {file}: {camera} is {name!r:.60}, must be a name; export it again")
    return presets


def _read_caption(file: Path, video: str) -> str:
    reader = csv.DictReader(io.StringIO(read_text(file), newline=""))
    try:
        if not {"file_name", "text"} <= set(reader.fieldnames or ()):
            raise ValueError(
                f"caption file {file} has columns {reader.fieldnames}, must be file_name and text; add them"
            )
        captions = [row["text"] for row in reader if Path(row["file_name"] or "").name == video]
    except csv.Error as error:
        raise ValueError(f"caption file {file} is no table ({error}); repair it or remove it") from error
    if len(captions) != 1 or not (captions[0] or "").strip():
        raise ValueError(
            f"caption file {file} has {len(captions)} rows for {video}, must have one with a text; "
            "complete the file or remove it"
        )
    return captions[0]
