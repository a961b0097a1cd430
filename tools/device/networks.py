"""The parts that need the networks: a rollout step, an update with LoRA, and decoding.

Weights are random: no file is read. Sizes and precision are those that loading gives (`load_recam_transformer`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import Tensor

from flow_grpo.algorithm.rollout.denoise import step_transition
from flow_grpo.cost.footprint import footprint
from flow_grpo.maths.loss import grpo_loss
from flow_grpo.maths.sde import Transition, log_prob, sample
from flow_grpo.models.adapters import apply_training_mode, trained_parameters
from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.recomputation import set_checkpointing
from flow_grpo.models.networks.transformers import stays_fp32
from flow_grpo.models.policy import Policy
from flow_grpo.models.recam import RECAM
from flow_grpo.models.wan_policy import TIMESTEPS
from flow_grpo.records import Conditioning
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.device import DTYPES
from flow_grpo.settings.sampling import sampling_of
from flow_grpo.settings.schema import Config
from tools.device.counts import count, recipe, transformer_config
from tools.device.kernels import Record, Records, Setting, Size
from tools.device.timing import breakdown, measure

RATIO_SHARE = 0.1  # of the clip range, which log-ratios may reach before any update


@dataclasses.dataclass(frozen=True)
class TrainingNetworks:
    """What a training process holds, with random weights."""

    transformer: ReCamTransformer3DModel  # in its training mode
    codec: AutoencoderKLWan  # frozen, fp32
    text_encoder: Tensor  # as many bytes as it has; it computes nothing here
    dtype: torch.dtype  # of the transformer's computation

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the fp32 velocity (B, C, F, H, W) as `WanPolicy` computes it without guidance."""
        given = (TIMESTEPS * sigma, conditioning.prompt_embeds, conditioning.inputs)
        with device_api.autocast(latents.device, self.dtype):
            return RECAM.call(self.transformer, latents, *given).float()


@dataclasses.dataclass(frozen=True)
class StochasticStep:
    """One stochastic denoising step, ready to be taken."""

    config: Config
    networks: TrainingNetworks
    latents: Tensor  # (B, C, F, H, W) fp32 before the step
    noise: Tensor  # the same shape, what the step draws
    transition: Callable[[], Transition]  # the call to time: the Gaussian that the step draws from


def build_transformer(config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> ReCamTransformer3DModel:
    """Return the network with random weights, made where they will stay: on a CPU they would take a minute.

    As after loading: frozen weights in `dtype`, what Wan keeps in fp32 in fp32.
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
    with torch.no_grad():  # activations of order one; never matrices of zeros, with which a device may run faster
        for name, parameter in network.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
    network.eval()
    return network


def build_networks(size: Size, config: Config, device: torch.device) -> TrainingNetworks:
    dtype = DTYPES[config.model.dtype]
    transformer = build_transformer(transformer_config(size), dtype, device)
    apply_training_mode(transformer, config.model)
    set_checkpointing(transformer, config.model.checkpointing)
    codec = AutoencoderKLWan(base_dim=size.codec_width).requires_grad_(False)
    codec.eval().to(device)
    text_encoder = torch.empty(size.text_encoder_bytes, dtype=torch.uint8, device=device)
    return TrainingNetworks(transformer, codec, text_encoder, dtype)


def build_step(setting: Setting) -> StochasticStep:
    size, device, rows, video = setting.size, setting.device, setting.rows, setting.video
    torch.manual_seed(0)
    config = recipe(size)
    networks = build_networks(size, config, device)
    shape = (rows, *video.latent_shape)
    latents, source, noise = (torch.randn(shape).to(device) for _ in range(3))
    conditioning = Conditioning(
        prompt_embeds=torch.randn(rows, size.prompt_tokens, size.text_width).to(device),
        inputs={"source_latents": source, "target_cameras": torch.randn(rows, shape[2], 12).to(device)},
    )
    sampling, steps = sampling_of(config), torch.full((rows,), config.sample.sde_steps[0])

    def transition() -> Transition:
        policy = cast(Policy, networks)  # a step asks for nothing but the velocity
        return step_transition(policy, latents, conditioning, steps, sampling)

    return StochasticStep(config, networks, latents, noise, transition)


def forward(setting: Setting) -> Records:
    """Yield one rollout step, a forward without gradients, the draw and its log-probability; then with compiled blocks.

    After each, what its log-probability becomes when the update replays it with gradients, before any update.
    """
    step, video = build_step(setting), setting.video
    scored: list[Tensor] = []

    @torch.no_grad()
    def rollout_step() -> None:
        drawn_from = step.transition()
        scored[:] = [log_prob(sample(drawn_from, step.noise), drawn_from)]

    def named(name: str) -> Records:
        record = measure(rollout_step, setting.device, setting.repeat) | {"tokens": video.tokens}
        yield f"{name}_{video}", record | {"finite": bool(scored[0].isfinite().all())}
        yield f"{name}_ratio_{video}", first_ratio(step)

    yield from named("forward")
    yield f"forward_kernels_{video}", breakdown(rollout_step, setting.device)
    if device_api.supports_compile(setting.device):
        step.networks.transformer.compile_repeated_blocks()  # type: ignore[no-untyped-call]
        yield from named("forward_compiled")


def first_ratio(step: StochasticStep) -> Record:
    """Return the largest log-ratio between a draw's log-probability in the rollout and in the update's replay of it."""
    with torch.no_grad():
        drawn_from = step.transition()
        drawn = sample(drawn_from, step.noise)
        old = log_prob(drawn, drawn_from)
    new = log_prob(drawn, step.transition())
    found, bound = float((new.detach() - old).abs().max()), RATIO_SHARE * step.config.train.clip_range
    return {"max_abs_log": found, "bound": bound, "within": found <= bound}


def update(setting: Setting) -> Records:
    """Yield one micro-batch of the update with its optimizer step, as `Updater` takes it, by what checkpointing keeps.

    Last the recipe's own checkpointing with compiled blocks.
    """
    step, video = build_step(setting), setting.video
    transformer, train, norm = step.networks.transformer, step.config.train, 0.0
    trained = list(trained_parameters(transformer).values())
    optimizer = torch.optim.AdamW(trained, lr=train.learning_rate, weight_decay=train.weight_decay, foreach=True)
    advantages = torch.ones(len(step.latents), device=step.latents.device)

    def optimizer_step() -> None:
        nonlocal norm  # before clipping
        new = log_prob(step.latents + 0.1 * step.noise, step.transition())
        terms = grpo_loss(new[:, None], new[:, None].detach(), advantages, clip_range=train.clip_range)
        terms.per_sample.mean().backward()
        norm = float(torch.nn.utils.clip_grad_norm_(trained, train.max_grad_norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def timed(name: str) -> Records:
        record = measure(optimizer_step, setting.device, setting.repeat)
        yield f"{name}_{video}", record | {"finite": bool(0 < norm < float("inf"))}

    yield from timed("update")
    yield f"update_kernels_{video}", breakdown(optimizer_step, setting.device)
    set_checkpointing(transformer, "keep_attention")
    yield from timed("update_keep_attention")
    model = dataclasses.replace(step.config.model, checkpointing="none")
    whole = footprint(RECAM, transformer_config(setting.size), video.latent_shape, model, rows=setting.rows)
    needed = (whole.kept_bytes + whole.block_bytes) / 2**30
    if needed < 0.8 * device_api.memory(setting.device).get("total", 0.0):
        set_checkpointing(transformer, "none")
        yield from timed("update_none")
    else:
        yield f"update_none_{video}", {"unavailable": f"would keep {needed:.0f} GiB of activations"}
    if device_api.supports_compile(setting.device):
        set_checkpointing(transformer, "blocks")
        transformer.compile_repeated_blocks()  # type: ignore[no-untyped-call]
        yield from timed("update_compiled")


def decode(setting: Setting) -> Records:
    """Yield the times of decoding in fp32, with rounded convolutions, in overlapping tiles and in bf16."""
    step = build_step(setting)
    codec, video = step.networks.codec, setting.video

    @torch.no_grad()
    def decoded() -> object:
        return codec.decode(step.latents.to(codec.dtype), return_dict=False)

    def tried() -> Record:
        device_api.empty_cache(setting.device)
        try:
            return measure(decoded, setting.device, setting.repeat)
        except RuntimeError as error:  # out of memory, which the next way may not be
            return {"error": " ".join(str(error).split())[:300]}

    yield f"decode_{video}", tried()
    with device_api.rounded_convolutions(setting.device):
        yield f"decode_tf32_{video}", tried()
    codec.enable_tiling()
    yield f"decode_tiled_{video}", tried()
    codec.disable_tiling()
    codec.to(torch.bfloat16)
    yield f"decode_bf16_{video}", tried()


PARTS: Mapping[str, Callable[[Setting], Records]] = {
    "count": count,
    "forward": forward,
    "update": update,
    "decode": decode,
}
