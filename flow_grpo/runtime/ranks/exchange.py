"""Move a few samples between group, tensor by tensor, in CPU memory.

Rows are sent point to point as bytes over the gloo control group, without gathering or pickling. Object collectives
would copy every row to every rank several times and restore device tensors on the sender's device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from flow_grpo.runtime.ranks.process_group import Group


def exchange_rows(
    tensors: Mapping[str, Tensor], send: Sequence[Sequence[int]], receive: Sequence[int], group: Group
) -> tuple[dict[str, Tensor], int]:
    """Send rows to other ranks; return the received rows in order of source rank, and the bytes of one row.

    Collective call: every rank must call it, even with nothing to send or receive.

    Args:
        tensors: name -> (n, ...) CPU tensors, with the same names, dtypes and row shapes on every rank that has any; a
            rank without rows passes an empty mapping and learns shapes and dtypes from the others.
        send: per destination rank, the indices of the rows to send there.
        receive: per source rank, the number of rows to expect from there.
        group: who takes part.

    Raises:
        ValueError: on every rank, if tensors are not in CPU memory, differ in shape or dtype, or a rank is to send rows
            that it does not have.
    """
    row_types = _agreed_row_types(tensors, group, sends=any(send))
    received = {}
    for name, (shape, dtype) in row_types.items():
        # One tensor at a time: only the rows that move are copied, and freed before the next tensor.
        outgoing = _bytes(tensors[name], [row for rows in send for row in rows]) if tensors else torch.empty(0)
        row_bytes = _row_bytes(shape, dtype)
        group.sent["rows"] += row_bytes * (sum(map(len, send)) - len(send[group.rank]))
        incoming = torch.empty(sum(receive) * row_bytes, dtype=torch.uint8)
        if group.gloo is not None:
            with group.waiting_for_peers():
                dist.all_to_all_single(
                    incoming,
                    outgoing.to(torch.uint8),
                    output_split_sizes=[count * row_bytes for count in receive],
                    input_split_sizes=[len(rows) * row_bytes for rows in send],
                    group=group.gloo,
                )
        received[name] = incoming.view(dtype).view(sum(receive), *shape)
    return received, sum(_row_bytes(*row_type) for row_type in row_types.values())


def _agreed_row_types(
    tensors: Mapping[str, Tensor], group: Group, *, sends: bool
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return name -> (row shape, dtype), sorted by name, which is the order of the collectives."""
    own = [(name, list(t.shape[1:]), str(t.dtype), t.device.type) for name, t in sorted(tensors.items())]
    texts = [text for text in group.gather_text(json.dumps(own) if own or sends else "") if text]
    agreed = json.loads(texts[0]) if texts else []
    if len(set(texts)) > 1 or any(device != "cpu" for *_, device in agreed):
        raise ValueError(
            "rows to exchange must be in CPU memory and have one shape and dtype on all ranks that hold any, got "
            f"{sorted(set(texts))}"
        )
    return {name: (tuple(shape), getattr(torch, dtype.removeprefix("torch."))) for name, shape, dtype, _ in agreed}


def _bytes(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    picked = tensor if rows == list(range(len(tensor))) else tensor[torch.tensor(rows, dtype=torch.int64)]
    return picked.contiguous().view(-1).view(torch.uint8)


def _row_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
