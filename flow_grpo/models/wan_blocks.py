"""What the video-to-video networks on diffusers' Wan share: norms, the walk through the blocks, the head, loading.

Letters: B rows, C F H W latent channels, frames, height, width, D model width, S tokens.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import torch
from diffusers.models.transformers.transformer_wan import WanAttention, WanTransformer3DModel
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of rotary angles."""


Network = TypeVar("Network", bound="VideoToVideoWan")


class CastingRMSNorm(nn.RMSNorm):
    """RMSNorm in its input's dtype: an fp32 weight (trained, under autocast) would disable the fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., D) over its root mean square, times the weight."""
        assert self.weight is not None
        return functional.rms_norm(x, self.normalized_shape, self.weight.type_as(x), self.eps)


def cast_norms(attention: WanAttention, eps: float) -> None:
    """Replace an attention's RMSNorms by new ones of `CastingRMSNorm`, in place."""
    for name in ("norm_q", "norm_k", "norm_added_k"):
        if hasattr(attention, name):
            setattr(attention, name, CastingRMSNorm(attention.inner_dim, eps=eps))


class VideoToVideoWan(WanTransformer3DModel):
    """Base class of networks that take [target | source] latents on the frame axis.

    Attributes:
        camera_modules: names of the modules that read the camera, which plain Wan does not have.
        camera_encoders: those of them that `model.trained=camera` trains, in every block.
        variant: part of the file names of an exported transformer's weights, as of any diffusers variant: plain Wan
            does not find them, which would otherwise load all but the camera modules, with a warning.
    """

    camera_modules: ClassVar[tuple[str, ...]]
    camera_encoders: ClassVar[tuple[str, ...]]
    variant: ClassVar[str]
    # The base class's context-parallel plan would shard the tokens but not the camera.
    _cp_plan = None  # type: ignore[assignment]

    @classmethod
    def from_pretrained(
        cls: type[Network], pretrained_model_name_or_path: str | PathLike[Any] | None, **settings: Any
    ) -> Network:
        """Load a folder as diffusers does, an exported transformer (`save_adapter`) included.

        Raises:
            OSError: it holds no weights.
        """
        folder = str(pretrained_model_name_or_path)
        if any(Path(folder, settings.get("subfolder") or "").glob(f"*.{cls.variant}*")):
            settings = {"variant": cls.variant} | settings
        loaded: Any = super().from_pretrained(folder, **settings)
        return cast(Network, loaded)

    def through_blocks(self, tokens: Tensor, *arguments: Any) -> Tensor:
        """Return the (B, S, D) tokens after all blocks, checkpointed if that is on; `arguments` go to every block."""
        checkpointing = self.gradient_checkpointing and torch.is_grad_enabled()
        checkpointed: Any = self._gradient_checkpointing_func
        for block in self.blocks:
            tokens = checkpointed(block, tokens, *arguments) if checkpointing else block(tokens, *arguments)
        return tokens

    def head(self, tokens: Tensor, temb: Tensor, grid: dict[str, int]) -> Tensor:
        """Return the (B, C, F, H, W) velocity of tokens (B, S, D), modulated by the timestep's temb (B, D).

        Args:
            tokens: (B, S, D).
            temb: (B, D).
            grid: tokens of a video along its axes: f frames, h rows, w columns; S = f h w.
        """
        _, patch_h, patch_w = self.config["patch_size"]
        shift, scale = (self.scale_shift_table + rearrange(temb, "b d -> b 1 d")).chunk(2, dim=1)
        tokens = (self.norm_out(tokens.float()) * (1 + scale) + shift).type_as(tokens)
        velocity: Tensor = rearrange(
            self.proj_out(tokens), "b (f h w) (p q c) -> b c f (h p) (w q)", p=patch_h, q=patch_w, **grid
        )
        return velocity

    def check_latents(self, hidden_states: Tensor, timestep: Tensor) -> None:
        """Raise ValueError unless there is one timestep a row, and height and width are multiples of the patch."""
        rows, (height, width) = len(hidden_states), hidden_states.shape[-2:]
        if timestep.shape != (rows,):
            raise ValueError(f"timestep has shape {tuple(timestep.shape)}, expected ({rows},): one per row")
        _, patch_h, patch_w = self.config["patch_size"]
        if height % patch_h or width % patch_w:
            raise ValueError(f"latents are {height}x{width}, expected multiples of the patch {patch_h}x{patch_w}")
