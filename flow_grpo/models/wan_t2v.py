"""Plain Wan text-to-video (arXiv 2503.20314): Wan 2.1, and Wan 2.2 TI2V-5B, from their folders in diffusers layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn

from flow_grpo.models.encodings import Encodings
from flow_grpo.models.video_model import WAN_1_3B, Inputs, Shape, VideoModel
from flow_grpo.records import Condition


def _no_inputs(encodings: Encodings, conditions: Sequence[Condition]) -> dict[str, Tensor]:  # noqa: ARG001
    return {}


def _no_input_shapes(rows: int, latents: Shape, transformer: Mapping[str, Any]) -> dict[str, Shape]:  # noqa: ARG001
    return {}


def _call(network: nn.Module, latents: Tensor, timesteps: Tensor, prompts: Tensor, inputs: Inputs) -> Tensor:  # noqa: ARG001
    # Wan 2.2 TI2V-5B takes a timestep a token in image-to-video; in text-to-video all are equal, and one a row will do.
    predicted: Tensor = network(latents, timesteps, prompts, return_dict=False)[0]
    return predicted


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
)
