"""Sizes, and the parts that need no network: the matmul rate and attention.

Every part is a generator of (name, record) for `device_report.py`, which runs it in a process of its own. A record
holds `seconds` of one call, `flops` of one call where they are known here, and `peak_gib`; or why there is no figure.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flow_grpo.runtime import device as device_api
from tools.device.timing import measure

Record = dict[str, Any]
Records = Iterator[tuple[str, Record]]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Context = Callable[[], AbstractContextManager[Any]]

SDPA_KERNELS = ("flash_attention", "cudnn_attention", "efficient_attention", "overrideable", "math")
_SCORE_BYTES = 16  # per query and key, where a kernel keeps scores: fp32 before and after the softmax, both with grads
_TEMPORAL, _SPATIAL = 4, 8  # compression of Wan's codec
_CHANNELS = 16


@dataclasses.dataclass(frozen=True)
class VideoSize:
    """Size of a video: 4n+1 frames with sides that are multiples of 16 pixels."""

    frames: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"

    @classmethod
    def parse(cls, text: str) -> VideoSize:
        """Return the size written as FRAMESxHEIGHTxWIDTH; ValueError for one that the model does not take."""
        if not re.fullmatch(r"\d+x\d+x\d+", text):
            raise ValueError(f"--videos: got {text!r}, must be FRAMESxHEIGHTxWIDTH; for example --videos 81x480x832")
        video = cls(*map(int, text.split("x")))
        if (video.frames - 1) % _TEMPORAL or video.height % 16 or video.width % 16 or not video.height * video.width:
            raise ValueError(f"--videos: got {text!r}, must be 4n+1 frames with sides that are multiples of 16")
        return video

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        return _CHANNELS, (self.frames - 1) // _TEMPORAL + 1, self.height // _SPATIAL, self.width // _SPATIAL

    @property
    def tokens(self) -> int:
        """S, of target and source together."""
        _, latent_frames, rows, columns = self.latent_shape
        return 2 * latent_frames * (rows // 2) * (columns // 2)


@dataclasses.dataclass(frozen=True)
class Size:
    """What is built; all that is not named here is as in Wan 2.1."""

    heads: int
    head_width: int
    blocks: int
    ffn_width: int
    text_width: int
    codec_width: int  # channels of the codec at full resolution
    prompt_tokens: int  # after padding
    lora_rank: int  # of every adapter
    text_encoder_bytes: int  # what the frozen text encoder holds on the device all the while
    matrices: tuple[int, ...]  # side lengths tried for the matrix rate


SIZES = {
    # ReCamMaster on Wan2.1-T2V-1.3B, and UMT5-XXL in bf16.
    "real": Size(
        heads=12,
        head_width=128,
        blocks=30,
        ffn_width=8960,
        text_width=4096,
        codec_width=96,
        prompt_tokens=512,
        lora_rank=64,
        text_encoder_bytes=11_361_920_418,
        matrices=(4096, 8192, 16384),
    ),
    "self-test": Size(
        heads=2,
        head_width=24,
        blocks=2,
        ffn_width=96,
        text_width=32,
        codec_width=4,
        prompt_tokens=8,
        lora_rank=4,
        text_encoder_bytes=1024,
        matrices=(128, 256),
    ),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a part is run."""

    size: Size
    device: torch.device
    videos: tuple[VideoSize, ...]  # one for all parts but the count of operations
    rows: int  # B, videos in one call
    repeat: int  # how often a call is timed, after one call to warm up

    @property
    def video(self) -> VideoSize:
        return self.videos[0]


def matmul(setting: Setting) -> Records:
    """Yield the measured rate of bf16 matrix products: the best of several sizes, which is what shares refer to."""
    calls = 10  # per timing, so that starting a kernel does not count
    found = []
    for side in setting.size.matrices:
        left, right = (torch.randn(side, side, device=setting.device).bfloat16() for _ in range(2))
        out = torch.empty_like(left)

        def products(left: Tensor = left, right: Tensor = right, out: Tensor = out) -> None:
            for _ in range(calls):
                torch.mm(left, right, out=out)

        record = measure(products, setting.device, setting.repeat) | {"flops": 2.0 * calls * side**3, "side": side}
        found.append((record["flops"] / record["seconds"], record))
        yield "matmul", max(found, key=lambda pair: pair[0])[1]


def attention(setting: Setting) -> Records:
    """Yield the times of self-attention, forward and forward with backward, for every kernel available.

    Names: `native` and the like are diffusers', as the transformer calls them; `sdpa_*` force one kernel of torch's
    own function, where the device lets it be chosen.
    """
    size, video = setting.size, setting.video
    tokens = video.tokens
    shape = (setting.rows, tokens, size.heads, size.head_width)
    flops = 4.0 * setting.rows * size.heads * size.head_width * tokens**2
    inputs = [torch.randn(shape, device=setting.device).bfloat16().requires_grad_() for _ in range(3)]
    gradient = torch.randn(shape, device=setting.device).bfloat16()
    for name, context, call in _attentions(setting.device):
        needed = setting.rows * size.heads * tokens**2 * _SCORE_BYTES / 2**30
        if name.endswith("_math") and needed > 0.5 * device_api.memory(setting.device).get("total", 0.0):
            yield f"attention_{name}_{video}", {"unavailable": f"would need {needed:.0f} GiB for its scores"}
            continue

        def alone(call: Attention = call) -> None:
            with torch.no_grad():
                call(*inputs)

        def with_backward(call: Attention = call) -> None:
            torch.autograd.grad(call(*inputs), inputs, gradient)

        for label, timed, factor in ((name, alone, 1), (f"{name}_backward", with_backward, 3)):
            try:
                with context():
                    record = measure(timed, setting.device, setting.repeat) | {"flops": factor * flops}
            except (ImportError, RuntimeError, TypeError, ValueError) as error:  # how a kernel is refused
                yield f"attention_{label}_{video}", {"unavailable": " ".join(str(error).split()).split(". ")[0][:160]}
                device_api.empty_cache(setting.device)
                break
            yield f"attention_{label}_{video}", record


def _attentions(device: torch.device) -> Iterator[tuple[str, Context, Attention]]:
    """Yield (name, context, function of (B, S, heads, head width) queries, keys and values), the default first."""
    from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn  # seconds, not for matmul

    def own(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return scaled_dot_product_attention(query, key, value).transpose(1, 2)

    backends, known = device_api.attention_backends(device), SDPBackend.__members__
    for backend in backends:
        yield backend.strip("_"), functools.partial(attention_backend, backend), dispatch_attention_fn
    for kernel in SDPA_KERNELS if device_api.chooses_sdpa_kernel(device) else ():
        name = kernel.removesuffix("_attention")
        # The list grows with torch; skip kernels already measured under diffusers' name.
        if kernel.upper() in known and f"_native_{name}" not in backends:
            yield f"sdpa_{name}", functools.partial(sdpa_kernel, known[kernel.upper()]), own


PARTS: Mapping[str, Callable[[Setting], Records]] = {"matmul": matmul, "attention": attention}
