"""The transformer against tests/reference_redirector.py, an independent implementation from the description."""

import pytest
import torch

from flow_grpo.maths import poses
from flow_grpo.models.networks.redirector_transformer import ReDirectorTransformer3DModel
from tests.parity import check_gradients, distance, state_of
from tests.reference_redirector import redirector_forward
from tests.tiny_models import CHANNELS, tiny_redirector

HEIGHT, WIDTH = 4, 6
PHASES = ("phase_qk", "phase_vo")


def build(kind: str) -> ReDirectorTransformer3DModel:
    """Return a model with every parameter away from 0 and 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = tiny_redirector()
        if kind == "wide":  # head width 20: 8 channels for time, 6 for rows, 6 for columns
            model = ReDirectorTransformer3DModel(
                num_attention_heads=3,
                attention_head_dim=20,
                in_channels=2 * CHANNELS + 1,
                out_channels=CHANNELS,
                text_dim=20,
                freq_dim=32,
                ffn_dim=64,
                num_layers=1,
                image_dim=18,
                rope_max_seq_len=32,
                temporal_compression=2,
                spatial_compression=2,
                eps=1e-5,
            ).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def inputs(model: ReDirectorTransformer3DModel, tokens: int = 5, seed: int = 0):
    """Return two rows that differ in everything, in float64: latents, timestep, prompt, image and cameras."""
    draw, config, frames = torch.Generator().manual_seed(seed), model.config, 2

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    videos = config["temporal_compression"] * (frames - 1) + 1
    matrices = poses.pose(poses.rotation_matrix(normal(2, 2, videos, 3)), normal(2, 2, videos, 3))
    lenses = torch.tensor([20.0, 17.0, 11.0, 9.0], dtype=torch.float64) + normal(2, 2, videos, 4)
    return (
        normal(2, CHANNELS, 2 * frames, HEIGHT, WIDTH),
        torch.tensor([995.93, 437.25], dtype=torch.float64),
        normal(2, tokens, config["text_dim"]),
        normal(2, 7, config["image_dim"]),
        torch.cat([matrices[..., :3, :].flatten(-2), lenses], dim=-1),
    )


@pytest.mark.parametrize(("kind", "tokens"), [("tiny", 5), ("wide", 5), ("tiny", 1), ("tiny", 512), ("tiny", 600)])
@torch.no_grad()
def test_float64_outputs_agree_whatever_the_length_of_the_prompt(exact, kind, tokens):
    model = exact(build(kind))
    arguments = inputs(model, tokens)
    got = model(*arguments)[0]
    assert got.dtype == torch.float64
    expected = redirector_forward(state_of(model), model.config, *arguments)
    assert distance(got, expected) < 1e-12
    assert all(distance(got[row], expected[row]) < 1e-12 for row in range(2))
    for part in PHASES:  # they matter, so that a wrong one would show
        without = {name: value * (part not in name) for name, value in state_of(model).items()}
        assert distance(redirector_forward(without, model.config, *arguments), expected) > 1e-4


@pytest.mark.parametrize("kind", ["tiny", "wide"])
@torch.no_grad()
def test_fp32_outputs_agree_with_nothing_replaced(kind):
    model = build(kind)
    arguments = inputs(model)
    got = model(*(one.float() for one in arguments))[0]
    assert got.dtype == torch.float32
    assert distance(got, redirector_forward(state_of(model), model.config, *arguments)) < 1e-5


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["tiny", "wide"])
def test_float64_gradients_of_all_parameters_agree(exact, kind, checkpointing):
    model = exact(build(kind))
    check_gradients(model, redirector_forward, inputs(model), 1e-11, checkpointing=checkpointing)
