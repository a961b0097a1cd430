"""Plain Wan text-to-video (arXiv 2503.20314): Wan 2.1, and Wan 2.2 TI2V-5B, from their folders in diffusers layout."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn

from flow_grpo.models.encodings import Encodings
from flow_grpo.models.video_model import WAN_1_3B, Inputs, Shape, VideoModel
from flow_grpo.models.wan_blocks import Positions, SelfAttnProcessor, rotary_pairs
from flow_grpo.records import Condition
from flow_grpo.runtime.ranks.context import Context


def _no_inputs(encodings: Encodings, conditions: Sequence[Condition]) -> dict[str, Tensor]:  # noqa: ARG001
    return {}


def _no_input_shapes(rows: int, latents: Shape, transformer: Mapping[str, Any]) -> dict[str, Shape]:  # noqa: ARG001
    return {}


def _call(network: nn.Module, latents: Tensor, timesteps: Tensor, prompts: Tensor, inputs: Inputs) -> Tensor:  # noqa: ARG001
    # Wan 2.2 TI2V-5B takes a timestep a token in image-to-video; in text-to-video all are equal, and one a row will do.
    predicted: Tensor = network(latents, timesteps, prompts, return_dict=False)[0]
    return predicted


def _share(network: WanTransformer3DModel, context: Context) -> None:
    """Let ranks share the tokens between the first and the last block of diffusers' own network, by hooks."""
    context.divide_heads(network.config["num_attention_heads"])
    blocks: Any = network.blocks
    for number, block in enumerate(blocks):
        processor = SelfAttnProcessor()
        processor._attention_backend = block.attn1.processor._attention_backend
        block.attn1.set_processor(processor)
        block.register_forward_pre_hook(functools.partial(_enter, context, number == 0))
    blocks[-1].register_forward_hook(_leave)


def _enter(context: Context, first: bool, block: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ARG001
    tokens, text, modulation, rotary = given
    share = context.share(rotary[0].shape[1])
    cos, sin = map(share.cut, rotary_pairs(rotary))
    return share.cut(tokens) if first else tokens, text, modulation, Positions(cos, sin, share)


def _leave(block: nn.Module, given: tuple[Any, ...], tokens: Tensor) -> Tensor:  # noqa: ARG001
    positions: Positions = given[3]
    return positions.share.join(tokens)


WAN_T2V = VideoModel(
    network=WanTransformer3DModel,
    published=WAN_1_3B,
    origin=(
        "on a connected machine download Wan-AI/Wan2.1-T2V-1.3B-Diffusers, or another Wan text-to-video folder in "
        "diffusers layout, from the Hugging Face hub and set --config.model.path"
    ),
    needs=(),
    videos=1,
    consecutive=False,
    inputs=_no_inputs,
    input_shapes=_no_input_shapes,
    call=_call,
    share=_share,
)
