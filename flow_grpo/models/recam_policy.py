"""ReCam as a policy: frozen codec and text encoder around the camera-controlled transformer.

Letters: B rows, C F H W latent channels, frames, height, width, T h w video frames, rows, columns, L D prompt tokens
and width.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import Tensor, nn

from flow_grpo.maths.poses import camera_tokens
from flow_grpo.models.adapters import adapters_off, apply_training_mode, has_lora, swap_parameters, trained_parameters
from flow_grpo.models.codec import Codec
from flow_grpo.models.encodings import Encodings
from flow_grpo.models.recam_transformer import ReCamTransformer3DModel, load_recam_transformer
from flow_grpo.models.texts import TextEncoder
from flow_grpo.records import Condition, Conditioning
from flow_grpo.runtime import device as devices
from flow_grpo.runtime.ranks.sharding import local, unwrap
from flow_grpo.runtime.tensor_store import TensorStore, content_key
from flow_grpo.settings.schema import ModelConfig, SampleConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TIMESTEPS = 1000.0  # the transformer's clock: timestep = 1000 * sigma, as a float
PARTS = ("transformer", "vae", "text_encoder", "tokenizer")  # of a model folder


@dataclasses.dataclass(frozen=True)
class Networks:
    """The parts of a model folder; codec and text encoder are read when they are first used."""

    transformer: ReCamTransformer3DModel
    codec: Codec
    texts: TextEncoder


def load_networks(
    path: str | Path, dtype: torch.dtype, device: torch.device, *, offload: bool = False, **codec: Any
) -> Networks:
    """Load a folder in diffusers layout; the transformer to the CPU, the codec always in fp32.

    Args:
        path: folder with transformer/, vae/, text_encoder/ and tokenizer/.
        dtype: of the transformer and the text encoder.
        device: where codec and text encoder run.
        offload: keep those two in CPU memory while they are not in use.
        **codec: `tiling` and `slicing` of `Codec`.

    Raises:
        ValueError: a part is missing, with the way to get it, or the transformer is another model.
    """
    folder = check_folder(path)
    return Networks(
        transformer=load_recam_transformer(folder / "transformer", dtype),
        codec=Codec.from_folder(folder / "vae", device=device, offload=offload, **codec),
        texts=TextEncoder.from_folder(folder, dtype, device=device, offload=offload),
    )


def check_folder(path: str | Path) -> Path:
    """Return a model folder that has all its parts.

    Raises:
        ValueError: a part is missing, with the way to get it.
    """
    folder = Path(path)
    absent = [part for part in PARTS if not (folder / part).is_dir()]
    if absent:
        what = f"has no {', '.join(absent)} folder" if folder.is_dir() else "does not exist"
        raise ValueError(
            f"model.path {str(folder)!r} {what}, expected transformer, vae, text_encoder and tokenizer in diffusers "
            "layout; on a connected machine download Wan-AI/Wan2.1-T2V-1.3B-Diffusers and KwaiVGI/ReCamMaster-Wan2.1 "
            "from the Hugging Face hub, run tools/convert_recammaster.py on them and set --config.model.path"
        )
    return folder


def _switch(transformer: ReCamTransformer3DModel, model: ModelConfig, device: torch.device) -> None:
    """Set how the transformer computes, in rollout and update alike.

    Raises:
        ValueError: the device has no such attention backend, or cannot compile.
    """
    known = devices.attention_backends(device)
    if model.attention_backend not in known:
        raise ValueError(
            f"model.attention_backend is {model.attention_backend!r}, must be one of {', '.join(known)} "
            f"on {device.type}"
        )
    if model.attention_backend != known[0]:  # which needs no asking, and diffusers warns of the question
        of_others, _ = _AttentionBackendRegistry.get_active_backend()  # type: ignore[no-untyped-call]
        try:
            transformer.set_attention_backend(model.attention_backend)
        except RuntimeError as error:
            raise ValueError(f"model.attention_backend={model.attention_backend!r} cannot be used: {error}") from error
        finally:  # diffusers also makes it the choice of every other network in the process
            _AttentionBackendRegistry.set_active_backend(of_others)
    if model.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    if model.compile:
        if not devices.supports_compile(device):
            raise ValueError(f"model.compile is true, must be false on {device.type}: its compiler is experimental")
        transformer.compile_repeated_blocks()  # type: ignore[no-untyped-call]


class RecamPolicy:
    """A `Policy` on ReCam: Wan 2.1 with camera control, source video beside the target.

    The reference policy is the network with its adapters off under LoRA; otherwise a frozen copy of the trained weights
    that `keep_reference` makes.

    Args:
        networks: the parts, the transformer with its training mode applied.
        guidance_scale: 1 is none; otherwise one forward of 2B rows, half of them with the negative prompt.
        negative_prompt: text of the unguided half; camera and source are given to both halves.
        max_prompt_tokens: L, prompts are cut and padded to it.
        dtype: what the transformer computes in (autocast); latents and velocities are always fp32.
        device: where everything runs.
        store: where encodings are kept; in memory only unless given.
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
        store: TensorStore | None = None,
    ) -> None:
        self.module: nn.Module = networks.transformer
        devices.place(self.module, device)
        self.codec = networks.codec
        self.texts = networks.texts
        self.encodings = Encodings(
            networks.codec, networks.texts, store or TensorStore(), max_prompt_tokens=max_prompt_tokens
        )
        self.guidance_scale = guidance_scale
        self.negative_prompt = negative_prompt
        self.dtype = dtype
        self.device = device
        self._patch: tuple[int, int, int] = networks.transformer.config["patch_size"]
        self._start: list[Tensor] | None = None

    @classmethod
    def from_config(cls, model: ModelConfig, sample: SampleConfig, device: torch.device) -> RecamPolicy:
        """Load `model.path` and make `model.trained` of it trainable.

        Raises:
            ValueError: unknown dtype, missing or foreign model folder, or nothing to train.
        """
        if model.dtype not in DTYPES:
            raise ValueError(f"model.dtype is {model.dtype!r}, expected one of {list(DTYPES)}")
        networks = load_networks(
            model.path,
            DTYPES[model.dtype],
            device,
            offload=model.offload,
            tiling=model.vae_tiling,
            slicing=model.vae_slicing,
        )
        apply_training_mode(networks.transformer, model)
        _switch(networks.transformer, model, device)
        return cls(
            networks,
            guidance_scale=sample.guidance_scale,
            negative_prompt=sample.negative_prompt,
            max_prompt_tokens=model.max_prompt_tokens,
            dtype=DTYPES[model.dtype],
            device=device,
            store=TensorStore(Path(model.encodings) if model.encodings else None),
        )

    def keep_reference(self, *, offload: bool = False) -> None:
        """Remember the trained weights as they are now for `reference()`: call once they are where they stay.

        Adapters need no copy. With `offload` the copy is kept in CPU memory.
        """
        if not has_lora(self.module):
            place = torch.device("cpu") if offload else self.device
            self._start = [local(parameter).to(place, copy=True) for parameter in self.trained_parameters()]

    @torch.no_grad()
    def encode(self, conditions: Sequence[Condition]) -> Conditioning:
        """Return one row per condition, in order; each distinct condition and prompt passes its encoder once.

        Every video and prompt is encoded alone, so its numbers do not depend on what shares its batch.

        Raises:
            ValueError: the conditions' videos do not fit the codec or one another, see `latent_shape`.
        """
        self.latent_shape(conditions)
        prompts = [self.encodings.prompt(condition.prompt) for condition in conditions]
        guided = self.guidance_scale != 1.0
        negatives = [self.encodings.prompt(self.negative_prompt)] * len(conditions) if guided else None
        cameras = [camera_tokens(condition.target_poses, self.codec.temporal) for condition in conditions]
        return Conditioning(
            prompt_embeds=torch.stack(prompts),
            source_latents=torch.stack([self._source_latents(condition) for condition in conditions]),
            target_cameras=torch.stack(cameras),
            negative_prompt_embeds=torch.stack(negatives) if negatives else None,
        ).to(self.device)

    def _source_latents(self, condition: Condition) -> Tensor:
        """Return (C, F, H, W) CPU latents; of a video from elsewhere than a file, its pixels are its name."""
        video = condition.source_video
        return self.encodings.source(condition.source_id or content_key(video), condition.size, lambda: video)

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
        if (frames - 1) % self.codec.temporal:
            raise ValueError(
                f"videos have {frames} frames, must be {self.codec.temporal}n+1 for this codec; set data.num_frames"
            )
        rows, columns = self.codec.spatial * self._patch[1], self.codec.spatial * self._patch[2]
        if height % rows or width % columns:
            raise ValueError(
                f"videos are {height}x{width}, must be multiples of {rows}x{columns} (codec {self.codec.spatial}, "
                f"patch {self._patch[1]}x{self._patch[2]}); set data.height and data.width"
            )
        return self.latent_size((frames, height, width))

    def latent_size(self, size: tuple[int, int, int]) -> tuple[int, int, int, int]:
        """Return (C, F, H, W) of the latents of a video of (frames, rows, columns) that fits the model."""
        frames, rows, columns = size
        latent_frames = (frames - 1) // self.codec.temporal + 1
        return (self.codec.config["z_dim"], latent_frames, rows // self.codec.spatial, columns // self.codec.spatial)

    def tokens(self, size: tuple[int, int, int]) -> int:
        """Return how many tokens the transformer makes of a target video of (frames, rows, columns)."""
        return math.prod(side // patch for side, patch in zip(self.latent_size(size)[1:], self._patch, strict=True))

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
            latents.append(self.codec.encode(condition.target_video))
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

    def decode(self, latents: Tensor) -> Tensor:
        """Return videos (B, 3, T, h, w) fp32 in [0, 1] of final latents (B, C, F, H, W)."""
        return self.codec.decode(latents)

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
            raise ValueError("no reference policy was kept; call keep_reference() before training")
        else:
            with swap_parameters(self.trained_parameters(), self._start):
                yield

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters the optimizer moves."""
        return list(trained_parameters(self.module).values())
