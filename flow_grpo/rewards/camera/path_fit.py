"""The camera path of a video by matches with its source, all frames together.

A feature of the source is a ray from the source's camera; where on the ray its point lies is known roughly, or not at
all. So the path and the points are found together, and what is known of their depths is a wide prior:

    min over R_i, C_i, delta_j:
      sum_ij rho(|x_ij - pi(R_i, C_i, o + d_j exp(delta_j) r_j)|^2 / s^2)  +  sum_j (delta_j / spread)^2
      + sum_i |second difference of the deviation of (R_i, C_i) from the command|^2, in units of BEND_DEG and BEND_SHARE
      + n^2 sum_j log(1 + spread^2 sum_i |d x_ij / d delta_j|^2 / s^2 / n^2)

with s falling from 12 pixels to 1: bundle adjustment (`bundle.py`) with one unknown a point. A frame alone confuses a
short step with a small turn, and a zoom with a nearer scene; all frames see the same points, so together they do not.
Nothing but the prior knows the scale: in the end it is such that the middle delta is 0, which the few points that move
by themselves cannot shift as they shift the mean.

The last sum, with n the noise of a feature's place, is what integrating over delta leaves in a Gaussian likelihood: how
much a point could explain. Without it a camera that only turns seems to move: wherever a camera has moved, points take
up the noise of their places by their depths.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.spatial.transform import Rotation

from flow_grpo.rewards.camera.bundle import OUTLYING, Bundle, Matches, Normal
from flow_grpo.rewards.camera.features import Floats
from flow_grpo.rewards.camera.pnp import GATE

SCALES = (12.0, 4.0, 1.5, 1.0)  # s, in units of `bundle.py`
STEPS = 3  # of each
DOUBTFUL = (2.0, 1.0), 5  # then, with all sums: s, and steps of each
INLIER_SHARE = 0.3  # of a frame's matches; of 200 random ones 0.17 agree at most
BEND_DEG, BEND_SHARE = 0.3, 0.005  # a frame to the next: of the rotation, and of the centre as a share of the depth
LEAST_DEPTH = 1e-3  # of the usual depth: nearer points are behind the camera
NOISE = 0.2  # of a feature's place, likewise
MOST_STRETCH = 2.0  # of log-depths


@dataclasses.dataclass(frozen=True)
class Points:
    """M points of a scene as a source in one place sees them, in the reference frame of the path."""

    centre: Floats  # (3,) of the source's camera
    rays: Floats  # (M, 3) unit vectors from there
    depths: Floats  # (M,) where on the ray the point is expected
    spread: float  # standard deviation of the logarithm of the depths


def fit_path(matches: Matches, points: Points, camera: Floats, command: Floats) -> Floats:
    """Return the camera-to-world poses (F, 4, 4) float64 of a video's frames, NaN where not located.

    A frame is located with `GATE` inliers that are `INLIER_SHARE` of its matches. Two starts are tried, the command and
    each frame from the one before it, and the better end is kept. The video begins about where the command
    (F, 4, 4) does.
    """
    count = len(command)
    seen = np.bincount(matches.frames, minlength=count)
    if seen.max(initial=0) < GATE:
        return np.full_like(command, np.nan)
    tried = []
    for start in (command, _chained(matches, points, camera, command)):
        fit = _Fit(matches, points, camera, start, command)
        fit.run(SCALES, STEPS)
        tried.append(fit)
    best = min(tried, key=_Fit.cost)
    best.doubtful = True
    best.run(*DOUBTFUL)
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
        own = matches.frames == frame
        used, numbers = np.unique(matches.points[own], return_inverse=True)
        here = Matches(np.zeros_like(numbers), numbers, matches.pixels[own])
        seen = dataclasses.replace(points, rays=points.rays[used], depths=points.depths[used])
        fit = _Fit(here, seen, camera, poses[-1][None], poses[-1][None])
        if len(numbers) >= GATE:
            fit.run(SCALES[:2], STEPS)
        poses.append(fit.poses[0])
    return np.stack(poses[1:])


class _Fit(Bundle):
    """A path and the depths of its points, on the way to the best ones."""

    def __init__(self, matches: Matches, points: Points, camera: Floats, start: Floats, command: Floats) -> None:
        self.points, self.command, self.stretch = points, command, np.zeros(len(points.rays))  # (M,) delta
        super().__init__(matches, camera, start, points.centre + self._along())
        self.doubtful = False  # whether the last sum counts: on the way there it would hold a camera in its place
        self.usual = float(np.median(points.depths)) if len(points.depths) else 1.0
        self.nearest = LEAST_DEPTH * self.usual
        second = np.diff(np.eye(len(start)), n=2, axis=0)
        self._bend: Floats = second.T @ second  # (F, F)

    def cost(self) -> float:
        """Return what is minimised, but for the last two sums."""
        squares = self.errors() ** 2
        return float((squares / (1 + squares / OUTLYING**2)).sum() + ((self.stretch / self.points.spread) ** 2).sum())

    def directions(self) -> Floats:
        """Return how the places move as delta grows, (M, 3, 1)."""
        return self._along()[:, :, None]

    def move_points(self, steps: Floats) -> None:
        """Add steps (M, 1) to delta."""
        self.stretch = np.clip(self.stretch + steps[:, 0], -MOST_STRETCH, MOST_STRETCH)
        self.places = self.points.centre + self._along()

    def add_priors(self, normal: Normal, weight: Floats, moving: Floats) -> None:
        """Add the bends of the path and the depths' distances from the expected ones."""
        relative = np.swapaxes(self.command[:, :3, :3], 1, 2) @ self.poses[:, :3, :3]
        deviations = Rotation.from_matrix(relative).as_rotvec(), self.poses[:, :3, 3] - self.command[:, :3, 3]
        bends = np.deg2rad(BEND_DEG), BEND_SHARE * self.usual
        for first, size, deviation in zip((0, 3), bends, deviations, strict=True):
            for axis in range(3):
                normal.poses[:, first + axis, :, first + axis] += self._bend / size**2
            normal.poses_slope[:, first : first + 3] += self._bend @ deviation / size**2
        if self.doubtful:
            self._add_doubt(normal, weight, moving)
        normal.points += self.points.spread**-2
        normal.points_slope[:, 0] += self.points.spread**-2 * self.stretch

    def _along(self) -> Floats:
        return (self.points.depths * np.exp(self.stretch))[:, None] * self.points.rays

    def _add_doubt(self, normal: Normal, weight: Floats, moving: Floats) -> None:
        """Add the last sum of the module's docstring, as a quadratic form in the centres that lies above it.

        The pixel of a point moves with delta as much as with its camera's way from the source, to first order.
        """
        frames, rows, spread = self.matches.frames, self.matches.points, self.points.spread
        away = self.poses[:, :3, 3] - self.points.centre
        moved = ((moving @ away[frames, :, None]) ** 2).sum((1, 2))
        seen = np.bincount(rows, weight * moved, len(self.stretch)) / NOISE**2
        held = weight * (spread**2 / (1 + spread**2 * seen))[rows]
        blocks = np.zeros((len(away), 3, 3))
        np.add.at(blocks, frames, np.einsum("n,nki,nkj->nij", held, moving, moving))
        normal.poses[range(len(away)), 3:, range(len(away)), 3:] += blocks
        normal.poses_slope[:, 3:] += np.einsum("fij,fj->fi", blocks, away)
