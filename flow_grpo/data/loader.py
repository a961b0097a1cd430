"""The loader of every data set: lists of items by a batch sampler, read ahead by processes that end quietly."""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from flow_grpo.runtime.signals import live_as_long_as_the_parent


def make_loader(
    dataset: Dataset[Any], sampler: Sampler[Any], num_workers: int, *, persistent: bool = False
) -> DataLoader[Any]:
    """Return the loader of a rank.

    Never pass it through accelerate's `prepare`: the samplers here already serve ranks.

    Args:
        dataset: whose items are delivered as they are.
        sampler: yields the indices of one batch after the other.
        num_workers: processes that read two batches ahead each; 0 reads in this one.
        persistent: keep the processes from one epoch of the sampler to the next.
    """
    # Of its own, or every new iterator would draw from the process's: a resumed run makes one more than another.
    seeds = torch.Generator()
    if not num_workers:
        return DataLoader(dataset, batch_sampler=sampler, collate_fn=list, generator=seeds)
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=list,
        generator=seeds,
        num_workers=num_workers,
        persistent_workers=persistent,
        prefetch_factor=2,
        multiprocessing_context="spawn",  # a forked child must not touch a device in use
        worker_init_fn=_prepare_worker,
    )


def _prepare_worker(_: int) -> None:
    """Make this worker end without Python's own shutdown, and not by a signal to its whole group.

    A worker that is dropped with batches on their way would abort in it, nearly always: the thread that sends them is
    stopped inside torch's C++ code, and the loader's owner prints a traceback of a worker "killed by signal: Aborted".
    """
    atexit.register(os._exit, 0)
    live_as_long_as_the_parent()
