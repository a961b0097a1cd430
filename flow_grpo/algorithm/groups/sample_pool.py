"""The samples of several rounds that one rank holds, and how those that change rank get there.

A pool row names a sample over all rounds and ranks: round * N + its place among the N gathered samples of its round.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

import torch

from flow_grpo.algorithm.groups.compare import Chosen, Gathered
from flow_grpo.algorithm.groups.selection import Placement
from flow_grpo.algorithm.rollout.collector import Collected
from flow_grpo.records import Experience
from flow_grpo.runtime.ranks.exchange import exchange_rows
from flow_grpo.runtime.ranks.process_group import Ranks


class Held(NamedTuple):
    """Where this rank has a sample."""

    experience: Experience
    row: int


class SamplePool:
    """Samples of the rounds of an epoch, on one rank.

    Args:
        local: samples of a rank and round.
        ranks: who takes part.
    """

    def __init__(self, local: int, ranks: Ranks) -> None:
        self._local = local
        self._ranks = ranks
        self._held: dict[int, Held] = {}
        self._facts: list[Gathered] = []

    def add(self, collected: Collected, gathered: Gathered, wanted: Container[int]) -> None:
        """Keep those of a round's samples whose pool rows are wanted; a part of a record is copied out of it."""
        first = (len(self._facts) * self._ranks.world_size + self._ranks.rank) * self._local
        self._facts.append(gathered)
        for batch in collected.batches:
            kept = [row for row, position in enumerate(batch.positions) if first + position in wanted]
            whole = len(kept) == len(batch.positions)
            experience = batch.experience if whole else batch.experience.rows(torch.tensor(kept, dtype=torch.int64))
            for place, row in enumerate(kept):
                self._held[first + batch.positions[row]] = Held(experience, place)

    def take(self, placement: Placement) -> tuple[Chosen, int]:
        """Return the placed samples, each on the rank that trains on it, and how many bytes changed rank over all.

        Every rank must call it. Where ranks get one sample less than others, a stand-in of weight 0 keeps their replays
        in step.
        """
        facts = Gathered.concatenate(self._facts)
        moved_bytes = self._move(placement, facts)
        with self._ranks.sync_errors("choosing"):
            return self._choose(placement, facts), moved_bytes

    def _choose(self, placement: Placement, facts: Gathered) -> Chosen:
        """Return the placed samples once all of this rank's are here.

        Raises:
            RuntimeError: a sample arrived under another's name.
        """
        own = [self._held[row] for row in placement.rows[self._ranks.rank]]
        stand_in = own[0] if own else next(iter(self._held.values()))
        own += [stand_in] * (max(map(len, placement.rows)) - len(own))
        records = _positions_in_records(own)
        distinct = sorted({row for rows in placement.rows for row in rows})
        number = {row: place for place, row in enumerate(distinct)}
        wrong = [
            row
            for row, sample in zip(placement.rows[self._ranks.rank], own, strict=False)
            if sample.experience.keys[sample.row, :2].tolist() != [int(facts.gids[row]), int(facts.slots[row])]
        ]
        if wrong:
            raise RuntimeError(f"pool rows {wrong} are held as other samples than were gathered")
        return Chosen(
            gathered=facts.rows(torch.tensor(distinct)),
            placement=tuple(tuple(number[row] for row in rows) for rows in placement.rows),
            experiences=tuple(experience for experience, _ in records),
            positions=tuple(tuple(positions) for _, positions in records),
            as_rolled_out=False,
        )

    def _move(self, placement: Placement, facts: Gathered) -> int:
        """Send and receive what changes rank, one video size after the other, and return the bytes."""
        moved_bytes = 0
        sizes = {row: tuple(facts.sizes[row].tolist()) for row, _, _ in placement.moves}
        for size in sorted(set(sizes.values())):
            moves = [move for move in placement.moves if sizes[move[0]] == size]
            arrived, row_bytes = self._move_size(moves)
            mine = sorted((source, row) for row, source, target in moves if target == self._ranks.rank)
            self._held |= {row: Held(arrived, place) for place, (_, row) in enumerate(mine)}
            moved_bytes += len(moves) * row_bytes
        return moved_bytes

    def _move_size(self, moves: Sequence[tuple[int, int, int]]) -> tuple[Experience, int]:
        """Exchange samples of one video size; return what arrives by (source rank, pool row), and the bytes of one."""
        rank, world = self._ranks.rank, range(self._ranks.world_size)
        form = next(iter(self._held.values())).experience  # all samples of an epoch share what is no tensor
        sent = [sorted(row for row, source, target in moves if (source, target) == (rank, to)) for to in world]
        record, place_of = self._one_record([row for rows in sent for row in rows])
        send = [[place_of[row] for row in rows] for rows in sent]
        receive = [sum((source, target) == (sender, rank) for _, source, target in moves) for sender in world]
        tensors = {} if record is None else record.tensors()
        received, row_bytes = exchange_rows(tensors, send, receive, self._ranks)
        return form.with_tensors(received), row_bytes

    def _one_record(self, rows: Sequence[int]) -> tuple[Experience | None, dict[int, int]]:
        """Return a record that holds these pool rows, and where; a copy only when they lie in several records."""
        samples = [self._held[row] for row in rows]
        if not samples:
            return None, {}
        if all(sample.experience is samples[0].experience for sample in samples):
            return samples[0].experience, {row: self._held[row].row for row in rows}
        parts = [sample.experience.rows(slice(sample.row, sample.row + 1)) for sample in samples]
        return Experience.concatenate(parts), {row: place for place, row in enumerate(rows)}


def _positions_in_records(samples: Sequence[Held]) -> list[tuple[Experience, list[int]]]:
    """Return the records that hold these samples and, for every row, where it stands among them, or -1.

    Nothing is copied. A sample that stands there twice makes its record appear twice.
    """
    records: list[tuple[Experience, list[int]]] = []
    for position, sample in enumerate(samples):
        free = (
            positions
            for experience, positions in records
            if experience is sample.experience and positions[sample.row] < 0
        )
        places = next(free, None)
        if places is None:
            places = [-1] * len(sample.experience)
            records.append((sample.experience, places))
        places[sample.row] = position
    return records
