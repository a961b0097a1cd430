"""Batch samplers that limit the cost of a batch, such as its latent tokens, instead of its number of items.

Every rank computes the identical plan of the whole epoch and takes its own part. Ranks that pack independently get
unequal numbers of batches, and the first collective call without a partner blocks until it times out.

Letters: W ranks, n items in the dataset. A row is one step of all ranks: W batches of nearly equal cost, batch r for
rank r. Use in a plain loop, under accelerate and under Lightning: docs/cost_limited_batches.md.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler, get_worker_info

from flow_grpo.data import STRATEGIES
from flow_grpo.data.k_repeat_sampler import AlreadySharded
from flow_grpo.maths.keys import generator, key

OVERSIZE = {"raise": "refused", "single": "a batch of its own", "drop": "left out"}
WORKER_SLOTS = 1024

_log = logging.getLogger(__name__)


def video_tokens(frames: int, height: int, width: int, *, temporal: int = 4, spatial: int = 16) -> int:
    """Number of latent tokens of a video, by default for Wan: a codec of stride (4, 8, 8) and 2x2 patches.

    The first latent frame covers one frame, every further one `temporal` frames.
    """
    return ((frames - 1) // temporal + 1) * (height // spatial) * (width // spatial)


class DynamicBatchSampler(AlreadySharded, Sampler[list[int]]):
    """Batches whose costs add up to at most `max_points`, equally many on every rank, covering each item once.

    Use it as `DataLoader(dataset, batch_sampler=sampler)`, never inside `accelerator.prepare`, which would shard again.
    Call `set_epoch` before `iter(loader)`. Call `world.data.check_equal(sampler.fingerprint(), "batch plan")` once
    before the first step: ranks with different plans then raise instead of hanging later.

    Items of one structure are packed in the order drawn, the batches are sorted by cost, and every W successive batches
    make a row, one batch per rank, so over an epoch a rank waits for the others for about the cost of one batch. The
    last row is padded with batches of one repeated item, which must get weight 0:

        loss = sampler.batch_weight(number) * losses.sum() * W / sampler.real_items(number)    # DDP divides by W

    Args:
        dataset: anything with a length.
        max_points: largest total cost of a batch.
        shuffle: shuffle items and rows anew in each epoch; otherwise both follow the dataset's order.
        drop_last: drop the batches drawn last that do not fill a row, instead of filling it. A later epoch that packs
            into less than one row keeps it, filled, with a warning: it must not end a run that has begun.
        sampler: which items an epoch draws, in order (`shuffle` then applies to rows only): a
            `DistributedWeightedSampler`, or a torch sampler that does not shard. None draws each item once.
        num_replicas: W; default from torch.distributed, or 1.
        rank: 0..W-1; default from torch.distributed, or 0.
        seed: seed of all shuffling, identical on every rank.
        cost: cost of an index, a whole number >= 1; default `dataset.cost`. Called once per item, like `structure`.
        structure: sortable key of an index that the items of a batch share, such as (frames, height, width); default
            `dataset.size_of` if it exists, else any items can share a batch.
        oversize: what to do with an item above max_points: "raise"; "single", a batch with only this item; or
            "drop", leave it out and count it in `dropped_items`.

    Raises:
        TypeError: `sampler` shards over ranks or has its own generator.
        ValueError: numbers that do not fit together; the message holds all of them.
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
        self.max_points, self.shuffle, self.seed, self._drops_last = max_points, shuffle, seed, drop_last
        self.num_replicas, self.rank = _ranks(num_replicas, rank)
        name = type(sampler).__name__
        if not hasattr(sampler, "global_draws") and hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            raise TypeError(
                f"{name} shards over ranks, and its share would be sharded once more; give one without ranks"
            )
        if getattr(sampler, "generator", None) is not None:
            raise TypeError(f"{name} has its own generator, which moves with every plan; leave it out, seed= is enough")
        self._sampler, self._single = sampler, oversize == "single"
        self._costs = _read_costs(dataset, cost or getattr(dataset, "cost", None))
        structure = structure or getattr(dataset, "size_of", None)
        self._structures: list[Any] = [structure(index) if structure else 0 for index in range(len(self._costs))]
        self._check_oversized(oversize)
        self._plan(0)

    def set_epoch(self, epoch: int) -> None:
        """Plan `epoch` unless it is the current one; new iterators start at its first row, existing ones are kept."""
        if epoch != self.epoch:
            self._plan(epoch)

    def __len__(self) -> int:
        """Number of batches that a new iterator yields, identical on every rank."""
        return len(self._rows) - self._start

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over this rank's batches of the epoch, after a resume over the remaining ones."""
        # Not a generator function: the plan must be read now, not when a prefetching loader asks for the first batch.
        # Do not reset _start here: a loader with workers calls iter() twice before its first batch.
        return (list(row[self.rank]) for row in self._rows[self._start :])

    def batch_weight(self, number: int) -> float:
        """0.0 if this rank's batch in row `number` of the epoch is filler, else 1.0."""
        return float(self.rank < self._real[number])

    def real_items(self, number: int) -> int:
        """Number of items in row `number` over all ranks, without filler."""
        return sum(map(len, self._rows[number][: self._real[number]]))

    def drawn_before(self, number: int) -> dict[int, int]:
        """How often the epoch draws each item of row `number`'s batch of this rank in earlier batches.

        Batches are in the order of rows, and within a row of ranks. Without a weighted sampler all counts are 0.
        """
        return self._before[number]

    def fingerprint(self) -> str:
        """Text that identifies the epoch's plan for all ranks."""
        digest = blake2b(repr((self._rows, self._real)).encode(), digest_size=8).hexdigest()
        return f"{len(self._rows)} rows, epoch {self.epoch}, {digest}"

    def state_dict(self, consumed: int) -> dict[str, int | str]:
        """State to resume from after `consumed` rows of this epoch, those before an earlier resume included.

        Only the training loop knows how many it consumed: a prefetching loader is ahead of it.
        """
        numbers = {name: getattr(self, name) for name in ("seed", "epoch", "num_replicas", "max_points")}
        return numbers | {"consumed": consumed, "fingerprint": self.fingerprint()}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Plan the saved epoch and start iterators after its consumed rows, until `set_epoch` sets another epoch.

        Raises:
            ValueError: the saved run differs; lists each difference with both values.
        """
        epoch, consumed = int(state["epoch"]), int(state["consumed"])
        self._plan(epoch)
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

    def _plan(self, epoch: int) -> None:
        """Plan an epoch, identically on every rank: the plan depends neither on the rank nor on earlier epochs."""
        draws, ranks = self._draws(epoch), self.num_replicas
        batches, cost, structure = self._packed(draws), self._costs.__getitem__, self._structures.__getitem__
        oversized = len(draws) - sum(map(len, batches))
        if self._drops_last and (len(batches) >= ranks or not epoch):
            # Before sorting, or the same cheap items would be dropped in every epoch.
            batches = batches[: len(batches) // ranks * ranks]
        elif self._drops_last and self.rank == 0:
            _log.warning("epoch %d has only %d batches for %d ranks: the rest is filler", epoch, len(batches), ranks)
        # In sorted order the cost differences within all rows add up to at most the cost of the largest batch.
        order = sorted(range(len(batches)), key=lambda b: (-sum(map(cost, batches[b])), structure(batches[b][0])))
        rows: list[Any] = [order[first : first + ranks] for first in range(0, len(order), ranks)]
        if not rows:
            got = f"{len(draws)} draws, {oversized} above max_points={self.max_points}, drop_last={self._drops_last}"
            raise ValueError(f"epoch {epoch} has not one row of {ranks} batches ({got}); add data or keep the last row")
        rows.sort(key=min)  # batches are numbered in the order of their first items, so rows follow the dataset
        if self.shuffle:
            picked = torch.randperm(len(rows), generator=generator(self.seed, "rows", epoch))
            rows = [rows[number] for number in picked.tolist()]
        self._real = [len(row) for row in rows]
        self._rows = [[batches[b] for b in row] for row in rows]
        self._before: list[dict[int, int]] = []
        seen: Counter[int] = Counter()
        for row in self._rows:
            self._before.append({})  # of filler
            for rank, batch in enumerate(row):
                if rank == self.rank:
                    self._before[-1] = {index: seen[index] for index in batch}
                seen.update(batch)
            # Filler is the cheapest item of its row, so no rank waits for it.
            row += [[min(itertools.chain(*row), key=cost)]] * (ranks - len(row))
        self.epoch, self._start, self.dropped_items = epoch, 0, oversized

    def _packed(self, draws: list[int]) -> list[list[int]]:
        # Of one structure each, filled greedily in the order drawn.
        batches: list[list[int]] = []
        latest: dict[Hashable, tuple[list[int], int]] = {}  # the open batch of each structure and what still fits
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
        # By all ranks together, in the order in which they are packed.
        n, inner = len(self._costs), self._sampler
        if inner is None:
            shuffled = torch.randperm(n, generator=generator(self.seed, "draw", epoch))
            return list(map(int, shuffled.tolist())) if self.shuffle else list(range(n))
        if hasattr(inner, "global_draws"):
            draws: list[int] = inner.global_draws(epoch)
        else:
            # Not torch.manual_seed: it would also reseed the accelerator, which fork_rng(devices=[]) does not restore.
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(key(self.seed, "draw", epoch))
                draws = [int(index) for index in inner]
        wrong = [index for index in draws if not 0 <= index < n]
        if wrong:
            raise ValueError(f"sampler drew {len(wrong)} indices outside 0..{n - 1}, first {wrong[0]}; wrong dataset?")
        return draws


class DistributedWeightedSampler(Sampler[int]):
    """Draws items with probability proportional to their weights, one list per epoch for all ranks.

    As the `sampler` of a `DynamicBatchSampler`, which plans and shards the whole list. Without one, rank r yields
    draws r, r + W, r + 2W, ..., num_samples // W of them; with replacement, ranks may hold the same item.

    Args:
        dataset: anything with a length.
        weights: one per item, finite and >= 0; they need not sum to 1.
        num_samples: draws per epoch over all ranks.
        replacement: draw with replacement.
        num_replicas: as for `DynamicBatchSampler`.
        rank: as for `DynamicBatchSampler`.
        seed: as for `DynamicBatchSampler`.

    Raises:
        ValueError: unfit weights or numbers.
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
        """Draw the num_samples indices of an epoch, of all ranks together."""
        source = generator(self.seed, "draw", epoch)
        if self.replacement:
            # Not torch.multinomial, which is limited to 2**24 categories.
            bounds = (self._weights / self._weights.max()).cumsum(0)
            points = torch.rand(self.num_samples, dtype=torch.float64, generator=source) * bounds[-1]
            picked = torch.searchsorted(bounds, points, right=True).clamp_(max=len(bounds) - 1)  # points may round up
        else:
            # The largest u**(1/w) (Efraimidis and Spirakis, 2006), as log w - log(-log u), which does not underflow for
            # tiny w. Shuffled because heavy items come first and dropping the end must not single out light ones.
            u = 1 - torch.rand(len(self._weights), dtype=torch.float64, generator=source)
            picked = (self._weights.log() - (-u.log()).log()).topk(self.num_samples).indices
            picked = picked[torch.randperm(self.num_samples, generator=source)]
        return list(map(int, self._positive[picked].tolist()))

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter()` draw this epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Number of draws of one rank."""
        return self.num_samples // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's share of the epoch's draws."""
        return iter(self.global_draws(self.epoch)[self.rank :: self.num_replicas][: len(self)])


class LimitedPointsCollateFn:
    """A collate function that drops samples until the batch costs at most `max_points`; the batch count is unchanged.

    One sample always stays, even above the limit: the cheapest or the first. Ranks then hold different numbers of
    samples, so weight the loss by the global count. Never use it for GRPO batches: it would break up groups.

    Args:
        max_points: largest total cost of a batch.
        strategy: "drop_largest", or "drop_last" from the end of the batch; the rest keeps its order.
        cost: cost of a sample, a number > 0; by default the sample's own, see `sample_cost`.
        collate: builds the batch from the list of remaining samples.

    Raises:
        ValueError: an unknown strategy.
    """

    def __init__(
        self,
        max_points: int = 500_000,
        strategy: str = "drop_largest",
        *,
        cost: Callable[[Any], int] | None = None,
        collate: Callable[[list[Any]], Any] = list,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy is {strategy!r}, must be one of {', '.join(STRATEGIES)}")
        self.max_points, self.strategy, self.cost, self.collate = max_points, strategy, cost or sample_cost, collate
        # One shared counter per loader worker, so that workers do not race; slot 0 is the main process.
        self._dropped = torch.zeros(1 + WORKER_SLOTS, dtype=torch.int64).share_memory_()

    @property
    def dropped(self) -> int:
        """How many samples were dropped so far, over all workers of this loader."""
        return int(self._dropped.sum())

    def __call__(self, samples: list[Any]) -> Any:
        """Drop samples and collate the rest."""
        costs = [self.cost(sample) for sample in samples]
        order = list(range(len(samples)))
        if self.strategy == "drop_largest":
            order.sort(key=costs.__getitem__)
        sums = itertools.accumulate(costs[position] for position in order)
        kept = sorted(order[: max(1, sum(total <= self.max_points for total in sums))])
        worker = get_worker_info()
        self._dropped[0 if worker is None else 1 + worker.id] += len(samples) - len(kept)
        return self.collate([samples[position] for position in kept])


def sample_cost(sample: Any) -> int:
    """Cost of a sample: its `cost` or the tokens of its video `size` (frames, height, width).

    Both may be attributes or keys; TypeError if there is neither.
    """
    cost, size = (
        sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None) for name in ("cost", "size")
    )
    if cost is not None:
        return int(cost)
    if size is not None and not callable(size):
        return video_tokens(*size)
    raise TypeError(f"a {type(sample).__name__} has neither cost nor size (frames, height, width); pass cost=")


def _ranks(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    grouped = dist.is_available() and dist.is_initialized()
    world = num_replicas if num_replicas is not None else dist.get_world_size() if grouped else 1
    own = rank if rank is not None else dist.get_rank() if grouped else 0
    if not 0 <= own < world:
        raise ValueError(f"rank is {own} with num_replicas={world}; need 0 <= rank < num_replicas")
    return world, own


def _read_costs(dataset: Sized, cost: Callable[[int], int] | None) -> list[int]:
    if cost is None:
        raise ValueError("dataset has no cost(index); give it one or pass cost=, such as one that calls video_tokens")
    costs = [cost(index) for index in range(len(dataset))]
    for index, value in enumerate(costs):
        if not (value >= 1 and value == int(value)):
            raise ValueError(f"cost of item {index} is {value!r}, must be a whole number >= 1")
    return [int(value) for value in costs]
