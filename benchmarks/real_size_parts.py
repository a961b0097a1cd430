"""The parts that need the networks: a rollout step, an update with LoRA, decoding, and their operations counted.

Weights are random: no file is read. Sizes and precision are those that loading gives (`load_recam_transformer`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.real_size_kernels import Records, Setting, Size, measure
from flow_grpo.algorithm.rollout.denoise import SdeSettings, step_transition
from flow_grpo.maths.loss import grpo_loss
from flow_grpo.maths.schedule import flow_sigmas
from flow_grpo.maths.sde import Transition, log_prob, sample
from flow_grpo.models.adapters import apply_training_mode, trained_parameters
from flow_grpo.models.policy import Policy
from flow_grpo.models.recam_policy import DTYPES, TIMESTEPS
from flow_grpo.models.recam_transformer import ReCamTransformer3DModel, stays_fp32
from flow_grpo.preflight.footprint import WAN_1_3B, footprint
from flow_grpo.records import Conditioning
from flow_grpo.runtime import device as device_door
from flow_grpo.settings.loading import load_config
from flow_grpo.settings.schema import Config

RECIPE = f"{Path(__file__).resolve().parents[1]}/config/grpo.py:my_recam_8npu"
UPDATE_FORWARDS = 4  # forward, recomputation, and a backward of two


@dataclasses.dataclass(frozen=True)
class Networks:
    """What a training process holds, with random weights.

    Attributes:
        transformer: in its training mode.
        codec: frozen, fp32.
        text_encoder: as many bytes as it has; it computes nothing here.
        dtype: what the transformer computes in.
    """

    transformer: ReCamTransformer3DModel
    codec: AutoencoderKLWan
    text_encoder: Tensor
    dtype: torch.dtype

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the fp32 velocity (B, C, F, H, W) as `RecamPolicy` computes it without guidance."""
        joined = torch.cat([latents, conditioning.source_latents], dim=2)
        given = (TIMESTEPS * sigma, conditioning.prompt_embeds, conditioning.target_cameras)
        with device_door.autocast(latents.device, self.dtype):
            predicted: Tensor = self.transformer(joined, *given)[0]
        return predicted[:, :, : latents.shape[2]].float()


@dataclasses.dataclass(frozen=True)
class Step:
    """One stochastic denoising step, ready to be taken.

    Attributes:
        config: the recipe.
        networks: that take it.
        latents: (B, C, F, H, W) fp32 before the step.
        noise: the same shape, what the step draws.
        transition: the call to time: the Gaussian that the step draws from.
    """

    config: Config
    networks: Networks
    latents: Tensor
    noise: Tensor
    transition: Callable[[], Transition]


def transformer_config(size: Size) -> dict[str, Any]:
    """Return the transformer's configuration: Wan's, at this size."""
    return dict(WAN_1_3B) | {
        "num_attention_heads": size.heads,
        "attention_head_dim": size.head_width,
        "num_layers": size.blocks,
        "ffn_dim": size.ffn_width,
        "text_dim": size.text_width,
    }


def recipe(size: Size) -> Config:
    """Return the recipe for 8 devices with this size's rank and prompt."""
    knobs = {"model.lora_rank": size.lora_rank, "model.max_prompt_tokens": size.prompt_tokens}
    return load_config(RECIPE, [f"--config.{name}={value}" for name, value in knobs.items()])


def build_transformer(config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> ReCamTransformer3DModel:
    """Return the network with random weights, made where they will stay: on a CPU they would take a minute.

    As after loading: frozen weights in `dtype`, what Wan keeps in fp32 in fp32.

    Args:
        config: such as `WAN_1_3B`.
        dtype: of the weights.
        device: where they are made.
    """
    with torch.device("meta"):
        network: ReCamTransformer3DModel = ReCamTransformer3DModel(**config)
    for name, parameter in network.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if stays_fp32(name) else dtype)
    # `to_empty` leaves noise in buffers, and not every device has the float64 that the rotary tables are computed in.
    tables = WanRotaryPosEmbed(config["attention_head_dim"], tuple(config["patch_size"]), config["rope_max_seq_len"])
    left = {name for name, _ in network.named_buffers()} - {f"rope.{name}" for name, _ in tables.named_buffers()}
    assert not left, f"no values for the buffers {left}"
    network.to_empty(device=device)
    network.rope = tables.to(device)
    for name, parameter in network.named_parameters():
        _fill(name, parameter)
    network.eval()
    return network


@torch.no_grad()
def _fill(name: str, parameter: nn.Parameter) -> None:
    """Draw a weight that keeps activations of order one; never zeros, with which a device may run faster."""
    if parameter.ndim > 1:
        parameter.normal_(std=0.02)
    else:
        parameter.fill_(1.0 if name.endswith("weight") else 0.0)


def build_networks(size: Size, config: Config, device: torch.device) -> Networks:
    """Return the networks of a recipe, trained weights and gradient checkpointing as it says."""
    dtype = DTYPES[config.model.dtype]
    transformer = build_transformer(transformer_config(size), dtype, device)
    apply_training_mode(transformer, config.model)
    if config.model.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    codec = AutoencoderKLWan(base_dim=size.codec_width).requires_grad_(False)
    codec.eval().to(device)
    text_encoder = torch.empty(size.text_encoder_bytes, dtype=torch.uint8, device=device)
    return Networks(transformer, codec, text_encoder, dtype)


def build_step(setting: Setting) -> Step:
    """Return the recipe's first stochastic step on random latents."""
    size, device, rows = setting.size, setting.device, setting.rows
    torch.manual_seed(0)
    config = recipe(size)
    networks = build_networks(size, config, device)
    shape = (rows, *size.latent_shape(setting.frames[0]))
    latents, source, noise = (torch.randn(shape).to(device) for _ in range(3))
    conditioning = Conditioning(
        prompt_embeds=torch.randn(rows, size.prompt_tokens, size.text_width).to(device),
        source_latents=source,
        target_cameras=torch.randn(rows, shape[2], 12).to(device),
    )
    plan = config.sample
    sigmas = flow_sigmas(plan.num_steps, plan.shift)
    sde = SdeSettings(plan.sde, plan.noise_level, plan.max_step_std)

    def transition() -> Transition:
        policy = cast(Policy, networks)  # a step asks for nothing but the velocity
        return step_transition(policy, latents, conditioning, sigmas=sigmas, step=plan.sde_steps[0], sde=sde)

    return Step(config, networks, latents, noise, transition)


def forward(setting: Setting) -> Records:
    """Yield one rollout step: a forward without gradients, the draw and its log-probability."""
    step = build_step(setting)
    scored: list[Tensor] = []

    @torch.no_grad()
    def rollout_step() -> None:
        drawn_from = step.transition()
        scored[:] = [log_prob(sample(drawn_from, step.noise), drawn_from)]

    record = measure(rollout_step, setting) | {"tokens": setting.size.tokens(setting.frames[0])}
    yield f"forward_{setting.frames[0]}", record | {"finite": bool(scored[0].isfinite().all())}


def update(setting: Setting) -> Records:
    """Yield one micro-batch of the update with its optimizer step, as `Updater` takes it."""
    step = build_step(setting)
    train, trained = step.config.train, list(trained_parameters(step.networks.transformer).values())
    optimizer = torch.optim.AdamW(trained, lr=train.learning_rate, weight_decay=train.weight_decay, foreach=True)
    advantages = torch.ones(setting.rows, device=setting.device)
    norms: list[Tensor] = []

    def optimizer_step() -> None:
        current = step.transition()
        new = log_prob(step.latents + 0.1 * step.noise, current)
        terms = grpo_loss(
            new[:, None],
            new[:, None].detach(),
            advantages,
            clip_range=train.clip_range,
            adv_clip=train.adv_clip,
        )
        terms.per_sample.mean().backward()
        norms[:] = [torch.nn.utils.clip_grad_norm_(trained, train.max_grad_norm)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    record = measure(optimizer_step, setting)
    norm = norms[0].cpu()
    yield f"update_{setting.frames[0]}", record | {"finite": bool(norm.isfinite() & (norm > 0))}


def decode(setting: Setting) -> Records:
    """Yield decoding in fp32, of whole frames and then in overlapping tiles: less memory, more operations."""
    step = build_step(setting)
    codec, frames = step.networks.codec, setting.frames[0]

    @torch.no_grad()
    def decoded() -> object:
        return codec.decode(step.latents, return_dict=False)

    try:
        record = measure(decoded, setting)
    except RuntimeError as error:  # out of memory, which tiles may not be
        record = {"error": " ".join(str(error).split())[:300]}
    yield f"decode_{frames}", record
    device_door.empty_cache(setting.device)
    codec.enable_tiling()
    yield f"decode_tiled_{frames}", measure(decoded, setting)


def count(setting: Setting) -> Records:
    """Yield the operations of one call of every other part; nothing is allocated."""
    size, model = setting.size, recipe(setting.size).model
    for frames in setting.frames:
        counted = footprint(
            transformer_config(size), size.latent_shape(frames), model, rows=setting.rows, dtype=DTYPES[model.dtype]
        )
        yield f"forward_{frames}", {"flops": counted.forward_flops}
        yield f"update_{frames}", {"flops": UPDATE_FORWARDS * counted.forward_flops}
        whole = decoding_flops(size, frames) * setting.rows
        yield f"decode_{frames}", {"flops": whole}
        yield f"decode_tiled_{frames}", {"flops": whole * tiled_area(size)}


def decoding_flops(size: Size, frames: int) -> float:
    """Return the operations of decoding one video untiled."""
    with FakeTensorMode(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        AutoencoderKLWan(base_dim=size.codec_width).eval().decode(torch.empty(1, *size.latent_shape(frames)))
    return float(counter.get_total_flops())


def tiled_area(size: Size) -> float:
    """Return the area of all tiles over that of the picture: they overlap, and the codec's work grows with area.

    Decoding in tiles cannot be counted like the rest: it takes minutes even without computing anything.
    """
    codec = AutoencoderKLWan(base_dim=8, num_res_blocks=1)
    sides = (
        (size.height, codec.tile_sample_min_height, codec.tile_sample_stride_height),
        (size.width, codec.tile_sample_min_width, codec.tile_sample_stride_width),
    )
    area = 1.0
    for side, tile, stride in sides:
        # Pictures no larger than a tile are decoded whole, which the formula gives as well.
        starts = range(0, side, stride) if size.height > sides[0][1] or size.width > sides[1][1] else (0,)
        area *= sum(min(tile, side - start) for start in starts) / side
    return area


PARTS: Mapping[str, Callable[[Setting], Records]] = {
    "count": count,
    "forward": forward,
    "update": update,
    "decode": decode,
}
