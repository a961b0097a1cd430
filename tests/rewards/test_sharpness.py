"""More contrast between neighbours is more, whatever it shows."""

import math

import pytest
import torch

from flow_grpo.maths.pictures import blur
from flow_grpo.rewards.sharpness import Sharpness
from tests.toy import group


def videos() -> torch.Tensor:
    return torch.rand(2, 3, 5, 12, 16, generator=torch.Generator().manual_seed(0)) * 0.5 + 0.25


def values(given: torch.Tensor) -> list[float]:
    return Sharpness()(given, group(0, len(given))).values.tolist()


def test_the_value_is_the_log_of_the_mean_step_between_neighbours():
    ramp = torch.arange(16.0).expand(1, 3, 5, 12, 16) / 32
    result = Sharpness()(ramp, group(0, 1))
    assert result.info["edges"].tolist() == pytest.approx([1 / 64])  # along the rows, none along the columns
    assert result.values.tolist() == pytest.approx([math.log(1 / 64 + 1 / 255)])
    assert result.valid.tolist() == [True]
    assert values(torch.full((1, 3, 5, 12, 16), 0.5)) == pytest.approx([math.log(1 / 255)])


def test_blur_costs_and_noise_pays():
    plain = videos()
    assert all(less < own for less, own in zip(values(blur(plain, 1.0)), values(plain), strict=True))
    steps = plain.round(decimals=0)
    assert all(more > own for more, own in zip(values(steps), values(plain), strict=True))
