"""The small decoder: its published layout, its frames, and the files and codecs that do not fit."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from flow_grpo.models.encoders.codec import Codec
from flow_grpo.models.encoders.small_decoder import SmallDecoder
from tests.tiny_models import CPU, tiny_settings

VAE = Path(__file__).parents[2] / "assets" / "tiny_recam" / "vae"


def by_description(state: dict[str, torch.Tensor], latents: torch.Tensor) -> torch.Tensor:
    """Decode one video (C, F, H, W) layer by layer, frame by frame, by the names of the published files."""

    def conv(number: str, x: torch.Tensor, padding: int = 1) -> torch.Tensor:
        name = f"decoder.{number}"
        return functional.conv2d(x[None], state[f"{name}.weight"], state.get(f"{name}.bias"), padding=padding)[0]

    frames = [conv("1", 3 * torch.tanh(frame / 3)).relu() for frame in latents.unbind(1)]
    for first in (3, 9, 15):
        for number in range(first, first + 3):
            made = []
            for place, x in enumerate(frames):
                before = frames[place - 1] if place else torch.zeros_like(x)
                inner = conv(f"{number}.conv.0", torch.cat([x, before])).relu()
                made.append((conv(f"{number}.conv.4", conv(f"{number}.conv.2", inner).relu()) + x).relu())
            frames = made
        large = [x.repeat_interleave(2, 1).repeat_interleave(2, 2) for x in frames]
        grown = [conv(f"{first + 4}.conv", x, padding=0) for x in large]
        frames = [
            conv(f"{first + 5}", part) for x in grown for part in x.split(state[f"decoder.{first + 5}.weight"].shape[1])
        ]
    return torch.stack([conv("22", x.relu()) for x in frames], dim=1)


def made(strides: tuple[int, ...] = (1, 2, 2), patch: int = 1) -> SmallDecoder:
    torch.manual_seed(0)
    return SmallDecoder(16, (12, 8, 6), strides, patch)


@pytest.mark.parametrize(("strides", "patch"), [((1, 2, 2), 1), ((1, 1, 1), 1), ((1, 2, 2), 2)])
@torch.no_grad()
def test_a_file_of_the_published_layout_is_decoded_as_described_whatever_stands_beside_the_decoder(
    strides, patch, tmp_path
):
    state = made(strides, patch).state_dict()
    torch.save(state | {"encoder.0.weight": torch.zeros(1)}, tmp_path / "taew.pth")
    save_file({name: value.contiguous() for name, value in state.items()}, tmp_path / "taew.safetensors")
    latents = 2 * torch.randn(2, 16, 3, 4, 6)
    for name in ("taew.pth", "taew.safetensors"):
        decoder = SmallDecoder.from_file(tmp_path / name, torch.float32)
        videos, grown = decoder(latents), strides[1] * strides[2]
        assert videos.shape == (2, 3, 2 * grown + 1, 8 * 4 * patch, 8 * 6 * patch)
        for video, own in zip(videos, latents, strict=True):
            whole = functional.pixel_shuffle(by_description(state, own).transpose(0, 1), patch).transpose(0, 1)
            torch.testing.assert_close(video, whole[:, grown - 1 :], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {name: state[name] for name in list(state)[:5]}, "holds no small decoder"),
        (lambda state: state | {"decoder.9.conv.0.weight": torch.zeros(3)}, r"size mismatch for decoder\.9|shape"),
        (lambda state: {"model.weight": torch.zeros(3)}, "it has none"),
        (lambda state: state | {"decoder.1.bias": torch.full((12,), torch.nan)}, r"decoder\.1\.bias"),
    ],
)
def test_a_file_of_something_else_is_refused(change, message, tmp_path):
    save_file(
        {name: value.contiguous() for name, value in change(made().state_dict()).items()}, tmp_path / "x.safetensors"
    )
    with pytest.raises(ValueError, match=message):
        SmallDecoder.from_file(tmp_path / "x.safetensors", torch.float32)


def test_the_codec_decodes_for_rewards_by_it_and_refuses_that_of_another_codec(tmp_path):
    fits, wrong = tmp_path / "fits.safetensors", tmp_path / "wrong.safetensors"
    codec = Codec.from_folder(VAE, tiny_settings(), CPU)
    torch.manual_seed(0)
    small = SmallDecoder(codec.config["z_dim"], (12, 8, 6), (1, 1, 1))
    for file, decoder in ((fits, small), (wrong, made())):
        save_file({name: value.contiguous() for name, value in decoder.state_dict().items()}, file)
    latents = torch.randn(2, codec.config["z_dim"], 2, 2, 3)
    assert torch.equal(codec.decode_for_rewards(latents), codec.decode(latents))
    own = Codec.from_folder(VAE, dataclasses.replace(tiny_settings(), reward_decoder=str(fits)), CPU)
    with torch.no_grad():
        assert torch.equal(own.decode_for_rewards(latents), small(latents).clamp(0, 1))
    assert torch.equal(own.decode(latents), codec.decode(latents))
    with pytest.raises(ValueError, match=re.escape("must be for") + ".* of the codec"):
        Codec.from_folder(VAE, dataclasses.replace(tiny_settings(), reward_decoder=str(wrong)), CPU)
