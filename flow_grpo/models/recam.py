"""ReCamMaster (arXiv 2503.11647): Wan 2.1 that films a given video again, along a new camera path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flow_grpo.maths.poses import camera_tokens
from flow_grpo.models.encoders.encodings import Encodings
from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.video_model import WAN_1_3B, Inputs, Shape, VideoModel
from flow_grpo.records import Condition


def _inputs(encodings: Encodings, conditions: Sequence[Condition]) -> dict[str, Tensor]:
    """Return source_latents (B, C, F, H, W), clean, and target_cameras (B, F, 12), see `camera_tokens`."""
    cameras = [camera_tokens(condition.need_poses(), encodings.codec.temporal) for condition in conditions]
    return {"source_latents": encodings.sources(conditions), "target_cameras": torch.stack(cameras)}


def _input_shapes(rows: int, latents: Shape, transformer: Mapping[str, Any]) -> dict[str, Shape]:
    cameras = (rows, latents[1], transformer.get("camera_dim", 12))
    return {"source_latents": (rows, *latents), "target_cameras": cameras}


def _call(network: nn.Module, latents: Tensor, timesteps: Tensor, prompts: Tensor, inputs: Inputs) -> Tensor:
    joined = torch.cat([latents, inputs["source_latents"]], dim=2)
    predicted: Tensor = network(joined, timesteps, prompts, inputs["target_cameras"])[0]
    return predicted


RECAM = VideoModel(
    network=ReCamTransformer3DModel,
    published=WAN_1_3B,
    origin=(
        "on a connected machine download Wan-AI/Wan2.1-T2V-1.3B-Diffusers and KwaiVGI/ReCamMaster-Wan2.1 from the "
        "Hugging Face hub, run tools/convert_recammaster.py on them and set --config.model.path"
    ),
    needs=("source_video", "target_poses"),
    videos=2,
    consecutive=True,
    inputs=_inputs,
    input_shapes=_input_shapes,
    call=_call,
)
