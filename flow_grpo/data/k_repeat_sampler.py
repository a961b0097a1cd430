"""Which rank samples which copy of which condition at which step: one pure function, alike on every rank.

Letters: W ranks, B samples per rank and batch, k copies of a condition (its group), m = W*B/k conditions per batch,
nb batches per epoch, n conditions in the dataset. A `step` is one batch over all ranks; nb steps make a round.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Hashable, Iterator, Sequence, Sized
from functools import lru_cache
from typing import Any

import torch
from torch.utils.data import Sampler

from flow_grpo.maths.keys import generator, key

LAYOUTS = ("spread", "shuffled", "contiguous")
StateValue = int | str
Draw = tuple[int, int, int, int]
"""One sample to make: (step, gid, slot, index).

`gid` numbers the draw and so the group, once per run: the same condition drawn twice gives two groups. `slot` is which
of the k copies this is, `index` the condition's position in the dataset.
"""


class StaleBatchError(RuntimeError):
    """A batch was drawn for another step than the one being consumed."""


class DistributedKRepeatSampler(Sampler[list[Draw]]):
    """Endless batches in which every condition appears exactly k times over the ranks.

    Use it as `DataLoader(dataset, batch_sampler=sampler, collate_fn=list)`. Loader workers draw ahead of the consumer,
    so nothing here depends on when `set_epoch` is called: the running iterator owns its counter, every item carries
    its step, and `check` compares that step with the one the consumer is at.

    Never pass the loader through `accelerator.prepare`: on several processes it wraps the batch sampler once more and
    hands each rank one batch in W of a sampler that already yields only that rank's rows. Nothing fails there; `check`
    is what notices, at the first or second batch.

    Layouts, all with the same draws per round:
        spread: the copies of a group lie on min(k, W) ranks, on k different ones exactly if W >= k.
        shuffled: a random permutation of the batch over the ranks.
        contiguous: a whole group on one rank over the round (not over the batch); conditions are encoded once.
    """

    def __init__(  # noqa: PLR0913 - the published arguments and one more
        self,
        dataset: Sized | int,
        batch_size: int,
        k: int,
        num_replicas: int,
        rank: int,
        seed: int,
        *,
        num_batches_per_epoch: int = 1,
        layout: str = "spread",
        structures: Sequence[Hashable] | None = None,
    ) -> None:
        """Plan draws from `dataset`, or from that many conditions when it is an int.

        Args:
            dataset: anything with a length; its `fingerprint()`, when it has one, is part of the saved state.
            batch_size: B, samples per rank and batch.
            k: copies of each condition.
            num_replicas: W.
            rank: this rank, 0..W-1.
            seed: of the order of conditions; the ranks must agree on it.
            num_batches_per_epoch: nb.
            layout: "spread", "shuffled" or "contiguous".
            structures: of every condition, what shapes its call, such as the video's size; sortable. The m gids from
                step * m on are then of one structure: all conditions of a step, so that no rank waits for a larger one.
                (In layout contiguous a step holds parts of several such blocks.) None takes all as alike.

        Raises:
            ValueError: numbers that do not fit together, all of them in the text.
        """
        self.num_conditions = dataset if isinstance(dataset, int) else len(dataset)
        self.batch_size = batch_size
        self.k = k
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = seed
        self.num_batches_per_epoch = num_batches_per_epoch
        self.layout = layout
        self._dataset = dataset
        self._buckets = _buckets(self.num_conditions, structures)
        self._expected = 0  # the step the consumer takes next; a new iterator starts here
        self._check_numbers()

    @property
    def conditions_per_batch(self) -> int:
        """Return m, distinct conditions in one batch over all ranks."""
        return self.num_replicas * self.batch_size // self.k

    @property
    def next_step(self) -> int:
        """The step that the consumer takes next."""
        return self._expected

    def plan(self, step: int) -> list[list[Draw]]:
        """Return the W lists of B draws of a step: a pure function, any step in any order on any rank.

        Raises:
            ValueError: negative step.
        """
        _check_step(step)
        pairs = self._contiguous_pairs(step) if self.layout == "contiguous" else self._batch_pairs(step)
        draws = [(step, gid, slot, self._index(gid)) for gid, slot in pairs]
        size = self.batch_size
        return [draws[rank * size : (rank + 1) * size] for rank in range(self.num_replicas)]

    def seek(self, step: int) -> None:
        """Set the step that the consumer takes next; iterators made from now on start there, running ones go on.

        Raises:
            ValueError: negative step.
        """
        _check_step(step)
        self._expected = step

    def set_epoch(self, epoch: int) -> None:
        """Before `iter()` a seek to that step; afterwards only what `check` expects of the next batch.

        Args:
            epoch: number of the batch, usually `epoch * num_batches_per_epoch + i`.
        """
        self.seek(epoch)

    def check(self, tag: int) -> None:
        """Accept the step of a batch just taken from the loader, once per batch, and move on to the next.

        Raises:
            StaleBatchError: the batch was drawn for another step.
        """
        if tag != self._expected:
            raise StaleBatchError(
                f"the loader delivered the batch of step {tag} where step {self._expected} was expected; call seek() "
                "or set_epoch() before iter(loader), check every batch once, keep the loader out of accelerator.prepare"
            )
        self._expected = tag + 1

    def __iter__(self) -> Iterator[list[Draw]]:
        """Return an endless iterator over this rank's batches, from the next step on."""
        # Not a generator itself: the start must be read now, not when a prefetching loader asks for the first batch.
        return (self.plan(step)[self.rank] for step in itertools.count(self._expected))

    def state_dict(self) -> dict[str, StateValue]:
        """Return what a resumed run must agree on, and the step its consumer takes next.

        The loader's own position is not in it: under prefetching it runs ahead of the consumer.
        """
        fingerprint = getattr(self._dataset, "fingerprint", None)
        return {
            "seed": self.seed,
            "n": self.num_conditions,
            "fingerprint": "" if fingerprint is None else fingerprint(),
            "num_replicas": self.num_replicas,
            "batch_size": self.batch_size,
            "k": self.k,
            "num_batches_per_epoch": self.num_batches_per_epoch,
            "layout": self.layout,
            "structures": key(*map(tuple, self._buckets)) if len(self._buckets) > 1 else 0,
            "next_step": self.next_step,
        }

    def load_state_dict(self, state: dict[str, StateValue]) -> None:
        """Seek to where a saved run stood; call it before `iter()`.

        Another number of ranks is welcome when W*B is unchanged, since the draws of a round then stay the same.

        Raises:
            ValueError: the saved run differs, each difference with its two values.
        """
        mine = self.state_dict()
        if set(state) != set(mine):
            raise ValueError(f"sampler state has fields {sorted(state)}, must have {sorted(mine)}; not saved by this?")
        next_step = int(state["next_step"])
        differing = {name for name in mine if name != "next_step" and state[name] != mine[name]}
        per_batch = int(state["num_replicas"]) * int(state["batch_size"])
        # A contiguous batch takes other groups of its round when W changes, so only a whole round can be handed over.
        at_seam = self.layout != "contiguous" or next_step % self.num_batches_per_epoch == 0
        if per_batch == self.num_replicas * self.batch_size and at_seam:
            differing -= {"num_replicas", "batch_size"}
        if differing:
            text = ", ".join(f"{name} was {state[name]!r}, is {mine[name]!r}" for name in mine if name in differing)
            raise ValueError(
                f"sampler cannot resume at step {next_step}: {text}; restore these values (num_replicas may change "
                "when num_replicas * batch_size does not, in layout contiguous only between rounds) or start anew"
            )
        self.seek(next_step)

    def _batch_pairs(self, step: int) -> list[tuple[int, int]]:
        """Return the (gid, slot) pairs of a step in rank order; slot-major, so equal gids lie m positions apart."""
        m = self.conditions_per_batch
        pairs = [(step * m + position, slot) for slot in range(self.k) for position in range(m)]
        if self.layout == "spread":
            return pairs
        order = torch.randperm(len(pairs), generator=generator(self.seed, "shuffle", step))
        return [pairs[position] for position in order.tolist()]

    def _contiguous_pairs(self, step: int) -> list[tuple[int, int]]:
        """Return the (gid, slot) pairs of a step where each rank owns whole groups of the round."""
        round_index, batch = divmod(step, self.num_batches_per_epoch)
        per_round = self.num_batches_per_epoch * self.conditions_per_batch
        per_rank = per_round // self.num_replicas
        first, size = round_index * per_round, self.batch_size
        return [
            (first + rank * per_rank + sample // self.k, sample % self.k)
            for rank in range(self.num_replicas)
            for sample in range(batch * size, (batch + 1) * size)
        ]

    def _index(self, gid: int) -> int:
        """Return the condition of a draw: its step belongs to one bucket, which walks through its own passes."""
        step, place = divmod(gid, self.conditions_per_batch)
        bucket, own_step = self._bucket_of(step)
        members = self._buckets[bucket]
        n, m = len(members), self.conditions_per_batch
        number, position = divmod(own_step * m + place, pass_length(n, m))
        # One bucket alone is a data set without structures; several must not walk in step.
        seed = self.seed if len(self._buckets) == 1 else key(self.seed, "bucket", bucket)
        return members[pass_order(n, m, seed, number)[position]]

    def _bucket_of(self, step: int) -> tuple[int, int]:
        """Return whose turn a step is, and which of its own steps it is: turns go by size, shuffled in every cycle."""
        if len(self._buckets) == 1:
            return 0, step
        turns = tuple(len(members) // self.conditions_per_batch for members in self._buckets)
        cycle, position = divmod(step, sum(turns))
        order = cycle_order(turns, self.seed, cycle)
        return order[position], cycle * turns[order[position]] + order[:position].count(order[position])

    def _check_numbers(self) -> None:
        ranks, size, k, n = self.num_replicas, self.batch_size, self.k, self.num_conditions
        nb = self.num_batches_per_epoch
        given = f"num_replicas={ranks}, batch_size={size}, k={k}, num_batches_per_epoch={nb}, dataset of {n}"
        if self.layout not in LAYOUTS:
            raise ValueError(f"sampler layout is {self.layout!r}, must be one of {', '.join(LAYOUTS)}")
        if min(ranks, size, nb) < 1 or not 0 <= self.rank < ranks:
            raise ValueError(f"sampler got {given}, rank={self.rank}; counts must be >= 1 and 0 <= rank < num_replicas")
        if k < 2:
            raise ValueError(f"sampler got k={k} ({given}); a group needs k >= 2 copies to be compared with its mean")
        if ranks * size % k:
            raise ValueError(
                f"sampler got num_replicas * batch_size = {ranks * size}, not a multiple of k={k} ({given}); "
                "change batch_size or k so that k divides it"
            )
        m = self.conditions_per_batch
        short = min(len(members) for members in self._buckets)
        if len(self._buckets) > 1 and short < m:
            raise ValueError(
                f"the rarest of {len(self._buckets)} structures has {short} conditions, a batch needs m = num_replicas "
                f"* batch_size / k = {m} of one structure ({given}); use fewer structures, add data or raise k"
            )
        if n < m:
            raise ValueError(
                f"dataset has {n} conditions, a batch needs m = num_replicas * batch_size / k = {m} different ones "
                f"({given}); add data, raise k or lower batch_size"
            )
        if self.layout == "contiguous" and nb * m % ranks:
            raise ValueError(
                f"layout contiguous needs num_batches_per_epoch * m = {nb * m} groups per round to be a multiple of "
                f"num_replicas={ranks} ({given}, m={m}); change num_batches_per_epoch or use layout spread"
            )
        if nb * m > n and self.rank == 0:
            warnings.warn(
                f"an epoch draws {nb * m} conditions from a dataset of {n}, so some come twice ({given}); harmless: "
                "each draw is a group of its own",
                stacklevel=3,
            )


def pass_length(n: int, m: int) -> int:
    """Return how many draws a pass over n conditions holds; with n < 2m each pass is one step of m draws."""
    return n if n >= 2 * m else m


@lru_cache(maxsize=4)
def pass_order(n: int, m: int, seed: int, number: int) -> tuple[int, ...]:
    """Return the order in which pass `number` visits 0..n-1, such that every step of m draws is free of repeats.

    A pass rarely ends with a step. The step that straddles two passes is completed by the first conditions of the new
    pass that the old one did not already put into this step. They come from the first m entries, so the end of the
    order, which the next pass looks at, stays that of the plain permutation (this needs n >= 2m).
    """
    order = _permutation(n, seed, number)
    late = number * pass_length(n, m) % m  # draws of the straddling step that the previous pass made
    if late:
        used = set(_permutation(n, seed, number - 1)[n - late :])
        head = list(itertools.islice((index for index in order if index not in used), m - late))
        chosen = set(head)
        order = head + [index for index in order if index not in chosen]
    return tuple(order)


@lru_cache(maxsize=4)
def cycle_order(turns: tuple[int, ...], seed: int, cycle: int) -> tuple[int, ...]:
    """Return which bucket has which turn in a cycle where bucket b has turns[b] of them."""
    order = [bucket for bucket, count in enumerate(turns) for _ in range(count)]
    picked = torch.randperm(len(order), generator=generator(seed, "turns", cycle)).tolist()
    return tuple(order[place] for place in picked)


def _buckets(n: int, structures: Sequence[Hashable] | None) -> list[list[int]]:
    """Return the indices of every structure, structures in sorted order."""
    if structures is None:
        return [list(range(n))]
    if len(structures) != n:
        raise ValueError(f"sampler got {len(structures)} structures for {n} conditions, must be one for each")
    found: dict[Any, list[int]] = {}
    for index, structure in enumerate(structures):
        found.setdefault(structure, []).append(index)
    return [found[structure] for structure in sorted(found)]


def _permutation(n: int, seed: int, number: int) -> list[int]:
    order: list[int] = torch.randperm(n, generator=generator(seed, "pass", number)).tolist()
    return order


def _check_step(step: int) -> None:
    if step < 0:
        raise ValueError(f"sampler step is {step}, must be at least 0")
