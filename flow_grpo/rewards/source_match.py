"""Content agreement with the source video: a companion reward against new content, blur and faded colours.

Small soft videos have no features to match, so small colour patches are matched instead, regardless of their position:
each patch of the generated video to the nearest of the source, which finds content that the source lacks, and each
patch of the source to the nearest of the generated video, which finds what was lost, for instance to blur
(bidirectional similarity, Simakov et al. 2008).
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
from flow_grpo.rewards.references import once_per_condition
from flow_grpo.rewards.results import all_valid

COLUMNS = 48  # width, at most, of the pictures that patches are taken from
PATCH, QUERY_STRIDE, KEY_STRIDE = 4, 4, 2  # pixels
QUERIES = 1024  # patches whose distances to all others are held at once


def _patches(video: Tensor, stride: int) -> Tensor:
    frames = shrink(rearrange(video, "c t h w -> t c h w").float(), COLUMNS)
    return rearrange(functional.unfold(frames, PATCH, stride=stride), "t d n -> (t n) d")


def _distance(query: Tensor, key: Tensor) -> Tensor:
    """Return the mean rms colour distance, in [0, 1], of the patches of video `query` to their nearest of `key`."""
    first, second = _patches(query, QUERY_STRIDE), _patches(key, KEY_STRIDE)
    # A part at a time: all distances of a long, tall video take gigabytes.
    nearest = [torch.cdist(part, second).amin(-1) for part in first.split(QUERIES)]
    return torch.cat(nearest).mean() / math.sqrt(first.shape[-1])


def differences(video: Tensor, source: Tensor) -> Tensor:
    """Return (2,) colour distances of two videos (3, T, h, w): `video` not found in `source`, and the reverse."""
    return torch.stack([_distance(video, source), _distance(source, video)])


class SourceMatch:
    """value = -mean over both directions of max(0, distance to the source - the ground-truth view's distance to it).

    The ground-truth view also shows walls that the source never sees and misses some that it does: a video with the
    same distances scores 0, and smaller ones earn nothing. Without a ground-truth view the distances count in full. The
    value is a colour difference in [-1, 0]. `info`: `new`, the distance of the generated video to the source, and
    `lost`, the reverse.
    """

    name = "source_match"
    needs = ("source_video",)
    floor = 0.003  # colour difference that a codec's noise makes
    measures = ("new", "lost")

    @torch.no_grad()
    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score (B, 3, T, h, w) videos in [0, 1]."""
        found = torch.stack([differences(v, c.need_source()) for v, c in zip(videos, conditions, strict=True)])
        allowed = once_per_condition(conditions, _allowed)
        values = -(found - allowed).clamp(min=0).mean(-1)
        return all_valid(conditions, values, {"new": found[:, 0], "lost": found[:, 1]})


def _allowed(condition: Condition) -> Tensor:
    if condition.target_video is None:
        return torch.zeros(2)
    return differences(condition.target_video, condition.need_source())
