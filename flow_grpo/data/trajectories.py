"""Camera paths for videos without ground truth: presets by name and size, poses from a JSON file, users' own videos.

A path is T OpenCV camera-to-world poses in metres from the identity: the origin is the target's own first frame, which
is taken to stand where the source starts.

    "pan_right", "pan_right:0.5", "zoom_in:0.5+pan_left"     motions of `maths.poses.PRESETS`, scaled and added
    "orbit.json"     {"poses": [[[r r r x], [r r r y], [r r r z], [0 0 0 1]], ...], "fps": 24, "relative": true}
                     or the bare list of poses; "fps" and "relative" may be missing
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flow_grpo.data.buckets import Size
from flow_grpo.data.conditions import Conditions
from flow_grpo.data.video_io import VideoCache
from flow_grpo.maths.poses import (
    PRESETS,
    check_poses,
    pose,
    relative,
    rotation_angle_deg,
    rotation_matrix,
    rotation_vector,
)
from flow_grpo.records import Condition
from flow_grpo.runtime.json_files import read_json

Trajectory: TypeAlias = str | Path
"""Text of presets, or the name of a JSON file, which ends in .json."""

VIDEO_FPS = 15  # of the model's training videos; a path with times of its own is read at these
IDENTITY_TOLERANCE = 1e-3  # per entry; files print few digits
SURE_TURN_DEG = 170.0  # neighbouring poses further apart do not say which way round the camera turns
VIDEO_ENDINGS = (".mp4", ".mov", ".mkv", ".webm", ".avi")

# MultiCamVideo names angles in degrees but lengths as 1/4 to 1 times the distance of the filmed person. ReCamMaster's
# own presets put that person at 4 m: their arcs have that radius, and 0.994 m is their shortest move.
PERSON_METRES = 4.0
SHORTEST_METRES = PERSON_METRES / 4
LONGEST_METRES = 2 * PERSON_METRES * math.sin(math.radians(75 / 2))  # chord of the longest arc; straight moves: 4 m
SMALLEST_TURN_DEG, PAN_DEG, TILT_DEG, ARC_DEG = 5.0, 45.0, 30.0, 75.0
ROLL_DEG = 10.0  # never trained; pans and tilts together roll by a few degrees
SLACK = 1.01  # ReCamMaster's presets are 0.6 % short of their round numbers
STATIC_METRES, STATIC_DEG = 1e-3, 1e-2  # static cameras are trained, so this little is no motion


def camera_path(trajectory: Trajectory, num_frames: int) -> Tensor:
    """Return (num_frames, 4, 4) float64 poses of a trajectory, the first one the identity.

    Warns when the path lies outside what the model was trained on, see `outside_training`.

    Raises:
        ValueError: unknown preset, bad magnitude, unreadable file, no poses or too few, or a bad number of frames.
    """
    if num_frames < 1:
        raise ValueError(f"frames of camera path {str(trajectory)!r} is {num_frames}, must be at least 1")
    poses = read_path(Path(trajectory), num_frames) if _is_file(trajectory) else motion(str(trajectory), num_frames)
    if findings := outside_training(poses):
        warnings.warn(
            f"camera path {str(trajectory)!r} lies outside the training range: {'; '.join(findings)}", stacklevel=2
        )
    return poses


def motion(text: str, num_frames: int) -> Tensor:
    """Return the (num_frames, 4, 4) float64 path of presets such as "zoom_in:0.5+pan_left", at uniform speed.

    Each magnitude scales a preset's translation and rotation; 0 is a static camera. Of several, the translations and
    the rotation vectors at the last frame add up, so their order does not matter and the axis stays fixed.

    Raises:
        ValueError: unknown preset, or a magnitude that is no number of at least 0.
    """
    total = torch.zeros(2, 3, dtype=torch.float64)
    for part in text.split("+"):
        name, colon, size = (word.strip() for word in part.partition(":"))
        if name not in PRESETS:
            raise ValueError(
                f"camera motion {text!r} names {name!r}, must be among {', '.join(PRESETS)}, or a file ending in .json"
            )
        magnitude = _magnitude(text, size) if colon else 1.0
        ends = (PRESETS[name].translation, PRESETS[name].rotation)
        total += magnitude * torch.tensor(ends, dtype=torch.float64)
    progress = torch.arange(num_frames, dtype=torch.float64)[:, None] / max(num_frames - 1, 1)
    return pose(rotation_matrix(progress * total[1].deg2rad()), progress * total[0])


def _magnitude(text: str, size: str) -> float:
    try:
        magnitude = float(size)
    except ValueError:
        magnitude = math.nan
    if not 0 <= magnitude < math.inf:  # also false for NaN
        raise ValueError(
            f"camera motion {text!r} has magnitude {size!r}, must be a number of at least 0; "
            "the other direction is the opposite preset"
        )
    return magnitude


def read_path(file: Path, num_frames: int) -> Tensor:
    """Return the (num_frames, 4, 4) float64 poses of a JSON file, resampled, the first one the identity.

    Raises:
        ValueError: unreadable file, unknown entry, or a path that `fit_path` refuses; names the file.
    """
    content = read_json(file, "write the trajectory again")
    entries: dict[str, Any] = content if isinstance(content, dict) else {"poses": content}
    if not {"poses"} <= set(entries) <= {"poses", "fps", "relative"}:
        raise ValueError(f"trajectory file {file} has {sorted(entries)}, must have poses and may have fps, relative")
    fps, from_first = entries.get("fps"), entries.get("relative", False)
    if not isinstance(from_first, bool):
        raise ValueError(f"trajectory file {file}: relative is {from_first!r}, must be true or false")
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf):
        raise ValueError(f"trajectory file {file}: fps is {fps!r}, must be a number above 0; leave it out to stretch")
    try:
        poses = torch.tensor(entries["poses"], dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"trajectory file {file}: poses are no list of 4x4 matrices of numbers ({error})") from error
    return fit_path(poses, num_frames, fps=fps, from_first=from_first, name=f"trajectory file {file}")


def fit_path(
    poses: Tensor, num_frames: int, *, fps: float | None = None, from_first: bool = False, name: str = "camera path"
) -> Tensor:
    """Return (num_frames, 4, 4) float64 poses of a checked and resampled path, the first one the identity.

    Rotations turn at constant speed between neighbouring poses, about one axis; centres move on straight lines.

    Args:
        poses: (N, 4, 4) OpenCV camera-to-world in metres; N at least 2. Rotations may be off by what few printed
            digits leave (1e-3) and are replaced by the nearest exact ones.
        num_frames: T.
        fps: pose i stands at i / fps seconds and video frame k at k / 15; the end is cut off. None stretches or
            shrinks the path to the whole video.
        from_first: express the path relative to its first pose; otherwise that must be the identity to 1e-3.
        name: for messages.

    Raises:
        ValueError: what is no rigid path of determinant +1 from the identity, a turn of more than 170 degrees between
            neighbouring poses, or a path that ends before the video.
    """
    if poses.ndim != 3 or len(poses) < 2:
        raise ValueError(f"{name} has shape {tuple(poses.shape)}, must be (N, 4, 4) with N at least 2")
    check_poses(poses, name)
    poses = poses.double()
    for number in (torch.linalg.det(poses[:, :3, :3]) < 0).nonzero().flatten().tolist():
        raise ValueError(f"{name}: pose {number} is a mirror image (determinant -1), must be +1; use OpenCV's axes")
    left, _, right = torch.linalg.svd(poses[:, :3, :3])
    poses = pose(left @ right, poses[:, :3, 3])
    offset = (poses[0] - torch.eye(4, dtype=torch.float64)).abs().max().item()
    if offset > IDENTITY_TOLERANCE and not from_first:
        raise ValueError(
            f"{name}: the first pose is off the identity by {offset:.3g}, must be at most {IDENTITY_TOLERANCE:g}; "
            'add "relative": true to have all poses taken relative to the first'
        )
    poses = relative(poses[0], poses)
    turns = rotation_angle_deg(poses[:-1], poses[1:])
    if turns[at := int(turns.argmax())] > SURE_TURN_DEG:
        raise ValueError(
            f"{name}: poses {at} and {at + 1} are turned by {turns[at]:.1f} degrees, must be at most "
            f"{SURE_TURN_DEG:g}; add poses between them"
        )
    return _resample(poses, _places(len(poses), num_frames, fps, name))


def _places(count: int, num_frames: int, fps: float | None, name: str) -> Tensor:
    """Return (num_frames,) float64 places among `count` poses, from 0 to count - 1."""
    frames = torch.arange(num_frames, dtype=torch.float64)
    if fps is None:
        return frames * (count - 1) / max(num_frames - 1, 1)
    needed, given = (num_frames - 1) / VIDEO_FPS, (count - 1) / fps
    if needed > given + 1e-9:
        raise ValueError(
            f"{name} lasts {given:.3f} s, {num_frames} frames at {VIDEO_FPS} fps need {needed:.3f} s; "
            "add poses, or leave out fps to stretch the path to the video"
        )
    return (frames * fps / VIDEO_FPS).clamp(max=count - 1)


def _resample(poses: Tensor, places: Tensor) -> Tensor:
    """Return the poses (T, 4, 4) at fractional places (T,) along (N, 4, 4)."""
    before = places.floor().long().clamp(max=len(poses) - 2)
    part = (places - before)[:, None]
    first, second = poses[before], poses[before + 1]
    turn = rotation_vector(first[:, :3, :3].mT @ second[:, :3, :3])
    rotation = first[:, :3, :3] @ rotation_matrix(part * turn)
    return pose(rotation, torch.lerp(first[:, :3, 3], second[:, :3, 3], part))


def outside_training(poses: Tensor) -> list[str]:
    """Return in which ways a path (T, 4, 4) from the identity leaves the range of MultiCamVideo; empty if it does not.

    In range: static cameras; headings up to 45 degrees, or 75 (an arc) when the camera also travels at least 1 m;
    elevations up to 30 degrees; roll up to 10; centres up to 4.87 m from the start. A path that moves must travel 1 m
    or turn 5 degrees. Speeds are not judged.
    """
    right, down, forward = poses[:, :3, :3].unbind(-1)
    heading = torch.atan2(forward[:, 0], forward[:, 2]).rad2deg().abs().max().item()
    elevation = torch.asin(forward[:, 1].clamp(-1, 1)).rad2deg().abs().max().item()
    roll = torch.atan2(right[:, 1], down[:, 1]).rad2deg().abs().max().item()
    turn = rotation_angle_deg(poses, poses[:1]).max().item()
    reach = torch.linalg.vector_norm(poses[:, :3, 3] - poses[0, :3, 3], dim=-1).max().item()
    kind, largest = ("arc", ARC_DEG) if reach * SLACK >= SHORTEST_METRES else ("pan", PAN_DEG)
    found = [
        f"{what} of {value:.1f} degrees, trained up to {limit:g}"
        for what, value, limit in ((kind, heading, largest), ("tilt", elevation, TILT_DEG), ("roll", roll, ROLL_DEG))
        if value > limit * SLACK
    ]
    if reach > LONGEST_METRES * SLACK:
        found.append(f"{reach:.2f} m from the start, trained up to {LONGEST_METRES:.2f}")
    moves = reach > STATIC_METRES or turn > STATIC_DEG
    if moves and reach * SLACK < SHORTEST_METRES and turn * SLACK < SMALLEST_TURN_DEG:
        least = f"{SHORTEST_METRES:g} m or {SMALLEST_TURN_DEG:g} degrees"
        found.append(f"{reach:.3f} m and {turn:.2f} degrees in all, trained from {least} on, or static")
    return found


def user_condition(
    video_path: str | Path, trajectory: Trajectory, prompt: str, *, num_frames: int, height: int, width: int
) -> Condition:
    """Return what the model is asked to do: film a user's video again along a path.

    Like the one condition of `UserVideos([video_path], [trajectory], ...)`, and refused like it.
    """
    size = {"num_frames": num_frames, "height": height, "width": width}
    return UserVideos([video_path], [trajectory], prompt=prompt, cache_bytes=0, **size).condition(0)


class UserVideos(Conditions):
    """Every video along every trajectory, a pure function of the index: video 0 along all of them, then video 1.

    A video's first frames are taken one by one, resized and centre-cropped as in training. There is no ground truth:
    no target video, source poses or intrinsics. A condition's scene is the whole path of its video.
    """

    def __init__(
        self,
        videos: str | Path | Sequence[str | Path],
        trajectories: Sequence[Trajectory],
        *,
        num_frames: int,
        height: int,
        width: int,
        prompt: str | Mapping[str, str],
        cache_bytes: int = 2**28,
    ) -> None:
        """Read all trajectories; videos are read when asked for.

        `videos` are files, or a folder whose videos are taken in order of name; `prompt` is the caption of all, or
        file name -> caption. `num_frames` is 4n + 1 for Wan, `height` and `width` are in pixels, and `cache_bytes` of
        decoded videos are kept per process.

        Raises:
            ValueError: missing or empty folder, nothing or one name twice, refused trajectory, no caption, bad size.
        """
        if min(height, width) < 1:
            raise ValueError(f"user videos: height is {height} and width {width}, must be at least 1")
        self.videos = find_videos(Path(videos)) if isinstance(videos, str | Path) else [Path(video) for video in videos]
        self.trajectories = tuple(trajectories)
        self._labels = [_label(trajectory) for trajectory in self.trajectories]
        for what, names in (("videos", self.videos), ("trajectories", self._labels)):
            if not names or len(set(names)) < len(names):
                raise ValueError(f"user videos: {what} are {[*map(str, names)]}, must be at least one and none twice")
        self._prompts = [prompt if isinstance(prompt, str) else _caption(prompt, v.name) for v in self.videos]
        self._size = (num_frames, height, width)
        self._paths = [camera_path(trajectory, num_frames) for trajectory in self.trajectories]
        # Of files their text: numbers computed from it may differ in the last digit on another machine.
        self._sources = [Path(t).read_text("utf-8-sig") if _is_file(t) else "" for t in self.trajectories]
        self._cache = VideoCache(cache_bytes)

    def __len__(self) -> int:
        return len(self.videos) * len(self.trajectories)

    def make(self, index: int, gid: int, slot: int) -> Condition:
        """Return the condition at an index, see `condition`."""
        number, which = divmod(index, len(self.trajectories))
        return Condition(
            index=index,
            gid=gid,
            slot=slot,
            prompt=self._prompts[number],
            source_video=self.source_video(index),
            target_poses=self._paths[which].clone(),
            scene=self.videos[number].as_posix(),
            source_camera="user",
            target_camera=self._labels[which],
            preset=None if _is_file(self.trajectories[which]) else self._labels[which],
            source_id=self.source_id(index),
        )

    def source_file(self, index: int) -> Path:
        """Return the file of a condition's video."""
        return self.videos[index // len(self.trajectories)]

    def source_video(self, index: int) -> Tensor:
        """Return (3, T, height, width) fp32 in [0, 1] of a condition's video."""
        return self._cache.read(self.source_file(index), *self._size)[0].float() / 255

    def prompt_of(self, index: int) -> str:
        """Return a condition's prompt."""
        return self._prompts[index // len(self.trajectories)]

    def structure(self, index: int) -> Size:
        """Return the (frames, rows, columns) that a condition's video is delivered in, the same for every index."""
        assert 0 <= index < len(self), index
        return self._size

    def fingerprint(self) -> str:
        """Return a hash of the videos' names and sizes, their captions and the trajectories, wherever the files lie."""
        parts = [(v.name, v.stat().st_size, text) for v, text in zip(self.videos, self._prompts, strict=True)]
        return hashlib.blake2b(json.dumps([parts, self._labels, self._sources]).encode(), digest_size=16).hexdigest()


def find_videos(folder: Path) -> list[Path]:
    """Return the videos of a folder ordered by name; ValueError without such a folder or any video in it."""
    found = sorted(file for file in folder.glob("[!.]*") if file.suffix.lower() in VIDEO_ENDINGS)
    if not found:
        raise ValueError(f"{folder} is no folder with videos, must hold files ending in {', '.join(VIDEO_ENDINGS)}")
    return found


def _is_file(trajectory: Trajectory) -> bool:
    return str(trajectory).lower().endswith(".json")


def _label(trajectory: Trajectory) -> str:
    """Return how a condition names its path: a file's name without ending, or the presets without blanks."""
    return Path(trajectory).stem if _is_file(trajectory) else "".join(str(trajectory).split())


def _caption(captions: Mapping[str, str], name: str) -> str:
    if name not in captions:
        raise ValueError(f"user videos: no caption of {name}, got those of {sorted(captions)}; add it")
    return captions[name]
