"""Displacement of the picture from the ground-truth view, in pixels: `view_disp`.

Features of each generated frame are matched to those of the synchronised true view. The median of their displacements
falls steadily as the camera nears its command, where pixel scores saturate and optical flow fails. It needs no poses,
focal length or anchors, so it also scores sources that the pose rewards cannot use, and it detects errors of a few
hundredths of a degree.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.camera.features import Features, Floats, find_features, match
from flow_grpo.rewards.camera.pose import MOST_SECONDS, shared_measurer
from flow_grpo.rewards.frames import frame_numbers, frame_weights, grey_frames
from flow_grpo.rewards.process_pool import CallPool, Outcome
from flow_grpo.rewards.results import from_outcomes, why_not_comparable
from flow_grpo.runtime.lru import LruCache

CAP_PIXELS = 100.0  # in a picture of CAP_COLUMNS, the width of ReCamMaster's videos
CAP_COLUMNS = 832
LEAST_MATCHES = 12
VIEWS_KEPT = 8  # features of true views, up to 17 MB each

Views = tuple[Features, ...]


def find_views(pictures: NDArray[np.uint8]) -> Views:
    """Return the features of grey pictures (F, h, w)."""
    return tuple(map(find_features, pictures))


def displacements(pictures: NDArray[np.uint8], views: Views) -> Floats:
    """Return the median displacement (F,) in pixels of pictures (F, h, w) from views; NaN with under 12 matches."""
    medians = []
    for picture, view in zip(pictures, views, strict=True):
        features = find_features(picture)
        own, other = match(features.descriptors, view.descriptors)
        moved = np.linalg.norm(features.points[own] - view.points[other], axis=1)
        medians.append(np.median(moved) if len(moved) >= LEAST_MATCHES else np.nan)
    return np.array(medians, np.float64)


class ViewDisp:
    """Closeness of the picture to the ground-truth view, by matched features.

    value = -sum_i w_i min(m_i, c) / c over at most 21 frames i, evenly spread, with m_i the median displacement in
    pixels, c = 100 px in a picture 832 wide and in proportion in others, and w_i growing from 1 to 3 as in `pose_rot`.
    A generated frame with fewer than 12 matches scores the cap. A frame of the true view with fewer than 12 features
    cannot be matched by any video and has no weight.

    `info`: `disp_px`, the mean of min(m_i, c) over the frames with weight, in pixels of a picture 832 wide;
    `matched_frames`, the share of these frames that match.

    Args:
        pool: processes to spread a batch over; None shares those of the pose rewards.
    """

    name = "view_disp"
    needs = ("target_video",)
    floor = 0.2 / CAP_PIXELS  # a fifth of a pixel, which JPEG artefacts can cause
    measures = ("disp_px", "matched_frames")

    def __init__(self, pool: CallPool | None = None) -> None:
        self.pool = shared_measurer().pool if pool is None else pool
        self._views: LruCache[bytes, Views] = LruCache(VIEWS_KEPT)

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score (B, 3, T, h, w) videos in [0, 1]; not valid where there is no target video of the same shape."""
        frames = frame_numbers(videos.shape[2])
        causes = [why_not_comparable(video, condition) for video, condition in zip(videos, conditions, strict=True)]
        views = self._find_views([row for row, cause in enumerate(causes) if not cause], conditions, frames)
        scores: list[Outcome[tuple[float, ...]]] = [Outcome(None, cause, lacking=True) for cause in causes]
        jobs = {}
        for row, found in views.items():
            scores[row] = Outcome(None, found.fault, found.lacking)
            if found.value is not None:
                jobs[row] = grey_frames(videos[row], frames), found.value
        moved = self.pool.run(displacements, list(jobs.values()), seconds=MOST_SECONDS, what="displacements")
        for (row, (_, view)), outcome in zip(jobs.items(), moved, strict=True):
            scores[row] = outcome.then(functools.partial(_score, views=view, width=videos.shape[-1]))
        return from_outcomes(scores, self.measures)

    def _find_views(
        self, rows: Sequence[int], conditions: Sequence[Condition], frames: Sequence[int]
    ) -> dict[int, Outcome[Views]]:
        pictures, keys = {}, {}
        for row in rows:
            target = conditions[row].target_video
            assert target is not None, "rows without a target video are left out"
            picture = grey_frames(target, frames)
            keys[row] = hashlib.blake2b(picture.tobytes() + repr(picture.shape).encode(), digest_size=16).digest()
            pictures[keys[row]] = picture
        known = {key: Outcome(self._views[key]) for key in pictures if key in self._views}
        missing = [key for key in pictures if key not in known]
        jobs = [(pictures[key],) for key in missing]
        made = self.pool.run(find_views, jobs, seconds=MOST_SECONDS, what="true views")
        for key, outcome in zip(missing, made, strict=True):
            known[key] = outcome
            if outcome.value is not None:
                self._views[key] = outcome.value
        for row, key in keys.items():
            views = known[key].value
            if views is not None and all(len(view) < LEAST_MATCHES for view in views):
                where = f"{conditions[row].scene} {conditions[row].target_camera}"
                text = f"no frame of the true view {where} has {LEAST_MATCHES} features: no texture"
                known[key] = Outcome(None, text, lacking=True)
        return {row: known[key] for row, key in keys.items()}


def _score(pixels: Floats, views: Views, width: int) -> tuple[float, float, float]:
    visible = torch.tensor([len(view) >= LEAST_MATCHES for view in views])
    moved = torch.from_numpy(pixels) * (CAP_COLUMNS / width)
    matched = ~moved.isnan()
    moved = moved.masked_fill(~matched, CAP_PIXELS).clamp(max=CAP_PIXELS)
    value = -float((frame_weights(visible) * moved).sum()) / CAP_PIXELS
    return value, float(moved[visible].mean()), float(matched[visible].double().mean())
