"""Wan's video codec (VAE): pixels to normalised latents and back; encoder and decoder load at first use.

Letters: C F H W latent channels, frames, height, width, T h w video frames, rows, columns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from einops import rearrange
from safetensors import safe_open
from torch import Tensor

from flow_grpo.models.encoders.small_decoder import SmallDecoder
from flow_grpo.models.files.model_files import check_component, check_finite, read_statistics, stored_shapes, summarize
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.tensor_store import files_key
from flow_grpo.settings.schema import ModelConfig

Half: TypeAlias = Literal["encoder", "decoder"]

# Submodules of each half.
_SUBMODULES: Mapping[Half, tuple[str, str]] = {
    "encoder": ("encoder", "quant_conv"),
    "decoder": ("decoder", "post_quant_conv"),
}
# Height and width of a tile, and of the step to the next one, in latents: `tile_size` and `tile_stride` of
# inference_recammaster.py. Seams are blended by diffusers, not by the original code.
_RECAMMASTER_TILES = (30, 52, 15, 26)
# Dtype of the weights by `model.vae_dtype`.
NETWORK_DTYPE = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


class Codec:
    """A frozen codec.

    Encoder and decoder are two networks, so that a run whose source videos are already encoded loads no encoder.

    Args:
        config: the codec's configuration.
        open_half: loads one half to the CPU.
        identity: identifies the weights in cache keys of encodings.
        settings: of these `vae_tiling`, `vae_tiles`, `vae_slicing`, `vae_dtype` and `offload` count; inputs and results
            are fp32 whatever the dtype.
        device: where it runs.

    Raises:
        ValueError: scale factors in the configuration differ from those of the layers.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        open_half: Callable[[Half], AutoencoderKLWan],
        identity: str,
        settings: ModelConfig,
        device: torch.device,
    ) -> None:
        self.config = config
        self._tiles = settings.vae_tiles if settings.vae_tiling else ""
        self.identity = identity + {"": "", "diffusers": " tiled", "recammaster": " tiled 30x52"}[self._tiles]
        self.identity += "" if settings.vae_dtype == "fp32" else f" {settings.vae_dtype}"
        self.temporal, self.spatial = scale_factors(config)
        self._open_half, self._settings, self._device = open_half, settings, device
        self._dtype = NETWORK_DTYPE[settings.vae_dtype]
        self._halves: dict[Half, AutoencoderKLWan] = {}
        self._small = self._open_small(Path(settings.reward_decoder)) if settings.reward_decoder else None
        channels = (1, -1, 1, 1, 1)
        self._mean = torch.tensor(config["latents_mean"], device=device).view(channels)
        self._std = torch.tensor(config["latents_std"], device=device).view(channels)

    @classmethod
    def from_folder(cls, folder: Path, settings: ModelConfig, device: torch.device) -> Codec:
        """Return the codec of a folder in diffusers layout, without loading weights.

        ValueError if a file is missing or damaged, the weights are not those of config.json, or as in `Codec`.
        """
        check_component(folder)
        outline, stored = _on_meta(folder), stored_shapes(folder)
        config: Mapping[str, Any] = outline.config
        wanted = {name: tuple(value.shape) for name, value in outline.state_dict().items()}
        if wrong := sorted(name for name in {*wanted, *stored} if wanted.get(name) != stored.get(name)):
            raise ValueError(
                f"codec folder {folder} does not hold the weights of config.json: missing, unexpected or of another "
                f"shape are {summarize(wrong)}; download vae/ again"
            )
        read_statistics(folder / "config.json", config, ("latents_mean", "latents_std"), config["z_dim"])
        dtype = NETWORK_DTYPE[settings.vae_dtype]
        return cls(config, lambda half: _load_half(folder, half, dtype), files_key(folder), settings, device)

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        """Return (C, F, H, W) fp32 CPU latents of a video (3, T, h, w) in [0, 1]: the mean, normalised per channel."""
        with self._ready("encoder") as network:
            batch = rearrange(video, "c t h w -> 1 c t h w").to(self._device, torch.float32)
            mode = network.encode((2.0 * batch - 1.0).to(self._dtype), return_dict=False)[0].mode().float()
        normalised: Tensor = rearrange((mode - self._mean) / self._std, "1 c f h w -> c f h w")
        return normalised.cpu()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return videos (B, 3, T, h, w) fp32 in [0, 1] of normalised latents (B, C, F, H, W)."""
        with self._ready("decoder") as network:
            given = (latents.float() * self._std + self._mean).to(self._dtype)
            decoded: Tensor = network.decode(given, return_dict=False)[0].float()
        return (0.5 + 0.5 * decoded).clamp(0.0, 1.0)

    @torch.no_grad()
    def decode_for_rewards(self, latents: Tensor) -> Tensor:
        """Return the same by the small decoder `model.reward_decoder`, if there is one."""
        if self._small is None:
            return self.decode(latents)
        with device_api.visiting(self._small, self._device, stays=not self._settings.offload):
            decoded: Tensor = self._small(latents.to(self._dtype)).float()
        return decoded.clamp(0.0, 1.0)

    def _open_small(self, file: Path) -> SmallDecoder:
        small = SmallDecoder.from_file(file, self._dtype)
        wanted = self.config["z_dim"], self.temporal, self.spatial
        if (given := (small.latent_channels, small.temporal, small.spatial)) != wanted:
            raise ValueError(
                f"model.reward_decoder {str(file)!r} is for latents of (channels, frames, pixels) {given}, must be for "
                f"{wanted}, those of the codec; give the decoder of this model's codec"
            )
        return small

    @contextlib.contextmanager
    def _ready(self, half: Half) -> Iterator[AutoencoderKLWan]:
        if half not in self._halves:
            network = self._open_half(half).requires_grad_(False).eval()
            if self._tiles == "diffusers":
                network.enable_tiling()
            elif self._tiles == "recammaster":
                network.enable_tiling(*(side * self.spatial for side in _RECAMMASTER_TILES))
            if self._settings.vae_slicing:
                network.enable_slicing()  # type: ignore[no-untyped-call]
            self._halves[half] = network
        tf32 = self._settings.vae_dtype == "tf32"
        rounded = device_api.rounded_convolutions(self._device) if tf32 else contextlib.nullcontext()
        with device_api.visiting(self._halves[half], self._device, stays=not self._settings.offload), rounded:
            yield self._halves[half]


def _load_half(folder: Path, half: Half, dtype: torch.dtype) -> AutoencoderKLWan:
    # To the CPU, without reading the other half.
    network = _on_meta(folder)
    for name in _SUBMODULES["decoder" if half == "encoder" else "encoder"]:
        setattr(network, name, None)
    wanted = tuple(f"{name}." for name in _SUBMODULES[half])
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            state |= {name: opened.get_tensor(name).to(dtype) for name in opened.keys() if name.startswith(wanted)}  # noqa: SIM118
    check_finite(state, folder)
    network.load_state_dict(state, assign=True)
    return network


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return a codec folder's configuration; what it lacks, be it all, is diffusers' default, Wan's own codec."""
    found: Mapping[str, Any] = _on_meta(folder).config
    return found


def _on_meta(folder: Path) -> AutoencoderKLWan:
    try:
        with torch.device("meta"):
            named = (folder / "config.json").is_file()
            config = AutoencoderKLWan.load_config(str(folder)) if named else {}
            network: AutoencoderKLWan = AutoencoderKLWan.from_config(config)
    except Exception as error:  # diffusers raises a different type for each kind of nonsense in config.json
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{folder / 'config.json'} is no codec's ({type(error).__name__}: {reason}); download vae/ again"
        ) from error
    return network


def scale_factors(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the codec's temporal and spatial compression; ValueError if config and layers differ in them."""
    built = (2 ** sum(config["temperal_downsample"]), 2 ** (len(config["dim_mult"]) - 1) * (config["patch_size"] or 1))
    named = (config["scale_factor_temporal"], config["scale_factor_spatial"])
    if named != built:
        raise ValueError(
            f"vae config has scale_factor_temporal, scale_factor_spatial = {named}, its layers compress by {built}; "
            "correct vae/config.json"
        )
    return built
