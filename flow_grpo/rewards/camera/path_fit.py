"""The camera path of a video by matches with its source, all frames together.

A feature of the source is a ray from the source's camera; where on the ray its point lies is known roughly, or not at
all. So the path and the points are found together, and what is known of their depths is a wide prior:

    min over R_i, C_i, delta_j:
      sum_ij rho(|x_ij - pi(R_i, C_i, o + d_j exp(delta_j) r_j)|^2 / s^2)  +  sum_j (delta_j / spread)^2
      + sum_i |second difference of the deviation of (R_i, C_i) from the command|^2, in units of BEND_DEG and BEND_SHARE

with rho(e) = e / (1 + e / 9) (Geman and McClure), and s falling from 12 pixels to 1. This is bundle adjustment by
reweighted Gauss-Newton steps, the depths eliminated in closed form (Triggs et al., Bundle Adjustment - A Modern
Synthesis, 2000, section 6.1). A frame alone confuses a short step with a small turn, and a zoom with a nearer scene;
all frames see the same points, so together they do not. Nothing but the prior knows the scale: in the end it is such
that the middle delta is 0, which the few points that move by themselves cannot shift as they shift the mean.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from flow_grpo.rewards.camera.features import Floats
from flow_grpo.rewards.camera.pnp import GATE

SCALES = (12.0, 4.0, 1.5, 1.0)  # s, in pixels of a picture 416 wide
STEPS = 3  # of each
COLUMNS = 416
OUTLYING = 3.0  # s beyond which an observation hardly counts; also how far an inlier may lie from its place
INLIER_SHARE = 0.3  # of a frame's matches; of 200 random ones 0.17 agree at most
BEND_DEG, BEND_SHARE = 0.3, 0.005  # a frame to the next: of the rotation, and of the centre as a share of the depth
LEAST_DEPTH = 1e-3  # of the usual depth: nearer points are behind the camera
MOST_STRETCH = 2.0  # of log-depths


@dataclasses.dataclass(frozen=True)
class Points:
    """M points of a scene as a source in one place sees them, in the reference frame of the path."""

    centre: Floats  # (3,) of the source's camera
    rays: Floats  # (M, 3) unit vectors from there
    depths: Floats  # (M,) where on the ray the point is expected
    spread: float  # standard deviation of the logarithm of the depths

    def take(self, rows: NDArray[np.int64]) -> Points:
        """Return some of the points."""
        return Points(self.centre, self.rays[rows], self.depths[rows], self.spread)


@dataclasses.dataclass(frozen=True)
class Matches:
    """n observations of points in the frames of a video."""

    frames: NDArray[np.int64]  # (n,) row of the frame
    points: NDArray[np.int64]  # (n,) row in `Points`
    pixels: Floats  # (n, 2) x, y as OpenCV counts

    def __len__(self) -> int:
        return len(self.frames)

    def of_frame(self, frame: int) -> Matches:
        """Return the observations in one frame, as frame 0."""
        own = self.frames == frame
        return Matches(np.zeros(int(own.sum()), np.int64), self.points[own], self.pixels[own])


def fit_path(matches: Matches, points: Points, camera: Floats, command: Floats) -> Floats:
    """Return the camera-to-world poses (F, 4, 4) float64 of a video's frames, NaN where not located.

    A frame is located with `GATE` inliers that are `INLIER_SHARE` of its matches. Two starts are tried, the command and
    each frame from the one before it, and the better end is kept.

    Args:
        matches: what was seen.
        points: the source's points.
        camera: (3, 3) from `pnp.camera_matrix`.
        command: (F, 4, 4) camera-to-world; the video begins about where it does.
    """
    count = len(command)
    seen = np.bincount(matches.frames, minlength=count)
    if seen.max(initial=0) < GATE:
        return np.full_like(command, np.nan)
    tried = []
    for start in (command, _chained(matches, points, camera, command)):
        fit = _Fit(matches, points, camera, start, command)
        fit.run(SCALES)
        tried.append(fit)
    best = min(tried, key=_Fit.cost)
    agreeing = best.errors() < OUTLYING
    inliers = np.bincount(matches.frames[agreeing], minlength=count)
    located = (inliers >= GATE) & (inliers >= INLIER_SHARE * seen)
    if located.any():
        gain = np.exp(-np.median(best.stretch[np.unique(matches.points[agreeing])]))
        best.poses[:, :3, 3] = points.centre + gain * (best.poses[:, :3, 3] - points.centre)
    return np.where(located[:, None, None], best.poses, np.nan)


def _chained(matches: Matches, points: Points, camera: Floats, command: Floats) -> Floats:
    """Return poses (F, 4, 4) of which each was found by its own frame alone, from the one before it."""
    poses = [command[0]]
    for frame in range(len(command)):
        own = matches.of_frame(frame)
        used, numbers = np.unique(own.points, return_inverse=True)
        here = dataclasses.replace(own, points=numbers)
        fit = _Fit(here, points.take(used), camera, poses[-1][None], poses[-1][None])
        if len(own) >= GATE:
            fit.run(SCALES[:2])
        poses.append(fit.poses[0])
    return np.stack(poses[1:])


class _Fit:
    """A path and the depths of its points, on the way to the best ones."""

    def __init__(self, matches: Matches, points: Points, camera: Floats, start: Floats, command: Floats) -> None:
        self.matches, self.points, self.camera, self.command = matches, points, camera, command
        self.poses, self.stretch = start.copy(), np.zeros(len(points.rays))  # (F, 4, 4), (M,) delta
        self.unit = max(2 * camera[0, 2] + 1, 1.0) / COLUMNS  # pixels: the principal point lies in the middle
        self.usual = float(np.median(points.depths)) if len(points.depths) else 1.0
        second = np.diff(np.eye(len(start)), n=2, axis=0)
        self._bend: Floats = second.T @ second  # (F, F)

    def run(self, scales: tuple[float, ...]) -> None:
        """Take `STEPS` Gauss-Newton steps at each scale."""
        for scale in scales:
            for _ in range(STEPS):
                self._step(scale * self.unit)

    def errors(self) -> Floats:
        """Return the distance (n,) of every observation from its place, in pixels of a picture 416 wide."""
        return np.asarray(np.linalg.norm(self._project()[2], axis=1) / self.unit)

    def cost(self) -> float:
        """Return what is minimised, but for the bends."""
        squares = self.errors() ** 2
        return float((squares / (1 + squares / OUTLYING**2)).sum() + ((self.stretch / self.points.spread) ** 2).sum())

    def _project(self) -> tuple[Floats, Floats, Floats]:
        """Return the points in their cameras (n, 3), how they move there as delta grows (n, 3), residuals (n, 2)."""
        frames, rows = self.matches.frames, self.matches.points
        turned = self.poses[frames, :3, :3]
        along = (self.points.depths * np.exp(self.stretch))[:, None] * self.points.rays
        away = self.points.centre + along[rows] - self.poses[frames, :3, 3]
        inside, deeper = (np.einsum("nji,nj->ni", turned, part) for part in (away, along[rows]))
        inside[:, 2] = np.maximum(inside[:, 2], LEAST_DEPTH * self.usual)
        seen = inside @ self.camera.T
        return inside, deeper, seen[:, :2] / seen[:, 2:] - self.matches.pixels

    def _step(self, scale: float) -> None:
        frames, rows = self.matches.frames, self.matches.points
        count, many = len(self.poses), len(self.stretch)
        inside, deeper, residual = self._project()
        weight = 1 / (1 + (residual**2).sum(1) / (OUTLYING * scale) ** 2) ** 2 / scale**2
        weight[inside[:, 2] <= LEAST_DEPTH * self.usual] = 0
        image = pixel_slopes(inside, self.camera)
        # The pose moves as R exp(w), C + c: the point in its camera by inside x w - R^T c.
        by_pose = np.concatenate([image @ crossed(inside), -image @ np.swapaxes(self.poses[frames, :3, :3], 1, 2)], 2)
        by_depth = np.einsum("nij,nj->ni", image, deeper)

        normal = np.zeros((count, 6, count, 6))
        blocks, slope = np.zeros((count, 6, 6)), np.zeros((count, 6))
        np.add.at(blocks, frames, np.einsum("n,nki,nkj->nij", weight, by_pose, by_pose))
        np.add.at(slope, frames, np.einsum("n,nki,nk->ni", weight, by_pose, residual))
        normal[range(count), :, range(count)] = blocks
        bends = np.deg2rad(BEND_DEG), BEND_SHARE * self.usual
        for first, size, deviation in zip((0, 3), bends, self._deviations(), strict=True):
            for axis in range(3):
                normal[:, first + axis, :, first + axis] += self._bend / size**2
            slope[:, first : first + 3] += self._bend @ deviation / size**2
        prior = self.points.spread**-2
        curve = np.bincount(rows, weight * (by_depth**2).sum(1), many) + prior
        pull = np.bincount(rows, weight * (by_depth * residual).sum(1), many) + prior * self.stretch
        shared = np.zeros((many, count, 6))
        np.add.at(shared, (rows, frames), np.einsum("n,nki,nk->ni", weight, by_pose, by_depth))

        flat, tied = normal.reshape(6 * count, -1), shared.reshape(many, -1)
        ridge = 1e-6 * np.trace(flat) / len(flat)  # without matches a frame has no curvature
        reduced = flat + ridge * np.eye(len(flat)) - tied.T @ (tied / curve[:, None])
        moved = -np.linalg.solve(reduced, slope.ravel() - tied.T @ (pull / curve))
        self.stretch = np.clip(self.stretch - (pull + tied @ moved) / curve, -MOST_STRETCH, MOST_STRETCH)
        turns, moves = np.split(moved.reshape(count, 6), 2, axis=1)
        self.poses[:, :3, :3] = self.poses[:, :3, :3] @ Rotation.from_rotvec(turns).as_matrix()
        self.poses[:, :3, 3] += moves

    def _deviations(self) -> tuple[Floats, Floats]:
        """Return how far the path is from its command: rotation vectors and distances, (F, 3) each."""
        relative = np.swapaxes(self.command[:, :3, :3], 1, 2) @ self.poses[:, :3, :3]
        return Rotation.from_matrix(relative).as_rotvec(), self.poses[:, :3, 3] - self.command[:, :3, 3]


def pixel_slopes(points: Floats, camera: Floats) -> Floats:
    """Return how the pixels of points (n, 3), z forward, move with these, (n, 2, 3)."""
    x, y, z = points.T
    made = np.zeros((len(z), 2, 3))
    made[:, 0, 0], made[:, 1, 1] = camera[0, 0] / z, camera[1, 1] / z
    made[:, 0, 2], made[:, 1, 2] = -camera[0, 0] * x / z**2, -camera[1, 1] * y / z**2
    return made


def crossed(vectors: Floats) -> Floats:
    """Return the matrices (n, 3, 3) of the cross products with vectors (n, 3)."""
    made = np.zeros((len(vectors), 3, 3))
    x, y, z = vectors.T
    made[:, 0, 1], made[:, 0, 2], made[:, 1, 0] = -z, y, z
    made[:, 1, 2], made[:, 2, 0], made[:, 2, 1] = -x, -y, x
    return made
