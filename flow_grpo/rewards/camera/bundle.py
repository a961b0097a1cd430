"""Bundle adjustment: the poses of cameras and the points that they see, found together.

    min over poses and points: sum_n rho(|x_n - pi(R_i, C_i, X_j)|^2 / s^2) + priors

with rho(e) = e / (1 + e / 9) (Geman and McClure) and s falling, by reweighted Gauss-Newton steps. The points are
eliminated in closed form (Triggs et al., Bundle Adjustment - A Modern Synthesis, 2000, section 6.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from flow_grpo.rewards.camera.features import Floats

COLUMNS = 416  # the unit of errors is a pixel of a picture so wide
LEAST_UNIT = 0.7  # pixels: places in a picture under 292 wide are not known better
OUTLYING = 3.0  # s beyond which an observation hardly counts; also how far an inlier may lie from its place
BEHIND = 1e6  # the distance from its place of what lies behind the camera
RIDGE = 1e-6  # of the mean curvature: what nothing holds, such as a frame without matches, or the world's place, stays


@dataclasses.dataclass(frozen=True)
class Matches:
    """n observations of points in the frames of a video."""

    frames: NDArray[np.int64]  # (n,) row of the frame
    points: NDArray[np.int64]  # (n,) row of the point
    pixels: Floats  # (n, 2) x, y as OpenCV counts


class Normal:
    """The normal equations of a step, of F poses (turn, move) and M points with k unknowns each; zero at first."""

    def __init__(self, frames: int, points: int, unknowns: int) -> None:
        self.poses: Floats = np.zeros((frames, 6, frames, 6))
        self.poses_slope: Floats = np.zeros((frames, 6))
        self.points: Floats = np.zeros((points, unknowns, unknowns))
        self.points_slope: Floats = np.zeros((points, unknowns))
        self.shared: Floats = np.zeros((points, unknowns, frames, 6))

    def solve(self) -> tuple[Floats, Floats]:
        """Return the steps of the poses (F, 6) and of the points (M, k)."""
        many, unknowns, size = *self.points_slope.shape, self.poses_slope.size
        own = self.points + (RIDGE * np.trace(self.points, axis1=1, axis2=2)[:, None, None] + 1e-12) * np.eye(unknowns)
        sides = np.concatenate([self.shared.reshape(many, unknowns, size), self.points_slope[:, :, None]], 2)
        solved = np.linalg.solve(own, sides)
        normal, tied = self.poses.reshape(size, size), self.shared.reshape(many * unknowns, size)
        reduced = normal + (RIDGE * np.trace(normal) / size + 1e-12) * np.eye(size)  # all may be behind the camera
        reduced = reduced - tied.T @ solved[:, :, :-1].reshape(tied.shape)
        moved = -np.linalg.solve(reduced, self.poses_slope.ravel() - tied.T @ solved[:, :, -1].ravel())
        return moved.reshape(-1, 6), -solved[:, :, -1] - solved[:, :, :-1] @ moved


class Bundle:
    """Cameras and points on the way to those that project best onto what was seen, every point anywhere.

    They start from camera-to-world poses (F, 4, 4) and places (M, 3); `camera` is from `pnp.camera_matrix`.
    """

    def __init__(self, matches: Matches, camera: Floats, poses: Floats, places: Floats) -> None:
        self.matches, self.camera = matches, camera
        self.poses, self.places = poses.copy(), places.copy()
        self.unit = max((2 * camera[0, 2] + 1) / COLUMNS, LEAST_UNIT)  # the principal point lies in the middle
        self.nearest = 0.0  # z from which a point is in front of a camera

    def run(self, scales: Sequence[float], steps: int) -> None:
        """Take some Gauss-Newton steps at each scale s, in units."""
        for scale in scales:
            for _ in range(steps):
                self._step(scale * self.unit)

    def errors(self) -> Floats:
        """Return the distance (n,) of every observation from its place, in units."""
        inside, residual = self._project()
        return np.where(inside[:, 2] > self.nearest, np.linalg.norm(residual, axis=1) / self.unit, BEHIND)

    def directions(self) -> Floats:
        """Return how the places move with the unknowns of the points, (M, 3, k)."""
        return np.broadcast_to(np.eye(3), (len(self.places), 3, 3))

    def move_points(self, steps: Floats) -> None:
        """Add steps (M, k) to the unknowns of the points."""
        self.places = self.places + steps

    def add_priors(self, normal: Normal, weight: Floats, moving: Floats) -> None:
        """Add what is known of poses and points beside what was seen: here nothing.

        `weight` (n,) are those of the observations, `moving` (n, 2, 3) how their pixels move with the points.
        """

    def _project(self) -> tuple[Floats, Floats]:
        """Return the points in their cameras (n, 3) and residuals (n, 2), of those behind without meaning."""
        frames, points = self.matches.frames, self.matches.points
        away = self.places[points] - self.poses[frames, :3, 3]
        inside = np.einsum("nji,nj->ni", self.poses[frames, :3, :3], away)
        seen = inside @ self.camera.T
        return inside, seen[:, :2] / np.where(inside[:, 2:] > self.nearest, seen[:, 2:], 1) - self.matches.pixels

    def _step(self, scale: float) -> None:
        frames, points = self.matches.frames, self.matches.points
        inside, residual = self._project()
        ahead = inside[:, 2] > self.nearest
        weight = np.where(ahead, 1 / (1 + (residual**2).sum(1) / (OUTLYING * scale) ** 2) ** 2, 0) / scale**2
        inside[:, 2] = np.where(ahead, inside[:, 2], 1)
        # The pose moves as R exp(w), C + c: the point in its camera by inside x w - R^T c.
        image = _pixel_slopes(inside, self.camera)
        moving = image @ np.swapaxes(self.poses[frames, :3, :3], 1, 2)
        crossed = np.cross(np.eye(3), inside[:, None])  # (n, 3, 3): the matrices of the cross product with `inside`
        by_pose = np.concatenate([image @ crossed, -moving], 2)
        by_point = moving @ self.directions()[points]

        count = len(self.poses)
        normal = Normal(count, len(self.places), by_point.shape[2])
        blocks = np.zeros((count, 6, 6))
        np.add.at(blocks, frames, np.einsum("n,nki,nkj->nij", weight, by_pose, by_pose))
        normal.poses[range(count), :, range(count)] = blocks
        np.add.at(normal.poses_slope, frames, np.einsum("n,nki,nk->ni", weight, by_pose, residual))
        np.add.at(normal.points, points, np.einsum("n,nki,nkj->nij", weight, by_point, by_point))
        np.add.at(normal.points_slope, points, np.einsum("n,nki,nk->ni", weight, by_point, residual))
        tied = np.einsum("n,nki,nkj->nij", weight, by_point, by_pose)
        np.add.at(normal.shared.swapaxes(1, 2), (points, frames), tied)
        self.add_priors(normal, weight, moving)
        moved, stretched = normal.solve()
        self.move_points(stretched)
        self.poses[:, :3, :3] = self.poses[:, :3, :3] @ Rotation.from_rotvec(moved[:, :3]).as_matrix()
        self.poses[:, :3, 3] += moved[:, 3:]


def _pixel_slopes(points: Floats, camera: Floats) -> Floats:
    """Return how the pixels of points (n, 3), z forward, move with these, (n, 2, 3)."""
    x, y, z = points.T
    made = np.zeros((len(z), 2, 3))
    made[:, 0, 0], made[:, 1, 1] = camera[0, 0] / z, camera[1, 1] / z
    made[:, 0, 2], made[:, 1, 2] = -camera[0, 0] * x / z**2, -camera[1, 1] * y / z**2
    return made
