"""Samples of unlike structure in one round: which share a call, in as few and as full batches as possible.

Two samples share a call of the transformer only when everything that shapes its tensors or its loop is equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Structure(NamedTuple):
    """Everything that samples must have in common to be rolled out in one call.

    Attributes:
        frames: T, of the video.
        height: rows of the video, in pixels.
        width: columns.
        num_steps: denoising steps.
        guidance_scale: of the text guidance.
        window: the stochastic steps.
    """

    frames: int
    height: int
    width: int
    num_steps: int
    guidance_scale: float
    window: tuple[int, ...]


def group_configs_by_structure(structures: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """Return the positions of every structure, structures in the order in which they first appear."""
    groups: dict[Hashable, list[int]] = {}
    for position, structure in enumerate(structures):
        groups.setdefault(structure, []).append(position)
    return groups


def full_batches(structures: Sequence[Hashable], max_batch: int) -> list[list[int]]:
    """Return the positions of every call: per structure, batches of `max_batch` and one for what is left.

    The number of calls is the sum of ceil(samples / max_batch) over the structures, however they are mixed.

    Raises:
        ValueError: max_batch below 1.
    """
    if max_batch < 1:
        raise ValueError(f"max_batch is {max_batch}, must be at least 1 sample a call")
    groups = group_configs_by_structure(structures).values()
    return [group[start : start + max_batch] for group in groups for start in range(0, len(group), max_batch)]
