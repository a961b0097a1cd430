"""Sharpness by hand; what it takes blur and noise for is in test_tricks.py."""

import math

import pytest
import torch

from flow_grpo.rewards.sharpness import Sharpness
from tests.toy import group


def test_the_value_is_the_log_of_the_mean_step_between_neighbours():
    ramp = torch.arange(16.0).expand(1, 3, 5, 12, 16) / 32
    result = Sharpness()(ramp, group(0, 1))
    assert result.info["edges"].tolist() == pytest.approx([1 / 64])  # along the rows, none along the columns
    assert result.values.tolist() == pytest.approx([math.log(1 / 64 + 1 / 255)])
    assert result.valid.tolist() == [True]
    flat = Sharpness()(torch.full((1, 3, 5, 12, 16), 0.5), group(0, 1))
    assert flat.values.tolist() == pytest.approx([math.log(1 / 255)])
