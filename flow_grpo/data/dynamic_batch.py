"""Batches of limited cost, equally many on every rank, because every rank plans the whole epoch alike.

Letters: W ranks, n items in the dataset. A `row` is one step of all ranks: W batches of nearly equal cost, batch r for
rank r. Ranks that pack on their own get unequal counts, and the first collective without a partner blocks until its
timeout. Use in a plain loop, under accelerate and under Lightning: docs/cost_limited_batches.md.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Sized
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler, get_worker_info

from flow_grpo.maths.keys import generator, key

OVERSIZE = {"raise": "refused", "single": "a batch of its own", "drop": "left out"}
STRATEGIES = ("drop_largest", "drop_last")
WORKER_SLOTS = 1024

_log = logging.getLogger(__name__)


def video_tokens(frames: int, height: int, width: int, *, temporal: int = 4, spatial: int = 16) -> int:
    """Return latent tokens: the first frame is one, `temporal` make each other; spatial**2 pixels make a token."""
    return ((frames - 1) // temporal + 1) * (height // spatial) * (width // spatial)


class DynamicBatchSampler(Sampler[list[int]]):
    """Batches whose costs add up to at most `max_points`, equally many on every rank, each item once.

    Use it as `DataLoader(dataset, batch_sampler=sampler)` outside `accelerator.prepare`, which would shard once more.
    Call `set_epoch` before `iter(loader)`, and once `ranks.check_equal(sampler.fingerprint(), "batch plan")` before the
    first step, where a difference between ranks is an error message and not yet a hang.

    Items of one structure are packed in the order drawn, all batches sorted by cost, and W neighbours make a row: over
    a whole epoch a rank waits for the others for about the cost of one batch. A row of fewer than W batches is filled
    with batches of one item that count nothing:

        loss = sampler.batch_weight(number) * losses.sum() * W / sampler.real_items(number)    # DDP divides by W

    Args:
        max_points: largest sum of costs in a batch.
        shuffle: draw items and order rows anew in each epoch; otherwise both follow the dataset.
        drop_last: leave out the batches drawn last that make no whole row, instead of filling one.
        sampler: what an epoch draws, in which order (`shuffle` is then for rows only): a `DistributedWeightedSampler`
            or a torch sampler that knows of no ranks. None draws each item once.
        num_replicas: W, and `rank` is 0..W-1; None asks torch.distributed, without a process group 1 and 0.
        seed: of all orders; the ranks must agree on it.
        cost: of an index, a whole number >= 1; None is `dataset.cost`. Asked once, like `structure`.
        structure: of an index, what items of a batch share, such as (frames, height, width), sortable; None is
            `dataset.structure` when there is one, else any items may meet.
        oversize: an item above max_points is refused ("raise"), a batch of its own, the only one above the limit
            ("single"), or left out and counted in `dropped_items` ("drop").

    Raises:
        TypeError: `sampler` would shard too, or has a generator of its own.
        ValueError: numbers that do not fit together, all of them in the text.
    """

    def __init__(  # noqa: PLR0913 - the published signature
        self,
        dataset: Sized,
        max_points: int = 500_000,
        shuffle: bool = True,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        *,
        cost: Callable[[int], int] | None = None,
        structure: Callable[[int], Hashable] | None = None,
        oversize: str = "raise",
    ) -> None:
        # None of these may be named batch_size: accelerate takes that for a promise and loses items.
        self.max_points, self.shuffle, self.drop_last, self.seed = max_points, shuffle, drop_last, seed
        self.num_replicas, self.rank = _ranks(num_replicas, rank)
        self._sampler, self._single = _without_ranks(sampler), oversize == "single"
        self._costs = _read_costs(dataset, cost or getattr(dataset, "cost", None))
        structure = structure or getattr(dataset, "structure", None)
        self._structures: list[Any] = [structure(index) if structure else 0 for index in range(len(self._costs))]
        self._check_oversized(oversize)
        self._take(0)

    def set_epoch(self, epoch: int) -> None:
        """Plan another epoch, from its first row on; a running iterator goes on with the plan it was made from."""
        if epoch != self.epoch:
            self._take(epoch)

    def __len__(self) -> int:
        """Return how many batches an iterator made now yields, on this rank as on every other."""
        return len(self._rows) - self._start

    def __iter__(self) -> Iterator[list[int]]:
        """Return an iterator over this rank's batches of the epoch, or over what a resumed epoch has left."""
        # Not a generator itself: the plan must be taken now, not when a prefetching loader asks for the first batch.
        # The start stays until set_epoch: a loader with workers calls iter() twice before its first batch.
        return (list(row[self.rank]) for row in self._rows[self._start :])

    def batch_weight(self, number: int) -> float:
        """Return 0.0 if this rank's batch in row `number` of the epoch (from 0, also after resuming) is filler."""
        return float(self.rank < self._real[number])

    def real_items(self, number: int) -> int:
        """Return how many items row `number` of the epoch holds over all ranks, filler left out."""
        return sum(map(len, self._rows[number][: self._real[number]]))

    def fingerprint(self) -> str:
        """Return a text that tells the epoch's plan for all ranks from any other."""
        digest = blake2b(repr((self._rows, self._real)).encode(), digest_size=8).hexdigest()
        return f"{len(self._rows)} rows, epoch {self.epoch}, {digest}"

    def state_dict(self, consumed: int) -> dict[str, int | str]:
        """Return what a resumed run must agree on, where `consumed` counts the rows of this epoch that were trained.

        Those before an earlier resume count too. Only the training loop knows: a prefetching loader has taken more.
        """
        numbers = {name: getattr(self, name) for name in ("seed", "epoch", "num_replicas", "max_points")}
        return numbers | {"consumed": consumed, "fingerprint": self.fingerprint()}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Plan the saved epoch and begin iterators after its consumed rows, until `set_epoch` gets another epoch.

        Raises:
            ValueError: the saved run differs, each difference with its two values.
        """
        epoch, consumed = int(state["epoch"]), int(state["consumed"])
        self._take(epoch)
        mine = self.state_dict(min(max(consumed, 0), len(self._rows)))
        differing = [f"{name} was {state[name]!r}, is {mine[name]!r}" for name in mine if state[name] != mine[name]]
        if differing:
            raise ValueError(
                f"batches cannot resume within epoch {epoch}: {', '.join(differing)}; restore these values, or leave "
                f"out the saved state and start at the next epoch with set_epoch({epoch + 1})"
            )
        self._start = consumed

    def _check_oversized(self, oversize: str) -> None:
        if oversize not in OVERSIZE:
            raise ValueError(f"oversize is {oversize!r}, must be one of {', '.join(OVERSIZE)}")
        found = [index for index, cost in enumerate(self._costs) if cost > self.max_points]
        if found:
            first = f"the first is item {found[0]} with {self._costs[found[0]]}"
            text = f"{len(found)} of {len(self._costs)} items cost more than max_points={self.max_points}, {first}"
            if oversize == "raise":
                raise ValueError(f"{text}; raise max_points, shorten them, or set oversize to 'single' or 'drop'")
            if self.rank == 0:
                _log.warning("%s; each is %s", text, OVERSIZE[oversize])

    def _take(self, epoch: int) -> None:
        """Plan an epoch, alike on every rank: neither the rank nor what ran before enters."""
        draws, ranks = self._draws(epoch), self.num_replicas
        batches, cost, structure = self._packed(draws), self._costs.__getitem__, self._structures.__getitem__
        oversized = len(draws) - sum(map(len, batches))
        if self.drop_last:  # what was drawn last, before sorting: the cheapest would be the same in every epoch
            batches = batches[: len(batches) // ranks * ranks]
        # In sorted order the differences within all rows add up to no more than the largest batch costs.
        order = sorted(range(len(batches)), key=lambda b: (-sum(map(cost, batches[b])), structure(batches[b][0])))
        rows: list[Any] = [order[first : first + ranks] for first in range(0, len(order), ranks)]
        if not rows:
            got = f"{len(draws)} draws, {oversized} above max_points={self.max_points}, drop_last={self.drop_last}"
            raise ValueError(f"epoch {epoch} has not one row of {ranks} batches ({got}); add data or keep the last row")
        rows.sort(key=min)  # batches are numbered in the order of their first items
        if self.shuffle:
            picked = torch.randperm(len(rows), generator=generator(self.seed, "rows", epoch))
            rows = [rows[number] for number in picked.tolist()]
        self._real = [len(row) for row in rows]
        self._rows = [[batches[b] for b in row] for row in rows]
        for row in self._rows:  # filler is the cheapest item of its row, so that no rank waits for it
            row += [[min(itertools.chain(*row), key=cost)]] * (ranks - len(row))
        self.epoch, self._start, self.dropped_items = epoch, 0, oversized

    def _packed(self, draws: list[int]) -> list[list[int]]:
        """Return batches of one structure each, items in the order drawn."""
        batches: list[list[int]] = []
        latest: dict[Hashable, tuple[list[int], int]] = {}  # batch and room of each structure
        for index in draws:
            cost, structure = self._costs[index], self._structures[index]
            if cost > self.max_points:
                batches += [[index]] if self._single else []
                continue
            batch, room = latest.get(structure, ([], 0))
            if cost > room:
                batch, room = [], self.max_points
                batches.append(batch)
            batch.append(index)
            latest[structure] = batch, room - cost
        return batches

    def _draws(self, epoch: int) -> list[int]:
        """Return the indices of an epoch over all ranks, in the order in which they are packed."""
        n, inner = len(self._costs), self._sampler
        if inner is None:
            shuffled = torch.randperm(n, generator=generator(self.seed, "draw", epoch))
            return list(map(int, shuffled.tolist())) if self.shuffle else list(range(n))
        if hasattr(inner, "global_draws"):
            draws: list[int] = inner.global_draws(epoch)
        else:
            # Not torch.manual_seed: it would reseed the accelerator too, which is not restored here.
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(key(self.seed, "draw", epoch))
                draws = [int(index) for index in inner]
        wrong = [index for index in draws if not 0 <= index < n]
        if wrong:
            raise ValueError(f"sampler drew {len(wrong)} indices outside 0..{n - 1}, first {wrong[0]}; wrong dataset?")
        return draws


class DistributedWeightedSampler(Sampler[int]):
    """Draws in proportion to weights, one list for all ranks in each epoch.

    Inside `DynamicBatchSampler` the whole list is planned, and sharded only there. Alone, rank r yields every W-th draw
    from the r-th on, num_samples // W of them; with replacement, ranks may hold the same item.

    Args:
        weights: one for each item of the dataset, finite, >= 0, of any sum.
        num_samples: draws of an epoch over all ranks.
        num_replicas: like `rank` and `seed` as for `DynamicBatchSampler`.

    Raises:
        ValueError: weights or numbers that do not fit.
    """

    def __init__(
        self,
        dataset: Sized,
        weights: Sequence[float] | Tensor,
        num_samples: int,
        replacement: bool = True,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
    ) -> None:
        self.num_samples, self.replacement, self.seed, self.epoch = num_samples, replacement, seed, 0
        self.num_replicas, self.rank = _ranks(num_replicas, rank)
        values = torch.as_tensor(weights, dtype=torch.float64, device="cpu")
        if values.shape != (len(dataset),) or not values.isfinite().all() or (values < 0).any() or not values.any():
            got = f"{len(values)} from {values.min():g} to {values.max():g}" if values.numel() else "none"
            raise ValueError(f"weights are {got}; give {len(dataset)} finite ones >= 0, an item each, not all zero")
        self._positive = values.nonzero().flatten()
        self._weights = values[self._positive]
        if not self.num_replicas <= num_samples <= (num_samples if replacement else len(self._positive)):
            most = f"and, without replacement, at most the {len(self._positive)} items of positive weight"
            raise ValueError(f"num_samples is {num_samples}, must be at least num_replicas={self.num_replicas} {most}")

    def global_draws(self, epoch: int) -> list[int]:
        """Return the num_samples indices that all ranks together draw in an epoch."""
        source = generator(self.seed, "draw", epoch)
        if self.replacement:
            # Not torch.multinomial: it refuses more than 2**24 categories.
            bounds = (self._weights / self._weights.max()).cumsum(0)
            points = torch.rand(self.num_samples, dtype=torch.float64, generator=source) * bounds[-1]
            picked = torch.searchsorted(bounds, points, right=True).clamp_(max=len(bounds) - 1)  # points may round up
        else:
            # The largest u**(1/w) (Efraimidis and Spirakis 2006), as log w - log(-log u), which keeps tiny w apart;
            # shuffled, as heavy items come first and a cut must not single out light ones.
            u = 1 - torch.rand(len(self._weights), dtype=torch.float64, generator=source)
            picked = (self._weights.log() - (-u.log()).log()).topk(self.num_samples).indices
            picked = picked[torch.randperm(self.num_samples, generator=source)]
        return list(map(int, self._positive[picked].tolist()))

    def set_epoch(self, epoch: int) -> None:
        """Draw anew from the next `iter()` on."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the draws of one rank."""
        return self.num_samples // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over this rank's share of the epoch's draws."""
        return iter(self.global_draws(self.epoch)[self.rank :: self.num_replicas][: len(self)])


class LimitedPointsCollateFn:
    """Drop samples until the costs of a batch add up to at most `max_points`, then collate; the batch count stays.

    One sample always stays, even above the limit: the smallest or the first. Ranks then hold different numbers of
    samples, so weigh the loss by the global count of what stayed. It tears groups: never for GRPO batches.

    Args:
        strategy: "drop_largest", or "drop_last" from the end of the batch; what stays keeps its order.
        cost: of a sample, a number > 0.
        collate: makes the batch from the list of what stays.
    """

    def __init__(
        self,
        max_points: int = 500_000,
        strategy: str = "drop_largest",
        *,
        cost: Callable[[Any], int],
        collate: Callable[[list[Any]], Any] = list,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy is {strategy!r}, must be one of {', '.join(STRATEGIES)}")
        self.max_points, self.strategy, self.cost, self.collate = max_points, strategy, cost, collate
        # A slot per loader worker, so that none overwrites another's count; slot 0 is the main process.
        self._dropped = torch.zeros(1 + WORKER_SLOTS, dtype=torch.int64).share_memory_()

    @property
    def dropped(self) -> int:
        """Return how many samples were dropped so far, in all workers of the one loader that this serves."""
        return int(self._dropped.sum())

    def __call__(self, samples: list[Any]) -> Any:
        """Return the collated samples that stay."""
        costs = [self.cost(sample) for sample in samples]
        order = list(range(len(samples)))
        if self.strategy == "drop_largest":
            order.sort(key=costs.__getitem__)
        sums = itertools.accumulate(costs[position] for position in order)
        kept = sorted(order[: max(1, sum(total <= self.max_points for total in sums))])
        worker = get_worker_info()
        self._dropped[0 if worker is None else 1 + worker.id] += len(samples) - len(kept)
        return self.collate([samples[position] for position in kept])


def _ranks(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    found = (dist.get_world_size(), dist.get_rank()) if dist.is_available() and dist.is_initialized() else (1, 0)
    world, own = found[0] if num_replicas is None else num_replicas, found[1] if rank is None else rank
    if not 0 <= own < world:
        raise ValueError(f"rank is {own} with num_replicas={world}; need 0 <= rank < num_replicas")
    return world, own


def _without_ranks(sampler: Iterable[int] | None) -> Iterable[int] | None:
    name = type(sampler).__name__
    if not hasattr(sampler, "global_draws") and hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
        raise TypeError(f"{name} shards over ranks, and its share would be sharded once more; give one without ranks")
    if getattr(sampler, "generator", None) is not None:
        raise TypeError(f"{name} has its own generator, which moves with every plan; leave it out, seed= is enough")
    return sampler


def _read_costs(dataset: Sized, cost: Callable[[int], int] | None) -> list[int]:
    if cost is None:
        raise ValueError("dataset has no cost(index); give it one or pass cost=, such as one that calls video_tokens")
    costs = [cost(index) for index in range(len(dataset))]
    for index, value in enumerate(costs):
        if not (value >= 1 and value == int(value)):
            raise ValueError(f"cost of item {index} is {value!r}, must be a whole number >= 1")
    return [int(value) for value in costs]
