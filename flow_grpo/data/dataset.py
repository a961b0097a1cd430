"""The base class of all datasets of conditions, and the DataLoader that reads them."""

from __future__ import annotations

import abc
import atexit
import dataclasses
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from flow_grpo.data.k_repeat_sampler import SampleKey
from flow_grpo.data.video_io import Size
from flow_grpo.records import Condition
from flow_grpo.runtime.json_files import regular_file
from flow_grpo.runtime.processes import live_as_long_as_the_parent
from flow_grpo.runtime.ranks.process_group import InputError

_Batch = TypeVar("_Batch")


class ConditionDataset(Dataset[tuple[int, Condition]], abc.ABC):
    """A map-style dataset whose items are pure functions of their index; a damaged one raises, it is never replaced."""

    _size: Size  # of all its videos, in a data set without a `size_of` of its own

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of conditions."""

    @abc.abstractmethod
    def make(self, index: int, gid: int, slot: int) -> Condition:
        """Build the condition at an index within range; ValueError naming the file if it is damaged."""

    @abc.abstractmethod
    def prompt_of(self, index: int) -> str:
        """Prompt of a condition, without decoding a video."""

    def size_of(self, index: int) -> Size:
        """(frames, height, width) of the videos as they are delivered, without decoding one."""
        assert 0 <= index < len(self), index
        return self._size

    def scene_of(self, index: int) -> str:
        """Name of what a condition shares its scene by; without scenes, as for prompts, each has its own."""
        return str(index)

    def __getitem__(self, key: SampleKey) -> tuple[int, Condition]:
        """(step, condition) for a sampler's (step, gid, slot, index)."""
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[SampleKey]) -> list[tuple[int, Condition]]:
        """Read a batch, as DataLoader asks for it; copies of a condition share one set of tensors."""
        read = {index: self.condition(index) for index in dict.fromkeys(index for *_, index in keys)}
        return [(step, dataclasses.replace(read[index], gid=gid, slot=slot)) for step, gid, slot, index in keys]

    def condition(self, index: int, gid: int = 0, slot: int = 0) -> Condition:
        """Read the condition at `index`, labelled as copy `slot` of group `gid`.

        Raises:
            IndexError: index out of range.
            InputError: a file is missing, damaged or too short; one line naming it.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"dataset index is {index}, must be within 0..{len(self) - 1}")
        try:
            return self.make(index, gid, slot)
        except ValueError as error:
            raise InputError(str(error)) from error


def file_id(file: Path) -> str:
    """Hash of a file's content; ValueError if it cannot be read."""
    try:
        found = regular_file(file).stat()
    except OSError as error:
        raise ValueError(f"video {file} cannot be read ({error.strerror}); check the dataset folder") from error
    return _content_hash(file, found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=2**18)
def _content_hash(file: Path, size: int, mtime_ns: int) -> str:  # noqa: ARG001 - a changed file is hashed again
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()


def make_loader(
    dataset: Dataset[Any],
    sampler: Sampler[Any],
    num_workers: int,
    *,
    persistent: bool = False,
    prefetch_factor: int = 2,
    collate: Callable[[list[Any]], Any] = list,
) -> DataLoader[Any]:
    """Make this rank's DataLoader; never pass it through `accelerator.prepare`.

    The sampler must yield this rank's batches only, as all samplers in this package do. Without workers the calling
    process reads. `collate` makes a batch of a list of items; it is sent to the workers by pickle.
    """
    workers: dict[str, Any] = {
        "num_workers": num_workers,
        "persistent_workers": persistent,
        "prefetch_factor": prefetch_factor,
        "multiprocessing_context": "spawn",  # a forked child must not touch a device in use
        "worker_init_fn": _prepare_worker,
    }
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate,
        # Without its own generator each new iterator draws from the global one, and a resumed run makes one more
        # iterator than an uninterrupted run.
        generator=torch.Generator(),
        **(workers if num_workers else {}),
    )


def next_batch(batches: Iterator[_Batch]) -> _Batch:
    """Take the next batch of an iterator over `make_loader`'s loader; RuntimeError if a worker was killed."""
    try:
        return next(batches)
    except (ConnectionError, EOFError):
        # Tensors come over a connection to the worker. If that is killed, the connection can break a moment before the
        # system reports its death; torch's signal handler then raises the error that names the worker.
        time.sleep(1)
        raise


def _prepare_worker(_: int) -> None:
    # Without Python's shutdown, in which a worker dropped with batches in flight would nearly always abort: its feeder
    # thread is stopped inside torch's C++ code, and the parent prints a traceback about a worker "killed by signal:
    # Aborted".
    atexit.register(os._exit, 0)
    live_as_long_as_the_parent()
