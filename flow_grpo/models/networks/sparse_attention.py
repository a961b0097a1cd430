"""Attention to the blocks of keys that matter most, and to one mean for each of the others.

For network calls that no log-probability comes from. Tokens are cut into blocks of neighbours. Each head reads, for
each block of queries, those blocks of keys in full whose mean has the largest product with the mean of the queries, and
of every other block one mean key and one mean value, which count as often as the block has tokens. Choosing by products
of means is the coarse stage of arXiv 2505.13389 and 2502.18137; means of what is left out keep far away content.

Letters: B rows, Q queries, S keys, H heads, D channels of a head, q and b blocks of queries and of keys.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from flow_grpo.runtime import device as device_api

SHARE = 0.5  # of the blocks are read in full
LARGEST, SMALLEST = 128, 4  # tokens of a block; flex attention on CUDA wants 128
LEAST_BLOCKS = 64  # of a half of fewer, large ones copies are ranked otherwise
PROBES = 8  # queries whose attention is computed in full to see how much of it is kept
AT_ONCE = 2**27  # elements of keys that are copied together


class Blocks(NamedTuple):
    """Keys and values in blocks, and which of them each block of queries reads in full: the one definition."""

    size: int
    keys: Tensor  # (B, H, b, size, D), zeros behind the last
    values: Tensor
    mean_keys: Tensor  # (B, H, b, D)
    mean_values: Tensor
    inside: Tensor  # (b, size), 0 for a token and minus infinity for padding
    kept: Tensor  # (B, H, q, n) int64 blocks of keys
    mean_bias: Tensor  # (B, H, q, b) logarithm of the tokens that a mean stands for, minus infinity where it is kept


def block_size(tokens: int) -> int:
    """Return the tokens of a block: a power of two that leaves enough blocks to choose from."""
    fitting: int = 2 ** int(math.log2(max(1, tokens // LEAST_BLOCKS)))
    return max(SMALLEST, min(LARGEST, fitting))


def choose_blocks(query: Tensor, key: Tensor, value: Tensor, size: int, share: float = SHARE) -> Blocks:
    """Return the blocks of keys and values (B, H, S, D), chosen for queries (B, H, Q, D)."""
    keys, values, queries = (_in_blocks(x, size) for x in (key, value, query))
    place = torch.arange(keys.shape[2] * size, device=key.device).view(-1, size)
    inside = torch.zeros_like(place, dtype=query.dtype).masked_fill(place >= key.shape[2], -math.inf)
    count = (place < key.shape[2]).sum(1)
    mean_keys, mean_values = (x.sum(3) / count[:, None].to(x) for x in (keys, values))
    scores = queries.sum(3) @ mean_keys.mT  # how many queries a block has does not change their order
    kept = scores.topk(math.ceil(share * keys.shape[2]), dim=-1).indices
    bias = count.to(query.dtype).log().expand(scores.shape).scatter(-1, kept, -math.inf)
    return Blocks(size, keys, values, mean_keys, mean_values, inside, kept, bias)


def sparse_attention(query: Tensor, key: Tensor, value: Tensor, at_once: int = AT_ONCE) -> tuple[Tensor, Tensor]:
    """Return the attention (B, Q, H, D) of queries to keys and values (B, S, H, D), and the share of it that is kept.

    The share is the attention that `PROBES` queries, computed in full, have to the blocks that are read in full; ()
    fp32, mean over rows and heads. `at_once` bounds the elements of keys that are copied together.
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    blocks = choose_blocks(query, key, value, block_size(key.shape[2]))
    flex = device_api.has_flex_attention(query.device) and blocks.size == LARGEST
    attended = flex_blocks(query, blocks) if flex else gathered_blocks(query, blocks, at_once)
    return attended.transpose(1, 2), _kept_share(query, key, blocks)


def gathered_blocks(query: Tensor, blocks: Blocks, at_once: int = AT_ONCE) -> Tensor:
    """Return the attention (B, H, Q, D), a few blocks of queries at a time: on any device, and as torch counts it."""
    length, queries = query.shape[2], _in_blocks(query, blocks.size)
    rows, heads, count, chosen = blocks.kept.shape
    step = max(1, at_once // (rows * heads * chosen * blocks.size * query.shape[3]))
    parts = []
    for first in range(0, count, step):
        kept = blocks.kept[:, :, first : first + step]
        read = _take(blocks.keys, kept), _take(blocks.values, kept)
        means = (x.unsqueeze(2).expand(-1, -1, kept.shape[2], -1, -1) for x in (blocks.mean_keys, blocks.mean_values))
        # Attention kernels take four dimensions: rows and heads are one.
        keys, values = (torch.cat(pair, dim=3).flatten(0, 1) for pair in zip(read, means, strict=True))
        bias = torch.cat([blocks.inside[kept].flatten(3), blocks.mean_bias[:, :, first : first + step]], dim=-1)
        mask = bias.flatten(0, 1).unsqueeze(2).expand(-1, -1, blocks.size, -1)
        own = queries[:, :, first : first + step].flatten(0, 1)
        parts.append(functional.scaled_dot_product_attention(own, keys, values, attn_mask=mask))
    attended: Tensor = torch.cat(parts, dim=1).unflatten(0, (rows, heads)).flatten(2, 3)
    return attended[:, :, :length]


def flex_blocks(query: Tensor, blocks: Blocks, *, compiled: bool = True) -> Tensor:
    """Return the same by torch's flex attention, which skips what a block of queries does not read."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention  # loads the compiler

    size, tokens = blocks.size, blocks.keys.shape[2] * blocks.size
    means = [_in_blocks(x, size).flatten(2, 3) for x in (blocks.mean_keys, blocks.mean_values)]
    keys, values = (
        torch.cat([x.flatten(2, 3), mean], dim=2) for x, mean in zip((blocks.keys, blocks.values), means, strict=True)
    )
    inside = blocks.inside.flatten()
    bias = functional.pad(blocks.mean_bias, (0, means[0].shape[2] - blocks.mean_bias.shape[-1]), value=-math.inf)
    always = torch.arange(blocks.keys.shape[2], keys.shape[2] // size, device=query.device)
    read = torch.cat([blocks.kept, always.expand(*blocks.kept.shape[:3], -1)], dim=-1).sort(-1).values
    reads = torch.zeros(*read.shape[:3], keys.shape[2] // size, dtype=torch.bool, device=query.device)
    reads = reads.scatter(-1, read, value=True)

    def add(score: Tensor, row: Tensor, head: Tensor, own: Tensor, other: Tensor) -> Tensor:
        of_token = inside[other.clamp(max=tokens - 1)]
        return score + torch.where(
            other < tokens, of_token, bias[row, head, own // size, (other - tokens).clamp(min=0)]
        )

    def is_read(row: Tensor, head: Tensor, own: Tensor, other: Tensor) -> Tensor:
        return reads[row, head, own // size, other // size]

    counts = torch.full(read.shape[:3], read.shape[-1], dtype=torch.int32, device=query.device)
    mask = BlockMask.from_kv_blocks(
        counts,
        functional.pad(read.int(), (0, reads.shape[-1] - read.shape[-1])),
        BLOCK_SIZE=size,
        mask_mod=is_read,
        seq_lengths=(query.shape[2], keys.shape[2]),
    )
    attend: Any = _compiled(flex_attention) if compiled else flex_attention
    attended: Tensor = attend(query, keys, values, score_mod=add, block_mask=mask)
    return attended


@functools.cache
def _compiled(function: Any) -> Any:
    return torch.compile(function)  # once, not in every call of every block


def _kept_share(query: Tensor, key: Tensor, blocks: Blocks) -> Tensor:
    length = query.shape[2]
    probes = torch.arange(0, length, math.ceil(length / PROBES), device=query.device)
    scores = (query[:, :, probes] @ key.mT).float() / math.sqrt(query.shape[3])
    by_block = _in_blocks(scores.softmax(-1).mT, blocks.size).sum(3).mT  # (B, H, probes, b)
    return by_block.gather(-1, blocks.kept[:, :, probes // blocks.size]).sum(-1).mean()


def _in_blocks(x: Tensor, size: int) -> Tensor:
    # (..., tokens, D) -> (..., blocks, size, D)
    blocks: Tensor = functional.pad(x, (0, 0, 0, -x.shape[-2] % size)).unflatten(-2, (-1, size))
    return blocks


def _take(x: Tensor, kept: Tensor) -> Tensor:
    # (B, H, b, size, D), (B, H, q, n) -> (B, H, q, n * size, D)
    index = kept.flatten(2)[..., None, None].expand(-1, -1, -1, *x.shape[3:])
    taken: Tensor = x.gather(2, index).unflatten(2, kept.shape[2:]).flatten(3, 4)
    return taken
