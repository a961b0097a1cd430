"""What a video codec costs: operations, memory, and how fast it is beside the transformer; counted on fake tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from flow_grpo.cost.footprint import Latents, peak_bytes
from flow_grpo.models.encoders.codec import Codec
from flow_grpo.models.encoders.small_decoder import PUBLISHED_WIDTHS, SmallDecoder
from flow_grpo.models.fake_policy import FakePolicy
from flow_grpo.settings.schema import Config, ModelConfig

# Operations a second of the codec as a share of the transformer's in bf16, by `model.vae_dtype`: 27, 84 and 131 of 450
# TFLOP/s on an H100 (docs/devices.md). No NPU has measured it.
_BESIDE_BF16 = {"fp32": 0.06, "tf32": 0.19, "bf16": 0.29}


@dataclasses.dataclass(frozen=True)
class CodecCost:
    """Operations of encoding and of decoding one video."""

    latents: Latents  # of it
    encode_flops: float
    decode_flops: float
    reward_flops: float  # of decoding one that training scores


def codec_cost(model: ModelConfig, size: tuple[int, int, int]) -> CodecCost:
    """Return the costs of a video of (frames, rows, columns); each is counted once."""
    return _codec_cost(settings_of(model, "kind", "path", "reward_decoder"), size)


def decoding_peak(model: ModelConfig, latents: Latents, rows: int) -> float:
    """Return the peak bytes of decoding a batch of so many videos, weights left out; counted once."""
    return _decoding_peak(settings_of(model, "kind", "path", "vae_slicing", "vae_dtype"), latents, rows)


def rate_beside_transformer(model: ModelConfig) -> float:
    """Return the codec's operations a second as a share of the transformer's; 1 where both are in fp32, as on a CPU."""
    return 1.0 if model.dtype == "fp32" else _BESIDE_BF16[model.vae_dtype]


def flops_in_chunks(call: Callable[[int], object], frames: int, chunk: int) -> float:
    """Return the operations of a call on so many frames: beyond the first one, every chunk of them costs the same."""
    counts = []
    for counted in (1, 1 + chunk):
        with FlopCounterMode(display=False) as counter:
            call(counted)
        counts.append(counter.get_total_flops())
    return float(counts[0] + (frames - 1) / chunk * (counts[1] - counts[0]))


def settings_of(model: ModelConfig, *names: str) -> ModelConfig:
    """Return the settings that decide a count; all others have their defaults."""
    return ModelConfig(**{name: getattr(model, name) for name in names})


@functools.cache
def _codec_cost(model: ModelConfig, size: tuple[int, int, int]) -> CodecCost:
    policy = FakePolicy(dataclasses.replace(Config(), model=dataclasses.replace(model, reward_decoder="")))
    frames, *pixels = size
    latents = channels, latent_frames, *latent_pixels = policy.latent_size(size)
    # The first frame is encoded alone, then four at a time; latent frames are decoded one by one.
    with policy.fake_mode:
        encoding = flops_in_chunks(lambda n: policy.codec.encode(torch.empty(3, n, *pixels)), frames, 4)
        decoding = flops_in_chunks(
            lambda n: policy.decode(torch.empty(1, channels, n, *latent_pixels)), latent_frames, 1
        )
    reward = decoding
    if model.reward_decoder:
        with policy.fake_mode:
            small = _small_decoder(Path(model.reward_decoder), policy.codec)
            reward = flops_in_chunks(lambda n: small(torch.empty(1, channels, n, *latent_pixels)), latent_frames, 1)
    return CodecCost(latents, encoding, decoding, reward)


def _small_decoder(file: Path, codec: Codec) -> SmallDecoder:
    """Return the decoder of a file, or where there is none yet one as wide as those that are published."""
    if file.is_file():
        return SmallDecoder.from_file(file, torch.float32)
    return SmallDecoder.for_codec(codec.config["z_dim"], codec.temporal, codec.spatial, PUBLISHED_WIDTHS)


@functools.cache
def _decoding_peak(model: ModelConfig, latents: Latents, rows: int) -> float:
    policy = FakePolicy(dataclasses.replace(Config(), model=model))
    channels, frames, height, width = latents
    counted = min(frames, 3)
    with policy.fake_mode:
        given = torch.empty(rows, channels, counted, height, width)
        policy.decode(given[:, :, :1])  # loads the decoder
        peak = peak_bytes(lambda: policy.decode(given))
    # After the third latent frame only the videos grow, which exist twice: as the codec returns them, and in fp32.
    scale = policy.codec.temporal * policy.codec.spatial**2
    return peak + 2.0 * 4 * 3 * rows * (frames - counted) * height * width * scale
