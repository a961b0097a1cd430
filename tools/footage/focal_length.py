"""The focal length of a clip whose camera turns in one place, from the clip alone.

A turn moves the rays through the pixels by one rotation, and what rays pixels are depends on the focal length: with a
wrong one no turn explains what two frames share (Hartley, Self-Calibration of Stationary Cameras, 1997). A camera that
stands still tells nothing, nor does one that moves; a lens that bends straight lines tells something wrong.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from flow_grpo.rewards.camera.bundle import COLUMNS
from flow_grpo.rewards.camera.features import Floats, find_features
from flow_grpo.rewards.camera.fixed_source import FEWEST_FEATURES, TURN_SCALES, find_turn
from flow_grpo.rewards.camera.following import corresponding, to_follow
from flow_grpo.rewards.camera.matched_motion import unit_rays
from flow_grpo.rewards.frames import frame_numbers

PICTURES, APART = 9, 4  # that are looked at, and how far the two of a pair are from each other at least
TRIED = np.geomspace(0.4, 4.0, 13)  # focal lengths in widths: angles of view from 103 to 14 degrees
FINER = (1.0, 0.5)  # scales of the turn beside `TURN_SCALES`
PIXELS = 1.5  # of a picture 416 wide, from which on a match hardly counts
# What a length leaves unexplained must rise so much 2 % beside it. In rooms at 240x416, blurred and as JPEG of quality
# 70, lengths that rose by 0.5 % only were right to 0.4 %.
LEAST_RISE = 1.01
EXPLAINED = 0.9  # of the matches, within `PIXELS`, or the camera moves


def focal_length(pictures: NDArray[np.uint8]) -> float | None:
    """Return the focal length in pixels with which turns explain grey pictures (F, h, w), None where none is sure.

    Pixels are taken to be square, with the principal point in the middle.
    """
    found = [to_follow(find_features(pictures[row])) for row in frame_numbers(len(pictures), PICTURES)]
    pairs = []
    for number, first in enumerate(found):
        for second in found[number + APART :]:
            mine, there = corresponding(first, second)
            if len(mine) >= FEWEST_FEATURES:
                pairs.append((first.points[mine], there))
    if not pairs:
        return None
    height, width = pictures.shape[1:]
    middle = np.array([width - 1, height - 1]) / 2

    def apart(size: float) -> Floats:
        return np.concatenate([_apart(*pair, middle, np.exp(size)) for pair in pairs]) * COLUMNS / width

    def unexplained(size: float) -> float:
        squares = apart(size) ** 2
        return float((squares / (squares + PIXELS**2)).mean())

    sizes = np.log(width * TRIED)
    best = int(np.argmin([unexplained(size) for size in sizes]))
    if best in (0, len(sizes) - 1):
        return None
    least = minimize_scalar(unexplained, bracket=tuple(sizes[best - 1 : best + 2]), tol=1e-4)
    beside = (unexplained(least.x - 0.02) + unexplained(least.x + 0.02)) / 2
    sure = beside > LEAST_RISE * least.fun and (apart(least.x) < PIXELS).mean() > EXPLAINED
    return float(np.exp(least.x)) if sure else None


def _apart(first: Floats, second: Floats, middle: Floats, focal_px: float) -> Floats:
    """Return how far (n,), in pixels, matches of two pictures are apart after the best turn."""
    here, there = (unit_rays(points, middle, focal_px) for points in (first, second))
    pixel = (2 * middle[0] + 1) / COLUMNS / focal_px  # its angle, in a picture 416 wide
    turned = here @ find_turn(here, there, np.eye(3), pixel, (*TURN_SCALES, *FINER)).T
    return np.linalg.norm(focal_px * (turned / turned[:, 2:] - there / there[:, 2:]), axis=1)
