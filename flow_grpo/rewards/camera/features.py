"""SIFT features of a picture and their mutual matches.

Only this file, `following.py`, `pnp.py`, `matched_motion.py` and `structure_from_motion.py` import OpenCV.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

MOST_FEATURES = 1500  # of a picture, the strongest
LEAST_CONTRAST = 0.01  # a quarter of OpenCV's default, with which a darkened video has no features
SMALL = 96  # pixels of the shorter side, below which a picture hardly has features: `following.py`
RATIO = 0.8  # of the distances to the nearest and the second nearest, above which a match is ambiguous (Lowe's test)

Floats = NDArray[np.float64]

# Several processes score concurrently: one thread each. It also makes OpenCV's results deterministic.
cv2.setNumThreads(1)


@dataclasses.dataclass(frozen=True)
class Features:
    """The N features of one picture."""

    points: Floats  # (N, 2) float64 x, y in pixels; the centre of the first pixel is (0, 0), as OpenCV counts
    descriptors: NDArray[np.float32]  # (N, 128) float32 RootSIFT, of length 1
    picture: NDArray[np.uint8] | None = None  # (h, w) itself, if it is small: `following.py` needs it

    def __len__(self) -> int:
        return len(self.points)


@functools.cache
def _sift() -> Any:
    # Without the precise upscaling all points are off by a quarter of a pixel.
    return cv2.SIFT.create(nfeatures=MOST_FEATURES, contrastThreshold=LEAST_CONTRAST, enable_precise_upscale=True)


def find_features(picture: NDArray[np.uint8]) -> Features:
    """Return the features of a grey picture (h, w); an empty picture has none."""
    keypoints, descriptors = _sift().detectAndCompute(picture, None)
    small = picture if min(picture.shape) < SMALL else None
    if not keypoints:
        return Features(np.zeros((0, 2)), np.zeros((0, 128), np.float32), small)
    # RootSIFT (Arandjelovic and Zisserman 2012): Euclidean distance then compares histograms as Hellinger's does.
    roots = np.sqrt(descriptors / np.maximum(descriptors.sum(1, keepdims=True), 1e-12))
    points = np.array([keypoint.pt for keypoint in keypoints], np.float64)
    return Features(points, roots.astype(np.float32), small)


def match(first: NDArray[np.float32], second: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of descriptors (N, 128) and (M, 128) that are mutual nearest neighbours and pass the ratio test.

    In both directions the nearest must be at most `RATIO` times as far as the second nearest. With fewer than two
    candidates on a side nothing matches.
    """
    if min(len(first), len(second)) < 2:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    cosines = torch.from_numpy(first) @ torch.from_numpy(second).T
    there, clear_there = _nearest(cosines)
    back, clear_back = _nearest(cosines.T)
    rows = torch.arange(len(first))
    kept = (back[there] == rows) & clear_there & clear_back[there]
    return rows[kept].numpy(), there[kept].numpy()


def _nearest(cosines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # (N,) the column of the highest cosine in each row of (N, M), and (N,) whether it passes the ratio test.
    highest, columns = cosines.topk(2, dim=1)
    best, second = highest.unbind(1)
    clear = (1 - best).clamp(min=0) < RATIO**2 * (1 - second)  # squared distance of unit vectors: 2 - 2 cos
    return columns[:, 0], clear
