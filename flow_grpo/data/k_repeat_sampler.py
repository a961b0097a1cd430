"""The group sampler of GRPO: which rank generates which copy of which condition at each step.

GRPO compares k samples of the same condition with each other, so every condition must appear exactly k times in a batch
over all ranks. The plan is a pure function of (seed, step): every rank computes all of it and takes its own rows, so no
communication is needed, and resuming or prefetching cannot change it. How to use it: docs/k_repeat_sampler.md.

Letters: W ranks, B samples per rank and batch, k copies of a condition (a group), m = W * B / k conditions per batch,
nb batches per epoch, n conditions in the dataset. A step is one batch over all ranks; nb steps are one round (epoch).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Hashable, Iterator, Sequence, Sized
from functools import lru_cache
from typing import Any

import torch
from torch.utils.data import Sampler

from flow_grpo.maths.keys import generator, key

LAYOUTS = ("spread", "shuffled", "contiguous")

_log = logging.getLogger(__name__)

SampleKey = tuple[int, int, int, int]
"""One sample to generate: (step, gid, slot, index).

`step` is the batch, counted over the whole run. `gid` is the group, unique per draw over the whole run: a condition
drawn twice gives two groups. `slot` is which of the k copies this is, 0..k-1. `index` is the condition's position in
the dataset.
"""


class StaleBatchError(RuntimeError):
    """A batch was drawn for another step than the one being consumed."""


class AlreadySharded:
    """A batch sampler whose batches are this rank's own.

    `accelerator.prepare` around its loader would, on W processes, keep one in W of them and lose the rest in silence.
    accelerate's `BatchSamplerShard` reads `drop_last` when it is made; torch's DataLoader does not. So reading refuses.
    """

    @property
    def drop_last(self) -> bool:
        """Refuse to be sharded, by a TypeError."""
        raise TypeError(
            f"{type(self).__name__} yields this rank's batches already, so accelerator.prepare would lose all but one "
            "in num_processes of them; prepare model and optimizer only, and iterate over the loader as it is"
        )


class DistributedKRepeatSampler(AlreadySharded, Sampler[list[SampleKey]]):
    """An endless batch sampler in which every condition of a step appears exactly k times over the ranks.

        sampler = DistributedKRepeatSampler(dataset, batch_size=2, k=4, num_replicas=8, rank=rank, seed=42)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=list)

    An iterator yields this rank's batches, lists of B `SampleKey` (step, gid, slot, index); each is passed to
    `dataset[...]`. All randomness comes from `seed` and the step number: passes over the dataset are shuffled, the
    conditions of one step are distinct, and each condition is drawn once per pass. The draws of a round depend on
    W * B, not on W or the layout.

    Prefetching workers draw ahead of the consumer, so the iterator counts its own steps, every item carries its step,
    and `check` compares it with the step being consumed.

    Never pass the loader through `accelerator.prepare`: it would shard again, which is refused on several processes.

    Layouts, all with the same draws per round:
        spread: the copies of a group are on min(k, W) ranks, on k different ones if W >= k. The default.
        shuffled: a random permutation of the batch over the ranks.
        contiguous: a whole group on one rank within the round (not the batch), so it encodes each condition once.
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
        """Plan the draws of a dataset.

        Args:
            dataset: anything with a length, or the length; if it has `fingerprint()`, that is part of `state_dict`.
            batch_size: B, samples per rank and batch; W * B must be a multiple of k.
            k: group size, copies of each condition, at least 2.
            num_replicas: W, number of ranks.
            rank: this rank, 0..W-1.
            seed: seed of the order of conditions, identical on every rank.
            num_batches_per_epoch: nb.
            layout: "spread", "shuffled" or "contiguous".
            structures: a sortable key per condition, such as its video size; conditions of one step then share it, so
                no rank waits for a larger video. (Precisely the m gids from step * m on share it; with layout
                contiguous a step holds parts of several such blocks.) None: all conditions are interchangeable.

        Raises:
            ValueError: numbers that do not fit together; the message holds all of them.
        """
        self.num_conditions = dataset if isinstance(dataset, int) else len(dataset)
        self.batch_size = batch_size
        self.k = k
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = seed
        self.num_batches_per_epoch = num_batches_per_epoch
        self.layout = layout
        self.dataset = dataset
        self._members = _members_by_structure(self.num_conditions, structures)
        self.next_step = 0  # the step the consumer takes next, where a new iterator starts
        self._check_numbers()

    @property
    def conditions_per_batch(self) -> int:
        """Number m of distinct conditions in a batch over all ranks."""
        return self.num_replicas * self.batch_size // self.k

    def plan(self, step: int) -> list[list[SampleKey]]:
        """Plan the W lists of B keys of any step >= 0, in rank order; a pure function of the step."""
        _check_step(step)
        m, size, batches = self.conditions_per_batch, self.batch_size, self.num_batches_per_epoch
        if self.layout == "contiguous":  # the copies of a round, group by group, go to the ranks in turn
            round_index, batch = divmod(step, batches)
            ranks = range(round_index * self.num_replicas, (round_index + 1) * self.num_replicas)
            starts = [(rank * batches + batch) * size for rank in ranks]
            pairs = [divmod(copy, self.k) for start in starts for copy in range(start, start + size)]
        else:  # slot-major: copies of a group are m apart
            pairs = [(step * m + position, slot) for slot in range(self.k) for position in range(m)]
        if self.layout == "shuffled":
            order = torch.randperm(len(pairs), generator=generator(self.seed, "shuffle", step))
            pairs = [pairs[position] for position in order.tolist()]
        keys = [(step, gid, slot, self._index(gid)) for gid, slot in pairs]
        return [keys[rank * size : (rank + 1) * size] for rank in range(self.num_replicas)]

    def seek(self, step: int) -> None:
        """Set the step >= 0 that the consumer takes next; new iterators start there, existing ones stay."""
        _check_step(step)
        self.next_step = step

    def set_epoch(self, epoch: int) -> None:
        """Alias of `seek`, for training loops that call `set_epoch`; call it before `iter()`.

        The argument is the step, usually `epoch * num_batches_per_epoch + i`. An iterator that runs already stays where
        it is, so that `check` raises at its next batch.
        """
        self.seek(epoch)

    def check(self, tag: int) -> None:
        """Confirm the step of a batch just taken from the loader and advance; call it once per batch.

        Raises:
            StaleBatchError: the batch was drawn for another step.
        """
        if tag != self.next_step:
            raise StaleBatchError(
                f"the loader delivered the batch of step {tag} where step {self.next_step} was expected; call seek() "
                "or set_epoch() before iter(loader), check every batch once, keep the loader out of accelerator.prepare"
            )
        self.next_step = tag + 1

    def __iter__(self) -> Iterator[list[SampleKey]]:
        """Iterate without end over this rank's batches, starting at `next_step`."""
        # Not a generator function: the start must be read now, not when a prefetching loader asks for the first batch.
        return (self.plan(step)[self.rank] for step in itertools.count(self.next_step))

    def state_dict(self) -> dict[str, int | str]:
        """Next step to consume and everything a resumed run must agree on; identical on every rank.

        The loader's position is not part of it: with prefetching it is ahead of the consumer.
        """
        fingerprint = getattr(self.dataset, "fingerprint", None)
        return {
            "seed": self.seed,
            "n": self.num_conditions,
            "fingerprint": "" if fingerprint is None else fingerprint(),
            "num_replicas": self.num_replicas,
            "batch_size": self.batch_size,
            "k": self.k,
            "num_batches_per_epoch": self.num_batches_per_epoch,
            "layout": self.layout,
            "structures": key(*map(tuple, self._members)) if len(self._members) > 1 else 0,
            "next_step": self.next_step,
        }

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Resume at the saved step; call it before `iter()`.

        W may change if W * B does not, since the draws of a round stay the same.

        Raises:
            ValueError: the saved run differs; lists each difference with both values.
        """
        mine = self.state_dict()
        if set(state) != set(mine):
            raise ValueError(f"sampler state has fields {sorted(state)}, must have {sorted(mine)}; not saved by this?")
        next_step = int(state["next_step"])
        differing = {name for name in mine if name != "next_step" and state[name] != mine[name]}
        per_batch = int(state["num_replicas"]) * int(state["batch_size"])
        # With layout contiguous W decides which groups of a round a batch holds, so W may only change between rounds.
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

    def _index(self, gid: int) -> int:
        # The condition of a group. Its step belongs to one structure, which is visited in its own passes: each cycle
        # gives a structure turns in proportion to its number of conditions, in shuffled order.
        m = self.conditions_per_batch
        step, place = divmod(gid, m)
        turns = tuple(len(members) // m for members in self._members)
        cycle, position = divmod(step, sum(turns))
        order = _cycle_order(turns, self.seed, cycle)
        structure = order[position]
        earlier = cycle * turns[structure] + order[:position].count(structure)  # steps of the same structure
        members = self._members[structure]
        n = len(members)
        number, position = divmod(earlier * m + place, pass_length(n, m))
        # Structures of equal size must not be visited in the same order.
        seed = self.seed if len(self._members) == 1 else key(self.seed, "bucket", structure)
        return members[pass_order(n, m, seed, number)[position]]

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
        short = min(len(members) for members in self._members)
        if len(self._members) > 1 and short < m:
            raise ValueError(
                f"the rarest of {len(self._members)} structures has {short} conditions, a batch needs m = num_replicas "
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
        if self.rank == 0:
            self._log_repeats(given)

    def _log_repeats(self, given: str) -> None:
        drawn, n = self.num_batches_per_epoch * self.conditions_per_batch, self.num_conditions
        text = (
            "an epoch draws %d conditions from a dataset of %d, so %s (%s); harmless: each draw is a group of its own"
        )
        if drawn > n:
            _log.warning(text, drawn, n, "some come twice", given)
        elif self.num_batches_per_epoch > 1 and (n % drawn or len(self._members) > 1):
            _log.info(text, drawn, n, "one in which a pass over the dataset ends may hold a condition twice", given)


def pass_length(n: int, m: int) -> int:
    """Number of draws in a pass over n conditions; with n < 2m a pass is one step of m draws."""
    return n if n >= 2 * m else m


@lru_cache(maxsize=4)
def pass_order(n: int, m: int, seed: int, number: int) -> tuple[int, ...]:
    """Order in which pass `number` visits 0..n-1, such that no step of m draws holds a condition twice.

    A pass rarely ends at a step boundary. The step that straddles two passes is completed with the first conditions of
    the new permutation that the old pass did not put into that step. They come from its first m entries, so for
    n >= 2m the end of the order, which the next pass looks at, is that of the plain permutation.
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
def _cycle_order(turns: tuple[int, ...], seed: int, cycle: int) -> tuple[int, ...]:
    # Structure s appears turns[s] times.
    order = [structure for structure, count in enumerate(turns) for _ in range(count)]
    picked = torch.randperm(len(order), generator=generator(seed, "turns", cycle)).tolist()
    return tuple(order[place] for place in picked)


def _members_by_structure(n: int, structures: Sequence[Hashable] | None) -> list[list[int]]:
    # Structures in sorted order.
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
