"""State that lies in shards over the ranks: every rank saves its own part, and any number of ranks reads it back.

No rank ever holds more than its part and one whole tensor.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from flow_grpo.runtime.checkpoints import state_files
from flow_grpo.runtime.ranks.sharding import local


def own_part(tree: Any) -> Any:
    """Return a nested state with this rank's part of every tensor."""
    return map_tensors(tree, lambda _, tensor: local(tensor))


def map_tensors(tree: Any, cut: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """Return a nested state of dicts with every tensor passed through `cut`, which is also told its path."""
    if isinstance(tree, Tensor):
        return cut(path, tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, cut, f"{path}/{key}".lstrip("/")) for key, value in tree.items()}
    return tree


def join(stems: Sequence[Path], entry: str, cut: Callable[[str, Tensor], Tensor]) -> Any:
    """Return what `own_part` made of one entry of the ranks' states, put together again.

    Args:
        stems: the ranks' files in rank order, as for `state_files.read`.
        entry: its key in those states.
        cut: (path below the entry, whole tensor) -> what to keep of it; called for one tensor after the other.

    Raises:
        ValueError: there is no such entry.
    """
    found = dict(json.loads(state_files.paths(stems[0])[1].read_text())["dict"])
    if entry not in found:
        raise ValueError(
            f"{stems[0].parent} holds no {entry!r} state, so another version saved it; resume with that version, or "
            "start afresh under another run_name"
        )
    skeleton = found[entry]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(safe_open(state_files.paths(stem)[0], framework="pt")) for stem in stems]
        return state_files.unflatten(_Joined(files, entry, cut), skeleton)


class _Joined(Mapping[str, Tensor]):
    """Tensors of one entry by path, read when asked for."""

    def __init__(self, files: Sequence[Any], entry: str, cut: Callable[[str, Tensor], Tensor]) -> None:
        self._files, self._entry, self._cut = files, entry, cut

    def __getitem__(self, name: str) -> Tensor:
        first = self._files[0].get_tensor(name)
        # Numbers, such as an optimizer's count of steps, are the same on every rank.
        values = torch.cat([first, *(file.get_tensor(name) for file in self._files[1:])]) if first.ndim else first
        return self._cut(name.removeprefix(f"{self._entry}/"), values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files[0].keys())

    def __len__(self) -> int:
        return len(self._files[0].keys())
