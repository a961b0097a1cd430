"""What every data set of conditions has in common."""

from __future__ import annotations

import abc
import functools
import hashlib
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from flow_grpo.records import Condition
from flow_grpo.runtime.ranks.process_group import InputError


class Conditions(Dataset[tuple[int, Condition]], abc.ABC):
    """Conditions as a pure function of their index; a broken item raises and is never replaced by another one."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return how many conditions there are."""

    @abc.abstractmethod
    def make(self, index: int, gid: int, slot: int) -> Condition:
        """Return the condition at an index that exists; ValueError naming the file for one that is broken."""

    @abc.abstractmethod
    def source_file(self, index: int) -> Path:
        """Return the file of a condition's source video."""

    @abc.abstractmethod
    def source_video(self, index: int) -> Tensor:
        """Return (3, T, h, w) fp32 in [0, 1] as the condition has it, without reading anything else."""

    @abc.abstractmethod
    def prompt_of(self, index: int) -> str:
        """Return a condition's prompt without reading its videos."""

    @abc.abstractmethod
    def structure(self, index: int) -> tuple[int, int, int]:
        """Return the (frames, rows, columns) that a condition's videos are delivered in."""

    def __getitem__(self, draw: tuple[int, int, int, int]) -> tuple[int, Condition]:
        """Return (step, condition) of a sampler's (step, gid, slot, index)."""
        step, gid, slot, index = draw
        return step, self.condition(index, gid, slot)

    def condition(self, index: int, gid: int = 0, slot: int = 0) -> Condition:
        """Return the condition at `index`, labelled as copy `slot` of group `gid`.

        Raises:
            IndexError: no such index.
            InputError: a file is missing, broken or too short; one line naming it.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"dataset index is {index}, must be within 0..{len(self) - 1}")
        try:
            return self.make(index, gid, slot)
        except ValueError as error:
            raise InputError(str(error)) from error

    def source_id(self, index: int) -> str:
        """Return what names the content of a condition's source video, without decoding it."""
        return file_id(self.source_file(index))


def file_id(file: Path) -> str:
    """Return a hash of a file's content; ValueError when there is no such file."""
    try:
        found = file.stat()
    except OSError as error:
        raise ValueError(f"video {file} cannot be read ({error.strerror}); check the dataset folder") from error
    return _hash_of(file, found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=2**18)
def _hash_of(file: Path, size: int, changed: int) -> str:  # noqa: ARG001 - a file that changed is read again
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
