"""What a rank sends to the others in an epoch, in bytes, by kind; a ring is assumed where all ranks exchange."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flow_grpo.runtime.device import DTYPES
from flow_grpo.settings.schema import Config


def weights(config: Config, devices: int, frozen: int, trained: int, gathers: float) -> float:
    """Return the bytes of sharded weights, which FSDP gathers block by block; 0 where they are not sharded.

    Args:
        config: the recipe.
        devices: number of ranks.
        frozen: parameters that are not trained.
        trained: parameters that are.
        gathers: gathers of all blocks: one a forward, one more for its backward, which shares them with recomputation.
    """
    if config.train.sharding != "fsdp2":
        return 0.0
    return gathers * (frozen * DTYPES[config.model.dtype].itemsize + 4.0 * trained) * (devices - 1) / devices


def tokens(
    config: Config, transformer: Mapping[str, Any], length: int, videos: int, rows: float, recomputed: float
) -> float:
    """Return the bytes of tokens that ranks which share samples exchange, see `runtime.ranks.context_parallel`.

    Args:
        config: the recipe.
        transformer: its configuration.
        length: tokens of a row.
        videos: target and source are 2; the last block then asks for the target's tokens only.
        rows: forwards of one row, and backwards, in which the gradients of what was sent travel back.
        recomputed: rows whose blocks are computed, and exchange, once more.
    """
    sharing, heads = config.train.context_parallel, transformer["num_attention_heads"]
    team = math.gcd(heads, sharing)
    own = length / sharing * DTYPES[config.model.dtype].itemsize
    width, layers = heads * transformer["attention_head_dim"], transformer["num_layers"]
    asked = layers - 1 + 1 / videos  # blocks of queries and of outputs
    per_team, to_mates = 2 * (layers + asked) * (team - 1) / team, 2 * layers * (sharing // team - 1)
    joined: float = math.prod(transformer["patch_size"]) * transformer["out_channels"] / videos * (sharing - 1)
    sent: float = own * ((rows + recomputed) * width * (per_team + to_mates) + rows * joined)
    return sent


def prefixes(config: Config, groups: int, latents: tuple[int, ...]) -> float:
    """Return the bytes of shared prefixes, on average.

    Args:
        config: the recipe.
        groups: ranks that samples are dealt to.
        latents: (C, F, H, W) of the target.
    """
    sample = config.sample
    if not sample.share_prefix or sample.layout == "contiguous":
        return 0.0
    others = min(sample.k, groups) - 1
    return 4.0 * math.prod(latents) * others * sample.expanded_batch_size / sample.k
