"""How far the camera of a generated video is from its command: `pose_rot` and `pose_trans`, in degrees and metres.

Each frame is located by points of the source video whose places are known (`anchors.py`, `pnp.py`), so the unit is the
one of the camera files and the right path at the wrong speed is a wrong path. `smooth.py` reads the same measurement.

    value of pose_rot   = -sum_i w_i min(theta_i, 45 deg) / 45 deg
    value of pose_trans = -sum_i w_i min(d_i, 2 L) / 2 L,  L = max(longest commanded |t_i|, 0.3 m)

with w_i proportional to 1 + 2 i / (N - 1) over the frames that the ground-truth view allows to judge. A frame that is
not recognised takes the cap, and a video of which more than half is not recognised takes it everywhere: that is the
policy's fault. Exceptions, timeouts and sources that cannot be measured by are not: those rows have no value.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from flow_grpo.maths.poses import rot_err, trans_err
from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.camera.anchors import Film, Source, make_source
from flow_grpo.rewards.camera.pnp import Located, camera_matrix, locate_video
from flow_grpo.rewards.camera.unposed import make_unposed_source
from flow_grpo.rewards.frames import frame_numbers, frame_weights, grey_frames
from flow_grpo.rewards.process_pool import CallPool, Outcome, usable_cores
from flow_grpo.runtime.lru import keep_latest

ROT_CAP_DEG = 45.0
LEAST_REACH_M = 0.3
CAP_REACHES = 2.0
LEAST_LOCATED = 0.5  # share of the frames judged
MOST_SECONDS = 600.0  # for one kind of call on a batch: anchors, poses, displacements
MOST_WORKERS = 16
SOURCES_KEPT, BATCHES_KEPT = 32, 2

SourceKey = tuple[str, str, str, str]


@dataclasses.dataclass(frozen=True)
class PoseErrors:
    """One video's camera against its command.

    Attributes:
        degrees: (F,) float64 rotation errors of the frames looked at; the cap or more where not located.
        metres: (F,) float64 distances of camera centres, likewise.
        weights: (F,) float64, sum 1, 0 for frames that cannot be judged.
        reach: L, metres.
        located: share of the frames judged that were recognised.
        commanded: (F, 4, 4) float64 commanded poses of these frames.
        seen: (F, 4, 4) float64 poses found, NaN where not located.
        frames: (F,) the number of each frame in its video.
        metric: whether distances are in metres; else nothing can be said of them.
    """

    degrees: Tensor
    metres: Tensor
    weights: Tensor
    reach: float
    located: float
    commanded: Tensor
    seen: Tensor
    frames: tuple[int, ...]
    metric: bool = True

    @property
    def unregistered(self) -> bool:
        """Too few frames were recognised to say anything of the path."""
        return self.located < LEAST_LOCATED


def compare(
    commanded: Tensor, seen: Tensor, command: Tensor, visible: Tensor, frames: Sequence[int] | None = None
) -> PoseErrors:
    """Return the errors of a path.

    Args:
        commanded: (F, 4, 4) float64 commanded poses, in the frame in which `seen` is.
        seen: (F, 4, 4) float64 poses found, NaN where not located.
        command: (T, 4, 4) commanded poses as the policy was given them, which set the reach.
        visible: (F,) bool, at least one True.
        frames: (F,) the number of each frame in its video; None: all were looked at.
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


def _source_key(condition: Condition) -> SourceKey:
    """Name the anchors of a condition: scene, cameras and a hash of what they are made from.

    With a true view the target camera is part of it: the frames that can be judged depend on that view, and so do the
    anchors of a source without parallax.
    """
    content = hashlib.blake2b(digest_size=16)
    cameras = [(condition.source_video, condition.source_poses), (condition.target_video, condition.target_poses)]
    for video, poses in cameras:
        if video is not None:
            content.update(repr(tuple(video.shape)).encode())
            content.update(grey_frames(video[..., ::8, ::8], frame_numbers(video.shape[1])).tobytes())
            content.update(b"" if poses is None else poses.double().numpy().tobytes())
    if condition.intrinsics is not None:
        content.update(condition.intrinsics.double().numpy().tobytes())
    target = "" if condition.target_video is None else condition.target_camera
    return condition.scene, condition.source_camera, target, content.hexdigest()


def _films(condition: Condition) -> tuple[Film, Film | None, NDArray[np.float64]]:
    """Return the arguments of `make_source` and `make_unposed_source`."""
    frames = frame_numbers(condition.source_video.shape[1])
    assert condition.intrinsics is not None, "rows without intrinsics are left out"

    def film(video: Tensor, poses: Tensor | None) -> Film:
        known = np.full((len(frames), 4, 4), np.nan) if poses is None else poses[frames].double().numpy()
        return Film(grey_frames(video, frames), known, tuple(frames))

    target = None
    if condition.target_video is not None:
        target = film(condition.target_video, condition.target_poses)
    camera = camera_matrix(condition.intrinsics.double().tolist())
    return film(condition.source_video, condition.source_poses), target, camera


class PoseMeasurer:
    """Locates the frames of a batch once, for every reward that asks.

    Anchors are kept per source, measurements per batch content. A failure is kept nowhere: the next call tries again.

    Args:
        workers: processes; 0 measures in this one, without a time limit.
        seconds: time limit for the anchors of a batch's sources, and again for the poses of its frames.
    """

    def __init__(self, workers: int = 0, seconds: float = MOST_SECONDS) -> None:
        self.seconds = seconds
        self.pool = CallPool(workers)
        self._sources: OrderedDict[SourceKey, Source] = OrderedDict()
        self._batches: OrderedDict[str, list[Outcome[PoseErrors]]] = OrderedDict()

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> list[Outcome[PoseErrors]]:
        """Return for each of B CPU videos (B, 3, T, h, w) in [0, 1] its errors or why there are none."""
        frames = frame_numbers(videos.shape[2])
        pictures = [grey_frames(video, frames) for video in videos]
        keys = [_source_key(condition) for condition in conditions]
        content = hashlib.blake2b(repr(keys).encode(), digest_size=16)
        for picture, condition in zip(pictures, conditions, strict=True):
            content.update(picture.tobytes())
            content.update(condition.target_poses.double().numpy().tobytes())
        batch = content.hexdigest()
        if batch not in self._batches:
            outcomes = self._measure(pictures, conditions, keys)
            if any(outcome.failed for outcome in outcomes):
                return outcomes
            keep_latest(self._batches, batch, outcomes, BATCHES_KEPT)
        return self._batches[batch]

    def _measure(
        self,
        pictures: Sequence[NDArray[np.uint8]],
        conditions: Sequence[Condition],
        keys: Sequence[SourceKey],
    ) -> list[Outcome[PoseErrors]]:
        sources = self._find(conditions, keys)
        rows = [row for row, source in enumerate(sources) if source.value is not None]
        frames = frame_numbers(conditions[0].source_video.shape[1])
        jobs = []
        for row in rows:
            source = sources[row].value
            assert source is not None
            jobs.append((pictures[row], frames, source.views, source.camera))
        # Limited on their own: sources that took all of their time must not take that of the poses along.
        located = self.pool.run(locate_video, jobs, seconds=self.seconds, what="camera poses")
        outcomes = [Outcome[PoseErrors](None, source.fault, source.lacking) for source in sources]
        for row, found in zip(rows, located, strict=True):
            outcomes[row] = _errors(found, sources[row], conditions[row], frames)
        return outcomes

    def sources(self, conditions: Sequence[Condition]) -> list[Outcome[Source]]:
        """Return each condition's anchors; a source that cannot be measured by is `lacking`."""
        return self._find(conditions, [_source_key(condition) for condition in conditions])

    def _find(self, conditions: Sequence[Condition], keys: Sequence[SourceKey]) -> list[Outcome[Source]]:
        found: dict[SourceKey, Outcome[Source]] = {}
        missing: dict[SourceKey, Condition] = {}
        for key, condition in zip(keys, conditions, strict=True):
            if condition.intrinsics is None:
                text = f"{condition.scene} {condition.source_camera} has no known focal length"
                found[key] = Outcome(None, text, lacking=True)
            elif key not in self._sources:
                missing[key] = condition
        found |= {key: Outcome(self._sources[key]) for key in keys if key in self._sources}
        for make, posed in ((make_source, True), (make_unposed_source, False)):
            jobs = {key: _films(each) for key, each in missing.items() if (each.source_poses is not None) == posed}
            made = self.pool.run(make, list(jobs.values()), seconds=self.seconds, what="anchors")
            found |= dict(zip(jobs, made, strict=True))
        for key, outcome in found.items():
            if (source := outcome.value) is not None:
                keep_latest(self._sources, key, source, SOURCES_KEPT)
                if source.fault:
                    text = f"source {key[0]} {key[1]} is unusable: {source.fault}"
                    found[key] = Outcome(None, text, lacking=True)
        return [found[key] for key in keys]


def _errors(
    found: Outcome[Located], source: Outcome[Source], condition: Condition, frames: Sequence[int]
) -> Outcome[PoseErrors]:
    """Compare what was found with the command; a measurement that failed stays one."""
    if found.value is None or source.value is None:
        return Outcome(None, found.fault)
    commanded = condition.target_poses[list(frames)]
    visible = torch.from_numpy(source.value.visible)
    errors = compare(commanded, torch.from_numpy(found.value.poses), condition.target_poses, visible, frames)
    return Outcome(dataclasses.replace(errors, metric=source.value.metric))


@functools.cache
def shared_measurer() -> PoseMeasurer:
    """Return this process's measurer, which all rewards of poses read; it uses this rank's share of the cores."""
    share = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return PoseMeasurer(workers=min(share, MOST_WORKERS) if share > 1 else 0)


class PathReward:
    """What every reward of the camera's path does with a measurement.

    `measures` ends with "valid_frames", the share of the frames judged that are recognised, and "unregistered", 1 where
    too few are; before these stand the names of what `read` returns after the value.
    """

    measures: tuple[str, ...]
    needs_metres = True  # a source without a known unit is nothing to measure by

    def __init__(self, measurer: PoseMeasurer | None = None) -> None:
        self.measurer = shared_measurer() if measurer is None else measurer

    def read(self, errors: PoseErrors) -> tuple[float, ...]:
        """Return the value and what it stands for, in units of its own."""
        raise NotImplementedError

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score (B, 3, T, h, w) videos in [0, 1]; not valid where nothing could be measured."""
        outcomes = [self._in_metres(outcome) for outcome in self.measurer(videos, conditions)]
        rows = torch.full((len(conditions), 1 + len(self.measures)), torch.nan)
        for row, outcome in enumerate(outcomes):
            if outcome.value is not None:
                errors = outcome.value
                rows[row] = torch.tensor([*self.read(errors), errors.located, float(errors.unregistered)])
        values, *measured = rearrange(rows, "b k -> k b").unbind(0)
        causes = tuple(outcome.fault for outcome in outcomes)
        valid = torch.tensor([not cause for cause in causes])
        faulty = torch.tensor([outcome.failed for outcome in outcomes])
        return RewardResult(values, valid, causes, dict(zip(self.measures, measured, strict=True)), faulty)

    def _in_metres(self, outcome: Outcome[PoseErrors]) -> Outcome[PoseErrors]:
        if self.needs_metres and outcome.value is not None and not outcome.value.metric:
            text = "the source came without poses, so nothing tells the size of its scene in metres"
            return Outcome(None, text, lacking=True)
        return outcome


class PoseRot(PathReward):
    """Closeness of the camera's rotation to its command.

    `info`: `rot_deg`, the mean error over the frames judged, with the cap for those not recognised; `valid_frames`, the
    share of the frames judged that are recognised; `unregistered`, 1 where too few are.
    """

    name = "pose_rot"
    floor = 0.1 / ROT_CAP_DEG  # a tenth of a degree: blur and JPEG move the estimate so far
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
