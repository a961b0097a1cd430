"""Displacement of the picture from the ground-truth view, in pixels: `view_disp`.

Features of each generated frame are matched to those of the synchronised true view. The median of their displacements
falls steadily as the camera nears its command, where pixel scores saturate and optical flow fails. It needs no poses,
focal length or anchors, so it also scores sources that the pose rewards cannot use, and it detects errors of a few
hundredths of a degree.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.camera.feature_pool import MOST_SECONDS, FeaturePool, Views, together
from flow_grpo.rewards.camera.features import Floats, match
from flow_grpo.rewards.camera.pose import shared_measurer
from flow_grpo.rewards.frames import frame_numbers, frame_weights, grey_frames
from flow_grpo.rewards.process_pool import Outcome
from flow_grpo.rewards.results import from_outcomes, why_not_comparable

CAP_PIXELS = 100.0  # in a picture of CAP_COLUMNS, the width of ReCamMaster's videos
CAP_COLUMNS = 832
LEAST_MATCHES = 12


def displacements(video: Views, views: Views) -> Floats:
    """Return the median displacement (F,) in pixels of a video's features from those of views; NaN with under 12."""
    medians = []
    for features, view in zip(video, views, strict=True):
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
    """

    name = "view_disp"
    needs = ("target_video",)
    floor = 0.2 / CAP_PIXELS  # a fifth of a pixel, which JPEG artefacts can cause
    measures = ("disp_px", "matched_frames")

    def __init__(self, features: FeaturePool | None = None) -> None:
        self.features = features or shared_measurer().features  # those of the pose rewards

    def prepare(self, conditions: Sequence[Condition]) -> None:
        """Find the features of true views."""
        shown = [one.target_video for one in conditions if one.target_video is not None]
        self.features([grey_frames(view, frame_numbers(view.shape[1])) for view in shown], "true views")

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score (B, 3, T, h, w) videos in [0, 1]; not valid where there is no target video of the same shape."""
        frames = frame_numbers(videos.shape[2])
        causes = [why_not_comparable(video, condition) for video, condition in zip(videos, conditions, strict=True)]
        scores: list[Outcome[tuple[float, ...]]] = [Outcome(None, cause, lacking=True) for cause in causes]
        rows = [row for row, cause in enumerate(causes) if not cause]
        shown = [conditions[row].target_video for row in rows]
        targets = [grey_frames(target, frames) for target in shown if target is not None]  # all: the causes say so
        pictures = [grey_frames(videos[row], frames) for row in rows]
        found = self.features([*targets, *pictures], "features")
        pairs: dict[int, tuple[Views, Views]] = {}
        for row, view, own in zip(rows, found[: len(rows)], found[len(rows) :], strict=True):
            both = together([own, view])
            scores[row] = Outcome(None, both.fault, both.lacking)
            if view.value is not None and all(len(one) < LEAST_MATCHES for one in view.value):
                where = f"{conditions[row].scene} {conditions[row].target_camera}"
                text = f"no frame of the true view {where} has {LEAST_MATCHES} features: no texture"
                scores[row] = Outcome(None, text, lacking=True)
            elif both.value is not None:
                pairs[row] = (both.value[0], both.value[1])
        moved = self.features.pool.run(displacements, [*pairs.values()], seconds=MOST_SECONDS, what="displacements")
        for (row, (_, views)), outcome in zip(pairs.items(), moved, strict=True):
            scores[row] = outcome.then(functools.partial(_score, views=views, width=videos.shape[-1]))
        return from_outcomes(scores, self.measures)


def _score(pixels: Floats, views: Views, width: int) -> tuple[float, float, float]:
    visible = torch.tensor([len(view) >= LEAST_MATCHES for view in views])
    moved = torch.from_numpy(pixels) * (CAP_COLUMNS / width)
    matched = ~moved.isnan()
    moved = moved.masked_fill(~matched, CAP_PIXELS).clamp(max=CAP_PIXELS)
    value = -float((frame_weights(visible) * moved).sum()) / CAP_PIXELS
    return value, float(moved[visible].mean()), float(matched[visible].double().mean())
