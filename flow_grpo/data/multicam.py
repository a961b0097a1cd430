"""Datasets in MultiCamVideo layout: several synchronised cameras per scene, one item per (scene, target camera).

    <root>/<split>/f18_aperture10/scene12/videos/cam01.mp4 ...       the folder name holds the focal length in mm
                                          cameras/camera_extrinsics.json
                                          metadata.csv               optional captions, here or in videos/
                                          cameras/presets.json       optional {"cam01": "pan_right", ...}
                                          commands/cameras/...       optional, see below
    <root>/val/10basic_trajectories/{videos,cameras}                 a scene without lens folder has no intrinsics

A scene with a folder `commands` asks for the camera paths in `commands/cameras`, and its own videos are sources only.
They need no true view; `commands/videos/cam07.mp4` is the true view of cam07, for an evaluation. Such a scene needs no
camera file for its sources: their poses are unknown then, and a command is relative to its own first pose.
`videos/cam01.depth.npz` holds what is known of a video's depths, see depth_files.py.
A video's camera number comes from its file name; its poses are those under that name in camera_extrinsics.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from flow_grpo.data.camera_files import BAD_JSON, camera_names, read_cameras
from flow_grpo.data.captions import caption_of, tables
from flow_grpo.data.dataset import ConditionDataset, file_id
from flow_grpo.data.depth_files import depth_file, read_depth
from flow_grpo.data.dynamic_batch import video_tokens
from flow_grpo.data.exclude import Verdicts
from flow_grpo.data.video_io import Size, VideoCache, fitted_size, nearest_bucket, video_size
from flow_grpo.maths.keys import key
from flow_grpo.maths.poses import relative
from flow_grpo.records import Condition
from flow_grpo.runtime.json_files import read_json_object

SENSOR_MM = 23.76  # side of MultiCamVideo's square sensor; it spans the width of the original video
LENS_FOLDER = re.compile(r"f(\d+(?:\.\d+)?)_aperture\d+(?:\.\d+)?")
PUBLIC_NAME = re.compile(r"cam\d+")  # of a camera in MultiCamVideo
CAMERAS_JSON = Path("cameras", "camera_extrinsics.json")
COMMANDS = "commands"  # folder in a scene
PRESETS_JSON = Path("cameras", "presets.json")


@dataclasses.dataclass(frozen=True)
class Scene:
    """One scene folder."""

    folder: Path  # holds videos/ and cameras/
    name: str  # the folder relative to the dataset root, with forward slashes
    cameras: tuple[str, ...]  # names in order, numbers in them by their value
    focal_mm: float | None  # None without a lens folder
    commands: tuple[str, ...] = ()  # names of the camera paths that are asked for; () asks for those of the cameras

    @property
    def targets(self) -> tuple[str, ...]:
        """What the scene has an item for, each."""
        return self.commands or self.cameras

    def place(self, camera: str) -> Path:
        """Folder of the videos/ and cameras/ that a camera belongs to."""
        return self.folder / COMMANDS if camera in self.commands else self.folder

    def video(self, camera: str) -> Path:
        """Path of a camera's video; that of a command need not exist."""
        return self.place(camera) / "videos" / f"{camera}.mp4"


class MultiCamDataset(ConditionDataset):
    """Conditions of a folder in MultiCamVideo layout, one per (scene, target camera).

    The source camera is another camera of the scene, chosen by a hash of scene and target name: it depends on no seed
    and on no other scene.
    """

    def __init__(
        self,
        root: str | Path,
        split: str,
        size: Size,
        *,
        prompt: str,
        reference: Literal["source", "target"] = "source",
        buckets: Sequence[Size] = (),
        choose: Callable[[list[Scene]], list[Scene]] = list,
        exclude: Callable[[list[Scene]], Verdicts] | None = None,
    ) -> None:
        """List the scenes of `<root>/<split>`; videos and camera files are read on demand.

        Args:
            root: dataset folder.
            split: folder below the root, such as "train".
            size: (T, height, width) in pixels: the first T frames, resized and centre-cropped.
            prompt: caption of videos without one, see captions.py.
            reference: camera whose first frame is the origin of all poses: "source" (training) or "target" (presets).
            buckets: sizes to use instead of `size`; each scene takes the `nearest_bucket` of its first video.
            choose: returns those of the split's scenes to list; by default all.
            exclude: returns verdicts of the split's scenes; items whose verdict is not "" are left out.

        Raises:
            ValueError: missing or empty folder, scene without camera file or with fewer than two cameras, or every item
                excluded.
        """
        self.root, self.prompt, self.reference = Path(root), prompt, reference
        found = find_scenes(self.root, split)
        verdicts = exclude(found) if exclude else {}
        self.scenes = choose(found)
        everything = [(scene, camera) for scene in self.scenes for camera in scene.targets]
        self._items = [(s, camera) for s, camera in everything if not verdicts.get(s.name, {}).get(camera)]
        if not self._items:
            raise ValueError(
                f"all {len(everything)} items of {self.root / split} are excluded; give data that can be measured, or "
                "empty data.exclude"
            )
        self._sizes = {scene.name: _bucket_of(scene, buckets) if buckets else size for scene in self.scenes}
        self._cache = VideoCache()
        names = [f"{scene.name}/{camera}" for scene in self.scenes for camera in (*scene.cameras, *scene.commands)]
        self._fingerprint = _hash_lines([*names, "", *(f"{scene.name}/{camera}" for scene, camera in self._items)])

    def __len__(self) -> int:
        return len(self._items)

    def make(self, index: int, gid: int, slot: int) -> Condition:
        """Build the condition at an index, see `condition`."""
        scene, target = self._items[index]
        source, size = self._source_camera(scene, target), self.size_of(index)
        reference_pose, source_poses, target_poses = self._poses(scene, source, target, size[0])
        source_video, source_form = self._video(scene, source)
        target_video, form = None, source_form
        if target in scene.cameras or scene.video(target).is_file():
            target_video, form = self._video(scene, target)
        if source_form != form:
            raise ValueError(
                f"scene {scene.folder}: {source} is {source_form} and {target} is {form} (rows, columns, frames per "
                "second); the cameras of a scene must share one size and rate, encode them again"
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
            source_depth=read_depth(scene.video(source), *size[1:]),
            intrinsics=None if scene.focal_mm is None else fitted_intrinsics(scene.focal_mm, form[:2], *size[1:]),
            target_video=target_video,
            preset=_read_presets(scene.place(target)).get(target),
            source_id=self.source_id(index),
            fps=source_form[2],
        )

    def name_of(self, index: int) -> tuple[str, str]:
        """Scene name and target camera."""
        scene, camera = self._items[index]
        return scene.name, camera

    def scene_of(self, index: int) -> str:
        """Scene name."""
        return self.name_of(index)[0]

    def source_file(self, index: int) -> Path:
        """Path of the source video."""
        scene, target = self._items[index]
        return scene.video(self._source_camera(scene, target))

    def source_id(self, index: int) -> str:
        """Hash of the source video's file content, the cache key of its encoding; nothing is decoded."""
        return file_id(self.source_file(index))

    def source_video(self, index: int) -> Tensor:
        """Read the source video (3, T, h, w), fp32 in [0, 1], without the rest of the condition."""
        scene, target = self._items[index]
        return self._video(scene, self._source_camera(scene, target))[0]

    def prompt_of(self, index: int) -> str:
        """Caption of the target camera, a command's of its source; the default prompt where no file has any."""
        scene, camera = self._items[index]
        if camera in scene.commands:
            camera = self._source_camera(scene, camera)
        found = caption_of(scene.video(camera), self.root)
        return self.prompt if found is None else found

    def cameras(self) -> list[str]:
        """Every item's kind of camera, as `Condition.camera`, without reading a video."""
        presets = {scene.name: _read_presets(scene.place(scene.targets[0])) for scene in self.scenes}
        return [presets[scene.name].get(camera) or camera for scene, camera in self._items]

    def size_of(self, index: int) -> Size:
        """(frames, height, width) of the videos as they are delivered, without decoding one."""
        return self._sizes[self._items[index][0].name]

    def cost(self, index: int) -> int:
        """Latent tokens of the target video, for Wan's codec and patch size."""
        return video_tokens(*self.size_of(index))

    def fingerprint(self) -> str:
        """Hash of all camera and item names, which fixes what an index means; independent of the root."""
        return self._fingerprint  # asked for several times an epoch, with the sampler's state

    def contents(self) -> str:
        """Hash of the names and sizes of all files of the split, see `contents_of`."""
        return contents_of(self.scenes)

    def has_scene_file(self, name: str) -> bool:
        """Whether any scene has a file of this name, which a reward reads."""
        return any((scene.folder / name).is_file() for scene in self.scenes)

    def check_apart(self, held_out: ConditionDataset) -> None:
        """Refuse to train here on a held-out video, be it under a link or a copy.

        Only files of equal size are read and compared, so that this costs little more than listing them. The ValueError
        names both files.
        """
        assert isinstance(held_out, MultiCamDataset)
        own, others = ([s.video(camera) for s in data.scenes for camera in s.cameras] for data in (self, held_out))
        of_size: dict[int, list[Path]] = {}
        for video in others:
            of_size.setdefault(video.stat().st_size, []).append(video)
        for video in own:
            for twin in of_size.get(video.stat().st_size, ()):
                if video.samefile(twin) or file_id(video) == file_id(twin):
                    raise ValueError(
                        f"training video {video} has the content of held-out video {twin}, which must not be trained "
                        "on; remove one of the two scenes"
                    )

    def _poses(
        self, scene: Scene, source: str, target: str, frames: int
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Return the reference pose (4, 4) and poses (T, 4, 4) of source and target; None where not known."""
        (asked,) = read_cameras(scene.place(target) / CAMERAS_JSON, (target,), frames)
        if not (file := scene.folder / CAMERAS_JSON).is_file():
            return None, None, relative(asked[0], asked)
        (known,) = read_cameras(file, (source,), frames)
        reference = known[0] if self.reference == "source" else asked[0]
        return reference, *relative(reference, torch.stack([known, asked]))

    def _source_camera(self, scene: Scene, target: str) -> str:
        others = [camera for camera in scene.cameras if camera != target]
        return others[key("source camera", scene.name, target) % len(others)]

    def _video(self, scene: Scene, camera: str) -> tuple[Tensor, tuple[int, int, float]]:
        # The fitted video (3, T, h, w), fp32 in [0, 1], and the file's own height, width and frame rate.
        video, shape, rate = self._cache.read(scene.video(camera), *self._sizes[scene.name])
        return video.float() / 255, (*shape, rate)


def _hash_lines(lines: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def contents_of(scenes: Sequence[Scene]) -> str:
    """Hash of the names and sizes of all files of these scenes; independent of the root."""
    sizes = {}
    for scene in scenes:
        places = {scene.folder: scene.cameras} | ({scene.folder / COMMANDS: scene.commands} if scene.commands else {})
        for place, cameras in places.items():
            videos = [Path("videos", f"{camera}.mp4") for camera in cameras]
            root = scene.folder.parents[scene.name.count("/")]
            files = [place / part for part in (*videos, *map(depth_file, videos), CAMERAS_JSON, PRESETS_JSON)]
            for file in (*files, *tables(place / "videos", root)):
                with contextlib.suppress(FileNotFoundError):  # asked once: file systems of a cluster answer slowly
                    sizes[file.relative_to(root).as_posix()] = file.stat().st_size
    return _hash_lines([f"{name}\t{size}" for name, size in sorted(sizes.items())])


def contents_by_scene(scenes: Sequence[Scene]) -> dict[str, str]:
    """Scene name -> hash of the names and sizes of its files."""
    return {scene.name: contents_of([scene]) for scene in scenes}


def _bucket_of(scene: Scene, buckets: Sequence[Size]) -> Size:
    video = scene.video(scene.cameras[0])
    size = video_size(video)
    try:
        return nearest_bucket(size, buckets)
    except ValueError as error:
        raise ValueError(f"video {video}: {error}") from error


def find_scenes(root: Path, split: str) -> list[Scene]:
    """List the scenes of a split in order of their paths.

    Raises:
        ValueError: missing or empty folder, scene without camera file or with fewer than two cameras.
    """
    if not root.is_dir():
        raise ValueError(f"dataset folder {root} does not exist; set data.root to a folder in MultiCamVideo layout")
    folder = root / split
    if not folder.is_dir():
        splits = sorted(child.name for child in root.iterdir() if child.is_dir())
        raise ValueError(f"dataset {root} has no split {split!r}, it has {splits}; set the split to one of them")
    scenes = [_scene(root, scene) for scene in _scene_folders(folder, folder.resolve(), {})]
    if not scenes:
        raise ValueError(
            f"dataset split {folder} holds no scene; expected {folder}/<lens>/<scene>/videos/cam01.mp4, "
            "is the archive unpacked?"
        )
    return scenes


def _scene_folders(folder: Path, real: Path, seen: dict[Path, Path]) -> Iterator[Path]:
    # `folder` is as it was reached, `real` the same without links; `seen` tells where a real folder was reached before.
    if real in seen:
        raise ValueError(
            f"dataset folder {folder} is {seen[real]} again, its scenes would count twice; remove the link"
        )
    seen[real] = folder
    if (folder / "videos").is_dir():
        yield folder
        return
    try:
        children = [child for child in sorted(folder.iterdir()) if child.is_dir()]
    except OSError as error:
        raise ValueError(f"dataset folder {folder} cannot be read ({error.strerror}); make it readable") from error
    for child in children:
        yield from _scene_folders(child, child.resolve() if child.is_symlink() else real / child.name, seen)


def _scene(root: Path, folder: Path) -> Scene:
    cameras = sorted((file.stem for file in folder.joinpath("videos").glob("[!.]*.mp4")), key=_by_number)
    commanded = folder / COMMANDS / CAMERAS_JSON
    commands = tuple(sorted(camera_names(commanded), key=_by_number)) if commanded.is_file() else ()
    if not cameras or len(cameras) + len(commands) < 2:
        raise ValueError(
            f"scene {folder} has {len(cameras)} camera video(s), needs at least 2 (source and target); "
            "complete or remove the scene"
        )
    file = folder / CAMERAS_JSON
    posed = file.is_file()
    if not posed and not commands:
        raise ValueError(f"scene {folder} has no {CAMERAS_JSON.as_posix()}; complete or remove the scene")
    # A video of another name may be none of a camera. The thousands of files of the public data are not opened here.
    if posed and (own := [camera for camera in cameras if PUBLIC_NAME.fullmatch(camera) is None]):
        known = camera_names(file)
        if strays := [f"{camera}.mp4" for camera in own if camera not in known]:
            raise ValueError(
                f"scene {folder}: no camera of {CAMERAS_JSON.as_posix()} is named like the videos {', '.join(strays)}, "
                f"it has {', '.join(known)}; rename or move them, or complete the file"
            )
    name = folder.relative_to(root).as_posix()
    lenses = [match for part in name.split("/") if (match := LENS_FOLDER.fullmatch(part))]
    focal = float(lenses[-1].group(1)) if lenses else None
    if both := sorted({*cameras} & {*commands}):
        raise ValueError(
            f"scene {folder}: {', '.join(both)} is a camera with a video and a command; give one another name"
        )
    return Scene(folder, name, tuple(cameras), focal, commands)


def _by_number(name: str) -> tuple[list[str | int], str]:
    # Sorts cam10 behind cam9.
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)], name


def fitted_intrinsics(focal_mm: float, size: tuple[int, int], height: int, width: int) -> Tensor:
    """Compute fx, fy, cx, cy (4,), fp32, in pixels of a video that `fit_video` took from (height, width) `size`.

    The sensor spans the original width and its pixels are square. The origin is the outer corner of the first pixel, so
    pixel centres are at +0.5.
    """
    rows, columns = fitted_size(size, height, width)
    focal = focal_mm / SENSOR_MM * size[1]
    return torch.tensor([focal * columns / size[1], focal * rows / size[0], width / 2, height / 2])


def _read_presets(place: Path) -> dict[str, str]:
    file = place / PRESETS_JSON
    presets = read_json_object(file, BAD_JSON) if file.is_file() else {}
    for camera, name in presets.items():
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"presets {file}: {camera} is {name!r:.60}, must be a name; export it again")
    return presets
