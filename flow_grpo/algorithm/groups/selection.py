"""Which groups an epoch trains on, and which rank trains on which of their samples: pure functions.

Letters: W ranks, N samples of a round over all ranks, k copies in a group. *Pool rows* number the samples of all
rounds, or groups where their copies are trained on together: round by round, and in a round rank by rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flow_grpo.maths.keys import generator
from flow_grpo.settings.errors import RunStoppedError
from flow_grpo.settings.schema import DynamicSamplingConfig


class ShortageError(RunStoppedError):
    """Too few groups carry a signal under the policy "raise"; a resumed run samples other groups."""

    rewind = False


@dataclasses.dataclass(frozen=True)
class SampleGroup:
    """The k copies of one draw."""

    gid: int
    rows: tuple[int, ...]  # its k pool rows, in slot order; one where its copies are trained on together
    kind: str  # "valid" | "flat" | "incomplete"


@dataclasses.dataclass(frozen=True)
class Decision:
    """What to do after a round."""

    action: str  # "more" samples another round, "use" trains on `groups`, "original" on the first round unchanged
    valid: int  # samples in valid groups so far, over all ranks; may exceed the target
    groups: tuple[SampleGroup, ...] = ()  # what to train on; under "pad" a group may occur several times
    padded: int = 0  # samples of `groups` that are repetitions or belong to flat or incomplete groups


def groups_of(
    gids: Tensor, slots: Tensor, *, flat: Tensor, incomplete: Tensor, pool_row: Mapping[int, int]
) -> tuple[SampleGroup, ...]:
    """Return the groups of a round, sorted by gid.

    Args:
        gids: (N,) int64 group of every sample of the round.
        slots: (N,) int64 copy number.
        flat: (G,) bool of the groups sorted by gid.
        incomplete: (G,) bool, likewise.
        pool_row: sample of the round -> its pool row; where a row is a group, of its copy 0 alone.
    """
    order = sorted(range(len(gids)), key=lambda row: (int(gids[row]), int(slots[row])))
    members: dict[int, list[int]] = {}
    for row in order:
        members.setdefault(int(gids[row]), []).extend([pool_row[row]] if row in pool_row else [])
    kinds = [
        "incomplete" if is_incomplete else "flat" if is_flat else "valid"
        for is_incomplete, is_flat in zip(incomplete, flat, strict=True)
    ]
    return tuple(SampleGroup(gid, tuple(rows), kind) for (gid, rows), kind in zip(members.items(), kinds, strict=True))


def decide(
    rounds: Sequence[Sequence[SampleGroup]], config: DynamicSamplingConfig, *, target: int, k: int, seed: int
) -> Decision:
    """Return what to do after the rounds sampled so far; groups are taken in the order (round, gid).

    The pool is full with `target` samples over all ranks, a multiple of k. Under "pad" the seed decides what is
    repeated.

    Raises:
        ShortageError: the last allowed round left the pool short and the policy is "raise".
    """
    valid = [group for drawn in rounds for group in drawn if group.kind == "valid"]
    have, wanted = len(valid) * k, target // k
    if have >= target:
        return Decision("use", have, tuple(valid[:wanted]))
    if len(rounds) <= config.max_resample_times:
        return Decision("more", have)
    if config.policy == "raise":
        raise ShortageError(
            f"only {have} of {target} samples lie in groups that carry a signal after "
            f"{len(rounds) - 1} resample(s); look at reward/*_group_range_p50, raise sample.k, sample.noise_level or "
            "dynamic_sampling.max_resample_times, or set dynamic_sampling.policy=fallback_original"
        )
    if config.policy == "fallback_original" or not valid:
        return Decision("original", have)
    if config.policy == "rebalance":
        return Decision("use", have, tuple(valid))
    missing = wanted - len(valid)
    if config.policy == "pad":
        draw = generator(seed, "pad", rounds[0][0].gid)
        spare = [valid[int(torch.randint(len(valid), (), generator=draw))] for _ in range(missing)]
    else:
        spare = [group for kind in ("flat", "incomplete") for group in rounds[0] if group.kind == kind][:missing]
    return Decision("use", have, (*valid, *spare), padded=missing * k)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which rank trains on which pool rows."""

    rows: tuple[tuple[int, ...], ...]  # per rank, in the order it holds them: its own by rising number, then arrivals
    moves: tuple[tuple[int, int, int], ...]  # (pool row, from rank, to rank) of every sample that changes rank


def place(pool_rows: Sequence[int], rank_of: Sequence[int], world_size: int) -> Placement:
    """Return equal shares for all ranks with as few samples moved as possible.

    Rank r gets len(pool_rows) // W samples, the first len(pool_rows) % W ranks one more. A pool row may occur several
    times; `rank_of` says by pool row who has it.
    """
    share, more = divmod(len(pool_rows), world_size)
    quota = [share + (rank < more) for rank in range(world_size)]
    own: list[list[int]] = [[] for _ in range(world_size)]
    for row in sorted(pool_rows):
        own[rank_of[row]].append(row)
    surplus = [(row, rank) for rank in range(world_size) for row in own[rank][quota[rank] :]]
    holes = [rank for rank in range(world_size) for _ in range(quota[rank] - len(own[rank]))]
    moves = tuple((row, source, target) for (row, source), target in zip(surplus, holes, strict=True))
    arrived = [[row for row, _, target in moves if target == rank] for rank in range(world_size)]
    return Placement(tuple((*own[r][: quota[r]], *arrived[r]) for r in range(world_size)), moves)
