"""The codec's halves: laziness, tiling, slicing, identity, refusals."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from flow_grpo.models.encoders.codec import Codec
from tests.tiny_models import CPU, codec_of, tiny_settings, tiny_vae


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("codec")
    tiny_vae().save_pretrained(str(path))
    return path


def video(seed: int = 0, rows: int = 16) -> torch.Tensor:
    return torch.rand((3, 5, rows, 24), generator=torch.Generator().manual_seed(seed))


def test_halves_from_a_folder_load_alone_and_compute_what_the_whole_network_does(folder, tmp_path):
    codec, whole = Codec.from_folder(folder, tiny_settings(), CPU), codec_of(tiny_vae())
    assert not codec._halves
    latents = codec.encode(video())
    assert list(codec._halves) == ["encoder"] and latents.shape == (4, 2, 4, 6)
    assert torch.equal(latents, whole.encode(video()))
    assert torch.equal(codec.decode(latents[None]), whole.decode(latents[None]))
    tiny_vae(seed=1).save_pretrained(str(tmp_path))
    assert codec.identity != Codec.from_folder(tmp_path, tiny_settings(), CPU).identity


@pytest.mark.parametrize("change", ["missing", "cut", "added"])
def test_a_tensor_that_does_not_belong_to_the_codec_is_refused_before_anything_is_decoded(folder, tmp_path, change):
    state = load_file(folder / "diffusion_pytorch_model.safetensors")
    name = "decoder.other" if change == "added" else "decoder.conv_in.bias"
    state[name] = torch.zeros(2)
    if change == "missing":
        del state[name]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(state, tmp_path / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ValueError, match=rf"does not hold the weights.* 1 \({name}\); download vae/ again"):
        Codec.from_folder(tmp_path, tiny_settings(), CPU)


def test_tiling_changes_the_identity_and_little_else_and_slicing_only_rounding(folder):
    wide = torch.rand((3, 5, 16, 320), generator=torch.Generator().manual_seed(2))  # tiles are 256 pixels wide
    plain, tiled = (Codec.from_folder(folder, tiny_settings(vae_tiling=t), CPU) for t in (False, True))
    assert plain.identity != tiled.identity
    one, two = plain.encode(wide), tiled.encode(wide)
    assert one.shape == two.shape and not torch.equal(one, two)
    assert (one - two).abs().mean() < 0.05 * one.std()  # the middle block sees a tile instead of all
    pictures = [codec.decode(one[None]) for codec in (plain, tiled)]
    assert pictures[0].shape == pictures[1].shape == (1, 3, 5, 16, 320)
    assert (pictures[0] - pictures[1]).abs().mean() < 0.05
    latents = torch.randn(3, 4, 2, 4, 6, generator=torch.Generator().manual_seed(1))
    settings = [tiny_settings(vae_slicing=slicing) for slicing in (True, False)]
    one, many = (Codec.from_folder(folder, given, CPU).decode(latents) for given in settings)
    torch.testing.assert_close(one, many, rtol=0, atol=1e-6)


def test_recammasters_tiles_are_30_by_52_latents_and_overlap_by_half(folder):
    settings = tiny_settings(), *(tiny_settings(vae_tiling=True, vae_tiles=t) for t in ("diffusers", "recammaster"))
    codec = Codec.from_folder(folder, settings[-1], CPU)
    codec.decode(torch.zeros(1, 4, 1, 4, 6))
    (network,) = codec._halves.values()
    sides = [getattr(network, f"tile_sample_{what}") for what in ("min_height", "min_width")]
    steps = [getattr(network, f"tile_sample_{what}") for what in ("stride_height", "stride_width")]
    assert network.use_tiling and sides == [30 * 4, 52 * 4] and steps == [15 * 4, 26 * 4]
    assert len({Codec.from_folder(folder, given, CPU).identity for given in settings}) == 3


@pytest.mark.parametrize(("numbers", "error"), [("tf32", 0.0), ("bf16", 0.02)])
def test_other_numbers_are_another_codec_with_nearly_its_pixels(folder, numbers, error):
    """On a CPU TF32 is fp32; `tests/runtime/test_device.py` sees that an NPU rounds, and only while the codec runs."""
    plain, other = (Codec.from_folder(folder, tiny_settings(vae_dtype=name), CPU) for name in ("fp32", numbers))
    assert plain.identity != other.identity
    latents = plain.encode(video())
    for one, two in ((latents, other.encode(video())), (plain.decode(latents[None]), other.decode(latents[None]))):
        assert two.dtype == torch.float32
        difference = (one - two).abs().max() / one.abs().max()
        assert (difference == 0) if error == 0 else (0 < difference < error)


def test_scale_factors_that_the_layers_do_not_have_are_refused():
    vae = tiny_vae()
    vae.register_to_config(scale_factor_spatial=8)
    with pytest.raises(ValueError, match=r"\(4, 8\), its layers compress by \(4, 4\)"):
        codec_of(vae)


@pytest.mark.parametrize(
    "change", [{"latents_std": [0.0] * 4}, {"latents_std": [1.0]}, {"latents_mean": ["x"] * 4}, {"latents_mean": None}]
)
def test_statistics_that_do_not_fit_the_latents_are_refused(folder, tmp_path, change):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=rf"{next(iter(change))} is .*, must be 4 finite numbers above"):
        Codec.from_folder(tmp_path, tiny_settings(), CPU)
