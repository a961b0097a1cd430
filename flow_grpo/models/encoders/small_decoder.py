"""A small video decoder for rewards, in the published layout of tiny autoencoders for video latents.

Layers and names are those of madebyollin/taehv (MIT), of which `taew2_1` decodes the latents of Wan 2.1 and `taew2_2`
those of Wan 2.2 TI2V-5B: files of that project load as they are, and so do ones that were distilled for a codec of
one's own (`tools/dev/distill_decoder.py`). The weights are the user's. All layers work on single frames, but for the
memory blocks, which also read the frame before, so that a video costs a few hundredths of what its codec takes.

Letters: B rows, C F H W latent channels, frames, height, width, T h w video frames, rows, columns, N frames of
all rows.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from flow_grpo.models.files.model_files import check_finite, read_checkpoint, summarize

PREFIX = "decoder."
STAGES = 3  # each doubles height and width; between the first two and behind the second, time may double
BLOCKS = 3  # of memory in a stage
PUBLISHED_WIDTHS = (256, 128, 64)


class SoftClamp(nn.Module):
    """Bounds latents smoothly to -3..3."""

    def forward(self, x: Tensor) -> Tensor:
        """Return 3 tanh(x / 3)."""
        return 3 * torch.tanh(x / 3)


class MemoryBlock(nn.Module):
    """A residual block on a frame and the one before it, which is zeros for the first."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = [_conv(channels * 2, channels), nn.ReLU(), _conv(channels, channels), nn.ReLU()]
        self.conv = nn.Sequential(*layers, _conv(channels, channels))

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Return frames (N, C, H, W), those of a row one after the other, of N = rows * frames."""
        before = functional.pad(x.unflatten(0, (rows, -1))[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0)).flatten(0, 1)
        made: Tensor = self.conv(torch.cat([x, before], dim=1))
        return functional.relu(made + x)


class GrowTime(nn.Module):
    """Makes every frame `stride` ones."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv = nn.Conv2d(channels, channels * stride, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N * stride, C, H, W) of (N, C, H, W)."""
        grown: Tensor = self.conv(x).unflatten(1, (self.stride, -1))
        return grown.flatten(0, 1)


class SmallDecoder(nn.Module):
    """Decodes normalised latents.

    Args:
        latent_channels: C.
        widths: channels of the three stages.
        strides: frames that a frame becomes behind each stage.
        patch: side of the squares of pixels that the last layer gives at once.
    """

    def __init__(self, latent_channels: int, widths: tuple[int, ...], strides: tuple[int, ...], patch: int = 1) -> None:
        super().__init__()
        self.temporal, self.patch = strides[0] * strides[1] * strides[2], patch
        self.spatial, self.latent_channels = 2**STAGES * patch, latent_channels
        layers: list[nn.Module] = [SoftClamp(), _conv(latent_channels, widths[0]), nn.ReLU()]
        for width, after, stride in zip(widths, (*widths[1:], widths[-1]), strides, strict=True):
            layers += [*(MemoryBlock(width) for _ in range(BLOCKS)), nn.Upsample(scale_factor=2)]
            layers += [GrowTime(width, stride), _conv(width, after, bias=False)]
        self.decoder = nn.ModuleList([*layers, nn.ReLU(), _conv(widths[-1], 3 * patch**2)])

    @classmethod
    def for_codec(cls, channels: int, temporal: int, spatial: int, widths: tuple[int, ...]) -> SmallDecoder:
        """Return a new one for the latents of a codec that compresses so much in time and space."""
        return cls(channels, widths, (1, min(2, temporal), max(1, temporal // 2)), spatial // 2**STAGES)

    @classmethod
    def from_file(cls, file: Path, dtype: torch.dtype) -> SmallDecoder:
        """Load a file of `torch.save` or safetensors; an encoder beside the decoder is left out.

        Raises:
            ValueError: it does not hold such a decoder.
            OSError: it cannot be opened.
        """
        state = {name: value.to(dtype) for name, value in read_checkpoint(file).items() if name.startswith(PREFIX)}
        try:
            convs = [state[f"{PREFIX}{number}.weight"] for number in (1, 8, 14, 22)]
            grown = [state[f"{PREFIX}{number}.conv.weight"] for number in (7, 13, 19)]
            widths = tuple(conv.shape[1] for conv in convs[1:])
            strides = tuple(conv.shape[0] // conv.shape[1] for conv in grown)
            patch = int((convs[3].shape[0] / 3) ** 0.5)
            made = cls(convs[0].shape[1], widths, strides, patch).to(dtype)
            made.load_state_dict(state)
        except (KeyError, IndexError, RuntimeError) as error:
            found = summarize(sorted(state))
            raise ValueError(
                f"{file} holds no small decoder of the layout of taehv ({str(error)[:200]}), it has {found}; give "
                "a file such as taew2_1.safetensors, or one of tools/dev/distill_decoder.py"
            ) from error
        check_finite(state, file)
        return made.requires_grad_(False).eval()

    def forward(self, latents: Tensor) -> Tensor:
        """Return videos (B, 3, T, h, w) of latents (B, C, F, H, W), T = temporal * (F - 1) + 1."""
        rows = len(latents)
        x = latents.transpose(1, 2).flatten(0, 1)
        for layer in self.decoder:
            x = layer(x, rows) if isinstance(layer, MemoryBlock) else layer(x)
        videos: Tensor = functional.pixel_shuffle(x, self.patch).unflatten(0, (rows, -1))
        return videos[:, self.temporal - 1 :].transpose(1, 2)  # of the first latent frame the codec makes one frame


def _conv(given: int, made: int, *, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(given, made, 3, padding=1, bias=bias)
