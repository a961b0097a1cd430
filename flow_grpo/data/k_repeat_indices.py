"""The group sampler for a plain data set: batches of indices, one epoch per iterator. See docs/k_repeat_sampler.md."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler

from flow_grpo.data.k_repeat_sampler import AlreadySharded, DistributedKRepeatSampler, SampleKey, StaleBatchError


class KRepeatIndices(AlreadySharded, Sampler[list[int]]):
    """This rank's batches of a `DistributedKRepeatSampler`, as lists of indices into the data set.

        batches = KRepeatIndices(DistributedKRepeatSampler(dataset, 2, 4, world_size, rank, seed=42))
        loader = DataLoader(dataset, batch_sampler=batches)  # never through accelerator.prepare
        for epoch in range(epochs):
            batches.set_epoch(epoch)
            for batch, keys in zip(loader, batches.sample_keys()):
                gids = [gid for _, gid, _, _ in keys]

    Indices alone do not tell groups apart: a condition may be drawn twice. `sample_keys` gives the group and the copy
    of every row. An epoch is delivered once, and again only after another `set_epoch`: a loop that forgets it would
    train on the same conditions, and the same noise, for ever.

    Args:
        sampler: gives the plan; `num_batches_per_epoch` is the length of an epoch.
    """

    def __init__(self, sampler: DistributedKRepeatSampler) -> None:
        self.sampler = sampler
        self.epoch = 0
        self._begun = False

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iterators; ValueError for a negative one."""
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}, must be at least 0")
        self.epoch, self._begun = epoch, False

    def sample_keys(self) -> list[list[SampleKey]]:
        """(step, gid, slot, index) of every row of this rank's batches of the epoch."""
        count = self.sampler.num_batches_per_epoch
        steps = range(self.epoch * count, (self.epoch + 1) * count)
        return [self.sampler.plan(step)[self.sampler.rank] for step in steps]

    def __len__(self) -> int:
        """Number of batches of an epoch."""
        return self.sampler.num_batches_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the epoch's batches; StaleBatchError if they were delivered already."""
        if self._begun:
            raise StaleBatchError(
                f"epoch {self.epoch} was begun already; before iter(loader) call set_epoch({self.epoch + 1}), or "
                f"set_epoch({self.epoch}) to deliver it again"
            )
        # Not a generator function: the epoch must be read now, not when a prefetching loader asks for the first batch.
        return self._batches(self.epoch, self.sample_keys())

    def _batches(self, epoch: int, keys: list[list[SampleKey]]) -> Iterator[list[int]]:
        # Here and not in __iter__: a loader with workers calls that twice before its first batch.
        self._begun = self._begun or epoch == self.epoch
        for batch in keys:
            yield [index for *_, index in batch]
