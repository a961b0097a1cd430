"""The transformer against base Wan, its files, and the inputs and settings that it refuses."""

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.transformers import load_transformer
from tests.models import test_redirector_transformer
from tests.tiny_models import CHANNELS, tiny_redirector, tiny_transformer

FRAMES, HEIGHT, WIDTH = 2, 4, 6  # F, latent rows and columns


def inputs(rows: int = 2, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    latents = torch.randn((rows, CHANNELS, 2 * FRAMES, HEIGHT, WIDTH), generator=draw)
    timestep = 1000 * torch.rand((rows,), generator=draw)
    text = torch.randn((rows, 5, 16), generator=draw)
    camera = torch.randn((rows, FRAMES, 12), generator=draw)
    return latents, timestep, text, camera


def all_tokens(self, tokens, *arguments):
    """Return what `through_blocks` returns, without its shortcut in the last block."""
    for block in self.blocks:
        tokens = block(tokens, *arguments)
    return tokens[:, : tokens.shape[1] // 2]


def base_config(model: ReCamTransformer3DModel) -> dict:
    return {k: v for k, v in model.config.items() if not k.startswith("_") and k != "camera_dim"}


def base_wan(model: ReCamTransformer3DModel) -> WanTransformer3DModel:
    base = WanTransformer3DModel(**base_config(model)).eval()
    state = model.state_dict().items()
    base.load_state_dict({name: v for name, v in state if "cam_encoder" not in name and "projector" not in name})
    return base


@pytest.mark.parametrize("patch_size", [(1, 2, 2), (1, 1, 1), (1, 2, 1)])
@torch.no_grad()
def test_a_new_model_computes_bit_for_bit_what_base_wan_computes(patch_size):
    model = tiny_transformer(patch_size=patch_size, neutral=True)
    latents, timestep, text, camera = inputs()
    expected = base_wan(model)(latents, timestep, text, return_dict=False)[0][:, :, :FRAMES]
    assert torch.equal(model(latents, timestep, text, camera)[0], expected)


def test_the_last_block_s_shortcut_changes_no_bit_of_the_output_and_no_gradient_but_by_rounding(monkeypatch):
    model, given = tiny_transformer(), inputs()
    found = []
    for _ in range(2):
        model.zero_grad()
        output = model(*given)[0]
        output.square().mean().backward()
        found.append((output.detach(), {name: weight.grad for name, weight in model.named_parameters()}))
        monkeypatch.setattr(ReCamTransformer3DModel, "through_blocks", all_tokens)
    (short, gradients), (whole, expected) = found
    assert short.shape == (2, CHANNELS, FRAMES, HEIGHT, WIDTH) and torch.equal(short, whole)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize(
    ("model", "given", "own"),
    [
        (tiny_transformer(), inputs(), "cam_encoder"),
        (tiny_redirector(), test_redirector_transformer.inputs(), "attn1.phase_qk"),
    ],
    ids=["recam", "redirector"],
)
def test_a_saved_model_loads_as_it_was_and_in_half_precision_keeps_in_fp32_what_wan_keeps(tmp_path, model, given, own):
    for variant in (None, model.variant):
        model.save_pretrained(str(tmp_path / str(variant)), variant=variant)
        loaded = load_transformer(type(model), tmp_path / str(variant))
        assert not loaded.training and torch.equal(model(*given)[0], loaded(*given)[0])
    state = load_transformer(type(model), tmp_path / "None", torch.bfloat16).state_dict()
    assert state[f"blocks.0.{own}.weight"].dtype == torch.bfloat16
    assert state["blocks.0.scale_shift_table"].dtype == torch.float32


def test_base_wan_and_missing_folders_are_refused(tmp_path):
    base_wan(tiny_transformer()).save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match=r"checkpoint of another model: .* holds WanTransformer3DModel"):
        load_transformer(ReCamTransformer3DModel, tmp_path)
    with pytest.raises(ValueError, match="is missing; give a model folder"):
        load_transformer(ReCamTransformer3DModel, tmp_path / "nothing")


@pytest.mark.parametrize(
    ("position", "shape", "message"),
    [
        (0, (2, CHANNELS, 2 * FRAMES + 1, HEIGHT, WIDTH), "camera has shape"),
        (3, (2, 2 * FRAMES, 12), "one camera per target frame"),
        (3, (1, FRAMES, 12), "camera has shape"),
        (0, (2, CHANNELS, 2 * FRAMES, HEIGHT, WIDTH + 1), "multiples of the patch 2x2"),
        (1, (2, 48), "one per row"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(position, shape, message):
    arguments = list(inputs())
    arguments[position] = torch.zeros(shape)
    with pytest.raises(ValueError, match=message):
        tiny_transformer()(*arguments)


def test_the_default_size_is_the_published_one_and_settings_without_meaning_are_refused():
    with pytest.raises(ValueError, match="each latent frame has its pose"):
        ReCamTransformer3DModel(patch_size=(2, 2, 2), num_layers=0)
    with pytest.raises(ValueError, match="start from a T2V checkpoint"):
        ReCamTransformer3DModel(image_dim=8, num_layers=0)
    with torch.device("meta"):
        assert sum(value.numel() for value in ReCamTransformer3DModel().parameters()) == 1_490_420_800


@pytest.mark.parametrize("build", [tiny_transformer, tiny_redirector])
def test_sharding_and_compiling_by_block_find_the_block_class(build):
    model = build()
    names = {type(block).__name__ for block in model.blocks}
    assert names == set(model._no_split_modules) == set(model._repeated_blocks)
