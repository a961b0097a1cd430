"""Batched calls for samples of different video sizes: as few and as full batches as possible."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def group_configs_by_structure(structures: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """Return the positions of every structure, structures in the order of their first appearance."""
    groups: dict[Hashable, list[int]] = {}
    for position, structure in enumerate(structures):
        groups.setdefault(structure, []).append(position)
    return groups


def full_batches(structures: Sequence[Hashable], max_batch: int) -> list[list[int]]:
    """Return the positions of every call: per structure, batches of `max_batch` and one for the rest.

    The number of calls is the sum of ceil(samples / max_batch) over the structures, however they are mixed.

    Args:
        structures: of every sample, what must be equal for two samples to share a call, such as the video size.
        max_batch: most samples of a call, at least 1.
    """
    groups = group_configs_by_structure(structures).values()
    return [group[start : start + max_batch] for group in groups for start in range(0, len(group), max_batch)]
