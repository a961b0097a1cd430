"""Cache of tensors that are expensive to compute, in memory and optionally on disk.

    <folder>/<kind>/<first two digits>/<hash of the key>.safetensors

A key names everything the tensor depends on, so entries never go stale and may be copied to other machines. Files are
written atomically, so processes may share a folder; if two compute one entry, the last write wins.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flow_grpo.runtime.atomic_file import atomic_path
from flow_grpo.runtime.lru import LruCache

_SAMPLED = 16  # values per tensor in a weights key
_log = logging.getLogger(__name__)


class TensorStore:
    """Caches the results of pure functions.

    Args:
        folder: directory of the disk cache, or None for memory only.
        limit: limit of the LRU cache in memory, in bytes per kind; the default holds 60 sources of 81x480x832 pixels.
    """

    def __init__(self, folder: Path | None = None, limit: int = 2**29) -> None:
        self.folder = folder
        self._limit = limit
        self._cached: dict[str, LruCache[str, Tensor]] = {}

    def get(self, kind: str, key: str, make: Callable[[], Tensor]) -> Tensor:
        """Look up a CPU tensor in memory or on disk, or compute it with `make` and store it.

        Raises:
            OSError: the folder cannot be written.
        """
        memory = self._memory(kind)
        if key in memory:
            return memory[key]
        path = None if self.folder is None else self.path(kind, key)
        found = None if path is None else self._read(path, key)
        if found is None:
            found = make()
            if path is not None:
                found = found.cpu().contiguous()
                self._write(path, key, found)
        memory[key] = found
        return found

    def put(self, kind: str, key: str, tensor: Tensor) -> None:
        """Keep a CPU tensor in memory that another process has computed, and stored if there is a folder."""
        self._memory(kind)[key] = tensor

    def has(self, kind: str, key: str) -> bool:
        """Whether `get` would find an entry, in memory or valid on disk."""
        if key in self._memory(kind):
            return True
        return self.folder is not None and self._read(self.path(kind, key), key) is not None

    def _memory(self, kind: str) -> LruCache[str, Tensor]:
        return self._cached.setdefault(kind, LruCache(self._limit, lambda tensor: tensor.nbytes))

    def path(self, kind: str, key: str) -> Path:
        """File of an entry, whether or not it exists."""
        assert self.folder is not None
        name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        return self.folder / kind / name[:2] / f"{name}.safetensors"

    def _read(self, path: Path, key: str) -> Tensor | None:
        # None if it is missing or, with a warning, damaged.
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensor: Tensor = file.get_tensor("value")
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError) as error:
            _log.warning("encoding %s cannot be read (%s): it is made again", path, error)
            return None
        if metadata.get("key") != key or metadata.get("sha256") != _digest(tensor):
            _log.warning("encoding %s is not what was written there: it is made again", path)
            return None
        return tensor

    def _write(self, path: Path, key: str, tensor: Tensor) -> None:
        try:
            with atomic_path(path) as temporary:
                save_file({"value": tensor}, temporary, metadata={"key": key, "sha256": _digest(tensor)})
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"encoding {path} cannot be written ({error}); free some space, name another folder with "
                "--config.model.encodings, or pass an empty one to keep nothing"
            ) from error


def content_key(tensor: Tensor) -> str:
    """Hash of a tensor's values, shape and dtype."""
    return f"{tuple(tensor.shape)} {tensor.dtype} {_digest(tensor)}"


@torch.no_grad()
def weights_key(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hash of named tensors (name, shape and about 16 evenly spaced values of each): cheap, not exhaustive."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        values = tensor.detach().flatten()[:: max(1, tensor.numel() // _SAMPLED)]
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(values.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def files_key(folder: Path) -> str:
    """Hash that identifies a model folder without reading all weights.

    It covers every file's name and size; of a safetensors file also the header and the beginning, middle and end of
    every tensor; of any other file the whole content.

    Raises:
        ValueError: the folder does not exist or is empty.
    """
    files = sorted(file for file in folder.glob("**/*") if file.is_file() and not file.name.startswith("."))
    if not files:
        raise ValueError(f"{folder} holds no files, must be a part of a model in diffusers layout")
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.relative_to(folder).as_posix()} {file.stat().st_size}".encode())
        digest.update(_sampled(file) if file.suffix == ".safetensors" else file.read_bytes())
    return digest.hexdigest()


def _sampled(file: Path, block: int = 4096) -> bytes:
    # Its header and up to three blocks of every tensor.
    with file.open("rb") as opened:
        header = opened.read(int.from_bytes(opened.read(8), "little"))
        begin, parts = opened.tell(), [header]
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        for start, end in sorted(entry["data_offsets"] for entry in tensors.values()):
            for offset in sorted({start, max(start, (start + end - block) // 2), max(start, end - block)}):
                opened.seek(begin + offset)
                parts.append(opened.read(min(block, end - offset)))
    return b"".join(parts)


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(json.dumps([*tensor.shape]).encode() + flat.numpy().tobytes()).hexdigest()
