"""What rewards measure on a condition's own videos: once for all copies of the condition in a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flow_grpo.records import Condition


def once_per_condition(conditions: Sequence[Condition], measure: Callable[[Condition], Tensor]) -> Tensor:
    """Return the measurements (B, ...) of B conditions; those that share their videos are measured once.

    `measure` reads nothing of a condition but its source video and target video.
    """
    found: list[tuple[Condition, Tensor]] = []
    rows = []
    for condition in conditions:
        known = next((value for other, value in found if _same_videos(condition, other)), None)
        if known is None:
            known = measure(condition)
            found.append((condition, known))
        rows.append(known)
    return torch.stack(rows)


def _same_videos(one: Condition, other: Condition) -> bool:
    # Names first: equal ones do not prove equal videos, but different ones save reading them.
    if (one.scene, one.source_camera, one.target_camera) != (other.scene, other.source_camera, other.target_camera):
        return False
    pairs = ((one.target_video, other.target_video), (one.source_video, other.source_video))
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)
