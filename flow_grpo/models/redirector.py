"""ReDirector (arXiv 2511.19827): Wan2.1-Fun-Control-Camera that films a given video of any length again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flow_grpo.maths.rays import CAMERA_NUMBERS, camera_pair
from flow_grpo.models.encoders.encodings import Encodings
from flow_grpo.models.networks.redirector_transformer import ReDirectorTransformer3DModel
from flow_grpo.models.video_model import COMPONENTS, WAN_1_3B, Inputs, Shape, VideoModel
from flow_grpo.records import Condition

IMAGE_TOKENS = 257  # of CLIP ViT-H/14 at 224x224: a class token and 16x16 patches


def _inputs(encodings: Encodings, conditions: Sequence[Condition]) -> dict[str, Tensor]:
    """Return source_latents (B, C, F, H, W), image_embeds (B, I, D) of their first frames, cameras (B, 2, T, 16)."""
    cameras = []
    for condition in conditions:
        assert condition.source_poses is not None, "`needs` asks for them"
        assert condition.intrinsics is not None, "`needs` asks for them"
        cameras.append(camera_pair(condition.need_poses(), condition.source_poses, condition.intrinsics))
    return {
        "source_latents": encodings.sources(conditions),
        "image_embeds": encodings.first_frames(conditions),
        "cameras": torch.stack(cameras),
    }


def _input_shapes(rows: int, latents: Shape, transformer: Mapping[str, Any]) -> dict[str, Shape]:
    frames = transformer.get("temporal_compression", 4) * (latents[1] - 1) + 1
    return {
        "source_latents": (rows, *latents),
        "image_embeds": (rows, IMAGE_TOKENS, transformer["image_dim"]),
        "cameras": (rows, 2, frames, CAMERA_NUMBERS),
    }


def _call(network: nn.Module, latents: Tensor, timesteps: Tensor, prompts: Tensor, inputs: Inputs) -> Tensor:
    joined = torch.cat([latents, inputs["source_latents"]], dim=2)
    predicted: Tensor = network(joined, timesteps, prompts, inputs["image_embeds"], inputs["cameras"])[0]
    return predicted


REDIRECTOR = VideoModel(
    network=ReDirectorTransformer3DModel,
    published={**WAN_1_3B, "in_channels": 32, "image_dim": 1280},
    origin=(
        "on a connected machine download alibaba-pai/Wan2.1-Fun-V1.1-1.3B-Control-Camera, ReDirector's checkpoint and "
        "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers, run tools/convert_redirector.py on them and set --config.model.path"
    ),
    needs=("source_video", "target_poses", "source_poses", "intrinsics"),
    videos=2,
    consecutive=False,
    inputs=_inputs,
    input_shapes=_input_shapes,
    call=_call,
    components=(*COMPONENTS, "image_encoder", "image_processor"),
)
