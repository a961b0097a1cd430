"""What the parity tests share: a model in float64 throughout, and gradients of the model and of a reference.

Wan computes three things in fp32 whatever the dtype of its weights: the upcasts `.float()` (norms, modulation, residual
sums), the rotary tables and the timestep's sinusoid. They keep a float64 model 1e-6 to 5e-6 from exact arithmetic. The
fixture `exact` of tests/models makes all three float64.
"""

from collections.abc import Callable
from typing import Any

import torch

from tests import reference_recam as reference


class ExactSinusoid(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, timestep):
        return reference.sinusoid(timestep, self.width)


def exact_tables(width: int, length: int):
    """Cosines and sines of every position on the three axes, each channel pair's value twice, as the model keeps it."""
    lines = ((length, 1, 1), (1, length, 1), (1, 1, length))  # the other two axes' angles are 0 along each
    angles = sum(reference.rotary_angles(width, line, torch.float64) for line in lines).repeat_interleave(2, dim=1)
    return angles.cos(), angles.sin()


def lift(model: Any) -> Any:
    """Return the model in float64 with exact tables and sinusoid; its `.float()` remain."""
    model.double()
    cos, sin = exact_tables(model.config["attention_head_dim"], 2 * 3 + 1)
    model.rope.freqs_cos, model.rope.freqs_sin = cos, sin  # short: a grid longer than 7 would fail, not pass
    model.condition_embedder.timesteps_proj = ExactSinusoid(model.config["freq_dim"])
    return model


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def state_of(model, dtype=torch.float64):
    return {name: value.to(dtype) for name, value in model.state_dict().items()}


def with_checkpointing(model: Any, calls: list) -> Any:
    """Turn checkpointing on and note every computation of a block, recomputations too."""
    model.enable_gradient_checkpointing()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    return model


def probe(output: torch.Tensor) -> torch.Tensor:
    """Return a scalar that weighs every entry of the output differently."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output)
    return (output * weights).sum() + output.square().mean()


def model_gradients(model, *all_arguments):
    """Run every forward first, then one backward through all of them."""
    model.zero_grad()
    sum(probe(model(*arguments)[0]) for arguments in all_arguments).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def reference_gradients(model, forward: Callable[..., torch.Tensor], arguments):
    """Return the gradients of a reference, a function of state dict, configuration and inputs."""
    state = {name: value.clone().requires_grad_() for name, value in state_of(model).items()}
    probe(forward(state, model.config, *arguments)).backward()
    return {name: value.grad for name, value in state.items()}


def assert_same_gradients(got, expected, bound: float):
    assert got.keys() == expected.keys()
    assert all(value.norm() > 1e-6 for value in expected.values())
    far = [name for name in got if not distance(got[name], expected[name]) < bound]  # "not <" so that NaN counts
    assert not far


def check_gradients(model, forward: Callable[..., torch.Tensor], arguments, bound: float, *, checkpointing: bool):
    """Assert that all gradients are those of the reference, blocks being computed again under checkpointing only."""
    calls: list = []
    if checkpointing:
        with_checkpointing(model, calls)
    assert_same_gradients(model_gradients(model, arguments), reference_gradients(model, forward, arguments), bound)
    assert len(calls) == (2 * model.config["num_layers"] if checkpointing else 0)
