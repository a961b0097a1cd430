"""Camera poses of a video's frames from its own matches, where pycolmap has no wheel.

Pairs of frames give relative rotations and matches that one rigid scene explains; the rotations are averaged over all
pairs (Hartley et al., Rotation Averaging, 2013); then positions and points are the least of a quadratic form, the
distances of the points from their rays, with the points eliminated in closed form; and bundle adjustment refines all.
A linear start for the positions needs no first pair and knows straight paths, on which directions between cameras say
nothing about distances. The focal length is believed, as by COLMAP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, connected_components
from scipy.spatial.transform import Rotation

from flow_grpo.rewards.camera.bundle import OUTLYING, Bundle, Matches
from flow_grpo.rewards.camera.features import Features, Floats, find_features, match
from flow_grpo.rewards.camera.pnp import GATE, camera_matrix

APART = (1, 2, 4, 8, 16)  # frames that are matched
PAIR_PIXELS = 1.0  # from its epipolar line, of an inlier
LEAST_OF_PAIR, SHARE_OF_PAIR = 15, 0.3  # inliers, and their share of the matches
TURN_PIXELS = 0.3  # a pair whose matches are usually nearer than this after a turn alone is taken to have turned only
TWISTED_DEG = 60.0  # from the turn alone: an essential matrix has a twisted twin, which a flat scene may prefer
WRONG_DEG = 3.0  # a pair whose rotation is this far from the averaged ones does not count
LEAST_VIEWS = 3  # of a point
LEAST_PARALLAX_DEG = 0.3  # with less, and with few points, only rotations are known
LEAST_POINTS = 30  # triangulated; with fewer all frames get one position
SPREAD_DEG = 1.0  # rays to a triangulated point are apart by this at least
ROUNDS = 8  # of averages and of positions
SCALES = (4.0, 2.0, 1.0, 0.5)  # of bundle adjustment, in pixels of a picture 416 wide
STEPS = 5  # of each


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two frames that see the same scene."""

    first: int
    second: int
    rotation: Floats  # (3, 3) of the second camera in the first
    rows: NDArray[np.int64]  # (n, 2) features of both that agree


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimated cameras of F frames."""

    poses: Floats  # (F, 4, 4) float64 OpenCV camera-to-world in an arbitrary frame and unit; NaN where not registered
    points: int = 0  # number of triangulated points
    centred: bool = False  # too few points show parallax, so only rotations are known and all positions are 0
    parallax_deg: float = float("nan")  # how far the view moved apart from rotation; NaN when not known
    metric: bool = False  # whether the unit is the metre
    cpu_seconds: float = 0.0  # spent by the process

    @property
    def found(self) -> NDArray[np.bool_]:
        """(F,) which frames are registered."""
        return np.asarray(np.isfinite(self.poses).all((1, 2)))


def find_motion(pictures: NDArray[np.uint8], focal_px: float) -> Estimate:
    """Find the cameras of grey pictures (F, h, w) of square pixels with the principal point in the middle."""
    height, width = pictures.shape[1:]
    features = [find_features(picture) for picture in pictures]
    camera = camera_matrix((focal_px, focal_px, width / 2, height / 2))
    rays = [unit_rays(one.points, camera[:2, 2], focal_px) for one in features]
    cv2.setRNGSeed(0)  # for RANSAC
    ends = [(one, one + far) for one in range(len(pictures)) for far in APART if one + far < len(pictures)]
    tried = [_pair(first, second, features, rays, focal_px) for first, second in ends]
    poses = np.full((len(pictures), 4, 4), np.nan)
    pairs, frames = _largest_part([pair for pair in tried if pair], len(pictures))
    if not pairs:
        return Estimate(poses, centred=True)
    rotations, pairs = _average(pairs, frames, len(pictures))
    poses[frames] = np.eye(4)
    poses[frames, :3, :3] = rotations[frames]
    parallax = max(_parallax(pair, rays, rotations) for pair in pairs)
    turned = Estimate(poses, centred=True, parallax_deg=parallax)
    at, point, feature = _tracks(pairs, [len(one) for one in features])
    enough = np.bincount(at, minlength=len(pictures)) >= GATE  # a frame that shares no points would have any position
    frames, kept = np.flatnonzero(enough), enough[at]
    if parallax < LEAST_PARALLAX_DEG or not len(frames):
        return turned
    at, point, feature = at[kept], np.unique(point[kept], return_inverse=True)[1], feature[kept]
    looks, pixels = (
        np.stack([of[one][row] for one, row in zip(at, feature, strict=True)])
        for of in (rays, [one.points for one in features])
    )
    rows = np.searchsorted(frames, at)
    start = poses[frames]
    start[:, :3, 3], places = _positions(rows, point, np.einsum("nij,nj->ni", rotations[at], looks), 1 / focal_px)
    fit = Bundle(Matches(rows, point, pixels), camera, start, places)
    fit.run(SCALES, STEPS)
    good = fit.errors() < OUTLYING
    points = _triangulated(fit, good)
    if points < LEAST_POINTS:
        return turned
    found = np.bincount(rows[good], minlength=len(frames)) >= GATE
    moved = np.full_like(poses, np.nan)
    moved[frames[found]] = fit.poses[found]
    seen = [pair for pair in pairs if np.isfinite(moved[[pair.first, pair.second]]).all()]
    wide = [_parallax(pair, rays, moved[:, :3, :3]) for pair in seen]
    return Estimate(moved, points, parallax_deg=max(wide, default=parallax))


def unit_rays(pixels: Floats, middle: Floats, focal_px: float) -> Floats:
    """Return the unit vectors (n, 3), in the camera's frame, of pixels (n, 2) by the principal point (2,)."""
    rays = np.c_[(pixels - middle) / focal_px, np.ones(len(pixels))]
    return np.asarray(rays / np.linalg.norm(rays, axis=1, keepdims=True))


def usual_angle(one: Floats, other: Floats) -> float:
    """Return the median angle in degrees between unit vectors (n, 3)."""
    apart = np.median(np.linalg.norm(one - other, axis=1))
    return float(np.degrees(2 * np.arcsin(min(apart / 2, 1.0))))


def _pair(
    first: int, second: int, features: Sequence[Features], rays: Sequence[Floats], focal_px: float
) -> Pair | None:
    mine, theirs = match(features[first].descriptors, features[second].descriptors)
    if len(mine) < LEAST_OF_PAIR:
        return None
    one, other = rays[first][mine], rays[second][theirs]
    rotation = _turn(one, other)
    apart = np.linalg.norm(one - other @ rotation.T, axis=1) * focal_px
    kept = apart < PAIR_PIXELS
    if np.median(apart) > TURN_PIXELS:
        here, there = (np.ascontiguousarray(some[:, :2] / some[:, 2:]) for some in (one, other))
        camera, within = np.eye(3), PAIR_PIXELS / focal_px
        essential, agree = cv2.findEssentialMat(here, there, camera, cv2.USAC_ACCURATE, 0.9999, within)
        if essential is None or len(essential) != 3:
            return None
        kept = agree.ravel() > 0
    if kept.sum() < max(LEAST_OF_PAIR, SHARE_OF_PAIR * len(kept)):
        return None
    if np.median(apart) > TURN_PIXELS:
        told = cv2.recoverPose(essential, here[kept], there[kept], camera)[1].T
        if Rotation.from_matrix(told.T @ rotation).magnitude() < np.deg2rad(TWISTED_DEG):
            rotation = told
    return Pair(first, second, rotation, np.stack([mine[kept], theirs[kept]], 1))


def _turn(one: Floats, other: Floats) -> Floats:
    """Return the rotation that takes most of the rays (n, 3) of the other camera to those of the one."""
    weights = np.ones(len(one))
    for _ in range(ROUNDS):
        rotation, _ = Rotation.align_vectors(one, other, weights)
        apart = ((one - rotation.apply(other)) ** 2).sum(1)
        weights = 1 / (1 + apart / max(np.median(apart), 1e-12)) ** 2
    return np.asarray(rotation.as_matrix())


def _graph(pairs: Sequence[Pair], count: int) -> coo_array:
    ends = np.array([(pair.first, pair.second) for pair in pairs]).reshape(-1, 2)
    strength = [1 / len(pair.rows) for pair in pairs]
    return coo_array((strength, ends.T), shape=(count, count))


def _largest_part(pairs: Sequence[Pair], count: int) -> tuple[list[Pair], NDArray[np.int64]]:
    """Return the pairs of the most frames that hang together, and these frames."""
    _, labels = connected_components(_graph(pairs, count), directed=False)
    frames = np.flatnonzero(labels == np.bincount(labels).argmax())
    return [pair for pair in pairs if pair.first in frames], frames


def _average(pairs: list[Pair], frames: NDArray[np.int64], count: int) -> tuple[Floats, list[Pair]]:
    """Return the rotations (count, 3, 3) that agree best with those of the pairs, and the pairs they agree with."""
    known = {(pair.first, pair.second): pair.rotation for pair in pairs}
    known |= {(second, first): rotation.T for (first, second), rotation in known.items()}
    rotations = np.tile(np.eye(3), (count, 1, 1))
    order, before = breadth_first_order(_graph(pairs, count).tocsr(), frames[0], directed=False)
    for frame in order[1:]:
        rotations[frame] = rotations[before[frame]] @ known[before[frame], frame]
    first, second = (np.array([getattr(pair, end) for pair in pairs]) for end in ("first", "second"))
    told = np.stack([pair.rotation for pair in pairs])
    for _ in range(ROUNDS):
        between = np.swapaxes(rotations[first], 1, 2) @ rotations[second]
        off = Rotation.from_matrix(np.swapaxes(told, 1, 2) @ between).as_rotvec()
        weight = 1 / (1 + (off**2).sum(1) / np.deg2rad(WRONG_DEG / 3) ** 2)
        system = np.zeros((len(pairs), 3, count, 3))
        system[range(len(pairs)), :, second] = np.eye(3)
        system[range(len(pairs)), :, first] = -np.swapaxes(between, 1, 2)
        rows = (weight[:, None, None, None] * system).reshape(3 * len(pairs), -1)
        moved = np.linalg.lstsq(rows, -(weight[:, None] * off).ravel(), rcond=1e-9)[0].reshape(count, 3)
        rotations = rotations @ Rotation.from_rotvec(moved).as_matrix()
    right = np.linalg.norm(off, axis=1) < np.deg2rad(WRONG_DEG)
    return rotations, [pair for pair, fine in zip(pairs, right, strict=True) if fine] or pairs


def _parallax(pair: Pair, rays: Sequence[Floats], rotations: Floats) -> float:
    ends = zip((pair.first, pair.second), pair.rows.T, strict=True)
    return usual_angle(*(rays[frame][rows] @ rotations[frame].T for frame, rows in ends))


def _tracks(pairs: Sequence[Pair], sizes: Sequence[int]) -> tuple[NDArray[np.int64], ...]:
    """Return frame, point and feature (n,) of every observation of the points that `LEAST_VIEWS` frames see."""
    begin = np.concatenate([[0], np.cumsum(sizes)])
    links = np.concatenate([pair.rows + begin[[pair.first, pair.second]] for pair in pairs]).T
    graph = coo_array((np.ones(links.shape[1]), links), shape=(begin[-1], begin[-1]))
    _, labels = connected_components(graph, directed=False)
    frame = np.repeat(np.arange(len(sizes)), sizes)
    feature = np.arange(begin[-1]) - begin[frame]
    views = np.bincount(labels)
    once = np.ones(len(views), np.bool_)  # two features of one frame cannot be one point
    both, times = np.unique(np.stack([labels, frame]), axis=1, return_counts=True)
    once[both[0][times > 1]] = False
    kept = (once & (views >= LEAST_VIEWS))[labels]
    return frame[kept], np.unique(labels[kept], return_inverse=True)[1], feature[kept]


def _positions(
    frames: NDArray[np.int64], points: NDArray[np.int64], rays: Floats, pixel: float
) -> tuple[Floats, Floats]:
    """Return centres (F, 3) and points (M, 3) that lie nearest to the world's rays (n, 3), the first centre at 0.

    The distance of a point X from a ray v at a centre c is |P (X - c)| with P = 1 - v v'. For given weights the sum of
    squares is a quadratic form in the centres alone once each point is at its best place; its lowest eigenvector, the
    first centre apart, is the path. The weights make angles of the distances and take away those that are far out.
    """
    count, many = frames.max() + 1, points.max() + 1
    across = np.eye(3) - np.einsum("ni,nj->nij", rays, rays)
    weight = np.ones(len(rays))
    for _ in range(ROUNDS):
        blocks = np.zeros((many, 3, count, 3))
        np.add.at(blocks.swapaxes(1, 2), (points, frames), weight[:, None, None] * across)
        own = blocks.sum(2) + 1e-9 * np.eye(3)
        best = np.linalg.solve(own, blocks.reshape(many, 3, -1))  # the points' places as linear maps of the centres
        form = -blocks.reshape(3 * many, -1).T @ best.reshape(3 * many, -1)
        for frame, block in enumerate(blocks.sum(0).swapaxes(0, 1)):
            form[3 * frame : 3 * frame + 3, 3 * frame : 3 * frame + 3] += block
        path = np.concatenate([np.zeros(3), np.linalg.eigh(form[3:, 3:])[1][:, 0]])
        places, centres = best @ path, path.reshape(count, 3)
        away = places[points] - centres[frames]
        if (along := (away * rays).sum(1)).sum() < 0:
            places, centres, away, along = -places, -centres, -away, -along
        far = np.linalg.norm(away, axis=1)
        off = np.linalg.norm(away - along[:, None] * rays, axis=1) / far
        weight = np.where(along > 0, 1 / (1 + (off / (4 * pixel)) ** 2) ** 2 / far**2, 1e-6 / far**2)
        weight /= weight.mean()
    return centres, places


def _triangulated(fit: Bundle, good: NDArray[np.bool_]) -> int:
    """Return how many points are seen well from `SPREAD_DEG` apart."""
    rays = fit.places[fit.matches.points] - fit.poses[fit.matches.frames, :3, 3]
    rays = (rays / np.linalg.norm(rays, axis=1, keepdims=True))[good]
    rows, many = fit.matches.points[good], len(fit.places)
    seen = np.bincount(rows, minlength=many)
    mean = np.stack([np.bincount(rows, ray, many) for ray in rays.T], 1) / np.maximum(seen, 1)[:, None]
    widest = np.zeros(many)
    np.maximum.at(widest, rows, np.linalg.norm(rays - mean[rows], axis=1))
    return int(((seen >= LEAST_VIEWS) & (2 * widest > np.deg2rad(SPREAD_DEG))).sum())
