"""Plain Wan text-to-video (arXiv 2503.20314): Wan 2.1, and Wan 2.2 TI2V-5B, from their folders in diffusers layout."""

from __future__ import annotations

from typing import Any, cast

from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn

from flow_grpo.models.networks.wan_blocks import Positions, SelfAttnProcessor, rotary_pairs
from flow_grpo.models.video_model import WAN_1_3B, Inputs, VideoModel
from flow_grpo.runtime.ranks.context_parallel import ContextParallel


def _call(network: nn.Module, latents: Tensor, timesteps: Tensor, prompts: Tensor, inputs: Inputs) -> Tensor:  # noqa: ARG001
    # Wan 2.2 TI2V-5B takes a timestep a token in image-to-video; in text-to-video all are equal, and one a row will do.
    predicted: Tensor = network(latents, timesteps, prompts, return_dict=False)[0]
    return predicted


class _Sharing:
    """Hooks by which ranks share the tokens of diffusers' own network, from its first block to its output layer."""

    def __init__(self, context: ContextParallel) -> None:
        self._context = context
        self._share = context.share(context.size)  # of the forward in progress

    def cut(self, block: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ARG002
        tokens, *others = given
        self._share = self._context.share(tokens.shape[1])
        return self._share.cut(tokens), *others

    def place(self, block: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ARG002
        *others, rotary = given
        cos, sin = map(self._share.cut, rotary_pairs(rotary))
        return *others, Positions((cos, sin), self._share)

    def join(self, layer: nn.Module, given: tuple[Any, ...], velocity: Tensor) -> Tensor:  # noqa: ARG002
        return self._share.join(velocity)


def _share_tokens(network: WanTransformer3DModel, context: ContextParallel) -> None:
    context.divide_heads(network.config["num_attention_heads"])
    sharing, blocks = _Sharing(context), cast(Any, network.blocks)
    blocks[0].register_forward_pre_hook(sharing.cut)
    for block in blocks:
        processor = SelfAttnProcessor()
        processor._attention_backend = block.attn1.processor._attention_backend
        block.attn1.set_processor(processor)
        block.register_forward_pre_hook(sharing.place)
    network.proj_out.register_forward_hook(sharing.join)


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
    inputs=lambda *_: {},
    input_shapes=lambda *_: {},
    call=_call,
    share=_share_tokens,
)
