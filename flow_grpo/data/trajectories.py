"""Camera paths and conditions for users' own videos: scaled presets or poses from a file, no ground truth.

A path is T OpenCV camera-to-world poses in metres, starting at the identity: the origin is the target's first frame,
assumed to coincide with the source's. A trajectory is written as

    "pan_right", "pan_right:0.5", "zoom_in:0.5+pan_left"     presets of `maths.poses.PRESETS`, scaled and added
    "arc_left:per_frame"     a preset as ReDirector's code commands it: its speed of 81 frames in any number of them
    "orbit.json"     poses in a file, of any form that `pose_files.py` reads
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from flow_grpo.data.dataset import ConditionDataset, file_id
from flow_grpo.data.pose_files import PoseFile, label_of, names_pose_file, read_poses
from flow_grpo.data.video_io import Size, VideoCache, frame_rate
from flow_grpo.maths.benchmarks import preset_at_own_speed
from flow_grpo.maths.poses import PRESETS, check_poses, pose, relative, rot_err, rotation_matrix, rotation_vector
from flow_grpo.records import WAN_FPS, Condition

Trajectory: TypeAlias = str | Path
"""Preset text, or what `pose_files.read_poses` reads."""

LARGEST = 100  # magnitude of a preset, a dozen turns or a few hundred metres
PER_FRAME = "per_frame"
IDENTITY_TOLERANCE = 1e-3  # per entry, because files print few digits
SURE_TURN_DEG = 170.0  # beyond it the direction of rotation between two poses is ambiguous
VIDEO_ENDINGS = (".mp4", ".mov", ".mkv", ".webm", ".avi")

# MultiCamVideo gives angles in degrees but lengths as 1/4 to 1 times the distance of the filmed person. ReCamMaster's
# presets imply 4 m: the radius of their arcs, and four times their shortest move of 0.994 m.
PERSON_METRES = 4.0
SHORTEST_METRES = PERSON_METRES / 4
LONGEST_METRES = 2 * PERSON_METRES * math.sin(math.radians(75 / 2))  # chord of the longest arc; straight moves: 4 m
SMALLEST_TURN_DEG, PAN_DEG, TILT_DEG, ARC_DEG = 5.0, 45.0, 30.0, 75.0
ROLL_DEG = 10.0  # no roll in the training data, but a pan combined with a tilt rolls by a few degrees
SLACK = 1.01  # ReCamMaster's presets are 0.6 % short of their round numbers
STATIC_METRES, STATIC_DEG = 1e-3, 1e-2  # less motion than this is a static camera, which is in the training data


def camera_path(trajectory: Trajectory, num_frames: int, video_fps: float = WAN_FPS) -> Tensor:
    """Make the (num_frames, 4, 4) float64 poses of a trajectory for a video, the first one the identity.

    Warns if the path is outside the training distribution, see `outside_training`.

    Raises:
        ValueError: unknown preset, bad magnitude, unreadable file, or no poses or too few.
    """
    if names_pose_file(str(trajectory)):
        poses = read_path(trajectory, num_frames, video_fps)
    else:
        poses = motion(str(trajectory), num_frames)
    if findings := outside_training(poses):
        warnings.warn(
            f"camera path {str(trajectory)!r} lies outside the training range: {'; '.join(findings)}", stacklevel=2
        )
    return poses


def motion(text: str, num_frames: int) -> Tensor:
    """Make the (num_frames, 4, 4) float64 path of preset text such as "zoom_in:0.5+pan_left", at uniform speed.

    A magnitude scales a preset's translation and rotation; 0 is a static camera. Combined presets add their
    translations and rotation vectors at the last frame, so the order does not matter and the axis stays fixed.
    "PRESET:per_frame", never combined, is `preset_at_own_speed`.

    Raises:
        ValueError: unknown preset, or a magnitude that is not a number >= 0.
    """
    alone, _, speed = "".join(text.split()).partition(":")
    if alone in PRESETS and speed == PER_FRAME:
        return preset_at_own_speed(alone, num_frames)
    total = torch.zeros(2, 3, dtype=torch.float64)
    for part in text.split("+"):
        name, colon, size = (word.strip() for word in part.partition(":"))
        if name not in PRESETS:
            raise ValueError(
                f"camera motion {text!r} names {name!r}, must be among {', '.join(PRESETS)}, or a file of poses "
                "(.json, .npz, .txt or COLMAP's folder)"
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
    if not 0 <= magnitude <= LARGEST:  # also false for NaN
        raise ValueError(
            f"camera motion {text!r} has magnitude {size!r}, must be a number within 0..{LARGEST}; "
            f"the other direction is the opposite preset, and {PER_FRAME} alone is a preset's speed of 81 frames"
        )
    return magnitude


def read_path(file: Trajectory, num_frames: int, video_fps: float = WAN_FPS) -> Tensor:
    """Read the (num_frames, 4, 4) float64 poses of a file, resampled for a video, the first one the identity.

    Raises:
        ValueError: unreadable file, unknown field, or a path that `fit_path` refuses; names the file.
    """
    found = read_poses(file)
    name = f"trajectory file {file}"
    if not found.metres:
        warnings.warn(f"{name}: its unit is not known, taken as metres", stacklevel=2)
    return fit_path(found.poses, num_frames, fps=found.fps, video_fps=video_fps, from_first=found.from_first, name=name)


def read_source_path(file: Trajectory, num_frames: int, found: PoseFile | None = None) -> Tensor:
    """Read the (num_frames, 4, 4) float64 poses of a source's camera, relative to the first.

    Pose i of the file is that of the source's frame i. Nothing is resampled: videos are read frame by frame. `found` is
    what the file holds, where it was read before.

    Raises:
        ValueError: as `read_path`, or for a file with fps or fewer poses than frames.
    """
    found = found or read_poses(file)
    poses, fps = found.poses, found.fps
    name = f"poses of the source's camera, file {file}:"
    if fps is not None:
        raise ValueError(f"{name} fps is {fps:g}, must be left out; give one pose for each frame of the source")
    if poses.ndim != 3 or len(poses) < num_frames:
        raise ValueError(f"{name} got shape {tuple(poses.shape)}, must be (N, 4, 4), N at least {num_frames}")
    return fit_path(poses[:num_frames], num_frames, from_first=True, name=name)


def fit_path(
    poses: Tensor,
    num_frames: int,
    *,
    fps: float | None = None,
    video_fps: float = WAN_FPS,
    from_first: bool = False,
    name: str = "camera path",
) -> Tensor:
    """Validate a path and resample it to (num_frames, 4, 4) float64 poses, the first one the identity.

    Between neighbouring poses, rotations are interpolated at constant angular velocity (slerp) and centres linearly.

    Args:
        poses: (N, 4, 4) OpenCV camera-to-world in metres, N >= 2. Rotations within 1e-3 of orthonormal are replaced by
            the nearest exact ones.
        num_frames: T.
        fps: pose i is at i / fps seconds and video frame k at k / video_fps; a longer path is cut. None stretches the
            path to the whole video.
        video_fps: frames per second of the video.
        from_first: make the path relative to its first pose; otherwise that must be the identity to 1e-3.
        name: name of the path in error messages.

    Raises:
        ValueError: not a rigid path of determinant +1 from the identity, more than 170 degrees between neighbouring
            poses, or a path shorter than the video.
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
    turns = rot_err(poses[:-1], poses[1:]).rad2deg()
    if turns[at := int(turns.argmax())] > SURE_TURN_DEG:
        raise ValueError(
            f"{name}: poses {at} and {at + 1} are turned by {turns[at]:.1f} degrees, must be at most "
            f"{SURE_TURN_DEG:g}; add poses between them"
        )
    return resample(poses, _frame_positions(len(poses), num_frames, fps, video_fps, name))


def _frame_positions(count: int, num_frames: int, fps: float | None, video_fps: float, name: str) -> Tensor:
    # (num_frames,) float64 fractional pose index of every video frame; without `fps` the path is stretched.
    frames = torch.arange(num_frames, dtype=torch.float64)
    if fps is None:
        return frames * (count - 1) / max(num_frames - 1, 1)
    needed, given = (num_frames - 1) / video_fps, (count - 1) / fps
    if needed > given + 1e-9:
        raise ValueError(
            f"{name} lasts {given:.3f} s, {num_frames} frames at {video_fps:g} fps need {needed:.3f} s; "
            "add poses, or leave out fps to stretch the path to the video"
        )
    return (frames * fps / video_fps).clamp(max=count - 1)


def resample(poses: Tensor, positions: Tensor) -> Tensor:
    """Interpolate (N, 4, 4) poses, N >= 2, at fractional positions (T,) to (T, 4, 4): slerp and straight lines."""
    before = positions.floor().long().clamp(max=len(poses) - 2)
    part = (positions - before)[:, None]
    first, second = poses[before], poses[before + 1]
    turn = rotation_vector(first[:, :3, :3].mT @ second[:, :3, :3])
    rotation = first[:, :3, :3] @ rotation_matrix(part * turn)
    return pose(rotation, torch.lerp(first[:, :3, 3], second[:, :3, 3], part))


def outside_training(poses: Tensor) -> list[str]:
    """List the ways in which a path (T, 4, 4) from the identity leaves the range of MultiCamVideo; empty if it fits.

    In range: static cameras; yaw up to 45 degrees, or 75 (an arc) if the camera also travels at least 1 m; pitch up to
    30 degrees; roll up to 10; centres up to 4.87 m from the start. A moving camera must travel 1 m or turn 5 degrees.
    Speed is not checked.
    """
    right, down, forward = poses[:, :3, :3].unbind(-1)
    heading = torch.atan2(forward[:, 0], forward[:, 2]).rad2deg().abs().max().item()
    elevation = torch.asin(forward[:, 1].clamp(-1, 1)).rad2deg().abs().max().item()
    roll = torch.atan2(right[:, 1], down[:, 1]).rad2deg().abs().max().item()
    turn = rot_err(poses, poses[:1]).max().rad2deg().item()
    reach = torch.linalg.vector_norm(poses[:, :3, 3] - poses[0, :3, 3], dim=-1).max().item()
    kind, largest = ("arc", ARC_DEG) if reach * SLACK >= SHORTEST_METRES else ("pan", PAN_DEG)
    found = [
        f"{what} of {value:.1f} degrees, in MultiCamVideo up to {limit:g}"
        for what, value, limit in ((kind, heading, largest), ("tilt", elevation, TILT_DEG), ("roll", roll, ROLL_DEG))
        if value > limit * SLACK
    ]
    if reach > LONGEST_METRES * SLACK:
        found.append(f"{reach:.2f} m from the start, in MultiCamVideo up to {LONGEST_METRES:.2f}")
    moves = reach > STATIC_METRES or turn > STATIC_DEG
    if moves and reach * SLACK < SHORTEST_METRES and turn * SLACK < SMALLEST_TURN_DEG:
        least = f"{SHORTEST_METRES:g} m or {SMALLEST_TURN_DEG:g} degrees"
        found.append(f"{reach:.3f} m and {turn:.2f} degrees in all, in MultiCamVideo from {least} on, or static")
    return found


def label(trajectory: str) -> str:
    """Return what a trajectory is called in names of files: preset text without blanks, or a pose file's name."""
    return label_of(trajectory) if names_pose_file(trajectory) else "".join(trajectory.split())


class UserVideos(ConditionDataset):
    """Every video along every trajectory: index 0 is video 0 along trajectory 0, index 1 the same along trajectory 1.

    Frames are resized and centre-cropped as in training. There is no ground truth: target video, source poses and
    intrinsics are None. A condition's scene is the path of its video.
    """

    def __init__(
        self, videos: Sequence[Path], trajectories: Sequence[Trajectory], size: Size, *, prompts: Sequence[str]
    ) -> None:
        """Read all trajectories; videos are read on demand.

        Args:
            videos: files.
            trajectories: camera paths, each applied to every video.
            size: (T, height, width): the first T frames, 4n + 1 for Wan; in pixels.
            prompts: caption of each video.

        Raises:
            ValueError: no or duplicate names, a video without readable header, or a refused trajectory.
        """
        self.videos, self.trajectories = tuple(videos), tuple(trajectories)
        self._labels = [label(str(trajectory)) for trajectory in self.trajectories]
        for what, names in (("videos", self.videos), ("trajectories", self._labels)):
            if not names or len(set(names)) < len(names):
                raise ValueError(f"user videos: {what} are {[*map(str, names)]}, must be at least one and none twice")
        self._prompts, self._size = tuple(prompts), size
        self._rates = [frame_rate(video) for video in self.videos]
        self._paths = {(t, fps): camera_path(t, size[0], fps) for t in self.trajectories for fps in {*self._rates}}
        self._cache = VideoCache()

    def __len__(self) -> int:
        return len(self.videos) * len(self.trajectories)

    def make(self, index: int, gid: int, slot: int) -> Condition:
        """Build the condition at an index, see `condition`."""
        number, which = divmod(index, len(self.trajectories))
        video, label, fps = self.videos[number], self._labels[which], self._rates[number]
        return Condition(
            index=index,
            gid=gid,
            slot=slot,
            prompt=self.prompt_of(index),
            source_video=self._cache.read(video, *self._size)[0].float() / 255,
            target_poses=self._paths[self.trajectories[which], fps].clone(),
            scene=video.as_posix(),
            source_camera="user",
            target_camera=label,
            preset=None if names_pose_file(str(self.trajectories[which])) else label,
            source_id=file_id(video),
            fps=fps,
        )

    def prompt_of(self, index: int) -> str:
        """Prompt of the item."""
        return self._prompts[index // len(self.trajectories)]


def find_videos(folder: Path) -> list[Path]:
    """List the videos of a folder, or of `videos/` in it, in order of name; ValueError if there is no video in it."""
    places = (folder, folder / "videos")
    listed = [[f for f in place.glob("[!.]*") if f.suffix.lower() in VIDEO_ENDINGS] for place in places]
    found = sorted(listed[0] or listed[1])
    if not found:
        raise ValueError(f"{folder} is no folder with videos, must hold files ending in {', '.join(VIDEO_ENDINGS)}")
    return found
