"""ReDirector's network (arXiv 2511.19827) on diffusers' `WanTransformer3DModel`.

Target and source video share their positions, and cameras shift the phases of the rotary embedding: of queries and
keys, and of values, whose shift is undone after the output projection. Everything else is Wan2.1-Fun-Control-Camera:
the image-to-video variant of Wan 2.1 with an adapter for camera rays.

Letters: B rows, C H W latent channels, height, width, F latent frames of one video, T its video frames, D model width,
S = 2F * tokens per frame, s those of them that are this rank's (all, unless ranks share samples), L prompt tokens, I
image tokens, P channel pairs of a head.
"""

# ruff: noqa: ARG002 - arguments of a network's constructor are read from its configuration

from __future__ import annotations

from typing import Any

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.models.transformers.transformer_wan import WanAttention
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from flow_grpo.maths.rays import CAMERA_NUMBERS, RAY_CHANNELS, by_latent_frame, packed_rays
from flow_grpo.models.networks.wan_blocks import (
    CameraBlock,
    Positions,
    Rotary,
    VideoToVideoWan,
    attend,
    cast_norms,
    first,
    project,
    rotary_pairs,
    rotate,
    split_heads,
)

PHASE_MODULES = ("phase_qk", "phase_vo")


def phase_angles(phases: Tensor, heads: int, pairs: int) -> Rotary:
    """Return cosine and sine (B, s, heads, pairs) of phases (B, s, heads * p), in fp32 or wider.

    The p phases of a head belong to its last pairs, those of rows and columns; the pairs of time are not turned.
    """
    phases = rearrange(phases, "b s (n p) -> b s n p", n=heads)
    phases = phases.to(torch.promote_types(phases.dtype, torch.float32))
    phases = functional.pad(phases, (pairs - phases.shape[-1], 0))
    return phases.cos(), phases.sin()


class PhaseAttnProcessor:
    """Self-attention with phases of the cameras, through diffusers' choice of attention kernels."""

    _attention_backend: Any = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        _text: None,
        _mask: None,
        rotary_emb: Positions,
        *,
        camera: Tensor,
        queries: int | None = None,
    ) -> Tensor:
        """Return (B, Q, D) for the first Q tokens, of all for None; see `PhaseAttention`."""
        (cos, sin), share, walk = rotary_emb
        phase_cos, phase_sin = phase_angles(attn.phase_qk(camera), attn.heads, cos.shape[-1])
        # cos(a + b) and sin(a + b): exactly the rotary's own where the phase is zero
        angles = (cos * phase_cos - sin * phase_sin, sin * phase_cos + cos * phase_sin)
        query = split_heads(attn.norm_q(attn.to_q(hidden_states[:, :queries])), attn)
        query = share.to_heads(rotate(query, first(angles, queries)))
        key = share.to_keys(rotate(split_heads(attn.norm_k(attn.to_k(hidden_states)), attn), angles))
        phase_cos, phase_sin = phase_angles(attn.phase_vo(camera), attn.heads, cos.shape[-1])
        value = share.to_keys(rotate(split_heads(attn.to_v(hidden_states), attn), (phase_cos, -phase_sin)))
        attended = attend(query, key, value, self._attention_backend, walk)
        attended = project(share.to_tokens(attended), attn)
        return rotate(split_heads(attended, attn), first((phase_cos, phase_sin), queries)).flatten(2)


class ImageTextAttnProcessor:
    """Cross-attention to text and to an image, added before the output projection.

    diffusers' own takes the last 512 tokens as text, whatever the length of the prompt.
    """

    _attention_backend: Any = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        text: Tensor,
        _mask: None,
        _rotary: None,
        *,
        image: Tensor,
    ) -> Tensor:
        """Return (B, S, D) of hidden states (B, S, D), text (B, L, D) and image (B, I, D)."""
        query = split_heads(attn.norm_q(attn.to_q(hidden_states)), attn)
        key = split_heads(attn.norm_k(attn.to_k(text)), attn)
        read = attend(query, key, split_heads(attn.to_v(text), attn), self._attention_backend)
        key = split_heads(attn.norm_added_k(attn.add_k_proj(image)), attn)
        seen = attend(query, key, split_heads(attn.add_v_proj(image), attn), self._attention_backend)
        return project(read + seen, attn)


class PhaseAttention(WanAttention):
    """Self-attention whose channel pairs are also turned by angles that a camera token gives (RoCE).

    Queries and keys are turned by `phase_qk` on top of the rotary embedding. Values are turned by minus `phase_vo`, and
    the projected output by plus `phase_vo`: what a token sends is read relative to the receiver's camera. Angles are in
    radians; both modules start at zero, where this is Wan's own self-attention.
    """

    _default_processor_cls = PhaseAttnProcessor  # type: ignore[assignment]
    _available_processors = [PhaseAttnProcessor]  # type: ignore[list-item]  # noqa: RUF012
    _supports_qkv_fusion = False

    def __init__(self, dim: int, heads: int, eps: float) -> None:
        head_dim = dim // heads
        super().__init__(dim=dim, heads=heads, dim_head=head_dim, eps=eps, processor=PhaseAttnProcessor())
        # Of a head's d channels diffusers gives rows and columns 2 (d // 6) each. These are the published 2d // 3 // 2
        # pairs, 42 of 128 channels, unless d is 4 more than a multiple of 6, for which the original has no positions.
        phases = heads * 2 * (head_dim // 6)
        self.phase_qk, self.phase_vo = (nn.Linear(dim, phases, bias=False) for _ in PHASE_MODULES)
        nn.init.zeros_(self.phase_qk.weight)
        nn.init.zeros_(self.phase_vo.weight)


class ControlAdapter(nn.Module):
    """Camera rays to one embedding per token: unshuffled pixels, a convolution by patches, a residual block.

    Initialized to return zeros.

    Args:
        dim: D.
        patch: rows and columns of latents in a token.
        temporal: video frames per latent frame.
        spatial: pixels per latent, in each direction.
    """

    def __init__(self, dim: int, patch: tuple[int, int], temporal: int, spatial: int) -> None:
        super().__init__()
        self.temporal, self.spatial = temporal, spatial
        self.conv = nn.Conv2d(RAY_CHANNELS * temporal * spatial**2, dim, kernel_size=patch, stride=patch)
        self.conv1 = nn.Conv2d(dim, dim, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(dim, dim, kernel_size=3, padding=1)
        for layer in (self.conv, self.conv2):
            nn.init.zeros_(layer.weight)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)

    def forward(self, cameras: Tensor, height: int, width: int) -> Tensor:
        """Return (B, S, D) embeddings for cameras (B, 2, T, 16) and latents of height x width.

        Frame by frame: the rays of all frames at once would take gigabytes.
        """
        groups = by_latent_frame(cameras, self.temporal).flatten(1, 2)
        frames = []
        for group in groups.unbind(1):
            rays = packed_rays(group, height * self.spatial, width * self.spatial)
            x = self.conv(functional.pixel_unshuffle(rays, self.spatial))
            frames.append(x + self.conv2(functional.relu(self.conv1(x))))
        return rearrange(torch.stack(frames, dim=1), "b f d h w -> b (f h w) d")


class ReDirectorTransformerBlock(CameraBlock):
    """A Wan image-to-video block with `PhaseAttention`."""

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        num_heads: int,
        qk_norm: str | None = "rms_norm_across_heads",
        cross_attn_norm: bool = True,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(dim, ffn_dim, num_heads, qk_norm, cross_attn_norm, eps, dim)  # type: ignore[arg-type]
        self.attn1 = PhaseAttention(dim, num_heads, eps)
        self.attn2.set_processor(ImageTextAttnProcessor())  # type: ignore[arg-type]
        for attention in (self.attn1, self.attn2):
            cast_norms(attention, eps)

    def self_attention(self, tokens: Tensor, rotary_emb: Positions, camera: Tensor, queries: int | None) -> Tensor:
        """Return the output for (B, s, D), SiLU of the camera embeddings."""
        attended: Tensor = self.attn1(tokens, rotary_emb=rotary_emb, camera=camera, queries=queries)
        return attended


class ReDirectorTransformer3DModel(VideoToVideoWan):
    """Wan2.1-Fun-Control-Camera with ReDirector's shared positions and camera phases.

    Phases and control adapter are initialized to zero, so a new model computes what base Wan computes on the same
    [target | source] latents if both halves have the same rotary positions.
    """

    camera_modules = (*PHASE_MODULES, "control_adapter")
    camera_encoders = PHASE_MODULES
    variant = "redirector"
    _no_split_modules = ["ReDirectorTransformerBlock"]  # type: ignore[assignment]  # noqa: RUF012 - class attributes
    _repeated_blocks = ["ReDirectorTransformerBlock"]  # noqa: RUF012

    # As in ReCamTransformer3DModel, every field of config.json is a parameter of its own.
    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(  # noqa: PLR0913, PLR0917
        self,
        patch_size: tuple[int, ...] = (1, 2, 2),
        num_attention_heads: int = 12,
        attention_head_dim: int = 128,
        in_channels: int = 32,
        out_channels: int = 16,
        text_dim: int = 4096,
        freq_dim: int = 256,
        ffn_dim: int = 8960,
        num_layers: int = 30,
        cross_attn_norm: bool = True,
        qk_norm: str | None = "rms_norm_across_heads",
        eps: float = 1e-6,
        image_dim: int | None = 1280,
        added_kv_proj_dim: int | None = None,
        rope_max_seq_len: int = 1024,
        pos_embed_seq_len: int | None = None,
        temporal_compression: int = 4,
        spatial_compression: int = 8,
    ) -> None:
        dim = num_attention_heads * attention_head_dim
        if image_dim is None or added_kv_proj_dim not in (None, dim) or pos_embed_seq_len is not None:
            raise ValueError(
                f"image_dim is {image_dim}, added_kv_proj_dim {added_kv_proj_dim} and pos_embed_seq_len "
                f"{pos_embed_seq_len}, expected a number, the width {dim} and None: start from Fun-Control-Camera"
            )
        if patch_size[0] != 1:
            raise ValueError(
                f"patch_size is {tuple(patch_size)}, expected (1, h, w): each latent frame has its cameras"
            )
        super().__init__()
        self.register_to_config(added_kv_proj_dim=dim)  # type: ignore[no-untyped-call]
        self.control_adapter = ControlAdapter(
            dim, (patch_size[1], patch_size[2]), temporal_compression, spatial_compression
        )
        self.blocks = nn.ModuleList(
            ReDirectorTransformerBlock(dim, ffn_dim, num_attention_heads, qk_norm, cross_attn_norm, eps)
            for _ in range(num_layers)
        )

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        image_embeds: Tensor,
        cameras: Tensor,
    ) -> tuple[Tensor]:
        """Predict the velocity of the target latents.

        Cameras and not their rays are the input: a sample's rays are gigabytes that would have to be kept, sent and
        stacked with it, while computing them takes less than a thousandth of a forward.

        Args:
            hidden_states: (B, C, 2F, H, W) latents, noisy target frames before clean source frames.
            timestep: (B,) in 0..1000, shared by all frames of a row.
            encoder_hidden_states: (B, L, text_dim) prompt embeddings.
            image_embeds: (B, I, image_dim) features of the source's first frame.
            cameras: (B, 2, T, 16), target's and source's, see `flow_grpo.maths.rays`.

        Returns:
            A tuple whose only entry is (B, C, F, H, W).

        Raises:
            ValueError: the shapes do not fit each other or the model.
        """
        self._check_shapes(hidden_states, image_embeds, cameras)
        grid = self.grid(hidden_states, timestep)
        # The remaining input channels belong to the base model's own condition and are zero.
        padding = (0, 0, 0, 0, 0, 0, 0, self.config["in_channels"] - hidden_states.shape[1])
        patches = self.patch_embedding(functional.pad(hidden_states, padding))
        camera = self.control_adapter(cameras, *hidden_states.shape[3:])
        cos, sin = rotary_pairs(self.rope(hidden_states[:, :, : grid["f"]]))
        both = cos.repeat(1, 2, 1, 1), sin.repeat(1, 2, 1, 1)  # the source has the target's
        positions = self.positions(both, grid)
        tokens = positions.share.cut(rearrange(patches, "b d f h w -> b (f h w) d") + camera)
        camera = positions.share.cut(functional.silu(camera))  # which every block projects
        temb, modulation, text, image = self.condition_embedder(timestep, encoder_hidden_states, image_embeds)
        modulation = rearrange(modulation, "b (six d) -> b six d", six=6)

        tokens = self.through_blocks(tokens, text, image, modulation, positions, camera)
        return (self.head(tokens, temb, positions.share, grid),)

    def _check_shapes(self, hidden_states: Tensor, image_embeds: Tensor, cameras: Tensor) -> None:
        rows, channels, frames = hidden_states.shape[:3]
        video_frames = self.config["temporal_compression"] * (frames // 2 - 1) + 1
        if frames % 2 or cameras.shape != (rows, 2, video_frames, CAMERA_NUMBERS):
            raise ValueError(
                f"cameras have shape {tuple(cameras.shape)} for {frames} latent frames, expected {rows} rows of "
                f"(2, {video_frames}, {CAMERA_NUMBERS}): latents are [target | source] on the frame axis"
            )
        if channels != self.config["out_channels"]:
            raise ValueError(f"latents have {channels} channels, expected {self.config['out_channels']}")
        if len(image_embeds) != rows or image_embeds.shape[2:] != (self.config["image_dim"],):
            raise ValueError(
                f"image_embeds has shape {tuple(image_embeds.shape)}, expected ({rows}, tokens, "
                f"{self.config['image_dim']})"
            )


def is_phase_weight(name: str) -> bool:
    """Return whether a weight belongs to the camera phases, which Wan2.1-Fun-Control-Camera does not have."""
    return not set(PHASE_MODULES).isdisjoint(name.split("."))
