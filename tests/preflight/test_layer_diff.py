"""Where two calls of one network part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flow_grpo.preflight.layer_diff import LOOKED_AT, first_difference, recording


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def calls(model: nn.Module, *given: torch.Tensor):
    with recording(model) as seen:
        for values in given:
            model(values)
    return seen


def test_equal_calls_differ_nowhere_and_every_call_is_kept():
    first, second = calls(network(), torch.ones(2, 3), torch.ones(2, 3))
    assert list(first) == ["input 0", "layer 0", "layer 1", "layer 2", "the network"]
    assert first_difference(first, second) == "no layer differs: the step's Gaussian or its score does"


def test_the_first_layer_that_differs_is_named_with_its_gap():
    model = network()
    (first,) = calls(model, torch.ones(2, 3))
    with torch.no_grad():
        model[2].bias += 0.5
    (second,) = calls(model, torch.ones(2, 3))
    assert first_difference(first, second).startswith("layer 2 differs first, by 0.5 in values up to ")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (torch.ones(2, 3) + 1e-3, "input 0 differs first, by 0.001 in values up to 1"),
        (torch.ones(1, 3), "input 0 gave (2, 3) in the rollout and (1, 3) in the update"),
    ],
)
def test_inputs_are_compared_before_the_layers(other, said):
    assert first_difference(*calls(network(), torch.ones(2, 3), other)) == said


def test_a_layer_that_one_call_leaves_out_is_named():
    (first,) = calls(network(), torch.ones(2, 3))
    second = {name: kept for name, kept in first.items() if name != "layer 1"}
    assert first_difference(first, second) == "layer 1 ran in the rollout only"


def test_outputs_are_sampled_all_over_and_hooks_are_gone_afterwards():
    model = network()
    (seen,) = calls(model, torch.arange(3.0 * 10 * LOOKED_AT).view(-1, 3))
    shape, values = seen["input 0"]
    assert shape == (10 * LOOKED_AT, 3)
    assert len(values) == pytest.approx(LOOKED_AT, rel=0.01) and values[-1] > 2.9 * 10 * LOOKED_AT
    model(torch.ones(1, 3))
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())
