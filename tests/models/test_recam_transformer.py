"""The transformer against base Wan and against the block's formula written out once more."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch.nn import functional
from torch.utils import checkpoint as checkpointing

from flow_grpo.models.recam_transformer import ReCamTransformer3DModel, load_recam_transformer
from tests.tiny_models import CHANNELS, tiny_transformer

FRAMES, HEIGHT, WIDTH = 2, 4, 6  # F, latent rows and columns


def inputs(rows: int = 2, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    latents = torch.randn((rows, CHANNELS, 2 * FRAMES, HEIGHT, WIDTH), generator=draw)
    timestep = 1000 * torch.rand((rows,), generator=draw)
    text = torch.randn((rows, 5, 16), generator=draw)
    camera = torch.randn((rows, FRAMES, 12), generator=draw)
    return latents, timestep, text, camera


def base_config(model: ReCamTransformer3DModel) -> dict:
    return {k: v for k, v in model.config.items() if not k.startswith("_") and k != "camera_dim"}


def base_wan(model: ReCamTransformer3DModel) -> WanTransformer3DModel:
    base = WanTransformer3DModel(**base_config(model)).eval()
    base.load_state_dict(
        {k: v for k, v in model.state_dict().items() if "cam_encoder" not in k and "projector" not in k}
    )
    return base


@pytest.mark.parametrize("patch_size", [(1, 2, 2), (1, 1, 1), (1, 2, 1)])
@torch.no_grad()
def test_a_new_model_computes_bit_for_bit_what_base_wan_computes(patch_size):
    model = tiny_transformer(patch_size=patch_size, neutral=True)
    latents, timestep, text, camera = inputs()
    expected = base_wan(model)(latents, timestep, text, return_dict=False)[0]
    assert torch.equal(model(latents, timestep, text, camera)[0], expected)
    assert torch.equal(model(latents, timestep, text, camera, return_dict=True).sample, expected)


def attention(block_attention, x, context, angles):
    """Multi-head attention with RMS-normalised q, k and rotary q, k, from the formulas, without the library's parts."""
    q, k, v = (
        linear(y)
        for linear, y in zip(
            (block_attention.to_q, block_attention.to_k, block_attention.to_v), (x, context, context), strict=True
        )
    )

    def normalise(y, weight):
        return y / (y.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def heads(y):
        return y.unflatten(-1, (block_attention.heads, -1)).transpose(1, 2)

    q, k, v = (
        heads(normalise(q, block_attention.norm_q.weight)),
        heads(normalise(k, block_attention.norm_k.weight)),
        heads(v),
    )
    if angles is not None:

        def rotate(y):
            pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

        q, k = rotate(q), rotate(k)
    weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
    return block_attention.to_out[0]((weights @ v).transpose(1, 2).flatten(-2))


def rotary_angles(width: int, frames: int, rows: int, columns: int):
    """One angle per token and pair of a head: frame index, row and column, each with its share of the pairs."""
    space = 2 * (width // 6)
    shares, parts = (width - 2 * space, space, space), []
    grid = torch.cartesian_prod(torch.arange(frames), torch.arange(rows), torch.arange(columns)).float()
    for place, share in zip(grid.T, shares, strict=True):
        parts.append(place[:, None] / 10000 ** (torch.arange(0, share, 2) / share))
    return torch.cat(parts, dim=-1)


@torch.no_grad()
def test_a_block_adds_the_camera_per_frame_before_attention_and_projects_behind_it():
    model = tiny_transformer()
    block, heads = model.blocks[1], 2
    rows, columns = HEIGHT // 2, WIDTH // 2
    tokens_per_frame, width = rows * columns, 24
    draw = torch.Generator().manual_seed(3)
    x = torch.randn((2, 2 * FRAMES * tokens_per_frame, width), generator=draw)
    text, temb = torch.randn((2, 5, width), generator=draw), torch.randn((2, 6, width), generator=draw)
    camera = torch.randn((2, FRAMES, 12), generator=draw)

    mod = (block.scale_shift_table + temb).unbind(1)
    shift, scale, gate, ff_shift, ff_scale, ff_gate = (m[:, None] for m in mod)

    def norm(y):
        return (y - y.mean(-1, keepdim=True)) / (y.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()

    y = norm(x) * (1 + scale) + shift
    for row in range(2):
        for token in range(x.shape[1]):
            frame = token // tokens_per_frame % FRAMES  # the source half sees the target's cameras again
            y[row, token] += block.cam_encoder.weight @ camera[row, frame] + block.cam_encoder.bias
    angles = rotary_angles(width // heads, 2 * FRAMES, rows, columns)
    attended = attention(block.attn1, y, y, angles)
    expected = x + gate * (attended @ block.projector.weight.T + block.projector.bias)
    crossed = norm(expected) * block.norm2.weight + block.norm2.bias
    expected = expected + attention(block.attn2, crossed, text, None)
    hidden = functional.gelu(block.ffn.net[0].proj(norm(expected) * (1 + ff_scale) + ff_shift), approximate="tanh")
    expected = expected + ff_gate * block.ffn.net[2](hidden)

    rotary = model.rope(torch.empty((2, CHANNELS, 2 * FRAMES, HEIGHT, WIDTH)))
    got = block(x, text, temb, rotary, camera, tokens_per_frame)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


@torch.no_grad()
def test_the_camera_of_one_frame_enters_that_frame_of_both_halves_only():
    block = tiny_transformer().blocks[0]
    tokens = torch.zeros((1, 2 * FRAMES * 6, 24))
    camera = torch.randn((1, FRAMES, 12))
    moved = camera.clone()
    moved[:, 1] += 1.0
    difference = block._add_camera(tokens, moved, 6) - block._add_camera(tokens, camera, 6)
    touched = difference.view(2 * FRAMES, 6, 24).abs().amax(dim=(1, 2)) > 0
    assert touched.tolist() == [False, True, False, True]


@torch.no_grad()
def test_the_prediction_depends_on_the_camera_and_on_the_source():
    model = tiny_transformer()
    latents, timestep, text, camera = inputs()
    target = model(latents, timestep, text, camera)[0][:, :, :FRAMES]
    assert (model(latents, timestep, text, camera + 0.1)[0][:, :, :FRAMES] - target).abs().max() > 1e-4
    latents[:, :, FRAMES:] += 0.1
    assert (model(latents, timestep, text, camera)[0][:, :, :FRAMES] - target).abs().max() > 1e-4


@torch.no_grad()
def test_rows_do_not_mix():
    model = tiny_transformer()
    together = model(*inputs(rows=3))[0]
    alone = torch.cat([model(*(part[row : row + 1] for part in inputs(rows=3)))[0] for row in range(3)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


def gradients(model: ReCamTransformer3DModel) -> dict[str, torch.Tensor]:
    model.zero_grad()
    # Two forwards before one backward: a camera kept outside the call would be the second one in both recomputations.
    loss = sum(model(*inputs(seed=seed))[0].square().mean() for seed in (1, 2))
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_checkpointing_gives_the_same_gradients_with_two_forwards_before_one_backward(monkeypatch):
    plain = gradients(tiny_transformer())
    calls = []
    original = checkpointing.checkpoint
    monkeypatch.setattr(checkpointing, "checkpoint", lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    model = tiny_transformer()
    model.enable_gradient_checkpointing()
    checkpointed = gradients(model)
    assert len(calls) == 2 * len(model.blocks)
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    assert plain["blocks.0.cam_encoder.weight"].abs().max() > 0


def test_saving_and_loading_gives_the_same_model(tmp_path):
    model = tiny_transformer()
    model.save_pretrained(str(tmp_path))
    loaded = load_recam_transformer(tmp_path)
    assert loaded.config["num_layers"] == 2 and loaded.config["camera_dim"] == 12
    assert not loaded.training
    with torch.no_grad():
        assert torch.equal(model(*inputs())[0], loaded(*inputs())[0])


def test_loading_in_half_precision_keeps_in_fp32_what_wan_keeps(tmp_path):
    tiny_transformer().save_pretrained(str(tmp_path))
    state = load_recam_transformer(tmp_path, torch.bfloat16).state_dict()
    assert state["blocks.0.attn1.to_q.weight"].dtype == torch.bfloat16
    assert state["blocks.0.scale_shift_table"].dtype == torch.float32


def test_base_wan_and_missing_folders_are_refused(tmp_path):
    base_wan(tiny_transformer()).save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match=r"checkpoint of another model: .* holds WanTransformer3DModel"):
        load_recam_transformer(tmp_path)
    with pytest.raises(ValueError, match="is missing; give a model folder"):
        load_recam_transformer(tmp_path / "nothing")


@torch.no_grad()
def test_base_wan_weights_become_a_neutral_model():
    base = base_wan(tiny_transformer())
    model = ReCamTransformer3DModel.from_base_wan(base.config, base.state_dict()).eval()
    latents, timestep, text, camera = inputs()
    assert torch.equal(model(latents, timestep, text, camera)[0], base(latents, timestep, text, return_dict=False)[0])


@pytest.mark.parametrize("change", ["lacks one", "has another", "is a ReCam state"])
def test_a_state_that_is_not_base_wans_is_refused(change):
    model = tiny_transformer()
    state = base_wan(model).state_dict()
    if change == "lacks one":
        del state["proj_out.bias"]
    elif change == "has another":
        state["blocks.0.extra.weight"] = torch.zeros(1)
    else:
        state = model.state_dict()
    with pytest.raises(ValueError, match="not a base Wan state dict"):
        ReCamTransformer3DModel.from_base_wan(base_config(model), state)


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


def test_settings_that_recam_has_no_meaning_for_are_refused():
    with pytest.raises(ValueError, match="each latent frame has its pose"):
        ReCamTransformer3DModel(patch_size=(2, 2, 2), num_layers=0)
    with pytest.raises(ValueError, match="start from a T2V checkpoint"):
        ReCamTransformer3DModel(image_dim=8, num_layers=0)


def test_the_full_size_has_the_number_of_weights_of_the_published_model():
    with torch.device("meta"):
        state = ReCamTransformer3DModel().state_dict()
    camera = [name for name in state if "cam_encoder" in name or "projector" in name]
    assert (len(state), len(camera)) == (945, 120)
    assert sum(value.numel() for value in state.values()) == 1_490_420_800
    assert sum(state[name].numel() for name in camera) == 71_424_000


def test_sharding_and_compiling_by_block_find_the_block_class():
    names = {type(block).__name__ for block in tiny_transformer().blocks}
    assert names == set(ReCamTransformer3DModel._no_split_modules) == set(ReCamTransformer3DModel._repeated_blocks)
