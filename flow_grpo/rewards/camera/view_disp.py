"""How far the picture is from where the ground-truth view has it, in pixels: `view_disp`.

Features of each generated frame are matched to those of the synchronised true view; the median of how far they lie
apart falls steadily as the camera nears its command, where pixel scores saturate and optical flow loses its way. It
needs no poses, no focal length and no anchors, so it also judges sources that the pose rewards cannot use, and it sees
errors of a few hundredths of a degree.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
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
from flow_grpo.rewards.target_view import why_not_comparable
from flow_grpo.runtime.lru import keep_latest

CAP_PIXELS = 100.0  # of a picture CAP_COLUMNS wide, the width of ReCamMaster's videos
CAP_COLUMNS = 832
LEAST_MATCHES = 12
VIEWS_KEPT = 8  # true views, of up to 17 MB

Views = tuple[Features, ...]


def find_views(pictures: NDArray[np.uint8]) -> Views:
    """Return the features of grey pictures (F, h, w)."""
    return tuple(find_features(picture) for picture in pictures)


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
    A frame with fewer than 12 matches takes the cap: that is the policy's fault. A frame of the true view with fewer
    than 12 features can be matched by nobody and has no weight.

    `info`: `disp_px`, the mean of min(m_i, c) over the frames judged, in pixels of a picture 832 wide;
    `matched_frames`, the share of the frames judged that match.

    Args:
        pool: processes to spread a batch over; None shares those of the pose rewards.
    """

    name = "view_disp"
    floor = 0.2 / CAP_PIXELS  # a fifth of a pixel: what JPEG makes of one video
    measures = ("disp_px", "matched_frames")

    def __init__(self, pool: CallPool | None = None) -> None:
        self.pool = shared_measurer().pool if pool is None else pool
        self._views: OrderedDict[bytes, Views] = OrderedDict()

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score (B, 3, T, h, w) videos in [0, 1]; not valid where there is no target video of the same shape."""
        frames = frame_numbers(videos.shape[2])
        causes = [why_not_comparable(video, condition) for video, condition in zip(videos, conditions, strict=True)]
        rows = [row for row, cause in enumerate(causes) if not cause]
        views = self._find_views(rows, conditions, frames)
        measured = torch.full((len(causes), 1 + len(self.measures)), torch.nan)
        faulty, jobs = torch.zeros(len(causes), dtype=torch.bool), {}
        for row in rows:
            found = views[row]
            causes[row], faulty[row] = found.fault, found.failed
            if found.value is not None:
                jobs[row] = (grey_frames(videos[row], frames), found.value)
        outcomes = self.pool.run(displacements, list(jobs.values()), seconds=MOST_SECONDS, what="displacements")
        for (row, (_, view)), outcome in zip(jobs.items(), outcomes, strict=True):
            causes[row], faulty[row] = outcome.fault, outcome.failed
            if outcome.value is not None:
                measured[row] = torch.tensor(_judge(torch.from_numpy(outcome.value), view, videos.shape[-1]))
        values, *info = measured.unbind(1)
        valid = torch.tensor([not cause for cause in causes])
        return RewardResult(values, valid, tuple(causes), dict(zip(self.measures, info, strict=True)), faulty)

    def _find_views(
        self, rows: Sequence[int], conditions: Sequence[Condition], frames: Sequence[int]
    ) -> dict[int, Outcome[Views]]:
        """Return row -> features of its true view, found once for all copies, or why they are of no use."""
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
        known |= dict(zip(missing, made, strict=True))
        for key, outcome in known.items():
            if outcome.value is not None:
                keep_latest(self._views, key, outcome.value, VIEWS_KEPT)
        return {row: _usable(known[key], conditions[row]) for row, key in keys.items()}


def _usable(found: Outcome[Views], condition: Condition) -> Outcome[Views]:
    """Refuse a true view that nothing could be matched to."""
    if found.value is not None and all(len(view) < LEAST_MATCHES for view in found.value):
        where = f"{condition.scene} {condition.target_camera}"
        return Outcome(
            None, f"no frame of the true view {where} has {LEAST_MATCHES} features: no texture", lacking=True
        )
    return found


def _judge(moved: Tensor, views: Views, width: int) -> tuple[float, float, float]:
    """Return the value, the mean displacement and the share of matched frames of displacements (F,) in pixels."""
    visible = torch.tensor([len(view) >= LEAST_MATCHES for view in views])
    matched = ~moved.isnan()
    pixels = (moved * (CAP_COLUMNS / width)).masked_fill(~matched, CAP_PIXELS).clamp(max=CAP_PIXELS)
    value = -float((frame_weights(visible) * pixels).sum()) / CAP_PIXELS
    return value, float(pixels[visible].mean()), float(matched[visible].double().mean())
