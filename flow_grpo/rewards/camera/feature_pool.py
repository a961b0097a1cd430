"""Features of pictures, found once for all rewards of a process, a picture a call of its pool."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flow_grpo.rewards.camera.features import Features, find_features
from flow_grpo.rewards.process_pool import CallPool, Outcome, ResultType
from flow_grpo.runtime.lru import LruCache

KEPT = 256  # pictures, at most 0.8 MB each
MOST_SECONDS = 600.0  # for each stage of a batch: features, anchors, poses, displacements

Views = tuple[Features, ...]


class FeaturePool:
    """Finds the features of videos; those of the last pictures are kept, failures are not."""

    def __init__(self, pool: CallPool) -> None:
        self.pool = pool
        self._kept: LruCache[bytes, Features] = LruCache(KEPT)

    def __call__(self, videos: Sequence[NDArray[np.uint8]], what: str) -> list[Outcome[Views]]:
        """Return the features of grey videos (F, h, w) frame by frame; `what` names them in messages."""
        keys = [[_key(picture) for picture in video] for video in videos]
        pictures = dict(zip((key for row in keys for key in row), (p for video in videos for p in video), strict=True))
        found = {key: Outcome(self._kept[key]) for key in pictures if key in self._kept}
        missing = [key for key in pictures if key not in found]
        made = self.pool.run(find_features, [(pictures[key],) for key in missing], seconds=MOST_SECONDS, what=what)
        for key, outcome in zip(missing, made, strict=True):
            found[key] = outcome
            if outcome.value is not None:
                self._kept[key] = outcome.value
        return [together([found[key] for key in row]) for row in keys]


def together(outcomes: Sequence[Outcome[ResultType]]) -> Outcome[tuple[ResultType, ...]]:
    """Return the values of several calls, or the first fault among them."""
    for outcome in outcomes:
        if outcome.fault:
            return Outcome(None, outcome.fault, outcome.lacking)
    return Outcome(tuple(outcome.value for outcome in outcomes if outcome.value is not None))


def _key(picture: NDArray[np.uint8]) -> bytes:
    return hashlib.blake2b(picture.tobytes() + repr(picture.shape).encode(), digest_size=16).digest()
