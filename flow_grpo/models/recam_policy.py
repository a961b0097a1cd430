"""ReCam as a policy: frozen codec and text encoder around the camera-controlled transformer.

Letters: B rows, C F H W latent channels, frames, height, width, T h w video frames, rows, columns, L D prompt tokens
and width.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from einops import rearrange
from torch import Tensor, nn
from transformers import AutoModelForTextEncoding, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from flow_grpo.config import ModelConfig, SampleConfig
from flow_grpo.maths.poses import camera_tokens
from flow_grpo.models.adapters import (
    adapters_off,
    apply_training_mode,
    has_lora,
    swapped_in,
    trained_parameters,
    unwrap,
)
from flow_grpo.models.recam_transformer import ReCamTransformer3DModel, load_recam_transformer
from flow_grpo.records import Condition, Conditioning
from flow_grpo.runtime import device as devices

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TIMESTEPS = 1000.0  # the transformer's clock: timestep = 1000 * sigma, as a float
_KEPT = 64  # encoded conditions and prompts remembered on the CPU, 0.5 GiB of latents at 81x480x832


@dataclasses.dataclass(frozen=True)
class Networks:
    """The four parts of a model folder."""

    transformer: ReCamTransformer3DModel
    vae: AutoencoderKLWan
    text_encoder: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_networks(path: str | Path, dtype: torch.dtype) -> Networks:
    """Load a folder in diffusers layout to the CPU; the codec always in fp32.

    Args:
        path: folder with transformer/, vae/, text_encoder/ and tokenizer/.
        dtype: of the transformer and the text encoder.

    Raises:
        ValueError: a part is missing, with the way to get it, or the transformer is another model.
    """
    folder = Path(path)
    absent = [part.name for part in dataclasses.fields(Networks) if not (folder / part.name).is_dir()]
    if absent:
        what = f"has no {', '.join(absent)} folder" if folder.is_dir() else "does not exist"
        raise ValueError(
            f"model.path {str(folder)!r} {what}, expected transformer, vae, text_encoder and tokenizer in diffusers "
            "layout; on a connected machine download Wan-AI/Wan2.1-T2V-1.3B-Diffusers and KwaiVGI/ReCamMaster-Wan2.1 "
            "from the Hugging Face hub, run tools/convert_recammaster.py on them and set --config.model.path"
        )
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # drawn by every rank over the console
    return Networks(
        transformer=load_recam_transformer(folder / "transformer", dtype),
        vae=AutoencoderKLWan.from_pretrained(str(folder / "vae"), torch_dtype=torch.float32).eval(),
        text_encoder=AutoModelForTextEncoding.from_pretrained(str(folder / "text_encoder"), dtype=dtype).eval(),
        tokenizer=AutoTokenizer.from_pretrained(str(folder / "tokenizer")),
    )


class RecamPolicy:
    """A `Policy` on ReCam: Wan 2.1 with camera control, source video beside the target.

    The reference policy is the network with its adapters off under LoRA; otherwise a frozen copy of the trained weights
    made here when `keep_reference` is set, so construct the policy before a checkpoint is loaded into it.

    Args:
        networks: the parts, the transformer with its training mode applied.
        guidance_scale: 1 is none; otherwise one forward of 2B rows, half of them with the negative prompt.
        negative_prompt: text of the unguided half; camera and source are given to both halves.
        max_prompt_tokens: L, prompts are cut and padded to it.
        dtype: what the transformer computes in (autocast); latents and velocities are always fp32.
        device: where everything runs.
        keep_reference: keep what `reference()` needs.

    Raises:
        ValueError: the codec's configured scale factors are not those of its layers.
    """

    def __init__(
        self,
        networks: Networks,
        *,
        guidance_scale: float = 1.0,
        negative_prompt: str = "",
        max_prompt_tokens: int = 512,
        dtype: torch.dtype = torch.float32,
        device: torch.device,
        keep_reference: bool = False,
    ) -> None:
        parts: tuple[nn.Module, ...] = (networks.transformer, networks.vae, networks.text_encoder)
        for part in parts:
            part.to(device)
        self.module: nn.Module = networks.transformer
        self.vae = networks.vae.requires_grad_(False)
        self.text_encoder = networks.text_encoder.requires_grad_(False)
        self.tokenizer = networks.tokenizer
        self.guidance_scale = guidance_scale
        self.negative_prompt = negative_prompt
        self.max_prompt_tokens = max_prompt_tokens
        self.dtype = dtype
        self.device = device
        self._temporal, self._spatial = _scale_factors(networks.vae)
        self._patch: tuple[int, int, int] = networks.transformer.config["patch_size"]
        channels = (1, -1, 1, 1, 1)
        self._mean = torch.tensor(self.vae.config["latents_mean"], device=device).view(channels)
        self._std = torch.tensor(self.vae.config["latents_std"], device=device).view(channels)
        self._trained = list(trained_parameters(self.module).values())
        self._start: list[Tensor] | None = None
        if keep_reference and not has_lora(self.module):
            self._start = [parameter.detach().clone() for parameter in self._trained]
        self._source_latents = _Memory()
        self._prompt_embeds = _Memory()

    @classmethod
    def from_config(
        cls, model: ModelConfig, sample: SampleConfig, device: torch.device, *, keep_reference: bool = False
    ) -> RecamPolicy:
        """Load `model.path` and make `model.trained` of it trainable.

        Raises:
            ValueError: unknown dtype, missing or foreign model folder, or nothing to train.
        """
        if model.dtype not in DTYPES:
            raise ValueError(f"model.dtype is {model.dtype!r}, expected one of {list(DTYPES)}")
        networks = load_networks(model.path, DTYPES[model.dtype])
        apply_training_mode(networks.transformer, model)
        if model.gradient_checkpointing:
            networks.transformer.enable_gradient_checkpointing()
        return cls(
            networks,
            guidance_scale=sample.guidance_scale,
            negative_prompt=sample.negative_prompt,
            max_prompt_tokens=model.max_prompt_tokens,
            dtype=DTYPES[model.dtype],
            device=device,
            keep_reference=keep_reference,
        )

    @torch.no_grad()
    def encode(self, conditions: Sequence[Condition]) -> Conditioning:
        """Return one row per condition, in order; each distinct condition and prompt passes its encoder once.

        Every video and prompt is encoded alone, so its numbers do not depend on what shares its batch.

        Raises:
            ValueError: the conditions' videos do not fit the codec or one another, see `latent_shape`.
        """
        self.latent_shape(conditions)
        prompts = [self._encode_prompt(condition.prompt) for condition in conditions]
        guided = self.guidance_scale != 1.0
        negatives = [self._encode_prompt(self.negative_prompt)] * len(conditions) if guided else None
        cameras = [camera_tokens(condition.target_poses, self._temporal) for condition in conditions]
        return Conditioning(
            prompt_embeds=torch.stack(prompts),
            source_latents=torch.stack([self._encode_source(condition) for condition in conditions]),
            target_cameras=torch.stack(cameras),
            negative_prompt_embeds=torch.stack(negatives) if negatives else None,
        ).to(self.device)

    def latent_shape(self, conditions: Sequence[Condition]) -> tuple[int, int, int, int]:
        """Return (C, F, H, W) of the target latents.

        Raises:
            ValueError: the videos differ in shape, are not 4n+1 frames long, or their sides are no multiples of what
                codec and patches need.
        """
        shapes = {tuple(condition.source_video.shape[1:]) for condition in conditions}
        if len(shapes) != 1:
            raise ValueError(f"conditions of one batch need one video shape (T, h, w), got {sorted(shapes)}")
        frames, height, width = shapes.pop()
        if (frames - 1) % self._temporal:
            raise ValueError(
                f"videos have {frames} frames, must be {self._temporal}n+1 for this codec; set data.num_frames"
            )
        rows, columns = self._spatial * self._patch[1], self._spatial * self._patch[2]
        if height % rows or width % columns:
            raise ValueError(
                f"videos are {height}x{width}, must be multiples of {rows}x{columns} (codec {self._spatial}, patch "
                f"{self._patch[1]}x{self._patch[2]}); set data.height and data.width"
            )
        latent_frames = (frames - 1) // self._temporal + 1
        return (self.vae.config["z_dim"], latent_frames, height // self._spatial, width // self._spatial)

    def tokens(self, size: tuple[int, int, int]) -> int:
        """Return how many tokens the transformer makes of a target video of (frames, rows, columns)."""
        frames, rows, columns = size
        latent_frames = (frames - 1) // self._temporal + 1
        return (
            latent_frames
            // self._patch[0]
            * (rows // (self._spatial * self._patch[1]))
            * (columns // (self._spatial * self._patch[2]))
        )

    @torch.no_grad()
    def encode_targets(self, conditions: Sequence[Condition]) -> Tensor:
        """Return the clean, normalised latents (B, C, F, H, W) of the conditions' true target videos.

        Raises:
            ValueError: a condition has no target video, or as `latent_shape`.
        """
        self.latent_shape(conditions)
        latents = []
        for condition in conditions:
            if condition.target_video is None:
                raise ValueError(
                    f"scene {condition.scene}: no true video of {condition.target_camera}, needed to learn from it"
                )
            latents.append(self._encode_video(condition.target_video))
        return torch.stack(latents).to(self.device)

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the fp32 velocity (B, C, F, H, W), guidance included, for latents at noise levels sigma (B,)."""
        if self.guidance_scale == 1.0:
            return self._forward(latents, sigma, conditioning, conditioning.prompt_embeds)
        negative = conditioning.negative_prompt_embeds
        assert negative is not None, "conditioning was encoded without guidance"
        doubled = Conditioning.concatenate([conditioning, conditioning])
        prompts = torch.cat([conditioning.prompt_embeds, negative])
        both = self._forward(torch.cat([latents, latents]), torch.cat([sigma, sigma]), doubled, prompts)
        towards, away = both.chunk(2)
        return away + self.guidance_scale * (towards - away)

    def _forward(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, prompts: Tensor) -> Tensor:
        # Only a backward pass needs the wrapper that synchronises gradients.
        network = self.module if torch.is_grad_enabled() else unwrap(self.module)
        joined = torch.cat([latents, conditioning.source_latents], dim=2)
        with devices.autocast(self.device, self.dtype):
            predicted: Tensor = network(joined, TIMESTEPS * sigma, prompts, conditioning.target_cameras)[0]
        # What is predicted for the source half has no meaning.
        return predicted[:, :, : latents.shape[2]].float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return videos (B, 3, T, h, w) fp32 in [0, 1] of final latents (B, C, F, H, W)."""
        decoded: Tensor = self.vae.decode(latents.float() * self._std + self._mean, return_dict=False)[0]
        return (0.5 + 0.5 * decoded).clamp(0.0, 1.0)

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, `velocity` is that of the policy training started from.

        Raises:
            ValueError: parameters themselves are trained and no copy was kept.
        """
        if has_lora(self.module):
            with adapters_off(self.module):
                yield
        elif self._start is None:
            raise ValueError("no reference policy was kept; make the policy with keep_reference=True")
        else:
            with swapped_in(self._trained, self._start):
                yield

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters the optimizer moves."""
        return self._trained

    def _encode_source(self, condition: Condition) -> Tensor:
        """Return (C, F, H, W) CPU latents: the codec's mean, normalised per channel."""
        video = condition.source_video
        names = (condition.scene, condition.source_camera, condition.target_camera)
        return self._source_latents.get((condition.index, *names, *video.shape), lambda: self._encode_video(video))

    def _encode_video(self, video: Tensor) -> Tensor:
        batch = rearrange(video, "c t h w -> 1 c t h w").to(self.device, torch.float32)
        mode = self.vae.encode(2.0 * batch - 1.0, return_dict=False)[0].mode()
        normalised: Tensor = rearrange((mode - self._mean) / self._std, "1 c f h w -> c f h w")
        return normalised.cpu()

    def _encode_prompt(self, prompt: str) -> Tensor:
        """Return (L, D) CPU fp32 embeddings, zero after the prompt's true length."""
        return self._prompt_embeds.get(prompt, lambda: self._embed(prompt))

    def _embed(self, prompt: str) -> Tensor:
        text = " ".join(prompt.split())
        tokens = self.tokenizer([text], truncation=True, max_length=self.max_prompt_tokens, return_tensors="pt")
        tokens = tokens.to(self.device)
        states = self.text_encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state[0]
        # Unpadded, then zeros: the same as padding first and blanking the padding's embeddings, without its cost.
        embeds = torch.zeros((self.max_prompt_tokens, states.shape[-1]))
        embeds[: len(states)] = states.float().cpu()
        return embeds


class _Memory:
    """The last few results of a pure function, by key."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Tensor] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        if key not in self._known:
            self._known[key] = make()
        self._known.move_to_end(key)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return self._known[key]


def _scale_factors(vae: AutoencoderKLWan) -> tuple[int, int]:
    """Return the codec's temporal and spatial compression.

    Raises:
        ValueError: the configuration says something else than the layers; its defaults are those of Wan's own codec.
    """
    config = vae.config
    built = (2 ** sum(config["temperal_downsample"]), 2 ** (len(config["dim_mult"]) - 1) * (config["patch_size"] or 1))
    named = (config["scale_factor_temporal"], config["scale_factor_spatial"])
    if named != built:
        raise ValueError(
            f"vae config has scale_factor_temporal, scale_factor_spatial = {named}, its layers compress by {built}; "
            "correct vae/config.json"
        )
    return built
