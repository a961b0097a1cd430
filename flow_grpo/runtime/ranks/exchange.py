"""Move samples between ranks, and hand what one rank has made to the others that need it.

Rows are sent point to point as bytes over the gloo control group, without gathering or pickling. Object collectives
would copy every row to every rank several times and restore device tensors on the sender's device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flow_grpo.runtime.ranks.process_group import Group

Key = TypeVar("Key", int, str)


def exchange_rows(
    tensors: Mapping[str, Tensor], send: Sequence[Sequence[int]], receive: Sequence[int], group: Group
) -> tuple[dict[str, Tensor], int]:
    """Send rows; return those received, in order of source rank, and the bytes of one row.

    Collective call: every rank must call it, even with nothing to send or receive.

    Args:
        tensors: name -> (n, ...) CPU tensors, with the same names, dtypes and row shapes on every rank that has any. A
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
        row_bytes = math.prod(shape) * dtype.itemsize
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
    return received, sum(math.prod(shape) * dtype.itemsize for shape, dtype in row_types.values())


def _agreed_row_types(
    tensors: Mapping[str, Tensor], group: Group, *, sends: bool
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    # Sorted by name, which is the order of the collectives.
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


def owners(wanted: Sequence[Sequence[Key]]) -> dict[Key, int]:
    """Choose which rank makes each of n things, one that needs it; keys ascend, equal on every rank.

    Where every thing is needed as often as every other and every rank needs as many, counted with repetitions, no rank
    of W makes more than ceil(n / W): a rank then has its share of every thing it needs, n / W in all. Else as few as
    there can be.
    """
    keys, needed = sorted({key for own in wanted for key in own}), [set(own) for own in wanted]
    if len(wanted) == 1:
        return dict.fromkeys(keys, 0)
    from scipy.optimize import linear_sum_assignment  # a second, which one rank does not wait for

    for most in range(math.ceil(len(keys) / len(wanted)), len(keys) + 1):
        # Where it can be, each rank makes one of as many neighbours as there are ranks: they are equally much work.
        wrong = len(keys) + 1
        costs = [
            [wrong * (key not in own) + (turn != place // len(wanted)) for own in needed for turn in range(most)]
            for place, key in enumerate(keys)
        ]
        places = linear_sum_assignment(costs)[1].tolist() if keys else []
        found = {key: place // most for key, place in zip(keys, places, strict=True)}
        if all(key in needed[rank] for key, rank in found.items()):
            return found
    raise AssertionError("a rank may make all that it needs")


def dealt(gids: Sequence[Sequence[int]]) -> tuple[dict[int, int], list[list[int]]]:
    """Return each group's rank, and per rank its groups, ascending, filled up with others that it holds.

    So all ranks make equally many calls, in the rollout and in the update, where those others have no weight.
    """
    owner = owners(gids)
    share = [[gid for gid in owner if owner[gid] == rank] for rank in range(len(gids))]
    most = max(map(len, share))
    spare = [[gid for gid in dict.fromkeys(held) if gid not in own] for held, own in zip(gids, share, strict=True)]
    return owner, [[*own, *more[: most - len(own)]] for own, more in zip(share, spare, strict=True)]


def hand_out(
    own: Mapping[Key, Tensor], owner: Mapping[Key, int], wanted: Sequence[Sequence[Key]], group: Group
) -> dict[Key, Tensor]:
    """Send what others need of this rank's, return what it needs of theirs (collective call).

    Tensors are fp32, of any shapes; `owner` names the rank that made each, keys ascending.
    """
    if group.size == 1:
        return {}
    made_here = [list(own[key].shape) for key in owner if key in own]
    shapes = [iter(json.loads(text)) for text in group.gather_text(json.dumps(made_here))]
    shape = {key: tuple(next(shapes[rank])) for key, rank in owner.items()}
    needed = [set(keys) for keys in wanted]
    found: dict[Key, Tensor] = {}
    for one in sorted(set(shape.values())):
        keys = [key for key in owner if shape[key] == one]
        held = [key for key in keys if key in own]
        send = [
            [row for row, key in enumerate(held) if key in needs] if rank != group.rank else []
            for rank, needs in enumerate(needed)
        ]
        coming = [key for key in keys if owner[key] != group.rank and key in needed[group.rank]]
        coming.sort(key=lambda key: owner[key])  # stable: of one rank they come in its order
        receive = [sum(owner[key] == rank for key in coming) for rank in range(group.size)]
        tensors = {"made": torch.stack([own[key] for key in held]).cpu()} if held else {}
        received, _ = exchange_rows(tensors, send, receive, group)
        if coming:
            found |= dict(zip(coming, received["made"], strict=True))
    return found
