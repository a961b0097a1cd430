"""Nested state (optimizers, random states, counters) as a pair of files: tensors in safetensors, the rest in JSON.

Nothing is pickled, and tensors are stored from CPU memory, so that a file opens on any machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor


def write(stem: Path, tree: Mapping[str, Any]) -> None:
    """Write a nested dict to `paths(stem)` and bring the files to the disk.

    Raises:
        ValueError: it holds something that `flatten` does not take.
        OSError: the disk does not take it.
    """
    tensors, rest = flatten(dict(tree))
    # Own memory for each: the format refuses tensors that share storage.
    copies = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    tensor_file, rest_file = paths(stem)
    save_file(copies, tensor_file)
    rest_file.write_text(json.dumps(rest))
    to_disk(tensor_file)
    to_disk(rest_file)


def read(stem: Path) -> dict[str, Any]:
    """Return what `write` was given; tensors are on the CPU. ValueError for a file of another kind."""
    tensor_file, rest_file = paths(stem)
    try:
        tensors = load_file(tensor_file)
    except SafetensorError as error:
        raise ValueError(f"{tensor_file} is no file of tensors ({error}); resume from another checkpoint") from None
    tree: dict[str, Any] = unflatten(tensors, json.loads(rest_file.read_text()))
    return tree


def paths(stem: Path) -> tuple[Path, Path]:
    """Return the tensor file and the JSON file of a stem."""
    return stem.with_suffix(".safetensors"), stem.with_suffix(".json")


def to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flatten(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Separate a nested structure into its tensors by path and a JSON-able rest.

    In the rest every container or tensor is an object with one key that says what it is, so that int keys, tuples and
    dicts of any names come back as they were.

    Args:
        tree: nested dicts (keys str or int), lists and tuples of tensors, numbers, texts, booleans and None.

    Raises:
        ValueError: something else is in there (its path and type are named), or two tensors have the same path.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _flatten(tree, "", tensors)


def unflatten(tensors: Mapping[str, Tensor], rest: Any) -> Any:
    """Put together again what `flatten` separated."""
    if not isinstance(rest, dict):
        return rest
    ((kind, content),) = rest.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: unflatten(tensors, value) for key, value in content}
    values = [unflatten(tensors, value) for value in content]
    return tuple(values) if kind == "tuple" else values


def _flatten(tree: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        if path in tensors:
            raise ValueError(f"{path} cannot be saved: two tensors have this path, rename one of their keys")
        tensors[path] = tree
        return {"tensor": path}
    if isinstance(tree, Mapping):
        if any(type(key) not in (str, int) for key in tree):
            raise ValueError(f"{path or 'the state'} cannot be saved: its keys must be str or int, got {list(tree)}")
        return {"dict": [[key, _flatten(value, f"{path}/{key}".lstrip("/"), tensors)] for key, value in tree.items()]}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_flatten(value, f"{path}/{i}", tensors) for i, value in enumerate(tree)]}
    if tree is None or type(tree) in (bool, int, float, str):
        return tree
    raise ValueError(f"{path} cannot be saved: {type(tree).__name__} is no tensor, number, text, list, tuple or dict")
