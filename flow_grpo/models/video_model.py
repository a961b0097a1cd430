"""What one video model does differently from the next; everything that they share is `WanPolicy`.

A model is one file with a `VideoModel`, and one line in `VIDEO_MODELS` of registry.py.

Letters: B rows, C F H W latent channels, frames, height, width, T h w video frames, rows, columns, L D prompt tokens
and width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn

from flow_grpo.models.encoders.encodings import Encodings
from flow_grpo.records import Condition
from flow_grpo.runtime.ranks.context_parallel import ContextParallel

COMPONENTS = ("transformer", "vae", "text_encoder", "tokenizer")  # folders of a model
# transformer/config.json of Wan-AI/Wan2.1-T2V-1.3B-Diffusers.
WAN_1_3B: Mapping[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 8960,
    "num_layers": 30,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
}


def share_tokens(network: Any, context: ContextParallel) -> None:
    """Let ranks share the tokens of a sample in a network that heeds its attribute `context` (collective call)."""
    if not hasattr(network, "context"):
        raise ValueError(
            f"train.context_parallel is {context.size}, must be 1 for {type(network).__name__}, which cannot share its "
            "tokens: see docs/add_a_model.md"
        )
    context.divide_heads(network.config["num_attention_heads"])
    network.context = context


Shape: TypeAlias = tuple[int, ...]
Inputs: TypeAlias = Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True)
class VideoModel:
    """A transformer on Wan's codec and text encoder, and how it is called.

    Attributes:
        network: class of the transformer; its class attribute `camera_modules` names those that plain Wan lacks.
        published: configuration of its published transformer, which a missing config.json and missing fields take.
        origin: where its weights are, and how to make a model folder of them, for messages.
        needs: fields of `Condition` that it cannot do without.
        videos: in the transformer's sequence: 1 for the target alone, 2 with its source.
        consecutive: these follow each other on the axis of rotary positions, rather than sharing their positions.
        inputs: returns the tensors of B conditions that travel with the samples (`Conditioning.inputs`), on the CPU.
        input_shapes: returns their shapes from B, the latent shape (C, F, H, W) and the transformer's configuration.
        call: returns the velocity (B, C, F, H, W) from the network, latents, timesteps (B,) in 0..1000, prompt
            embeddings (B, L, D) and these inputs.
        components: folders that a model folder holds; with image_encoder and image_processor it has one.
        share: lets ranks share the tokens of a sample (`train.context_parallel`).
    """

    network: type[WanTransformer3DModel]
    published: Mapping[str, Any]
    origin: str
    needs: tuple[str, ...]
    videos: int
    consecutive: bool
    inputs: Callable[[Encodings, Sequence[Condition]], dict[str, Tensor]]
    input_shapes: Callable[[int, Shape, Mapping[str, Any]], dict[str, Shape]]
    call: Callable[[nn.Module, Tensor, Tensor, Tensor, Inputs], Tensor]
    components: tuple[str, ...] = COMPONENTS
    share: Callable[[Any, ContextParallel], None] = share_tokens

    def check_size(self, size: Shape, transformer: Mapping[str, Any], compression: tuple[int, int]) -> None:
        """Raise ValueError unless a video of size (T, h, w) fits the codec, the patches and the rotary positions.

        `compression` is that of the codec, in time and in space.
        """
        frames, height, width = size
        length, (_, *patch) = transformer["rope_max_seq_len"], transformer["patch_size"]
        temporal, spatial = compression
        if frames < 1 or (frames - 1) % temporal:
            raise ValueError(
                f"videos have {frames} frames, must be {temporal}n+1 for this codec, such as {5 * temporal + 1}; "
                "set data.num_frames, or --frames"
            )
        rows, columns = (spatial * side for side in patch)
        if min(height, width) < 1 or height % rows or width % columns:
            raise ValueError(
                f"videos are {height}x{width}, must be multiples of {rows}x{columns} (codec {spatial}, "
                f"patch {patch[0]}x{patch[1]}); set data.height and data.width, or --height and --width"
            )
        most = temporal * (length // (self.videos if self.consecutive else 1) - 1) + 1
        largest = most, length * rows, length * columns
        if any(side > bound for side, bound in zip(size, largest, strict=True)):
            raise ValueError(
                f"videos are {frames}x{height}x{width} (frames, height, width), must be at most "
                f"{'x'.join(map(str, largest))}, where the model's rotary positions end; lower data.num_frames, "
                "data.height or data.width, or --frames, --height or --width"
            )

    def tokens(self, latents: Shape, patch: Shape) -> int:
        """Return the length of the transformer's sequence for latents (C, F, H, W) of the target, cut into patches."""
        return self.videos * math.prod(side // one for side, one in zip(latents[1:], patch, strict=True))

    def check(self, conditions: Sequence[Condition]) -> None:
        """Raise ValueError for the first field that the model needs and a condition lacks."""
        for condition in conditions:
            for field in self.needs:
                if getattr(condition, field) is None:
                    raise ValueError(
                        f"the model needs the {field} of every condition, {condition.scene or condition.prompt!r} has "
                        "none; give data that have it, or another model.kind"
                    )
