"""Anchors: features of a source video with known 3D positions, by which generated frames are located.

Features of source frames are triangulated with the source's known poses. A source that only rotates, or is static, has
no parallax; then the synchronised source and target cameras are triangulated at equal times. Such points may lie on
moving objects: one is used for other frames only if another time shows it at the same place.

Before anchors are used, they must locate pictures of known pose: source frames that were not triangulated, and the
ground-truth view. A wrong focal length, a flipped axis or a wrong reference camera fails this check.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from flow_grpo.maths.poses import rot_err, trans_err
from flow_grpo.rewards.camera.features import Features, Floats, find_features, match
from flow_grpo.rewards.camera.pnp import MappedView, locate_video

VIEWS = 6  # source frames that are triangulated, evenly spread
REPROJECTION = 1.5  # pixels
LEAST_PARALLAX = np.deg2rad(1.0)
LASTING_PIXELS = 2.0
FEWEST_ANCHORS = 200
CHECKED = 5  # source frames held out for the check
CHECK_SHARE, CHECK_DEG, CHECK_M = 0.8, 0.2, 0.02  # share of them that must be located within degrees and metres
OVERLAP_SHARE, OVERLAP_DEG, OVERLAP_M = 0.5, 1.0, 0.1  # the same for the ground-truth view


@dataclasses.dataclass(frozen=True)
class PosedFrames:
    """F frames of one camera."""

    pictures: NDArray[np.uint8]  # (F, h, w) uint8 grey
    poses: Floats  # (F, 4, 4) float64 camera-to-world in metres; NaN for a source without poses, see `unposed.py`
    frames: tuple[int, ...]  # the number of each frame in its video
    features: dict[int, Features] = dataclasses.field(default_factory=dict, repr=False)  # of rows, as far as found

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, row: int) -> Picture:
        if row not in self.features:
            self.features[row] = find_features(self.pictures[row])
        return Picture(self.frames[row], self.features[row], self.poses[row])


@dataclasses.dataclass(frozen=True)
class Source:
    """A source video with anchors."""

    views: tuple[MappedView, ...]  # the anchors
    camera: Floats  # (3, 3) from `pnp.camera_matrix`
    # (F,) bool: frames whose ground-truth view the anchors locate correctly; all without such a view
    visible: NDArray[np.bool_]
    fault: str  # why the anchors cannot be used, or ""
    metric: bool = True  # whether their unit is the metre; otherwise it is unknown

    def __len__(self) -> int:
        return sum(map(len, self.views))


@dataclasses.dataclass(frozen=True)
class Picture:
    """One frame: its number, its features and its camera-to-world pose (4, 4)."""

    frame: int
    features: Features
    pose: Floats


def make_source(source: PosedFrames, target: PosedFrames | None, camera: Floats) -> Source:
    """Return the checked anchors of a source video; if the check fails, `fault` of the result says why.

    Points are triangulated from the source alone first. If they fail the check and there is a ground-truth view of the
    same times, points triangulated between both cameras are added and all are checked again. Poses of both are relative
    to one camera, any; `camera` is from `pnp.camera_matrix`.
    """
    chosen, held_out = split_rows(len(source))
    views = triangulate([source[row] for row in chosen], camera)
    made = _checked(views, source, held_out, target, camera)
    if made.fault and target is not None:
        views = [*views, *across_cameras(source, target, chosen, camera)]
        made = _checked(views, source, held_out, target, camera)
    return made


def split_rows(count: int) -> tuple[list[int], list[int]]:
    """Return which of `count` frames are triangulated, and which of the others are held out.

    Both are evenly spread. The first are `VIEWS` at most, with both ends, and never all of 3 frames or more.
    """

    def spread(rows: Sequence[int], number: int) -> list[int]:
        return sorted({rows[round(place)] for place in np.linspace(0, len(rows) - 1, number).tolist()}) if rows else []

    chosen = spread(range(count), min(VIEWS, count // 2 + 1))
    return chosen, spread(sorted(set(range(count)) - set(chosen)), CHECKED)


def triangulate(pictures: Sequence[Picture], camera: Floats) -> list[MappedView]:
    """Return each picture's triangulated features: in front of the cameras, exact, and with parallax."""
    matches = {
        (a, b): match(pictures[a].features.descriptors, pictures[b].features.descriptors)
        for a, b in itertools.combinations(range(len(pictures)), 2)
    }
    projections = np.stack([camera @ np.linalg.inv(picture.pose)[:3] for picture in pictures])
    centres = np.stack([picture.pose[:3, 3] for picture in pictures])
    views = []
    for own, picture in enumerate(pictures):
        seen = np.full((len(pictures), len(picture.features), 2), np.nan)
        seen[own] = picture.features.points
        for (a, b), (rows_a, rows_b) in matches.items():
            if own == a:
                seen[b, rows_a] = pictures[b].features.points[rows_b]
            elif own == b:
                seen[a, rows_b] = pictures[a].features.points[rows_a]
        xyz = _places(seen, own, projections, centres)
        kept = np.isfinite(xyz).all(1)
        lasting = np.ones(int(kept.sum()), np.bool_)
        views.append(MappedView(picture.frame, picture.features.descriptors[kept], xyz[kept], lasting))
    return views


def _places(seen: Floats, own: int, projections: Floats, centres: Floats) -> Floats:
    """Return the positions (N, 3) of N features seen at (V, N, 2) in V pictures, NaN where not triangulated.

    Each other picture proposes a position. The one with the largest parallax decides which observations belong to the
    feature; all of these are then triangulated together.
    """
    best = np.full((seen.shape[1], 3), np.nan)
    widest = np.full(seen.shape[1], LEAST_PARALLAX)
    for other in range(len(seen)):
        if other == own:
            continue
        pair = [own, other]
        xyz = _intersect(seen[pair], projections[pair])
        angle = parallax(xyz, centres[own], centres[other])
        error = _errors(xyz, seen[pair], projections[pair])
        better = (error < REPROJECTION).all(0) & (angle > widest)
        best[better], widest[better] = xyz[better], angle[better]
    agreeing = _errors(best, seen, projections) < REPROJECTION
    xyz = _intersect(np.where(agreeing[..., None], seen, np.nan), projections)
    exact = (~agreeing | (_errors(xyz, seen, projections) < REPROJECTION)).all(0) & np.isfinite(best).all(1)
    return np.where(exact[:, None], xyz, np.nan)


def _intersect(seen: Floats, projections: Floats) -> Floats:
    """Return positions (N, 3) by linear triangulation (DLT) of observations (V, N, 2), NaN where not seen."""
    rows = seen[..., None] * projections[:, None, 2:3] - projections[:, None, :2]  # (V, N, 2, 4)
    rows = np.nan_to_num(rows / np.linalg.norm(rows[..., :3], axis=-1, keepdims=True))
    squares = np.einsum("vnki,vnkj->nij", rows, rows)
    placed = np.isfinite(seen).all(-1).sum(0) >= 2
    # The smallest eigenvector is the homogeneous point.
    point = np.linalg.eigh(squares)[1][:, :, 0]
    near = np.abs(point[:, 3]) > 1e-9
    xyz: Floats = point[:, :3] / np.where(near, point[:, 3], 1.0)[:, None]
    xyz[~(near & placed)] = np.nan
    return xyz


def _errors(xyz: Floats, seen: Floats, projections: Floats) -> Floats:
    # Reprojection errors (V, N) in pixels of positions (N, 3); infinite behind a camera and where not seen.
    projected = np.einsum("vij,nj->vni", projections[:, :, :3], xyz) + projections[:, None, :, 3]
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.linalg.norm(projected[..., :2] / projected[..., 2:] - seen, axis=-1)
    return np.where(np.isfinite(error) & (projected[..., 2] > 0), error, np.inf)


def parallax(xyz: Floats, first: Floats, second: Floats) -> Floats:
    """Return the angles (N,) in radians between the rays of points (N, 3) to two camera centres (3,); 0 for NaN."""
    a, b = xyz - first, xyz - second
    angle: Floats = np.arctan2(np.linalg.norm(np.cross(a, b), axis=1), (a * b).sum(1))
    return np.nan_to_num(angle)


def across_cameras(source: PosedFrames, target: PosedFrames, rows: Sequence[int], camera: Floats) -> list[MappedView]:
    """Triangulate between two synchronised cameras at the frames `rows`; each anchor is marked static or not."""
    views, pictures = [], []
    for row in rows:
        pair = [source[row], target[row]]
        views += triangulate(pair, camera)
        pictures += pair
    return [_with_lasting(view, pictures, camera) for view in views]


def _with_lasting(view: MappedView, pictures: Sequence[Picture], camera: Floats) -> MappedView:
    lasting = np.zeros(len(view), np.bool_)
    for picture in pictures:
        if picture.frame == view.frame:
            continue
        mine, theirs = match(view.descriptors, picture.features.descriptors)
        projection = camera @ np.linalg.inv(picture.pose)[:3]
        error = _errors(view.xyz[mine], picture.features.points[theirs][None], projection[None])[0]
        lasting[mine] |= error < LASTING_PIXELS
    return dataclasses.replace(view, lasting=lasting)


def _checked(
    views: Sequence[MappedView],
    source: PosedFrames,
    held_out: Sequence[int],
    target: PosedFrames | None,
    camera: Floats,
) -> Source:
    visible, fault = np.ones(len(source), np.bool_), ""
    made = Source(tuple(view for view in views if len(view)), camera, visible, "")
    if len(made) < FEWEST_ANCHORS:
        fault = f"{len(made)} anchors, needs {FEWEST_ANCHORS}: no parallax or texture, or a wrong focal length or poses"
    elif not held_out:
        fault = f"{len(source)} frames, needs 3: one is held out to check the others"
    elif (exact := _placed(made, source, held_out, (CHECK_DEG, CHECK_M))).mean() < CHECK_SHARE:
        fault = (
            f"{int(exact.sum())} of {len(exact)} source frames are found within {CHECK_DEG} degrees and "
            f"{CHECK_M} m, needs {CHECK_SHARE:.0%}: poses or focal length are wrong"
        )
    elif target is not None:
        visible = _placed(made, target, range(len(target)), (OVERLAP_DEG, OVERLAP_M))
        if visible.mean() < OVERLAP_SHARE:
            fault = f"{int(visible.sum())} of {len(visible)} frames of the true view are found by the source's anchors"
    return dataclasses.replace(made, visible=visible, fault=fault)


def _placed(made: Source, pictures: PosedFrames, rows: Sequence[int], most: tuple[float, float]) -> NDArray[np.bool_]:
    # Which of the rows are located within (degrees, metres) of their known pose.
    features, frames = [pictures[row].features for row in rows], [pictures.frames[row] for row in rows]
    found = torch.from_numpy(locate_video(features, frames, made.views, made.camera))
    known = torch.from_numpy(pictures.poses[list(rows)])
    near = (rot_err(known, found).rad2deg() <= most[0]) & (trans_err(known, found) <= most[1])
    right: NDArray[np.bool_] = near.numpy()
    return right
