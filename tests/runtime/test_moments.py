"""Moments find their weights again, whatever the parameter groups."""

import copy

import pytest
import torch

from flow_grpo.runtime.checkpoints.moments import load_moments, moments_by_place


def weights() -> list[torch.nn.Parameter]:
    """Return three weights, of which the first two have equal shapes."""
    draw = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, generator=draw)) for size in (2, 2, 3)]


def step(optimizer: torch.optim.Optimizer, own: list[torch.nn.Parameter]) -> None:
    for number, weight in enumerate(own):
        weight.grad = (number + 1.0) * weight.detach().cos()
    optimizer.step()


def test_moments_load_into_groups_of_another_order():
    own, other = weights(), weights()
    one = torch.optim.AdamW(own, lr=0.1)
    two = torch.optim.AdamW([{"params": [other[2], other[1]]}, {"params": [other[0]], "lr": 0.1}], lr=0.1)
    step(one, own)
    with torch.no_grad():
        for weight, value in zip(other, own, strict=True):
            weight.copy_(value)
    load_moments(two, other, copy.deepcopy(moments_by_place(one, own)))
    for optimizer, held in ((one, own), (two, other)):
        step(optimizer, held)
    assert all(map(torch.equal, own, other))
    assert [group["lr"] for group in two.param_groups] == [0.1, 0.1]


@pytest.mark.parametrize("kept", [slice(0, 2), slice(1, 3)], ids=["one weight less", "another shape"])
def test_moments_of_other_weights_are_refused_and_change_nothing(kept):
    own, other = weights(), weights()[kept]
    one, two = torch.optim.AdamW(own), torch.optim.AdamW(other)
    step(one, own)
    with pytest.raises(ValueError, match=r"of 3 weights has no place in these 2: resume with train\.sharding"):
        load_moments(two, other, moments_by_place(one, own))
    assert not two.state
