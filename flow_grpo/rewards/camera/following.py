"""Which places of two pictures show the same: by their features, or where a picture is too small for these, by flow.

Pictures smaller than `features.SMALL` have few features, those of smooth rooms at 64x96 17 and less where 50 are
needed. Points on a grid are followed there from one picture to the other by dense optical flow (DIS: Kroeger et al.,
Fast Optical Flow using Dense Inverse Search, 2016), and kept where the flow back returns.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import cv2
import numpy as np
from cv2.typing import MatLike
from numpy.typing import NDArray

from flow_grpo.rewards.camera.features import Features, Floats, match

GRID = 3  # pixels between points
TEXTURE, WINDOW = 1.0, 7  # grey levels a pixel that a point needs, root mean square over a window, in every direction
BACK = 0.25  # pixels: the largest distance from its start at which a point may return
PATCH, STRIDE, REFINEMENTS = 6, 3, 10  # of the flow, which is found at full size


@functools.cache
def _flow() -> Any:
    flow = cv2.DISOpticalFlow.create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    flow.setFinestScale(0)
    flow.setPatchSize(PATCH)
    flow.setPatchStride(STRIDE)
    flow.setVariationalRefinementIterations(REFINEMENTS)
    flow.setVariationalRefinementDelta(0.0)  # by slopes alone: another brightness is no motion
    return flow


def to_follow(found: Features) -> Features:
    """Return what a picture is matched by: its features, of a small one the points of the grid that have texture."""
    if found.picture is None:
        return found
    rows, columns = (np.arange(GRID // 2, side, GRID) for side in found.picture.shape)
    points = np.stack(np.meshgrid(columns, rows), -1).reshape(-1, 2).astype(np.float64)
    points = points[_textured(found.picture, points, TEXTURE)]
    return dataclasses.replace(found, points=points, descriptors=np.zeros((0, 128), np.float32))


def corresponding(first: Features, second: Features) -> tuple[NDArray[np.int64], Floats]:
    """Return rows (n,) of the points of one picture and where the other shows them, (n, 2) pixels.

    A small picture's points are those of `to_follow`.
    """
    if first.picture is None or second.picture is None:
        mine, theirs = match(first.descriptors, second.descriptors)
        return mine, second.points[theirs]
    if not len(first):
        return np.zeros(0, np.int64), first.points
    there = first.points + _read(_flow().calc(first.picture, second.picture, None), first.points)
    back = there + _read(_flow().calc(second.picture, first.picture, None), there)
    inside = ((there >= 0) & (there <= np.array(first.picture.shape[::-1]) - 1)).all(1)
    shown = inside & _textured(second.picture, there, TEXTURE / 2)  # in a flat picture flow stands still, both ways
    kept = np.flatnonzero(shown & (np.linalg.norm(back - first.points, axis=1) < BACK))
    return kept, there[kept]


def _textured(picture: NDArray[np.uint8], points: Floats, least: float) -> NDArray[np.bool_]:
    # OpenCV sums squares over the window, of slopes that it divides by four times its side.
    return _read(cv2.cornerMinEigenVal(picture.astype(np.float32), WINDOW, ksize=3), points) >= 4 * least**2


def _read(values: MatLike, points: Floats) -> Floats:
    """Return values (n, ...) of a picture (h, w, ...) at points (n, 2)."""
    x, y = points.astype(np.float32).T
    return np.asarray(cv2.remap(values, x[:, None], y[:, None], cv2.INTER_LINEAR)[:, 0], np.float64)
