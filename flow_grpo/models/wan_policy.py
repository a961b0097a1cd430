"""The policy of every model on Wan's parts: a frozen codec and text encoder around the model's transformer.

Letters: B rows, C F H W latent channels, frames, height, width, T h w video frames, rows, columns, L D prompt tokens
and width.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn

from flow_grpo.models.adapters import adapters_off, apply_training_mode, has_lora, swap_parameters, trained_parameters
from flow_grpo.models.encoders.codec import Codec
from flow_grpo.models.encoders.encodings import Encodings
from flow_grpo.models.encoders.images import ImageEncoder
from flow_grpo.models.encoders.texts import TextEncoder
from flow_grpo.models.files.lora_files import start_from
from flow_grpo.models.networks.recomputation import set_checkpointing
from flow_grpo.models.networks.sparse_walk import SparseWalk
from flow_grpo.models.networks.transformers import BOUNDARY, is_camera_weight, load_transformer
from flow_grpo.models.video_model import VideoModel
from flow_grpo.records import Condition, Conditioning, Guidance
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.device import DTYPES
from flow_grpo.runtime.ranks.context_parallel import ContextParallel
from flow_grpo.runtime.ranks.sharding import local, true_on_any_rank, unwrap
from flow_grpo.runtime.tensor_store import TensorStore, files_key
from flow_grpo.settings.errors import refusal
from flow_grpo.settings.schema import ModelConfig, SampleConfig

TIMESTEPS = 1000.0  # timestep = 1000 * sigma, not rounded to an integer


@dataclasses.dataclass(frozen=True)
class Networks:
    """The networks of a model folder, and how they are called; codec and text encoder are loaded at first use."""

    model: VideoModel
    transformer: WanTransformer3DModel
    codec: Codec
    texts: TextEncoder
    images: ImageEncoder | None = None
    identity: Mapping[str, str] = dataclasses.field(default_factory=dict)  # part of the folder -> hash of its files


def load_networks(model: VideoModel, settings: ModelConfig, device: torch.device) -> Networks:
    """Load the folder `model.path` in diffusers layout, its transformer to the CPU; all others run on `device`.

    Raises:
        ValueError: a component is missing or damaged, or the transformer is another model.
    """
    codec, texts, images = open_encoders(model, settings, device)
    folder = Path(settings.path)
    transformer = load_transformer(model.network, folder / "transformer", DTYPES[settings.dtype])
    if boundary := transformer.config.get(BOUNDARY):
        raise ValueError(
            f"{folder / 'transformer'} was exported for noise levels of at least {boundary:g}, below which the weights "
            "before training answer: give the folder with those, and this one as --adapter"
        )
    wanted = model.published["in_channels"] // 16 * codec.config["z_dim"]  # those of Wan 2.1 have 16 latent channels
    given = transformer.config["in_channels"]
    if given != wanted:  # an image-to-video model of the same class, for one
        raise ValueError(
            f"{folder / 'transformer'} reads {given} channels, must read {wanted} with this codec: it is of another "
            "model than model.kind names; give its folder"
        )
    widths = [("text_encoder", texts.width, "text_dim")]
    widths += [] if images is None else [("image_encoder", images.width, "image_dim")]
    for encoder, made, field in widths:
        if made != (read := transformer.config[field]):
            raise ValueError(
                f"{folder / encoder} makes features of width {made}, the transformer reads {read}: they are of "
                "different models; give a folder whose parts belong together"
            )
    identity = {part: files_key(folder / part) for part in model.components}
    return Networks(model=model, transformer=transformer, codec=codec, texts=texts, images=images, identity=identity)


def open_encoders(
    model: VideoModel, settings: ModelConfig, device: torch.device
) -> tuple[Codec, TextEncoder, ImageEncoder | None]:
    """Open the frozen parts of the folder `model.path`, an image encoder if the model has one; else ValueError."""
    folder, dtype = check_folder(model, settings.path), DTYPES[settings.dtype]
    placement: dict[str, Any] = {"device": device, "offload": settings.offload}
    codec = Codec.from_folder(folder / "vae", settings, device)
    texts = TextEncoder.from_folder(folder, dtype, **placement)
    if "image_encoder" not in model.components:
        return codec, texts, None
    return codec, texts, ImageEncoder.from_folder(folder, dtype, **placement)


def check_folder(model: VideoModel, path: str | Path) -> Path:
    """Return the path of a model folder; ValueError if a component is missing, or there is a second transformer."""
    folder = Path(path)
    absent = [part for part in model.components if not (folder / part).is_dir()]
    if absent:
        what = f"has no {', '.join(absent)} folder" if folder.is_dir() else "does not exist"
        raise ValueError(
            f"model.path {str(folder)!r} {what}, expected {', '.join(model.components)} in diffusers layout; "
            f"{model.origin}"
        )
    if (folder / "transformer_2").is_dir():
        raise ValueError(
            f"model.path {str(folder)!r} has a transformer_2: models of two transformers (Wan 2.2 A14B) are not "
            "served, and one of the two is not the model; give a folder of one, such as Wan2.1 or Wan2.2-TI2V-5B"
        )
    return folder


def apply_compute_settings(transformer: WanTransformer3DModel, model: ModelConfig, device: torch.device) -> None:
    """Set attention backend, checkpointing and compilation; ValueError for what the device does not have."""
    known = device_api.attention_backends(device)
    if model.attention_backend not in known:
        raise ValueError(
            f"model.attention_backend is {model.attention_backend!r}, must be one of {', '.join(known)} "
            f"on {device.type}"
        )
    if model.attention_backend != known[0]:  # setting the default is not needed, and makes diffusers warn
        process_default, _ = _AttentionBackendRegistry.get_active_backend()  # type: ignore[no-untyped-call]
        try:
            transformer.set_attention_backend(model.attention_backend)
        except RuntimeError as error:
            raise ValueError(f"model.attention_backend={model.attention_backend!r} cannot be used: {error}") from error
        finally:  # diffusers also makes it the default of every other network in the process
            _AttentionBackendRegistry.set_active_backend(process_default)
    set_checkpointing(transformer, model.checkpointing, "inductor" if model.compile else None)
    if model.compile:
        if not device_api.supports_compile(device):
            raise ValueError(f"model.compile is true, must be false on {device.type}: its compiler is experimental")
        transformer.compile_repeated_blocks()  # type: ignore[no-untyped-call]


class WanPolicy:
    """A `Policy` on a `VideoModel`: guidance, encodings, reference policy and decoding, the same for all of them.

    With LoRA that began without effect the reference policy is the network with adapters disabled; otherwise it is a
    copy of the trained weights that `keep_reference` makes.

    Args:
        networks: the model's networks, the training mode already applied to the transformer.
        settings: of these `max_prompt_tokens` (L), `round_timestep` and `dtype` (of the transformer's autocast; latents
            and velocities are always fp32) count.
        guidance: of rows encoded without one of their own; any scale but 1 runs one forward of 2B rows, of which the
            unconditional ones keep camera and source video.
        device: where everything runs.
        store: cache of encodings; in memory only by default.
    """

    _starts_adapted = False  # adapters have an effect before training, so switching them off is not the reference
    boundary_ratio = 0.0  # noise level below which the reference policy answers; `velocity` alone asks it
    _walk: SparseWalk | None = None  # whose calls are approximate

    def __init__(
        self,
        networks: Networks,
        settings: ModelConfig,
        guidance: Guidance,
        device: torch.device,
        store: TensorStore | None = None,
    ) -> None:
        self.model, self.identity = networks.model, networks.identity
        self.module: nn.Module = networks.transformer
        device_api.place(self.module, device)
        self.codec = networks.codec
        self.texts = networks.texts
        self.encodings = Encodings(
            self.codec,
            self.texts,
            store or TensorStore(),
            images=networks.images,
            max_prompt_tokens=settings.max_prompt_tokens,
        )
        self.guidance, self.device = guidance, device
        self.dtype, self._round_timestep = DTYPES[settings.dtype], settings.round_timestep
        self._config: Mapping[str, Any] = networks.transformer.config
        self._reference: list[Tensor] | None = None
        self._kept: list[Tensor] = []

    @classmethod
    def from_config(
        cls, video_model: VideoModel, model: ModelConfig, sample: SampleConfig, device: torch.device
    ) -> WanPolicy:
        """Load `model.path` with the parameters that `model.trained` names trainable; ValueError as `load_networks`."""
        networks = load_networks(video_model, model, device)
        apply_training_mode(networks.transformer, model)
        if model.adapter:
            start_from(networks.transformer, Path(model.adapter))
        apply_compute_settings(networks.transformer, model, device)
        if sample.ode_calls != "exact" and not hasattr(networks.transformer, "walk"):
            text = f"must be 'exact' for model.kind={model.kind!r}, which has no source to keep"
            raise refusal("sample.ode_calls", sample.ode_calls, text)
        guidance = Guidance(sample.guidance_scale, sample.negative_prompt)
        store = TensorStore(Path(model.encodings) if model.encodings else None)
        policy = cls(networks, model, guidance, device, store)
        policy.boundary_ratio = model.boundary_ratio
        policy._starts_adapted = bool(model.adapter)
        return policy

    def share_tokens(self, context: ContextParallel) -> None:
        """Compute every sample together with the ranks of `context` (collective call); call before wrapping."""
        self.model.share(self.module, context)

    def keep_reference(self, *, offload: bool = False, start: nn.Module | None = None) -> None:
        """Copy the trained weights for `reference`, to the CPU if `offload`; new LoRA needs no copy.

        Call after the network was wrapped and placed: of sharded weights each rank copies its shard. `start` is the
        network before training, where that of the policy was trained before and all its weights count as trained.
        """
        if self._starts_adapted or not has_lora(self.module):
            device = torch.device("cpu") if offload else self.device
            weights = self.trained_parameters() if start is None else start.parameters()
            self._reference = [local(parameter).to(device, copy=True) for parameter in weights]

    @torch.no_grad()
    def encode(self, conditions: Sequence[Condition], guidance: Guidance | None = None) -> Conditioning:
        """Return one row per condition, in order; ValueError as in `latent_shape`.

        Each distinct video and prompt is encoded once and alone, so its numbers do not depend on the batch. `guidance`
        is by default the policy's own.
        """
        latents = self.latent_shape(conditions)
        guidance = guidance or self.guidance
        inputs = self.model.inputs(self.encodings, conditions)
        # They must be those that the model plans with; sizes that its parts decide aside.
        made = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
        planned = self.model.input_shapes(len(conditions), latents, self._config)
        if {n: (s[0], len(s)) for n, s in made.items()} != {n: (s[0], len(s)) for n, s in planned.items()}:
            raise ValueError(f"inputs() of the model made {made}, input_shapes() says {planned}: must be the same")
        prompts = {text: self.encodings.prompt(text) for text in dict.fromkeys(c.prompt for c in conditions)}
        negative = None
        if guidance.scale != 1.0:
            negative = self.encodings.prompt(guidance.negative_prompt).repeat(len(conditions), 1, 1)
        return Conditioning(
            prompt_embeds=torch.stack([prompts[condition.prompt] for condition in conditions]),
            inputs=inputs,
            negative_prompt_embeds=negative,
            guidance_scale=guidance.scale,
        ).to(self.device)

    def lacking(self, conditions: Sequence[Condition]) -> dict[str, Callable[[], Tensor]]:
        """Return key -> encoder of the source videos that `encode` would encode now."""
        return self.encodings.lacking(conditions) if "source_video" in self.model.needs else {}

    def learn(self, latents: Mapping[str, Tensor]) -> None:
        """Take over the (C, F, H, W) latents of source videos that another rank has encoded, by these keys."""
        self.encodings.learn(latents)

    def latent_shape(self, conditions: Sequence[Condition]) -> tuple[int, int, int, int]:
        """Return (C, F, H, W) of the target latents; ValueError if videos differ in size, or by `check_size`."""
        self.model.check(conditions)
        shapes = {condition.size for condition in conditions}
        if len(shapes) != 1:
            raise ValueError(f"conditions of one batch need one video shape (T, h, w), got {sorted(shapes)}")
        size = shapes.pop()
        self.model.check_size(size, self._config, (self.codec.temporal, self.codec.spatial))
        return self.latent_size(size)

    def latent_size(self, size: tuple[int, int, int]) -> tuple[int, int, int, int]:
        """Return (C, F, H, W) of the latents of a video of (T, h, w), without checking that it fits."""
        frames, height, width = size
        latent_frames = (frames - 1) // self.codec.temporal + 1
        return (self.codec.config["z_dim"], latent_frames, height // self.codec.spatial, width // self.codec.spatial)

    def tokens(self, size: tuple[int, int, int]) -> int:
        """Return the number of transformer tokens of one video (T, h, w); a source has as many again."""
        return self.model.tokens(self.latent_size(size), self._config["patch_size"]) // self.model.videos

    @torch.no_grad()
    def encode_targets(self, conditions: Sequence[Condition]) -> Tensor:
        """Return the clean latents (B, C, F, H, W) of the true target videos; ValueError where there is none."""
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
        """Return the fp32 velocity (B, C, F, H, W), guidance included, of latents at noise levels sigma (B,).

        Rows at levels below `boundary_ratio` are the reference policy's, without gradient.
        """
        if self._walk:
            self._walk.begin_call(len(latents))
        if not self.boundary_ratio:
            return self._guided(latents, sigma, conditioning)
        # The one wait for the device in a call. diffusers draws the line likewise: `transformer` at t >= boundary.
        low = (sigma < self.boundary_ratio).cpu()
        below, above = true_on_any_rank(torch.stack([low.any(), ~low.all()]), self.module)
        if not (below and above):
            with self.reference() if below else contextlib.nullcontext():
                return self._guided(latents, sigma, conditioning)
        velocity = latents
        # The reference first: it may swap weights in place, which would break a graph that is already built.
        for side, weights in ((low, self.reference()), (~low, contextlib.nullcontext())):
            rows = side.nonzero().flatten() if side.any() else torch.zeros(1, dtype=torch.int64)  # with other ranks
            index = rows.to(latents.device, non_blocking=True)
            with weights:
                found = self._guided(latents[index], sigma[index], conditioning.rows(rows), index[: int(side.sum())])
            velocity = velocity.index_copy(0, index, found) if side.any() else velocity
        return velocity

    def _guided(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, own: Tensor | None = None) -> Tensor:
        # `own` are the rows of the call that these are, if not all; none for one that is made with other ranks.
        if conditioning.guidance_scale == 1.0:
            return self._forward(latents, sigma, conditioning, conditioning.prompt_embeds, own)
        negative = conditioning.negative_prompt_embeds
        assert negative is not None, "conditioning was encoded without guidance"
        doubled = Conditioning.concatenate([conditioning, conditioning])
        prompts = torch.cat([conditioning.prompt_embeds, negative])
        both = self._forward(torch.cat([latents, latents]), torch.cat([sigma, sigma]), doubled, prompts, own)
        conditional, unconditional = both.chunk(2)
        return unconditional + conditioning.guidance_scale * (conditional - unconditional)

    def _forward(
        self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, prompts: Tensor, own: Tensor | None
    ) -> Tensor:
        # Only a forward with a backward pass needs the wrapper, which synchronises gradients.
        network = self.module if torch.is_grad_enabled() else unwrap(self.module)
        timestep = TIMESTEPS * sigma
        if self._round_timestep:
            timestep = timestep.bfloat16().float()
        walk = self._walk if own is None or len(own) else None
        walking = walk.on(network, own) if walk else contextlib.nullcontext()
        with walking, device_api.autocast(self.device, self.dtype):
            return self.model.call(network, latents, timestep, prompts, conditioning.inputs).float()

    @contextlib.contextmanager
    def approximate(self, calls: int) -> Iterator[None]:
        """Context manager in which `velocity` is approximate: `calls` consecutive ones along the ODE of the same rows.

        See `SparseWalk`; the network must be one of `VideoToVideoWan`.
        """
        self._walk = walk = SparseWalk(calls)
        try:
            yield
        finally:
            self._walk = None
            self._kept += walk.kept

    def attention_kept(self) -> float:
        """Return the share of attention that approximate calls kept since this was asked last; NaN without any."""
        kept, self._kept = self._kept, []
        return float(torch.stack(kept).mean()) if kept else math.nan

    def decode(self, latents: Tensor) -> Tensor:
        """Return videos (B, 3, T, h, w) fp32 in [0, 1] of clean latents (B, C, F, H, W)."""
        return self.codec.decode(latents)

    def decode_for_rewards(self, latents: Tensor) -> Tensor:
        """Return the same by `model.reward_decoder`, if there is one."""
        return self.codec.decode_for_rewards(latents)

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Context manager, without gradients, in which `velocity` is the policy's before training at every level.

        Call `keep_reference` first.
        """
        weights: contextlib.AbstractContextManager[None]
        if has_lora(self.module) and not self._starts_adapted:
            weights = adapters_off(self.module)
        elif self._reference is None:
            raise ValueError("there is no copy of the reference policy; call keep_reference() before training")
        else:
            weights = swap_parameters(self.trained_parameters(), self._reference)
        boundary, self.boundary_ratio = self.boundary_ratio, 0.0
        try:
            with weights, torch.no_grad():
                yield
        finally:
            self.boundary_ratio = boundary

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters to optimize, in the network's order."""
        return list(trained_parameters(self.module).values())

    def camera_parameters(self) -> list[nn.Parameter]:
        """Return those of them that belong to the camera modules, which plain Wan does not have."""
        trained = trained_parameters(self.module)
        return [weight for name, weight in trained.items() if is_camera_weight(unwrap(self.module), name)]
