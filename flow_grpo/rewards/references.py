"""What rewards measure on a condition's own videos: once for all its copies, where possible before."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flow_grpo.records import Condition
from flow_grpo.rewards.frames import frame_numbers, grey_frames
from flow_grpo.runtime.lru import LruCache

KEPT = 256  # conditions, a few numbers each

VideosKey = tuple[str, str, str, str]


class References:
    """The measurements of conditions' own videos, which may read no more than `videos_key`; the last ones are kept."""

    def __init__(self, measure: Callable[[Condition], Tensor]) -> None:
        self.measure = measure
        self._kept: LruCache[VideosKey, Tensor] = LruCache(KEPT)

    def __call__(self, conditions: Sequence[Condition]) -> Tensor:
        """Return the measurements (B, ...) of B conditions."""
        return torch.stack(
            [self._kept.get_or_make(videos_key(c), functools.partial(self.measure, c)) for c in conditions]
        )


def videos_key(condition: Condition) -> VideosKey:
    """Return scene, cameras and a hash of what is given of a condition's videos: pixels, poses, focal length, depth.

    A true view's camera counts: the frames that can be scored depend on that view, and so do the anchors of a source
    without parallax. Every eighth row and column of the frames that are scored stand for the pixels.
    """
    content = hashlib.blake2b(digest_size=16)
    cameras = [(condition.source_video, condition.source_poses), (condition.target_video, condition.target_poses)]
    for video, poses in cameras:
        if video is not None:
            content.update(repr(tuple(video.shape)).encode())
            content.update(grey_frames(video[..., ::8, ::8], frame_numbers(video.shape[1])).tobytes())
            content.update(b"" if poses is None else poses.double().numpy().tobytes())
    depth = condition.source_depth
    for known in (condition.intrinsics, *(depth or ())):
        content.update(b"" if known is None else known.double().numpy().tobytes())
    target = "" if condition.target_video is None else condition.target_camera
    return condition.scene, condition.source_camera, target, content.hexdigest()
