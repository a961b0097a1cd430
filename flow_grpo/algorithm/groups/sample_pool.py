"""The samples of several rounds that one rank holds, and how samples that change rank are sent.

A pool row names a sample, or a group, over all rounds and ranks, see `selection.py`.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import chain

import torch

from flow_grpo.algorithm.groups.compare import Chosen, Gathered, first_copies
from flow_grpo.algorithm.groups.selection import Placement
from flow_grpo.records import Samples
from flow_grpo.runtime.ranks.exchange import exchange_rows
from flow_grpo.runtime.ranks.process_group import World


class SamplePool:
    """Samples of the rounds of an epoch, on one rank."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.rank_of: list[int] = []  # by pool row, who has rolled it out
        self._held: dict[int, tuple[Samples, int]] = {}  # pool row -> record and row in it
        self._gathered: list[Gathered] = []  # per round, all samples
        self._places: list[Gathered] = []  # per round, a row for every pool row
        self._example: Samples | None = None  # one sample, for a rank that holds none of the wanted ones

    def add(self, whole: Chosen, wanted: Container[int]) -> None:
        """Keep the wanted pool rows of a whole round; a part of a record is copied out of it."""
        counts = [len(rows) for rows in whole.placement]
        here = self._world.data.rank
        first, table = len(self.rank_of) + sum(counts[:here]), whole.table[:, : counts[here]]
        self.rank_of += [rank for rank, count in enumerate(counts) for _ in range(count)]
        self._gathered.append(whole.gathered)
        self._places.append(whole.gathered.rows(torch.tensor([*chain(*whole.placement)])))
        self._example = self._example or whole.parts[0].rows(torch.tensor([0]))
        for number, part in enumerate(whole.parts):
            positions = (table[0] == number).nonzero().flatten().tolist()
            own = [position for position in positions if first + position in wanted]
            kept, rows = table[1, own].unique(return_inverse=True)
            samples = part if len(kept) == len(part) else part.rows(kept)
            self._held |= {first + position: (samples, row) for position, row in zip(own, rows.tolist(), strict=True)}

    def take(self, placement: Placement) -> tuple[Chosen, int]:
        """Return the placed samples on the ranks that train on them, and the bytes sent by all ranks.

        Collective call. A rank that gets one sample less than another adds padding of weight 0, so that all replay
        equally many.
        """
        places = Gathered.concatenate(self._places)
        moved_bytes = self._move(placement, places)
        with self._world.sync_errors("choosing"):
            return self._choose(placement, places), moved_bytes

    def _choose(self, placement: Placement, places: Gathered) -> Chosen:
        """Return the placed samples once all of this rank's have arrived.

        Raises:
            RuntimeError: a sample arrived under another's key.
        """
        mine = placement.rows[self._world.data.rank]
        own = [self._held[row] for row in mine]
        wrong = [
            row
            for row, (samples, number) in zip(mine, own, strict=True)
            if samples.keys[number, :2].tolist() != [int(places.gids[row]), int(places.slots[row])]
        ]
        if wrong:
            raise RuntimeError(f"pool rows {wrong} are held as other samples than were gathered")
        assert self._example is not None, "rounds are added before samples are taken"
        padding = own[0] if own else (self._example, 0)
        own += [padding] * (max(map(len, placement.rows)) - len(own))
        records = {id(samples): samples for samples, _ in own}
        numbers = {key: number for number, key in enumerate(records)}
        distinct = sorted({row for rows in placement.rows for row in rows})
        number_of = {row: number for number, row in enumerate(distinct)}
        gathered = places.rows(torch.tensor(distinct))
        if self._example.copies > 1:  # of a group the pool names one copy
            everything = Gathered.concatenate(self._gathered)
            first_of, gids = gathered.gids, everything.gids
            gathered = everything.rows(torch.isin(gids, first_of).nonzero().flatten())
            first = first_copies(gathered)
            number_of = {row: first[gid] for row, gid in zip(distinct, first_of.tolist(), strict=True)}
        return Chosen(
            gathered=gathered,
            placement=tuple(tuple(number_of[row] for row in rows) for rows in placement.rows),
            parts=tuple(records.values()),
            table=torch.tensor([(numbers[id(samples)], row) for samples, row in own]).T,
            as_rolled_out=False,
        )

    def _move(self, placement: Placement, places: Gathered) -> int:
        """Exchange the samples that change rank, size by size, and return the bytes."""
        rank, ranks, moved_bytes = self._world.data.rank, range(self._world.data.size), 0
        assert self._example is not None, "rounds are added before samples are taken"
        sizes = {row: tuple(places.sizes[row].tolist()) for row, _, _ in placement.moves}
        for size in sorted(set(sizes.values())):
            moves = [move for move in placement.moves if sizes[move[0]] == size]
            sent = [sorted(row for row, source, target in moves if (source, target) == (rank, to)) for to in ranks]
            record, number_of = self._one_record([row for rows in sent for row in rows])
            send = [[number_of[row] for row in rows] for rows in sent]
            receive = [sum((source, target) == (sender, rank) for _, source, target in moves) for sender in ranks]
            tensors = {} if record is None else record.tensors()
            received, row_bytes = exchange_rows(tensors, send, receive, self._world.data)
            # By source rank and pool row. Fields that are no tensors are equal in all samples of an epoch.
            arrived = self._example.with_tensors(received)
            mine = sorted((source, row) for row, source, target in moves if target == rank)
            self._held |= {row: (arrived, number) for number, (_, row) in enumerate(mine)}
            moved_bytes += len(moves) * row_bytes
        return moved_bytes

    def _one_record(self, rows: Sequence[int]) -> tuple[Samples | None, dict[int, int]]:
        """Return a record that holds these pool rows, and where; a copy only when they are in several records."""
        held = [self._held[row] for row in rows]
        if not held:
            return None, {}
        if all(samples is held[0][0] for samples, _ in held):
            return held[0][0], {row: self._held[row][1] for row in rows}
        parts = [samples.rows(slice(number, number + 1)) for samples, number in held]
        return Samples.concatenate(parts), {row: number for number, row in enumerate(rows)}
