"""Anchors of a source video without poses: its cameras are estimated once by structure from motion.

The first frame is the reference camera, as in every command for a user's own video. The unit is unknown unless there is
a ground-truth view, whose path is known in metres.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from flow_grpo.rewards.camera.anchors import OVERLAP_SHARE, PosedFrames, Source, make_source
from flow_grpo.rewards.camera.features import Floats
from flow_grpo.rewards.camera.pnp import locate_video

LEAST_REGISTERED = 0.5  # share of the source's frames
LEAST_PATH_M = 0.1  # of the true view's camera: a shorter path does not determine the unit


def make_unposed_source(source: PosedFrames, target: PosedFrames | None, camera: Floats) -> Source:
    """Return the checked anchors of a source video whose poses are not known, and are not read.

    Poses of the ground-truth view are in metres, relative to the source's first camera. Of `camera` the reconstruction
    uses only fx, anchors and checks all.
    """
    # Imported in the scoring process that needs it: few runs do.
    from flow_grpo.rewards.camera import structure_from_motion

    nothing = Source((), camera, np.ones(len(source.frames), np.bool_), "", metric=False)
    found = structure_from_motion.reconstruct(source.pictures, float(camera[0, 0]))
    rows = np.flatnonzero(found.found)
    if found.centred or 0 not in rows or len(rows) < LEAST_REGISTERED * len(source.frames):
        fault = f"it came without poses, and of {len(source.frames)} frames {len(rows)} could be placed"
        return dataclasses.replace(nothing, fault=f"{fault}{' without parallax' if found.centred else ''}")
    poses = np.linalg.inv(found.poses[0]) @ found.poses[rows]
    poses[:, :3, 3] /= np.linalg.norm(poses[:, :3, 3], axis=1).max()  # so that the tolerances of the check apply
    posed = PosedFrames(source.pictures[rows], poses, tuple(source.frames[row] for row in rows))
    made = dataclasses.replace(make_source(posed, None, camera), visible=nothing.visible, metric=False)
    size = None if target is None or made.fault else metres(made, target)
    if size is None:
        return made
    poses[:, :3, 3] *= size  # those that `posed` holds
    return make_source(posed, target, camera)


def metres(made: Source, target: PosedFrames) -> float | None:
    """Return the metres in a source's unit, by least squares over the path of the true view; None if not known."""
    features = [target[row].features for row in range(len(target))]
    centres = locate_video(features, target.frames, made.views, made.camera)[:, :3, 3]
    seen = np.isfinite(centres).all(1)
    known = target.poses[:, :3, 3]
    if seen.mean() < OVERLAP_SHARE or np.linalg.norm(known[seen], axis=1).max() < LEAST_PATH_M:
        return None
    size = float((centres[seen] * known[seen]).sum() / (centres[seen] ** 2).sum())
    return size if size > 0 else None
