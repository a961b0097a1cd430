"""Tensors that are expensive to make, kept in memory and, with a folder, on disk, by what they were made from.

    <folder>/<kind>/<first two digits>/<hash of the key>.safetensors

A key names everything that the numbers depend on, so an entry is never out of date and may be copied elsewhere. Files
appear whole or not at all, and processes may share a folder: of two that make one entry, either one stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import uuid
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_log = logging.getLogger(__name__)


class TensorStore:
    """Remembers results of pure functions.

    Args:
        folder: where entries are kept over runs, or None to keep them in memory only.
        kept: entries of each kind in memory.
    """

    def __init__(self, folder: Path | None = None, kept: int = 64) -> None:
        self.folder = folder
        self._kept = kept
        self._known: dict[str, OrderedDict[str, Tensor]] = {}

    def get(self, kind: str, key: str, make: Callable[[], Tensor]) -> Tensor:
        """Return the CPU tensor of a key: remembered, else read, else made and written.

        Raises:
            OSError: the folder cannot be written, with the way out.
        """
        known = self._known.setdefault(kind, OrderedDict())
        if key not in known:
            known[key] = self._read_or_make(kind, key, make)
        known.move_to_end(key)
        while len(known) > self._kept:
            known.popitem(last=False)
        return known[key]

    def has(self, kind: str, key: str) -> bool:
        """Tell whether there is a sound entry on disk."""
        return self.folder is not None and self._read(self.path(kind, key), key) is not None

    def path(self, kind: str, key: str) -> Path:
        """Return the file of an entry, whether it exists or not."""
        assert self.folder is not None
        name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        return self.folder / kind / name[:2] / f"{name}.safetensors"

    def _read_or_make(self, kind: str, key: str, make: Callable[[], Tensor]) -> Tensor:
        if self.folder is None:
            return make()
        path = self.path(kind, key)
        found = self._read(path, key)
        if found is None:
            found = make().cpu().contiguous()
            self._write(path, key, found)
        return found

    def _read(self, path: Path, key: str) -> Tensor | None:
        """Return a sound entry; None when there is none, with a warning where it is damaged."""
        try:
            with safe_open(path, framework="pt") as file:
                made_of = file.metadata() or {}
                tensor: Tensor = file.get_tensor("value")
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError) as error:
            _log.warning("encoding %s cannot be read (%s): it is made again", path, error)
            return None
        if made_of.get("key") != key or made_of.get("sha256") != _digest(tensor):
            _log.warning("encoding %s is not what was written there: it is made again", path)
            return None
        return tensor

    def _write(self, path: Path, key: str, tensor: Tensor) -> None:
        partial = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex}")  # process numbers repeat over machines
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"value": tensor}, partial, metadata={"key": key, "sha256": _digest(tensor)})
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"encoding {path} cannot be written ({error}); free some space, name another folder with "
                "--config.model.encodings, or pass an empty one to keep nothing"
            ) from error
        finally:
            with contextlib.suppress(OSError):  # the folder itself may be what is wrong
                partial.unlink(missing_ok=True)


def content_key(tensor: Tensor) -> str:
    """Return a hash of a tensor's values, shape and type."""
    return f"{tuple(tensor.shape)} {tensor.dtype} {_digest(tensor)}"


def files_key(folder: Path) -> str:
    """Return a hash that tells the models of two folders apart, without reading their weights whole.

    Of every file its name and size; of a safetensors file also the list of its tensors and the beginning, middle and
    end of each; of any other its whole content.

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
    """Return a safetensors file's header and three blocks of every tensor."""
    with file.open("rb") as opened:
        header = opened.read(int.from_bytes(opened.read(8), "little"))
        begin, parts = opened.tell(), [header]
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        for start, end in sorted(entry["data_offsets"] for entry in tensors.values()):
            for place in sorted({start, max(start, (start + end - block) // 2), max(start, end - block)}):
                opened.seek(begin + place)
                parts.append(opened.read(min(block, end - place)))
    return b"".join(parts)


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(json.dumps([*tensor.shape]).encode() + flat.numpy().tobytes()).hexdigest()
