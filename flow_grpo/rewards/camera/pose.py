"""Distance of a generated video's camera from its command: `pose_rot` and `pose_trans`, in degrees and metres.

Each frame is located by 3D points of the source video (`anchors.py`, `pnp.py`), in the unit of the camera files, so the
right path at the wrong speed is a wrong path. `smooth.py` scores the same measurement.

    value of pose_rot   = -sum_i w_i min(theta_i, 45 deg) / 45 deg
    value of pose_trans = -sum_i w_i min(d_i, 2 L) / 2 L,  L = max(longest commanded |t_i|, 0.3 m)

with w_i proportional to 1 + 2 i / (N - 1) over the frames that can be scored (see `Source.visible`). A frame that is
not located scores the cap, as do all frames of a video with less than half of them located. Exceptions, timeouts and
sources without usable anchors are not the policy's fault: such rows have no value.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flow_grpo.maths.poses import rot_err, trans_err
from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.camera.anchors import PosedFrames
from flow_grpo.rewards.camera.feature_pool import MOST_SECONDS, FeaturePool, Views, together
from flow_grpo.rewards.camera.features import Floats
from flow_grpo.rewards.camera.find_source import AnySource, find_source
from flow_grpo.rewards.camera.fixed_source import FixedSource
from flow_grpo.rewards.camera.pnp import camera_matrix, locate_video
from flow_grpo.rewards.frames import frame_numbers, frame_weights, grey_frames
from flow_grpo.rewards.process_pool import CallPool, Outcome
from flow_grpo.rewards.references import VideosKey, videos_key
from flow_grpo.rewards.results import from_outcomes
from flow_grpo.runtime.lru import LruCache
from flow_grpo.runtime.processes import usable_cores

ROT_CAP_DEG = 45.0
LEAST_REACH_M = 0.3
CAP_REACHES = 2.0
LEAST_MOVE_M = 0.01  # of a command, to have a direction
LEAST_LOCATED = 0.5  # share of the scored frames
MOST_WORKERS = 16
SOURCES_KEPT, BATCHES_KEPT = 32, 2

Job = tuple[Views, Sequence[int], AnySource, Tensor]  # arguments of `locate_frames`


@dataclasses.dataclass(frozen=True)
class PoseErrors:
    """One video's camera compared with its command, at F frames."""

    degrees: Tensor  # (F,) float64 rotation errors; the cap where not located
    metres: Tensor  # (F,) float64 distances of camera centres, likewise
    weights: Tensor  # (F,) float64 of sum 1, 0 for frames that cannot be scored
    reach: float  # L, metres
    located: float  # located share of the frames with weight
    commanded: Tensor  # (F, 4, 4) float64 commanded poses
    seen: Tensor  # (F, 4, 4) float64 estimated poses, NaN where not located
    frames: tuple[int, ...]  # (F,) the number of each frame in its video
    metric: bool = True  # whether distances are in metres; otherwise their unit is unknown

    @property
    def unregistered(self) -> bool:
        """Too few frames were located to judge the path."""
        return self.located < LEAST_LOCATED


def compare(
    commanded: Tensor, seen: Tensor, command: Tensor, visible: Tensor, frames: Sequence[int] | None = None
) -> PoseErrors:
    """Return the errors of an estimated path; where too few frames are located, every frame counts as not located.

    Args:
        commanded: (F, 4, 4) float64 commanded poses, in the same reference frame as `seen`.
        seen: (F, 4, 4) float64 estimated poses, NaN where not located.
        command: (T, 4, 4) commanded poses of the whole video, which set the reach.
        visible: (F,) bool, which frames can be scored; at least one True.
        frames: (F,) the number of each frame in its video; None: all of it.
    """
    missing = seen.isnan().flatten(1).any(1)
    located = float((visible & ~missing).sum() / visible.sum())
    if located < LEAST_LOCATED:
        missing = torch.ones_like(missing)
    reach = max(float(command[..., :3, 3].norm(dim=-1).max()), LEAST_REACH_M)
    safe = torch.where(missing[:, None, None], commanded, seen)
    degrees = rot_err(commanded, safe).rad2deg().masked_fill(missing, ROT_CAP_DEG)
    metres = trans_err(commanded, safe).masked_fill(missing, CAP_REACHES * reach)
    numbers = tuple(range(len(seen)) if frames is None else frames)
    return PoseErrors(degrees, metres, frame_weights(visible), reach, located, commanded, seen, numbers)


def rotation_value(errors: PoseErrors) -> float:
    """Return the value of `pose_rot` in [-1, 0]."""
    return -float((errors.weights * errors.degrees.clamp(max=ROT_CAP_DEG)).sum()) / ROT_CAP_DEG


def translation_value(errors: PoseErrors) -> float:
    """Return the value of `pose_trans` in [-1, 0]."""
    cap = CAP_REACHES * errors.reach
    return -float((errors.weights * errors.metres.clamp(max=cap)).sum()) / cap


def direction_error(errors: PoseErrors) -> float:
    """Return the angle in degrees, at most 90, between the found and the commanded path, whatever their scales.

    Paths are vectors of all weighted centres; a frame that is not located, like a camera that does not move, lies at
    the origin. So a path that is half missing is some 45 degrees off, and a standing camera 90.
    """
    weights = errors.weights.sqrt()[:, None]
    asked = weights * errors.commanded[:, :3, 3]
    way = weights * errors.seen[:, :3, 3].nan_to_num() * (not errors.unregistered)
    cosine = (asked * way).sum() / (asked.norm() * way.norm()).clamp(min=1e-12)
    return float(cosine.clamp(0, 1).acos().rad2deg())


def _facts(condition: Condition) -> tuple[PosedFrames, PosedFrames | None, Floats, Floats | None]:
    """Return what `find_source` asks for."""
    frames = frame_numbers(condition.size[0])
    assert condition.intrinsics is not None, "rows without intrinsics are left out"

    def posed(video: Tensor, poses: Tensor | None) -> PosedFrames:
        known = np.full((len(frames), 4, 4), np.nan) if poses is None else poses[frames].double().numpy()
        return PosedFrames(grey_frames(video, frames), known, tuple(frames))

    target = None if condition.target_video is None else posed(condition.target_video, condition.target_poses)
    camera = camera_matrix(condition.intrinsics.double().tolist())
    depth = condition.source_depth
    known = None if depth is None else depth.at(frames).double().numpy()
    return posed(condition.need_source(), condition.source_poses), target, camera, known


class PoseMeasurer:
    """Locates the frames of a batch once for all rewards that share it.

    Anchors are cached by source, measurements by batch content. Failures are not cached: the next call tries again.
    With 0 `workers` it measures in this process, without a time limit.
    """

    def __init__(self, workers: int = 0) -> None:
        self.pool = CallPool(workers)
        self.features = FeaturePool(self.pool)
        self._sources: LruCache[VideosKey, AnySource] = LruCache(SOURCES_KEPT)
        self._batches: LruCache[str, list[Outcome[PoseErrors]]] = LruCache(BATCHES_KEPT)

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> list[Outcome[PoseErrors]]:
        """Return the errors of each of B CPU videos (B, 3, T, h, w) in [0, 1], or why there are none."""
        frames = frame_numbers(videos.shape[2])
        pictures = [grey_frames(video, frames) for video in videos]
        keys = [videos_key(condition) for condition in conditions]
        content = hashlib.blake2b(repr(keys).encode(), digest_size=16)
        for picture, condition in zip(pictures, conditions, strict=True):
            content.update(picture.tobytes())
            content.update(condition.need_poses().double().numpy().tobytes())
        batch = content.hexdigest()
        if batch in self._batches:
            return self._batches[batch]
        found = self._find(conditions, keys)
        outcomes = [Outcome[PoseErrors](None, outcome.fault, outcome.lacking) for outcome in found]
        sources = {row: outcome.value for row, outcome in enumerate(found) if outcome.value is not None}
        # Time limits of their own: slow anchors must not use up that of the poses.
        views = self.features([pictures[row] for row in sources], "features")
        jobs = []
        for (row, source), seen in zip(sources.items(), views, strict=True):
            outcomes[row] = Outcome(None, seen.fault, seen.lacking)
            if seen.value is not None:
                jobs += [(row, job) for job in self._jobs(source, seen.value, frames, conditions[row].need_poses())]
        parts = self.pool.run(locate_frames, [job for _, job in jobs], seconds=MOST_SECONDS, what="camera poses")
        for row in {row: None for row, _ in jobs}:
            own = together([part for (whose, _), part in zip(jobs, parts, strict=True) if whose == row])
            path = own.then(np.concatenate)
            outcomes[row] = path.then(functools.partial(_errors, sources[row], conditions[row], frames))
        if not any(outcome.failed for outcome in outcomes):
            self._batches[batch] = outcomes
        return outcomes

    def _jobs(self, source: AnySource, seen: Views, frames: Sequence[int], path: Tensor) -> list[Job]:
        """Split the work on a video for the pool, where its frames are located one by one."""
        parts = 1 if isinstance(source, FixedSource) else max(1, min(self.pool.workers, len(frames)))
        return [
            (seen[rows[0] : rows[-1] + 1], frames[rows[0] : rows[-1] + 1], source, path)
            for rows in np.array_split(np.arange(len(frames)), parts)
        ]

    def sources(self, conditions: Sequence[Condition]) -> list[Outcome[AnySource]]:
        """Return each condition's anchors; the outcome of a source without usable anchors is `lacking`."""
        return self._find(conditions, [videos_key(condition) for condition in conditions])

    def _find(self, conditions: Sequence[Condition], keys: Sequence[VideosKey]) -> list[Outcome[AnySource]]:
        found: dict[VideosKey, Outcome[AnySource]] = {}
        missing: dict[VideosKey, Condition] = {}
        for key, condition in zip(keys, conditions, strict=True):
            if condition.intrinsics is None:
                text = f"{condition.scene} {condition.source_camera} has no known focal length"
                found[key] = Outcome(None, text, lacking=True)
            elif key in self._sources:
                found[key] = Outcome(self._sources[key])
            else:
                missing[key] = condition
        jobs = [_facts(condition) for condition in missing.values()]
        shown = [target for _, target, _, _ in jobs if target is not None]
        views = self.features([target.pictures for target in shown], "true views")
        for target, seen in zip(shown, views, strict=True):
            target.features.update(enumerate(seen.value or ()))  # else the call for the anchors says what is wrong
        made = self.pool.run(find_source, jobs, seconds=MOST_SECONDS, what="anchors")
        found |= dict(zip(missing, made, strict=True))
        for key, outcome in found.items():
            if (source := outcome.value) is not None:
                self._sources[key] = source
                if source.fault:
                    text = f"source {key[0]} {key[1]} is unusable: {source.fault}"
                    found[key] = Outcome(None, text, lacking=True)
        return [found[key] for key in keys]


def locate_frames(seen: Views, frames: Sequence[int], source: AnySource, path: Tensor) -> Floats:
    """Return the poses (F, 4, 4) of F frames of a video by their features, NaN where not located.

    `frames` are their numbers in the video, whose command is `path` (T, 4, 4).
    """
    if isinstance(source, FixedSource):
        return source.locate(seen, path[list(frames)].double().numpy())
    return locate_video(seen, frames, source.views, source.camera)


def _errors(source: AnySource, condition: Condition, frames: Sequence[int], found: Floats) -> PoseErrors:
    path, visible = condition.need_poses(), torch.from_numpy(source.visible)
    errors = compare(path[list(frames)], torch.from_numpy(found), path, visible, frames)
    return dataclasses.replace(errors, metric=source.metric)


@functools.cache
def shared_measurer() -> PoseMeasurer:
    """Return the measurer that all pose rewards of this process share; it uses this rank's share of the cores.

    It has one process at least: a measurement in this one could not be stopped at its time limit.
    """
    share = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return PoseMeasurer(workers=min(max(share, 1), MOST_WORKERS))


class PathReward:
    """Base of the rewards that score `PoseErrors`.

    `measures` starts with the names of what `read` returns after the value and ends with "valid_frames", the located
    share of the frames with weight, and "unregistered", 1 where too few are located.
    """

    measures: tuple[str, ...]
    needs = ("source_video", "target_poses", "intrinsics")
    needs_metres = True  # not valid where the unit of the source is unknown

    def __init__(self, measurer: PoseMeasurer | None = None) -> None:
        self.measurer = measurer or shared_measurer()

    def prepare(self, conditions: Sequence[Condition]) -> None:
        """Find the anchors of conditions."""
        self.measurer.sources(conditions)

    def read(self, errors: PoseErrors) -> tuple[float, ...]:
        """Return the value, then measurements in their own units."""
        raise NotImplementedError

    def lacking(self, errors: PoseErrors) -> str:
        """Return why errors that were measured give no value, or ""."""
        if self.needs_metres and not errors.metric:
            return (
                "the source has neither poses with parallax nor depth, so nothing tells the size of its scene in metres"
            )
        return ""

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score (B, 3, T, h, w) videos in [0, 1]; not valid where nothing could be measured."""
        outcomes = list(self.measurer(videos, conditions))
        for row, outcome in enumerate(outcomes):
            if outcome.value is not None and (cause := self.lacking(outcome.value)):
                outcomes[row] = Outcome(None, cause, lacking=True)
        return from_outcomes([outcome.then(self._row) for outcome in outcomes], self.measures)

    def _row(self, errors: PoseErrors) -> tuple[float, ...]:
        return *self.read(errors), errors.located, float(errors.unregistered)


class PoseRot(PathReward):
    """Closeness of the camera's rotation to its command.

    `info`: `rot_deg`, the mean error over the frames with weight, with the cap for those not located; `valid_frames`,
    the located share of these frames; `unregistered`, 1 where it is too small.
    """

    name = "pose_rot"
    floor = 0.1 / ROT_CAP_DEG  # a tenth of a degree: how far blur and JPEG move the estimate
    measures = ("rot_deg", "valid_frames", "unregistered")
    needs_metres = False

    def read(self, errors: PoseErrors) -> tuple[float, float]:
        """Return the value and the mean rotation error in degrees."""
        return rotation_value(errors), float(errors.degrees[errors.weights > 0].mean())


class PoseTrans(PathReward):
    """Closeness of the camera's centre to its command.

    `info` as for `PoseRot`, with `trans_m`, the mean distance in metres.
    """

    name = "pose_trans"
    floor = 0.01 / CAP_REACHES  # a centimetre on a path of a metre
    measures = ("trans_m", "valid_frames", "unregistered")

    def read(self, errors: PoseErrors) -> tuple[float, float]:
        """Return the value and the mean distance in metres."""
        return translation_value(errors), float(errors.metres[errors.weights > 0].mean())


class PoseDir(PathReward):
    """Direction of the camera's path, where nothing tells how far it went.

    value = -angle / 90 degrees, see `direction_error`: the path at half or twice the commanded speed scores the same.
    `info`: `dir_deg`, the angle; `valid_frames` and `unregistered` as for `PoseRot`.
    """

    name = "pose_dir"
    floor = 1.0 / 90.0  # a degree
    measures = ("dir_deg", "valid_frames", "unregistered")
    needs_metres = False

    def lacking(self, errors: PoseErrors) -> str:
        """Return why there is no direction, or ""."""
        moves = errors.commanded[:, :3, 3].norm(dim=-1).max() >= LEAST_MOVE_M
        return "" if moves else f"the command stays within {LEAST_MOVE_M} m, which is no direction"

    def read(self, errors: PoseErrors) -> tuple[float, float]:
        """Return the value and the angle in degrees."""
        angle = direction_error(errors)
        return -angle / 90.0, angle
