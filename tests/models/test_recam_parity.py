"""The transformer against tests/reference_recam.py, an independent implementation from the paper's description.

The fixture `exact` replaces what Wan computes in fp32 (tests/parity.py); the replaced tables and sinusoid have tests of
their own, and the fp32 tests replace nothing.
"""

import itertools

import pytest
import torch

from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from tests import parity
from tests import reference_recam as reference
from tests.tiny_models import CHANNELS, tiny_transformer

HEIGHT, WIDTH = 4, 6
TIMESTEPS = [(1000.0, 0.0), (995.93, 437.25), (24.4, 833.3333), (1.0, 0.125)]
KINDS = ["tiny", "tiny, patch 1", "wide"]


def build(kind: str) -> ReCamTransformer3DModel:
    """Return a model with every parameter away from 0 and 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        if kind == "wide":  # head width 16 splits unevenly: 8 for frames, 4 for rows, 4 for columns
            model = ReCamTransformer3DModel(
                num_attention_heads=3,
                attention_head_dim=16,
                in_channels=CHANNELS,
                out_channels=CHANNELS + 1,
                text_dim=20,
                freq_dim=32,
                ffn_dim=64,
                num_layers=3,
                rope_max_seq_len=32,
                eps=1e-5,
            ).eval()
        else:
            model = tiny_transformer(patch_size=(1, 1, 1) if "patch 1" in kind else (1, 2, 2), neutral=True)
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def inputs(model: ReCamTransformer3DModel, timestep=TIMESTEPS[1], dtype=torch.float64, seed: int = 0):
    """Return two rows that differ in everything: latents, timestep, prompt and camera."""
    draw = torch.Generator().manual_seed(seed)
    frames = 3 if model.config["num_layers"] == 3 else 2
    latents = torch.randn((2, CHANNELS, 2 * frames, HEIGHT, WIDTH), generator=draw)
    text = torch.randn((2, 5, model.config["text_dim"]), generator=draw)
    camera = torch.randn((2, frames, 12), generator=draw)
    return latents.to(dtype), torch.tensor(timestep, dtype=dtype), text.to(dtype), camera.to(dtype)


@pytest.mark.parametrize("timestep", TIMESTEPS)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_float64_outputs_agree(exact, kind, timestep):
    model = exact(build(kind))
    arguments = inputs(model, timestep)
    got = model(*arguments)[0]
    assert got.dtype == torch.float64
    expected = reference.recam_forward(parity.state_of(model), model.config, *arguments)
    assert parity.distance(got, expected) < 1e-10
    assert all(parity.distance(got[row], expected[row]) < 1e-10 for row in range(2))


@pytest.mark.parametrize("timestep", TIMESTEPS)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_fp32_outputs_agree_with_nothing_replaced(kind, timestep):
    model = build(kind)
    arguments = inputs(model, timestep, torch.float32)
    got = model(*arguments)[0]
    assert got.dtype == torch.float32
    for dtype in (torch.float32, torch.float64):
        expected = reference.recam_forward(
            parity.state_of(model, dtype), model.config, *(a.to(dtype) for a in arguments)
        )
        assert parity.distance(got, expected) < 1e-5


@pytest.mark.parametrize("width", [12, 16, 128])
def test_the_rotary_tables_are_the_exact_ones_rounded_to_fp32(width):
    model = ReCamTransformer3DModel(num_attention_heads=1, attention_head_dim=width, num_layers=0, rope_max_seq_len=24)
    for got, expected in zip((model.rope.freqs_cos, model.rope.freqs_sin), parity.exact_tables(width, 24), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=2**-25 + 1e-14)  # half a step of fp32 below 1


@pytest.mark.parametrize("width", [16, 32, 256])
def test_the_sinusoid_is_the_exact_one_up_to_fp32_angles(width):
    model = ReCamTransformer3DModel(num_attention_heads=1, attention_head_dim=12, num_layers=0, freq_dim=width)
    timestep = torch.tensor([0.0, 0.125, 1.0, 24.4, 437.25, 995.93, 1000.0])
    got = model.condition_embedder.timesteps_proj(timestep)
    # In units of 2**-24, relative: the exponent x is rounded twice, exp is good to 2 and the product to 1. The angle
    # t exp(-x) is then off by at most t (2 x + 3) exp(-x) <= 3 t, and the cosine adds 2 of its own.
    bound = (3 * timestep.double()[:, None] + 2) * 2**-24
    assert ((got.double() - reference.sinusoid(timestep.double(), width)).abs() <= bound).all()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_float64_gradients_of_all_parameters_agree(exact, kind, checkpointing):
    model = exact(build(kind))
    parity.check_gradients(model, reference.recam_forward, inputs(model), 1e-9, checkpointing=checkpointing)


def same_but_for_the_camera(model, count: int = 3):
    first = inputs(model)
    return [(*first[:3], inputs(model, seed=seed)[3]) for seed in range(count)]


@pytest.mark.parametrize("kind", ["tiny", "wide"])
def test_forwards_with_different_cameras_before_one_backward_sum_their_gradients(exact, kind):
    calls: list = []
    model = parity.with_checkpointing(exact(build(kind)), calls)
    several = same_but_for_the_camera(model)
    got = parity.model_gradients(model, *several)
    assert len(calls) == 2 * len(several) * model.config["num_layers"]
    separate = [parity.reference_gradients(model, reference.recam_forward, arguments) for arguments in several]
    parity.assert_same_gradients(got, {name: sum(one[name] for one in separate) for name in got}, 1e-9)
    # The cameras matter, so that a mixed-up one would show.
    name = "blocks.0.cam_encoder.weight"
    assert all(parity.distance(a[name], b[name]) > 1e-2 for a, b in itertools.combinations(separate, 2))
