"""Nested state (optimizers, random states, counters) as two files: tensors in safetensors, the rest in JSON.

Nothing is pickled, and tensors are saved from CPU memory, so the files load on any machine.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from flow_grpo.runtime.atomic_file import naming

Copy = tuple[dict[str, Tensor], str]


def copied(tree: Mapping[str, Any]) -> Copy:
    """Copy a nested dict: its tensors on the CPU, and the rest as JSON.

    Raises:
        ValueError: a value is of a type that `flatten` does not support.
    """
    tensors, rest = flatten(dict(tree))
    # Copies also because safetensors refuses tensors that share storage.
    copies = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    return copies, json.dumps(rest)


def write(stem: Path, copy: Copy) -> None:
    """Write what `copied` returned to the files `paths(stem)` and fsync them; OSError if a file cannot be written."""
    tensor_file, rest_file = paths(stem)
    tensors, rest = copy
    with naming(stem.parent):
        save_file(tensors, tensor_file)
        rest_file.write_text(rest)
        fsync(tensor_file)
        fsync(rest_file)


def read(stem: Path) -> dict[str, Any]:
    """Read the nested dict that was `copied` and written, with tensors on the CPU.

    Raises:
        ValueError: the files are not what `write` writes, or not of one state.
    """
    tensor_file, _ = paths(stem)
    try:
        tensors = load_file(tensor_file)
    except SafetensorError as error:
        raise ValueError(f"{tensor_file} is no file of tensors ({error}); resume from another checkpoint") from None
    with misfits(stem):
        tree: dict[str, Any] = unflatten(tensors.__getitem__, skeleton_of(stem))
        if not isinstance(tree, dict):
            raise TypeError(f"a {type(tree).__name__}, must be a dict")
    return tree


def join_shards(stems: Sequence[Path], entry: str, cut: Callable[[str, Tensor], Tensor]) -> Any:
    """Read one entry of states that are sharded over ranks (FSDP2), with their shards of every tensor concatenated.

    Any number of ranks can load them; none holds more than its shards and one full tensor.

    Args:
        stems: the ranks' files in rank order, as for `read`.
        entry: its key in those states.
        cut: (path below the entry, full tensor) -> the tensor to return; full tensors are read one at a time.

    Raises:
        ValueError: there is no such entry, or the files are not what `write` writes.
    """
    with misfits(stems[0]):
        found = dict(skeleton_of(stems[0])["dict"])
    if entry not in found:
        raise ValueError(
            f"{stems[0].parent} holds no {entry!r} state, so another version saved it; resume with that version, or "
            "start afresh under another run_name"
        )
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(safe_open(paths(stem)[0], framework="pt")) for stem in stems]

        def read_cut(path: str) -> Tensor:
            shards = [file.get_tensor(path) for file in files]
            # 0-dimensional tensors, such as an optimizer's step count, are identical on every rank.
            return cut(path.removeprefix(f"{entry}/"), torch.cat(shards) if shards[0].ndim else shards[0])

        with misfits(stems[0]):
            return unflatten(read_cut, found[entry])


def skeleton_of(stem: Path) -> Any:
    """Read what `flatten` calls the skeleton; ValueError if the file is not JSON."""
    return json.loads(paths(stem)[1].read_text(encoding="utf-8"))


@contextlib.contextmanager
def misfits(stem: Path) -> Iterator[None]:
    """Raise ValueError naming the files where the block finds a skeleton that `write` did not write."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, SafetensorError) as error:
        raise ValueError(
            f"{paths(stem)[1]} is no state, or not that of its file of tensors ({type(error).__name__}: {error}); "
            "resume from another checkpoint"
        ) from error


def paths(stem: Path) -> tuple[Path, Path]:
    """Tensor file and JSON file of a stem."""
    return stem.with_suffix(".safetensors"), stem.with_suffix(".json")


def fsync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flatten(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Split a nested structure into its tensors by path and a JSON-serialisable skeleton.

    In the skeleton every container or tensor is an object with one key that names its type, so that int keys, tuples
    and dicts with any keys are restored exactly.

    Args:
        tree: nested dicts (keys str or int), lists and tuples of tensors, numbers, strings, booleans and None.

    Raises:
        ValueError: a value of another type (its path is named), or two tensors with the same path.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _flatten(tree, "", tensors)


def unflatten(tensor_at: Callable[[str], Tensor], skeleton: Any) -> Any:
    """Put together what `flatten` split; `tensor_at` returns the tensor of a path."""
    if not isinstance(skeleton, dict):
        return skeleton
    ((kind, content),) = skeleton.items()
    if kind == "tensor":
        return tensor_at(content)
    if kind == "dict":
        return {key: unflatten(tensor_at, value) for key, value in content}
    values = [unflatten(tensor_at, value) for value in content]
    return tuple(values) if kind == "tuple" else values


def map_tensors(tree: Any, function: Callable[[str, Tensor], Tensor]) -> Any:
    """Replace every tensor of a nested structure by `function(path, tensor)`."""
    tensors, skeleton = flatten(tree)
    return unflatten(lambda path: function(path, tensors[path]), skeleton)


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
