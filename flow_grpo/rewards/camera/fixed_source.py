"""Sources whose camera stays in one place, still or turning: no parallax gives anchors (`anchors.py`).

Frame i of a generated video is matched with frame i of its source (`following.py`), the same instant, so that what
moves in the scene stands in the way as little as what rests. Every feature of the source is a point on a ray; features
that a still camera sees in the same direction are one point. `path_fit.py` finds the path of the camera and the points
together.

Where nothing tells the depths, the path is known up to its scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

from flow_grpo.rewards.camera.alignment import align, place_pixels
from flow_grpo.rewards.camera.anchors import PosedFrames
from flow_grpo.rewards.camera.bundle import COLUMNS, Matches
from flow_grpo.rewards.camera.features import Features, Floats
from flow_grpo.rewards.camera.following import corresponding, to_follow
from flow_grpo.rewards.camera.path_fit import Points, fit_path

KNOWN_SPREAD, UNKNOWN_SPREAD = 0.3, 1.0  # of the logarithm of depths: by a depth map, and by one number or none
SAME_POINT = 1.0  # pixels of a picture 416 wide between the directions of one point in two frames
TURN_SCALES = (12.0, 4.0, 2.0)  # such pixels, of the search for a turn
# A turn explains what is within so many such pixels; that must be a share of the matches (others may be on what moves),
# and that share of it must lie within a third: a camera that moves leaves small distances everywhere.
NEAR_PIXELS, NEAR_SHARE, EXACT_SHARE = 3.0, 0.2, 0.75
FEWEST_FEATURES = 50  # of a frame


@dataclasses.dataclass(frozen=True)
class FixedSource:
    """A source video whose camera stays in one place."""

    features: tuple[Features, ...]  # of its F frames
    rows: tuple[NDArray[np.int64], ...]  # of every feature of a frame in `points`
    points: Points
    camera: Floats  # (3, 3) from `pnp.camera_matrix`
    visible: NDArray[np.bool_]  # (F,) all: each frame can be scored
    fault: str  # why it cannot be used, or ""
    metric: bool  # whether the depths are in metres; otherwise their unit is unknown
    places: Floats | None = None  # (F, N, 3) of what small frames' pixels show, where depth maps say: `alignment.py`

    def locate(self, video: Sequence[Features], command: Floats) -> Floats:
        """Return the camera-to-world poses (F, 4, 4) of a video's frames by their features, NaN where not located.

        The frames are of the instants of the source's; `command` (F, 4, 4) are poses to start from.
        """
        if self.places is not None:
            return self._align(self.places, video, command)
        found: list[tuple[NDArray[np.int64], NDArray[np.int64], Floats]] = []
        for frame, (seen, features, rows) in enumerate(zip(video, self.features, self.rows, strict=True)):
            mine, there = corresponding(features, seen)
            found.append((np.full(len(mine), frame), rows[mine], there))
        numbers, points, pixels = (np.concatenate(column) for column in zip(*found, strict=True))
        return fit_path(Matches(numbers, points, pixels), self.points, self.camera, command)

    def _align(self, places: Floats, video: Sequence[Features], command: Floats) -> Floats:
        standing, half = np.tile(np.eye(4), (len(command), 1, 1)), command.copy()
        standing[:, :3, 3] = self.points.centre
        half[:, :3, 3] = (command[:, :3, 3] + self.points.centre) / 2
        starts = np.stack([command, half, standing], axis=1)
        shown, source = ([each.picture for each in side if each.picture is not None] for side in (video, self.features))
        return align(np.stack(shown), np.stack(source), places, self.camera, starts)


def make_fixed_source(source: PosedFrames, camera: Floats, depth: Floats | None = None) -> FixedSource:
    """Return the points of a source video whose camera stays in one place; if it does not, `fault` says so.

    Poses that are NaN are found, as turns from the first frame. `depth` (F or 1, h, w) are distances in metres of what
    the frames show, along the optical axis; (1, 1, 1) for all of the scene; None: not known.
    """
    features = tuple(to_follow(source[row].features) for row in range(len(source)))
    unit = source.pictures.shape[2] / COLUMNS
    rays = [_rays(each.points, camera) for each in features]
    known = np.isfinite(source.poses).all()
    turns, near, exact = _turns(features, rays, camera, unit, source.poses[:, :3, :3] if known else None)
    centre = source.poses[0, :3, 3] if known else np.zeros(3)
    fault, fewest = "", min(map(len, features))
    if fewest < FEWEST_FEATURES:
        fault = f"a frame has {fewest} features, needs {FEWEST_FEATURES}: no texture"
    elif near.min() < 0:
        shares = f"shares under {FEWEST_FEATURES} features with the first frame and the one before it"
        fault = f"frame {source.frames[int(near.argmin())]} {shares}"
    elif near.min() < NEAR_SHARE or exact.min() < EXACT_SHARE:
        worst = int(np.minimum(near / NEAR_SHARE, exact / EXACT_SHARE).argmin())
        fault = (
            f"its camera moves: a turn explains {near[worst]:.0%} of what frames {source.frames[0]} and "
            f"{source.frames[worst]} share, needs {NEAR_SHARE:.0%}, and {exact[worst]:.0%} of that exactly, needs "
            f"{EXACT_SHARE:.0%}"
        )
    nothing = Points(np.zeros(3), np.zeros((0, 3)), np.zeros(0), UNKNOWN_SPREAD)
    made = FixedSource(features, (), nothing, camera, np.ones(len(source), np.bool_), fault, depth is not None)
    if fault:
        return made
    placed = [ray @ turn.T for ray, turn in zip(rays, turns, strict=True)]
    rows, directions = _joined(placed, SAME_POINT * unit / camera[0, 0])
    distances = _distances(features, rays, rows, len(directions), depth)
    spread = KNOWN_SPREAD if depth is not None and depth.size > 1 else UNKNOWN_SPREAD
    points = Points(centre, directions, distances, spread)
    places = None
    if features[0].picture is not None and depth is not None and depth.size > 1:
        maps = depth[[min(frame, len(depth) - 1) for frame in range(len(source))]]
        size = features[0].picture.shape
        shown = [place_pixels(each, turn, camera, size) for each, turn in zip(maps, turns, strict=True)]
        places = centre + np.stack(shown)
    return dataclasses.replace(made, rows=tuple(rows), points=points, places=places)


def _rays(points: Floats, camera: Floats) -> Floats:
    """Return the unit vectors (N, 3), in the camera's frame, in which pixels (N, 2) lie."""
    rays = np.c_[points, np.ones(len(points))] @ np.linalg.inv(camera).T
    return np.asarray(rays / np.linalg.norm(rays, axis=1, keepdims=True))


def _turns(
    features: Sequence[Features], rays: Sequence[Floats], camera: Floats, unit: float, known: Floats | None
) -> tuple[Floats, Floats, Floats]:
    """Return each frame's rotation to the world (F, 3, 3), the share of its matches near it, and of these exactly (F,).

    A frame is compared with the first, where these share enough, else with the one before it. `unit` are the pixels
    of one of a picture 416 wide; `known` are the rotations where they need not be found.
    """
    pixel = unit / camera[0, 0]  # its angle
    found = [(np.eye(3) if known is None else known[0], 1.0, 1.0)]
    for row in range(1, len(features)):
        last = found[-1][0]
        best = last, -1.0, 0.0  # compared with none
        for other in (0, row - 1):
            mine, there = corresponding(features[row], features[other])
            if len(mine) < FEWEST_FEATURES:
                continue
            own, placed = rays[row][mine], _rays(there, camera) @ found[other][0].T
            tried = [last, find_turn(own, placed, last, pixel)] if known is None else [known[row]]
            best = max((_explained(own, placed, turn, pixel) for turn in tried), key=lambda one: one[1] * one[2])
            break
        found.append(best)
    turns, near, exact = zip(*found, strict=True)
    return np.stack(turns), np.array(near), np.array(exact)


def _explained(own: Floats, placed: Floats, turn: Floats, pixel: float) -> tuple[Floats, float, float]:
    apart = np.linalg.norm(own @ turn.T - placed, axis=1) / pixel
    near = apart < NEAR_PIXELS
    return turn, float(near.mean()), float((apart[near] < NEAR_PIXELS / 3).mean()) if near.any() else 0.0


def find_turn(
    own: Floats, placed: Floats, start: Floats, pixel: float, scales: Sequence[float] = TURN_SCALES
) -> Floats:
    """Return the rotation (3, 3) that takes most of the unit vectors `own` (N, 3) to `placed`, near `start`.

    `pixel` is the angle of a pixel in a picture 416 wide, `scales` are in such pixels, falling.
    """
    turn = start
    for scale in scales:
        for _ in range(5):
            apart = np.linalg.norm(own @ turn.T - placed, axis=1) / (3 * scale * pixel)
            turn = Rotation.align_vectors(placed, own, weights=1 / (1 + apart**2) ** 2)[0].as_matrix()
    return np.asarray(turn)


def _joined(directions: Sequence[Floats], close: float) -> tuple[list[NDArray[np.int64]], Floats]:
    """Return each frame's rows in the points (M, 3) that they share: directions within `close` are one point."""
    points, rows = np.zeros((0, 3)), []
    for own in directions:
        numbers = np.full(len(own), -1)
        if len(points):
            apart, nearest = cKDTree(points).query(own)
            numbers[apart < close] = nearest[apart < close]
        new = np.flatnonzero(numbers < 0)
        numbers[new] = len(points) + np.arange(len(new))
        points = np.concatenate([points, own[new]])
        rows.append(numbers)
    return rows, points


def _distances(
    features: Sequence[Features],
    rays: Sequence[Floats],
    rows: Sequence[NDArray[np.int64]],
    count: int,
    depth: Floats | None,
) -> Floats:
    """Return how far away (M,) the points are: the geometric mean of what their frames say, 1 where nothing does."""
    if depth is None:
        return np.ones(count)
    total, times = np.zeros(count), np.zeros(count)
    for frame, (own, ray, row) in enumerate(zip(features, rays, rows, strict=True)):
        shown = depth[min(frame, len(depth) - 1)]
        x, y = (
            np.clip(own.points.round().astype(int)[:, axis], 0, side - 1) for axis, side in enumerate(shown.shape[::-1])
        )
        np.add.at(total, row, np.log(shown[y, x] / ray[:, 2]))
        np.add.at(times, row, 1)
    return np.asarray(np.exp(total / times))
