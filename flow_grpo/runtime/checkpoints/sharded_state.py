"""State sharded over ranks (FSDP2): every rank saves its own shards, and any number of ranks can load them.

No rank ever holds more than its shards and one full tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from flow_grpo.runtime.checkpoints import state_files


def join_shards(stems: Sequence[Path], entry: str, cut: Callable[[str, Tensor], Tensor]) -> Any:
    """Read one entry of the ranks' states, with their shards of every tensor concatenated again.

    Args:
        stems: the ranks' files in rank order, as for `state_files.read`.
        entry: its key in those states.
        cut: (path below the entry, full tensor) -> the tensor to return; full tensors are read one at a time.

    Raises:
        ValueError: there is no such entry, or the files are not what `state_files.write` writes.
    """
    with state_files.misfits(stems[0]):
        found = dict(state_files.skeleton_of(stems[0])["dict"])
    if entry not in found:
        raise ValueError(
            f"{stems[0].parent} holds no {entry!r} state, so another version saved it; resume with that version, or "
            "start afresh under another run_name"
        )
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(safe_open(state_files.paths(stem)[0], framework="pt")) for stem in stems]

        def read_cut(path: str) -> Tensor:
            shards = [file.get_tensor(path) for file in files]
            # 0-dimensional tensors, such as an optimizer's step count, are identical on every rank.
            return cut(path.removeprefix(f"{entry}/"), torch.cat(shards) if shards[0].ndim else shards[0])

        with state_files.misfits(stems[0]):
            return state_files.unflatten(read_cut, found[entry])
