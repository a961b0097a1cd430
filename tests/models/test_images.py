"""Pictures to features."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import interpolate

from flow_grpo.models.encoders.images import ImageEncoder, preprocess
from tests.tiny_models import CPU, add_tiny_image_encoder, tiny_image_encoder

MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)


@pytest.fixture
def folder(tmp_path) -> Path:
    add_tiny_image_encoder(tmp_path)
    return tmp_path


def encoder(folder: Path, dtype=torch.float32) -> ImageEncoder:
    return ImageEncoder.from_folder(folder, dtype, device=CPU)


def picture(height: int = 28, width: int = 28) -> torch.Tensor:
    return torch.rand((3, height, width), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def by_hand(frame: torch.Tensor) -> torch.Tensor:
    """Return the input of the last layer for a picture of the network's own size."""
    network = tiny_image_encoder()
    pixels = torch.stack([(frame[c] - MEAN[c]) / STD[c] for c in range(3)])[None]
    states = network.pre_layrnorm(network.embeddings(pixels))
    for layer in network.encoder.layers[:-1]:
        states = layer(states, attention_mask=None)
    return states[0]


def test_features_are_those_of_the_penultimate_layer(folder):
    made = encoder(folder)
    assert made._network is None
    found = made.embed(picture())
    assert made._network is not None and found.shape == (5, 20) and found.dtype == torch.float32
    torch.testing.assert_close(found, by_hand(picture()), rtol=1e-5, atol=1e-6)


def test_the_whole_picture_is_squashed_as_in_wans_own_code():
    frame = picture(60, 104)
    around_zero = interpolate((2 * frame - 1)[None], size=(28, 28), mode="bicubic", align_corners=False)
    expected = torch.stack([(around_zero[0, c] * 0.5 + 0.5 - MEAN[c]) / STD[c] for c in range(3)])[None]
    torch.testing.assert_close(preprocess(frame, 28, MEAN, STD), expected, rtol=1e-5, atol=1e-5)
    frame[:, :, :10] = 0.0  # a crop of the centre would not see this edge
    assert (preprocess(frame, 28, MEAN, STD) - expected)[..., :2].abs().max() > 0.1


def test_weights_under_their_older_names_are_the_same(folder):
    expected = encoder(folder).embed(picture())
    (file,) = (folder / "image_encoder").glob("*.safetensors")
    save_file({f"vision_model.{name}": value for name, value in load_file(file).items()}, file, {"format": "pt"})
    assert torch.equal(encoder(folder).embed(picture()), expected)


def test_the_identity_depends_on_weights_preprocessing_and_dtype(folder, tmp_path):
    found = {encoder(folder, dtype).identity for dtype in (torch.float32, torch.bfloat16)}
    file = folder / "image_processor" / "preprocessor_config.json"
    file.write_text(json.dumps({"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}))
    found.add(encoder(folder).identity)
    (tmp_path / "other").mkdir()
    add_tiny_image_encoder(tmp_path / "other", seed=1)
    found.add(encoder(tmp_path / "other").identity)
    assert len(found) == 4


@pytest.mark.parametrize(
    "change",
    [{"image_mean": [0.5, 0.5]}, {"image_std": [0.5, 0.0, 0.5]}, {"image_std": None}, {"image_mean": [0.5, "a", 0]}],
)
def test_statistics_that_are_none_are_refused(folder, change):
    file = folder / "image_processor" / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=rf"{next(iter(change))} is .*must be 3 finite numbers.*download it again"):
        encoder(folder)


@pytest.mark.parametrize("part", ["image_encoder/config.json", "image_processor/preprocessor_config.json"])
def test_missing_files_are_refused(folder, part):
    (folder / part).unlink()
    with pytest.raises(ValueError, match=f"{part} is missing"):
        encoder(folder)
