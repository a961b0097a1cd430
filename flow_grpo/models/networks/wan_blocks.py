"""What the video-to-video networks on diffusers' Wan share: attention, norms, the walk through the blocks, the head.

Letters: B rows, C F H W latent channels, frames, height, width, D model width, S tokens, target before source, s those
of them that are this rank's (all, unless ranks share samples), Q of these whose output is asked for, P channel pairs of
a head.
"""

from __future__ import annotations

import inspect
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention, WanTransformer3DModel, WanTransformerBlock
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from flow_grpo.models.networks.sparse_walk import SparseWalk
from flow_grpo.runtime.ranks.context_parallel import ContextParallel, Share

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of rotary angles, one per channel pair."""


class Positions(NamedTuple):
    """The rotary angles of this rank's tokens, (1, s, 1, P) cosines and sines, and which tokens these are.

    `walk` is that of an approximate call; None where all is computed exactly.
    """

    angles: Rotary
    share: Share
    walk: SparseWalk | None = None


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


def rotary_pairs(rotary: tuple[Tensor, Tensor]) -> Rotary:
    """Return (1, S, 1, P) cosines and sines of what diffusers' `rope` returns, which has each pair's value twice."""
    cos, sin = rotary
    return cos[..., 0::2], sin[..., 1::2]


def rotate(x: Tensor, angles: Rotary) -> Tensor:
    """Rotate neighbouring channels (2i, 2i + 1) of x (B, S, heads, 2P) by angles that broadcast to (B, S, heads, P)."""
    cos, sin = angles
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).type_as(x)


def first(angles: Rotary, queries: int | None) -> Rotary:
    """Return the angles of the first tokens; of all for None."""
    cos, sin = angles
    return cos[:, :queries], sin[:, :queries]


def split_heads(x: Tensor, attn: Any) -> Tensor:
    """Split (B, S, D) into (B, S, heads, head width)."""
    split: Tensor = x.unflatten(2, (attn.heads, -1))
    return split


def attend(query: Tensor, key: Tensor, value: Tensor, backend: Any, walk: SparseWalk | None = None) -> Tensor:
    """Return the attention (B, Q, heads, head width) of such queries to keys and values (B, S, heads, head width)."""
    if walk is not None:
        read: Tensor = walk.attend(query, key, value)
        return read
    attended: Tensor = dispatch_attention_fn(query, key, value, backend=backend)
    return attended.type_as(query)


def project(x: Tensor, attn: Any) -> Tensor:
    """Return what an attention's output layers make, (B, Q, D), of attention (B, Q, heads, head width)."""
    x = x.flatten(2, 3)
    for layer in attn.to_out:
        x = layer(x)
    return x


class SelfAttnProcessor:
    """Self-attention with rotary positions, through diffusers' choice of attention kernels.

    As diffusers' own, bit for bit, but that it can leave out the output of the source's tokens.
    """

    _attention_backend: Any = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        _text: None,
        _mask: None,
        rotary_emb: Positions,
        *,
        queries: int | None = None,
    ) -> Tensor:
        """Return the (B, Q, D) output of the first Q tokens of hidden states (B, s, D); of all for None."""
        angles, share, walk = rotary_emb
        query = split_heads(attn.norm_q(attn.to_q(hidden_states[:, :queries])), attn)
        query = share.to_heads(rotate(query, first(angles, queries)))
        key = share.to_keys(rotate(split_heads(attn.norm_k(attn.to_k(hidden_states)), attn), angles))
        value = share.to_keys(split_heads(attn.to_v(hidden_states), attn))
        return project(share.to_tokens(attend(query, key, value, self._attention_backend, walk)), attn)


class CameraBlock(WanTransformerBlock):
    """A Wan block whose self-attention reads the camera.

    The camera is an argument, not module state: gradient checkpointing then recomputes every forward with the camera of
    that forward.
    """

    def self_attention(self, tokens: Tensor, rotary_emb: Positions, camera: Tensor, queries: int | None) -> Tensor:
        """Return the (B, Q, D) output of modulated tokens (B, s, D); the other arguments are those of `forward`."""
        raise NotImplementedError

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        text: Tensor,
        image: Tensor | None,
        temb: Tensor,
        rotary_emb: Positions,
        camera: Tensor,
        queries: int | None = None,
    ) -> Tensor:
        """Return the (B, Q, D) tokens after this block, the first Q ones only.

        Args:
            hidden_states: (B, s, D), target frames before source frames.
            text: (B, L, D) embedded prompt.
            image: (B, I, D) embedded image, or None where cross-attention reads none.
            temb: (B, 6, D) modulation of the timestep.
            rotary_emb: positions of the tokens.
            camera: as the block's `self_attention` reads it.
            queries: Q; None for all.
        """
        shift, scale, gate, ff_shift, ff_scale, ff_gate = (self.scale_shift_table + temb.float()).chunk(6, dim=1)

        normed = (self.norm1(hidden_states.float()) * (1 + scale) + shift).type_as(hidden_states)
        attended = self.self_attention(normed, rotary_emb, camera, queries)
        hidden_states = (hidden_states[:, :queries].float() + attended * gate).type_as(hidden_states)

        normed = self.norm2(hidden_states.float()).type_as(hidden_states)
        hidden_states = hidden_states + self.attn2(normed, text, **({} if image is None else {"image": image}))

        normed = (self.norm3(hidden_states.float()) * (1 + ff_scale) + ff_shift).type_as(hidden_states)
        fed: Tensor = self.ffn(normed)
        return (hidden_states.float() + fed.float() * ff_gate).type_as(hidden_states)


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
    context = ContextParallel()  # the ranks that share the tokens of a sample
    walk: SparseWalk | None = None  # of an approximate call
    # The base class's plan of diffusers' own context parallelism would share the tokens but not the camera.
    _cp_plan = None  # type: ignore[assignment]

    def __init__(self) -> None:
        # diffusers has filled `config` before the body of a subclass's constructor runs. The subclass makes the blocks.
        given = dict(self.config)
        shared = inspect.signature(WanTransformer3DModel).parameters.keys() - {"num_layers", "added_kv_proj_dim"}
        super().__init__(num_layers=0, **{name: given[name] for name in shared})
        self.register_to_config(num_layers=given["num_layers"])  # type: ignore[no-untyped-call]

    @classmethod
    def from_pretrained(
        cls: type[Network], pretrained_model_name_or_path: str | PathLike[Any] | None, **settings: Any
    ) -> Network:
        """Load a folder as diffusers does, an exported transformer (`save_adapter`) included."""
        folder = str(pretrained_model_name_or_path)
        if any(Path(folder, settings.get("subfolder") or "").glob(f"*.{cls.variant}*")):
            settings = {"variant": cls.variant} | settings
        loaded: Any = super().from_pretrained(folder, **settings)
        return cast(Network, loaded)

    def positions(self, rotary: Rotary, grid: dict[str, int]) -> Positions:
        """Return this rank's positions, of the rotary angles (1, S, 1, P) of all tokens; grid as for `head`."""
        share = self.context.share(grid["h"] * grid["w"])
        cos, sin = map(share.cut, rotary)
        return Positions((cos, sin), share, self.walk)

    def through_blocks(self, tokens: Tensor, *arguments: Any) -> Tensor:
        """Return the target's tokens after all blocks, (B, s/2, D), of (B, s, D); checkpointed if that is on.

        `arguments` go to every block, and how many tokens to return: the last one computes the target's only.
        """
        checkpointing = self.gradient_checkpointing and torch.is_grad_enabled()
        checkpointed: Any = self._gradient_checkpointing_func
        targets, walk = tokens.shape[1] // 2, self.walk
        for number, block in enumerate(self.blocks):
            if walk:
                tokens = walk.complete(number, tokens, targets)
            alone = block is self.blocks[-1] or (walk and not walk.renewing)
            given = (tokens, *arguments, targets if alone else None)
            tokens = checkpointed(block, *given) if checkpointing else block(*given)
        return tokens

    def head(self, tokens: Tensor, temb: Tensor, share: Share, grid: dict[str, int]) -> Tensor:
        """Return the (B, C, F, H, W) velocity of this rank's tokens, modulated by the timestep.

        Args:
            tokens: (B, s/2, D), the target's.
            temb: (B, D), of the timestep.
            share: which tokens they are.
            grid: patches of a video along its axes: f frames, h rows, w columns.
        """
        _, patch_h, patch_w = self.config["patch_size"]
        shift, scale = (self.scale_shift_table + rearrange(temb, "b d -> b 1 d")).chunk(2, dim=1)
        tokens = (self.norm_out(tokens.float()) * (1 + scale) + shift).type_as(tokens)
        velocity: Tensor = rearrange(
            share.join(self.proj_out(tokens)), "b (f h w) (p q c) -> b c f (h p) (w q)", p=patch_h, q=patch_w, **grid
        )
        return velocity

    def grid(self, hidden_states: Tensor, timestep: Tensor) -> dict[str, int]:
        """Return the patches of a video along its axes, see `head`, of latents (B, C, 2F, H, W).

        Raises:
            ValueError: there is not one timestep a row, or height and width are not multiples of the patch.
        """
        rows, (frames, height, width) = len(hidden_states), hidden_states.shape[2:]
        if timestep.shape != (rows,):
            raise ValueError(f"timestep has shape {tuple(timestep.shape)}, expected ({rows},): one per row")
        _, patch_h, patch_w = self.config["patch_size"]
        if height % patch_h or width % patch_w:
            raise ValueError(f"latents are {height}x{width}, expected multiples of the patch {patch_h}x{patch_w}")
        return {"f": frames // 2, "h": height // patch_h, "w": width // patch_w}
