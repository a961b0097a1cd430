"""Times what changes the speed of one transformer call, as ratios: each switch beside the same call without it."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.recomputation import set_checkpointing
from flow_grpo.models.networks.transformers import load_transformer

# Latent frames, rows and columns of one video: 120, 640 and 2,560 tokens with its source.
VIDEOS = {120: (5, 3, 4), 640: (5, 8, 8), 2560: (5, 16, 16)}
REPEATS = 7
TINY = Path(__file__).resolve().parents[3] / "assets" / "tiny_recam" / "transformer"


def measure() -> dict[str, float]:
    """Return the seconds of an update step over those of the same step without a switch.

    Checkpointing is compared with recomputing blocks, the target's tokens alone in the last block with all of them.
    """
    network = load_transformer(ReCamTransformer3DModel, TINY)
    found = {}
    for tokens, shape in VIDEOS.items():
        step = functools.partial(call_of(network, shape), train=True)
        set_checkpointing(network, "none")
        ratios = []
        for _ in range(REPEATS):
            short = _timed(step)
            with mock.patch.object(ReCamTransformer3DModel, "through_blocks", all_tokens):
                ratios.append(short / _timed(step))
        found[f"update_target_only_over_all_tokens_{tokens}"] = statistics.median(ratios)
        seconds: dict[str, list[float]] = {"blocks": [], "keep_attention": [], "none": []}
        for repeat in range(REPEATS + 1):  # interleaved, because the speed of a shared machine drifts
            for mode, row in seconds.items():
                set_checkpointing(network, mode)
                spent = _timed(step)
                row += [spent] if repeat else []  # the first warms up
        for mode in ("keep_attention", "none"):
            ratios = [one / blocks for one, blocks in zip(seconds[mode], seconds["blocks"], strict=True)]
            found[f"update_{mode}_over_blocks_{tokens}"] = statistics.median(ratios)
    return found


def all_tokens(self: ReCamTransformer3DModel, tokens: Tensor, *arguments: Any) -> Tensor:
    """Return what `through_blocks` returns, without its shortcut in the last block."""
    for block in self.blocks:
        tokens = block(tokens, *arguments)
    return tokens[:, : tokens.shape[1] // 2]


def call_of(network: ReCamTransformer3DModel, shape: tuple[int, int, int]) -> Callable[..., None]:
    """Return a function that calls the network on latents of these frames, rows and columns; with `train`, backward."""
    (frames, rows, columns), channels = shape, network.config["in_channels"]
    draw = torch.Generator().manual_seed(0)
    latents = torch.randn((1, channels, 2 * frames, rows, columns), generator=draw)
    prompts, cameras = (
        torch.randn((1, 8, network.config["text_dim"]), generator=draw),
        torch.randn((1, frames, 12), generator=draw),
    )

    def call(*, train: bool) -> None:
        with torch.set_grad_enabled(train):
            output = network(latents, torch.full((1,), 500.0), prompts, cameras)[0]
            if train:
                output.square().mean().backward()

    return call


def _timed(call: Callable[[], None]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
