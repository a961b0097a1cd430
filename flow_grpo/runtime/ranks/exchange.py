"""Move a few samples between ranks, tensor by tensor, between CPUs.

Nothing is gathered and nothing is pickled: a row travels from the one rank that has it to the one rank that needs it,
as bytes over the gloo control group. Object collectives would copy every row to every rank, several times over, and
restore device tensors on the sender's device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from flow_grpo.runtime.ranks.process_group import Ranks


def exchange_rows(
    tensors: Mapping[str, Tensor], send: Sequence[Sequence[int]], receive: Sequence[int], ranks: Ranks
) -> tuple[dict[str, Tensor], int]:
    """Send rows to other ranks; return the rows that arrive, by source rank, and the bytes of one row over all tensors.

    Every rank must call it, also with nothing to send or receive.

    Args:
        tensors: name -> (n, ...) CPU tensors, alike in names, dtypes and row shapes on every rank that has any; a rank
            that never held such rows passes none and learns their form from the others.
        send: per destination rank, the rows that go there.
        receive: per source rank, how many rows come from there.
        ranks: who takes part.

    Raises:
        ValueError: on every rank alike, when tensors are not in CPU memory or differ in form, or a rank is to send what
            it has not.
    """
    forms = _agreed_forms(tensors, ranks, sends=any(send))
    received = {}
    for name, (shape, dtype) in forms.items():
        # A copy of the moved rows only, gone before the next tensor's turn.
        outgoing = _bytes(tensors[name], [row for rows in send for row in rows]) if tensors else torch.empty(0)
        row_bytes = _row_bytes(shape, dtype)
        incoming = torch.empty(sum(receive) * row_bytes, dtype=torch.uint8)
        if ranks.control_group is not None:
            dist.all_to_all_single(
                incoming,
                outgoing.to(torch.uint8),
                output_split_sizes=[count * row_bytes for count in receive],
                input_split_sizes=[len(rows) * row_bytes for rows in send],
                group=ranks.control_group,
            )
        received[name] = incoming.view(dtype).view(sum(receive), *shape)
    return received, sum(_row_bytes(*form) for form in forms.values())


def _agreed_forms(
    tensors: Mapping[str, Tensor], ranks: Ranks, *, sends: bool
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return name -> (row shape, dtype), sorted by name: the order of the exchange."""
    own = [(name, list(t.shape[1:]), str(t.dtype), t.device.type) for name, t in sorted(tensors.items())]
    texts = [text for text in ranks.gather_text(json.dumps(own) if own or sends else "") if text]
    agreed = json.loads(texts[0]) if texts else []
    if len(set(texts)) > 1 or any(device != "cpu" for *_, device in agreed):
        raise ValueError(
            "rows to exchange must be in CPU memory and have one form on all ranks that hold any, got "
            f"{sorted(set(texts))}"
        )
    return {name: (tuple(shape), getattr(torch, dtype.removeprefix("torch."))) for name, shape, dtype, _ in agreed}


def _bytes(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    picked = tensor if rows == list(range(len(tensor))) else tensor[torch.tensor(rows, dtype=torch.int64)]
    return picked.contiguous().view(-1).view(torch.uint8)


def _row_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
