"""The camera pose of a picture from points of known 3D position (perspective-n-point).

Features of the picture are matched to the anchors; RANSAC over a closed-form solver finds the pose with the most
inliers, and least squares on these refines it. Poses are in the unit of the anchors and nothing is aligned afterwards,
so a path of the right shape at half the speed is measured as such.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import cv2
import numpy as np
from cv2.typing import MatLike
from numpy.typing import NDArray

from flow_grpo.rewards.camera.features import Features, Floats, match

GATE = 12  # fewest inliers of a pose; with 6, even a tiled picture yields a pose
RANSAC_PIXELS = 2.5  # largest reprojection error of an inlier ...
FINE_PIXELS = 1.5  # ... and in the last refinement
RANSAC_ITERATIONS = 500


@dataclasses.dataclass(frozen=True)
class MappedView:
    """A picture whose features have known 3D positions."""

    frame: int  # number of the video frame
    descriptors: NDArray[np.float32]  # (N, 128) float32 RootSIFT
    xyz: Floats  # (N, 3) float64 metres, in the reference frame of the poses to find
    # (N,) bool: static, so used for every frame; the others only for the frame of the same time
    lasting: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.xyz)


def camera_matrix(intrinsics: Sequence[float]) -> Floats:
    """Return OpenCV's (3, 3) camera matrix of fx, fy, cx, cy in pixels.

    Ours count from the outer corner of the first pixel, OpenCV's from its centre: half a pixel, 0.03 degrees at fx 840.
    """
    fx, fy, cx, cy = intrinsics
    return np.array([[fx, 0.0, cx - 0.5], [0.0, fy, cy - 0.5], [0.0, 0.0, 1.0]])


def locate_video(
    seen: Sequence[Features], frames: Sequence[int], views: Sequence[MappedView], camera: Floats
) -> Floats:
    """Return the poses (F, 4, 4) float64 of F frames of a video, each as by `locate`."""
    return np.stack([locate(features, at, views, camera) for features, at in zip(seen, frames, strict=True)])


def locate(features: Features, frame: int, views: Sequence[MappedView], camera: Floats) -> Floats:
    """Return the camera-to-world pose (4, 4), NaN with fewer than `GATE` inliers.

    `frame` is the picture's number in its video: anchors not known to be static are matched only in their own frame.
    """
    nowhere = np.full((4, 4), np.nan)
    indices, positions = [np.zeros(0, np.int64)], [np.zeros((0, 3))]
    for view in views:
        serving = np.ones(len(view), np.bool_) if view.frame == frame else view.lasting
        mine, theirs = match(features.descriptors, view.descriptors[serving])
        indices.append(mine)
        positions.append(view.xyz[serving][theirs])
    numbers, xyz = np.concatenate(indices), np.concatenate(positions)
    if len(np.unique(numbers)) < GATE:
        return nowhere
    points = features.points[numbers]
    try:
        solved, turn, move, _ = cv2.solvePnPRansac(
            xyz,
            points,
            camera,
            None,
            iterationsCount=RANSAC_ITERATIONS,
            reprojectionError=RANSAC_PIXELS,
            confidence=0.9999,
            flags=cv2.SOLVEPNP_SQPNP,
        )
    except cv2.error:
        # Raised for a RANSAC draw of one point seen in several views: far too few features match.
        return nowhere
    if not solved or not np.isfinite(turn).all() or not np.isfinite(move).all():
        return nowhere
    for pixels in (RANSAC_PIXELS, FINE_PIXELS):
        agree = _agree(xyz, points, (turn, move), camera, pixels)
        if len(np.unique(numbers[agree])) < GATE:  # a feature matched in several views counts once
            return nowhere
        turn, move = cv2.solvePnPRefineLM(xyz[agree], points[agree], camera, None, turn, move)
    agree = _agree(xyz, points, (turn, move), camera, RANSAC_PIXELS)
    rotation = cv2.Rodrigues(turn)[0].T
    pose = np.eye(4)  # OpenCV's turn and move are world-to-camera
    pose[:3, :3], pose[:3, 3] = rotation, -rotation @ move.reshape(3)
    return pose if len(np.unique(numbers[agree])) >= GATE and np.isfinite(pose).all() else nowhere


def _agree(
    xyz: Floats, points: Floats, pose: tuple[MatLike, MatLike], camera: Floats, pixels: float
) -> NDArray[np.bool_]:
    # Which points (n, 3) are in front of the camera and project to within `pixels` of their observation.
    rotation = cv2.Rodrigues(pose[0])[0]
    seen = (xyz @ rotation.T + pose[1].reshape(3)) @ camera.T
    before = seen[:, 2] > 1e-6
    error = seen[:, :2] / np.where(before, seen[:, 2], 1.0)[:, None] - points
    agree: NDArray[np.bool_] = before & ((error**2).sum(1) < pixels**2)
    return agree
