"""What a video codec costs: operations, memory, and how fast it is beside the transformer; counted on fake tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from flow_grpo.cost.footprint import peak_bytes
from flow_grpo.models.fake_policy import FakePolicy
from flow_grpo.settings.schema import Config, ModelConfig

# Operations a second of the codec as a share of the transformer's in bf16, by `model.vae_dtype`: 27, 84 and 131 of 450
# TFLOP/s on an H100 (docs/devices.md). No NPU has measured it.
_BESIDE_BF16 = {"fp32": 0.06, "tf32": 0.19, "bf16": 0.29}
_CHUNK = 4  # frames that diffusers' Wan codec encodes at once after the first


@dataclasses.dataclass(frozen=True)
class CodecCost:
    """Costs of one video.

    Attributes:
        latents: (C, F, H, W) of it.
        encode_flops: operations of encoding.
        decode_flops: operations of decoding.
    """

    latents: tuple[int, int, int, int]
    encode_flops: float
    decode_flops: float


def codec_cost(model: ModelConfig, size: tuple[int, int, int]) -> CodecCost:
    """Return the costs of a video of (frames, rows, columns); each is counted once."""
    return _cost(model.kind, model.path, size)


def rate_beside_transformer(model: ModelConfig) -> float:
    """Return the codec's operations a second as a share of the transformer's; 1 where both are in fp32, as on a CPU."""
    return 1.0 if model.dtype == "fp32" else _BESIDE_BF16[model.vae_dtype]


def decoding_peak(model: ModelConfig, latents: tuple[int, int, int, int], rows: int) -> float:
    """Return the peak bytes of decoding a batch of so many videos, weights left out; counted once."""
    return _decoding_peak(_codec_of(model), latents, rows)


def _codec_of(model: ModelConfig) -> ModelConfig:
    """Return the settings that decide what the codec costs; all others have their defaults."""
    names = ("kind", "path", "vae_slicing", "vae_dtype")
    return ModelConfig(**{name: getattr(model, name) for name in names})


@functools.cache
def _cost(kind: str, path: str, size: tuple[int, int, int]) -> CodecCost:
    policy = FakePolicy(dataclasses.replace(Config(), model=ModelConfig(kind=kind, path=path)))
    latents = policy.latent_size(size)
    return CodecCost(latents, encoding_flops(policy, size), decoding_flops(policy, latents))


@functools.cache
def _decoding_peak(model: ModelConfig, latents: tuple[int, int, int, int], rows: int) -> float:
    return decoding_bytes(FakePolicy(dataclasses.replace(Config(), model=model)), latents, rows)


def encoding_flops(policy: FakePolicy, size: tuple[int, int, int]) -> float:
    """Return the operations of encoding one video.

    The codec encodes the first frame and then four at a time at the same cost: one chunk is counted.
    """
    frames, height, width = size
    first, both = (count_encoding(policy, (n, height, width)) for n in (1, 1 + _CHUNK))
    return first + (frames - 1) / _CHUNK * (both - first)


def decoding_flops(policy: FakePolicy, latents: tuple[int, int, int, int]) -> float:
    """Return the operations of decoding one sample.

    The codec decodes latent frames one by one, all but the first at the same cost: two are counted.
    """
    channels, frames, height, width = latents
    first, both = (count_decoding(policy, (channels, n, height, width)) for n in (1, 2))
    return first + (frames - 1) * (both - first)


def decoding_bytes(policy: FakePolicy, latents: tuple[int, int, int, int], rows: int) -> float:
    """Return the peak of decoding a batch, weights left out.

    After the third latent frame only the videos grow, which exist twice: as the codec returns them and as fp32 copies.
    """
    channels, frames, height, width = latents
    counted = min(frames, 3)
    with policy.fake_mode:
        given = torch.empty(rows, channels, counted, height, width)
        policy.decode(given[:, :, :1])  # loads the decoder
        peak = peak_bytes(lambda: policy.decode(given))
    scale = policy.codec.temporal * policy.codec.spatial**2
    return peak + 2.0 * 4 * 3 * rows * (frames - counted) * height * width * scale


def count_encoding(policy: FakePolicy, size: tuple[int, int, int]) -> float:
    """Return the operations of encoding one video, with every frame counted."""
    return _flops(policy, lambda: policy.codec.encode(torch.empty(3, *size)))


def count_decoding(policy: FakePolicy, latents: tuple[int, int, int, int]) -> float:
    """Return the operations of decoding one sample, with every frame counted."""
    return _flops(policy, lambda: policy.decode(torch.empty(1, *latents)))


def _flops(policy: FakePolicy, call: Callable[[], object]) -> float:
    with FlopCounterMode(display=False) as counter, policy.fake_mode:
        call()
    return float(counter.get_total_flops())
