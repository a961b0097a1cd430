"""The generated video shows what the source shows: a companion against new content, blur and faded colours.

Small soft videos carry no features to match, so small patches of colour are matched instead: every patch of the
generated video looks for its like anywhere in the source, and every patch of the source for its like in the generated
video. The first direction finds content that the source does not have, the second finds what was lost, for instance to
blur (compare bidirectional similarity, Simakov et al. 2008). The camera may move freely: patches carry no position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

from flow_grpo.maths.pictures import shrink
from flow_grpo.records import Condition, RewardResult

COLUMNS = 48  # patches are taken from pictures of this width or less
PATCH, ASKING_STRIDE, ANSWERING_STRIDE = 4, 4, 2  # pixels


def _patches(video: Tensor, stride: int) -> Tensor:
    """Return (N, D) patches of all frames of a video (3, T, h, w)."""
    frames = shrink(rearrange(video, "c t h w -> t c h w").float(), COLUMNS)
    return rearrange(functional.unfold(frames, PATCH, stride=stride), "t d n -> (t n) d")


def _distance(asking: Tensor, answering: Tensor) -> Tensor:
    """Return the mean rms colour distance, in [0, 1], of the patches of one video to their nearest of the other."""
    first, second = _patches(asking, ASKING_STRIDE), _patches(answering, ANSWERING_STRIDE)
    return torch.cdist(first, second).amin(-1).mean() / math.sqrt(first.shape[-1])


def differences(video: Tensor, source: Tensor) -> Tensor:
    """Return (2,) colour distances of two videos (3, T, h, w): `video` not found in `source`, and the reverse."""
    return torch.stack([_distance(video, source), _distance(source, video)])


class SourceMatch:
    """value = -mean over both directions of what the distance to the source exceeds that of the ground-truth view.

    The true view also shows walls that the source never sees and misses some that it does, so its distances are the
    best that can be asked for: a video that does as well has value 0, and doing better earns nothing. Without a
    ground-truth view the distances count in full. The value is a colour difference in [-1, 0]. `info`: `new`, the
    distance of the generated video to the source, and `lost`, the reverse.
    """

    name = "source_match"
    floor = 0.003  # colour: what a codec's noise makes of one video
    measures = ("new", "lost")

    @torch.no_grad()
    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score (B, 3, T, h, w) videos in [0, 1]."""
        seen = torch.stack([differences(v, c.source_video) for v, c in zip(videos, conditions, strict=True)])
        allowed = torch.stack([_allowed(condition) for condition in conditions])
        values = -(seen - allowed).clamp(min=0).mean(-1)
        info = {"new": seen[:, 0], "lost": seen[:, 1]}
        return RewardResult(values, torch.ones(len(conditions), dtype=torch.bool), ("",) * len(conditions), info)


def _allowed(condition: Condition) -> Tensor:
    if condition.target_video is None:
        return torch.zeros(2)
    return differences(condition.target_video, condition.source_video)
