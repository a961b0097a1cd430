"""ReCamMaster's network (arXiv 2503.11647) on diffusers' `WanTransformer3DModel`.

Every block adds an embedding of the camera, and the source video is concatenated to the target on the frame axis.

Letters: B rows, C H W latent channels, height, width, F latent frames of one video, D model width, S = 2F * tokens per
frame, s those of these tokens that are this rank's (all, unless ranks share samples), L prompt tokens.
"""

# ruff: noqa: ARG002 - arguments of a network's constructor are read from its configuration

from __future__ import annotations

from diffusers.configuration_utils import register_to_config
from einops import rearrange
from torch import Tensor, nn

from flow_grpo.models.networks import wan_blocks


class ReCamTransformerBlock(wan_blocks.CameraBlock):
    """A Wan block that adds the camera before self-attention and a linear `projector` after it."""

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        num_heads: int,
        qk_norm: str | None = "rms_norm_across_heads",
        cross_attn_norm: bool = False,
        eps: float = 1e-6,
        camera_dim: int = 12,
    ) -> None:
        super().__init__(dim, ffn_dim, num_heads, qk_norm, cross_attn_norm, eps)  # type: ignore[arg-type]
        for attention in (self.attn1, self.attn2):
            wan_blocks.cast_norms(attention, eps)
        self.attn1.set_processor(wan_blocks.SelfAttnProcessor())  # type: ignore[arg-type]
        self.cam_encoder = nn.Linear(camera_dim, dim)
        self.projector = nn.Linear(dim, dim)
        nn.init.zeros_(self.cam_encoder.weight)
        nn.init.zeros_(self.cam_encoder.bias)
        nn.init.eye_(self.projector.weight)
        nn.init.zeros_(self.projector.bias)

    def self_attention(
        self, tokens: Tensor, rotary_emb: wan_blocks.Positions, camera: Tensor, queries: int | None
    ) -> Tensor:
        """Return the output for cameras (B, F, camera_dim) of the target, added to both halves of the tokens."""
        # One embedding per frame is added to all tokens of that frame, in both the target and the source half.
        encoded = rearrange(self.cam_encoder(camera).type_as(tokens), "b f d -> b 1 f 1 d")
        halves = rearrange(tokens, "b (halves f s) d -> b halves f s d", halves=2, f=camera.shape[1])
        tokens = rearrange(halves + encoded, "b halves f s d -> b (halves f s) d")
        attended: Tensor = self.projector(self.attn1(tokens, rotary_emb=rotary_emb, queries=queries))
        return attended


class ReCamTransformer3DModel(wan_blocks.VideoToVideoWan):
    """Wan 2.1 text-to-video transformer with ReCamMaster's camera conditioning.

    `cam_encoder` is initialized to zero and `projector` to the identity, so a new model computes exactly what base Wan
    computes for the target of the same [target | source] latents.
    """

    camera_modules = ("cam_encoder", "projector")
    camera_encoders = ("cam_encoder",)
    variant = "recam"
    _no_split_modules = ["ReCamTransformerBlock"]  # type: ignore[assignment]  # noqa: RUF012 - class attributes
    _repeated_blocks = ["ReCamTransformerBlock"]  # noqa: RUF012

    # diffusers saves and restores the configuration through this signature: every field of config.json must be a
    # parameter of its own.
    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(  # noqa: PLR0913, PLR0917
        self,
        patch_size: tuple[int, ...] = (1, 2, 2),
        num_attention_heads: int = 12,
        attention_head_dim: int = 128,
        in_channels: int = 16,
        out_channels: int = 16,
        text_dim: int = 4096,
        freq_dim: int = 256,
        ffn_dim: int = 8960,
        num_layers: int = 30,
        cross_attn_norm: bool = True,
        qk_norm: str | None = "rms_norm_across_heads",
        eps: float = 1e-6,
        image_dim: int | None = None,
        added_kv_proj_dim: int | None = None,
        rope_max_seq_len: int = 1024,
        pos_embed_seq_len: int | None = None,
        camera_dim: int = 12,
    ) -> None:
        if image_dim is not None or added_kv_proj_dim is not None:
            raise ValueError(
                f"image_dim is {image_dim} and added_kv_proj_dim is {added_kv_proj_dim}, expected None: ReCam extends "
                "the text-to-video model, start from a T2V checkpoint"
            )
        if patch_size[0] != 1:
            raise ValueError(f"patch_size is {tuple(patch_size)}, expected (1, h, w): each latent frame has its pose")
        super().__init__()
        dim = num_attention_heads * attention_head_dim
        self.blocks = nn.ModuleList(
            ReCamTransformerBlock(dim, ffn_dim, num_attention_heads, qk_norm, cross_attn_norm, eps, camera_dim)
            for _ in range(num_layers)
        )

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        camera: Tensor,
    ) -> tuple[Tensor]:
        """Predict the velocity of the target latents; nothing is learned about the source's, which is left out.

        Args:
            hidden_states: (B, C, 2F, H, W) latents, noisy target frames before clean source frames.
            timestep: (B,) in 0..1000, shared by all frames of a row.
            encoder_hidden_states: (B, L, text_dim) prompt embeddings.
            camera: (B, F, camera_dim), row-major 3x4 of the relative target pose at each latent frame.

        Returns:
            A tuple whose only entry is (B, C, F, H, W).

        Raises:
            ValueError: the frames are not twice the camera's, or height and width are not multiples of the patch.
        """
        rows, _, frames = hidden_states.shape[:3]
        expected = (rows, frames // 2, self.config["camera_dim"])
        if frames % 2 or camera.shape != expected:
            raise ValueError(
                f"camera has shape {tuple(camera.shape)} for {frames} latent frames, expected {expected}: latents are "
                "[target | source] on the frame axis with one camera per target frame"
            )
        grid = self.grid(hidden_states, timestep)
        positions = self.positions(wan_blocks.rotary_pairs(self.rope(hidden_states)), grid)
        tokens = rearrange(self.patch_embedding(hidden_states), "b d f h w -> b (f h w) d")
        tokens = positions.share.cut(tokens).contiguous()
        temb, modulation, text, _ = self.condition_embedder(timestep, encoder_hidden_states)
        modulation = rearrange(modulation, "b (six d) -> b six d", six=6)

        tokens = self.through_blocks(tokens, text, None, modulation, positions, camera)
        return (self.head(tokens, temb, positions.share, grid),)
