"""The transformer against base Wan, its files, its attention kernels, and the inputs and settings that it refuses."""

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import nn

from flow_grpo.models.networks import redirector_transformer, wan_blocks
from flow_grpo.models.networks.redirector_transformer import ReDirectorTransformer3DModel
from flow_grpo.models.redirector import REDIRECTOR
from flow_grpo.models.wan_policy import load_networks
from tests.tiny_models import CHANNELS, CPU, make_tiny_redirector_folder, tiny_redirector, tiny_settings

FRAMES, HEIGHT, WIDTH = 2, 4, 6  # F, latent rows and columns
NEW = ("phase_qk", "phase_vo", "control_adapter")
CAMERAS = (2, 4 * (FRAMES - 1) + 1, 16)


def inputs(tokens: int = 5):
    rows, draw = 2, torch.Generator().manual_seed(0)
    latents = torch.randn((rows, CHANNELS, 2 * FRAMES, HEIGHT, WIDTH), generator=draw)
    timestep = 1000 * torch.rand((rows,), generator=draw)
    text = torch.randn((rows, tokens, 16), generator=draw)
    image = torch.randn((rows, 7, 20), generator=draw)
    cameras = torch.randn((rows, *CAMERAS), generator=draw)
    cameras[..., 12:] = torch.tensor([20.0, 20.0, 12.0, 8.0])
    return latents, timestep, text, image, cameras


class SharedPositions(nn.Module):
    """Wan's rotary positions of the first half of the frames, twice."""

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.rope = rope

    def forward(self, hidden_states):
        half = self.rope(hidden_states[:, :, : hidden_states.shape[2] // 2])
        return tuple(torch.cat([table, table], dim=1) for table in half)


def image_to_video_wan(model: ReDirectorTransformer3DModel) -> WanTransformer3DModel:
    """Return diffusers' own network with the weights that it shares with the model."""
    ours = ("temporal_compression", "spatial_compression")
    base = WanTransformer3DModel(**{k: v for k, v in model.config.items() if not k.startswith("_") and k not in ours})
    base.load_state_dict({k: v for k, v in model.state_dict().items() if not any(part in k for part in NEW)})
    return base.eval()


@torch.no_grad()
def test_a_new_model_computes_bit_for_bit_what_base_wan_computes_with_shared_positions():
    model = tiny_redirector(neutral=True)
    base = image_to_video_wan(model)
    latents, timestep, text, image, cameras = inputs(tokens=512)  # the length that diffusers' attention assumes
    padded = torch.cat([latents, torch.zeros_like(latents)], dim=1)
    got = model(latents, timestep, text, image, cameras)[0]
    assert not torch.equal(got, base(padded, timestep, text, image, return_dict=False)[0][:, :, :FRAMES])
    base.rope = SharedPositions(base.rope)
    assert torch.equal(got, base(padded, timestep, text, image, return_dict=False)[0][:, :, :FRAMES])
    assert torch.equal(got, model(latents, timestep, text, image, 2 * cameras)[0])  # it does not see the cameras at all


@torch.no_grad()
def test_the_attention_kernel_that_is_set_computes_every_attention(monkeypatch):
    model, given, seen = tiny_redirector(), inputs(), []
    expected = model(*given)[0]
    original = wan_blocks.dispatch_attention_fn

    def recording(*arguments, backend):
        seen.append(str(backend.value))
        return original(*arguments, backend=backend)

    monkeypatch.setattr(wan_blocks, "dispatch_attention_fn", recording)
    default, _ = _AttentionBackendRegistry.get_active_backend()
    model.set_attention_backend("_native_math")
    _AttentionBackendRegistry.set_active_backend(default)
    torch.testing.assert_close(model(*given)[0], expected, rtol=1e-4, atol=1e-5)
    assert seen == ["_native_math"] * 6  # self-attention, text and image of two blocks


@torch.no_grad()
def test_autocast_computes_rays_in_fp32(monkeypatch):
    model, given, dtypes = tiny_redirector(), inputs(), []
    original = redirector_transformer.packed_rays

    def recording(*arguments):
        rays = original(*arguments)
        dtypes.append((rays.dtype, torch.equal(rays, expected.pop(0))))
        return rays

    groups = redirector_transformer.by_latent_frame(given[4]).flatten(1, 2)
    expected = [original(group, 4 * HEIGHT, 4 * WIDTH) for group in groups.unbind(1)]
    monkeypatch.setattr(redirector_transformer, "packed_rays", recording)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(*given)[0].dtype == torch.bfloat16
    assert dtypes == [(torch.float32, True)] * 4


@pytest.mark.parametrize(("part", "field"), [("text_encoder", "text_dim"), ("image_encoder", "image_dim")])
def test_encoders_of_another_width_are_refused_before_a_run(part, field, tmp_path):
    folder = make_tiny_redirector_folder(tmp_path / "model")
    network = load_networks(REDIRECTOR, tiny_settings(folder), CPU).transformer
    settings = {name: value for name, value in network.config.items() if not name.startswith("_")}
    wider = REDIRECTOR.network(**settings | {field: settings[field] + 4})
    wider.save_pretrained(str(tmp_path / "model" / "transformer"))
    message = rf"{part} makes features of width {settings[field]}, the transformer reads {settings[field] + 4}"
    with pytest.raises(ValueError, match=message):
        load_networks(REDIRECTOR, tiny_settings(folder), CPU)


@pytest.mark.parametrize(
    ("position", "shape", "message"),
    [
        (0, (2, CHANNELS, 2 * FRAMES + 1, HEIGHT, WIDTH), "cameras have shape"),
        (0, (2, 2 * CHANNELS, 2 * FRAMES, HEIGHT, WIDTH), "8 channels, expected 4"),
        (3, (2, 7, 21), r"expected \(2, tokens, 20\)"),
        (3, (1, 7, 20), r"expected \(2, tokens, 20\)"),
        (4, (2, 2, FRAMES, 16), r"expected 2 rows of \(2, 5, 16\)"),
        (4, (1, *CAMERAS), "cameras have shape"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(position, shape, message):
    arguments = list(inputs())
    arguments[position] = torch.zeros(shape)
    with pytest.raises(ValueError, match=message):
        tiny_redirector()(*arguments)


@pytest.mark.parametrize(
    "setting", [{"image_dim": None}, {"added_kv_proj_dim": 7}, {"pos_embed_seq_len": 514}, {"patch_size": (2, 2, 2)}]
)
def test_settings_of_other_models_are_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        ReDirectorTransformer3DModel(**setting, num_layers=0)


@pytest.mark.parametrize("width", [12, 20, 128])
def test_phases_are_as_many_as_the_published_ones_and_as_the_pairs_of_rows_and_columns(width):
    with torch.device("meta"):
        model = ReDirectorTransformer3DModel(num_attention_heads=2, attention_head_dim=width, num_layers=1)
    found = len(model.blocks[0].attn1.phase_qk.weight) // 2
    assert found == 2 * width // 3 // 2 == (model.rope.h_dim + model.rope.w_dim) // 2


def test_the_default_size_is_that_of_the_published_model():
    with torch.device("meta"):
        model = ReDirectorTransformer3DModel()
    counts = {name: value.numel() for name, value in model.named_parameters()}
    assert len(counts) == 1049
    phases = [count for name, count in counts.items() if redirector_transformer.is_phase_weight(name)]
    assert phases == [1536 * 12 * 42] * 60
