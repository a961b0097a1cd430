"""Fixtures of the tests of models."""

import pytest
import torch

from tests.parity import lift


@pytest.fixture
def exact(monkeypatch):
    """Return a function that makes a model compute in float64 throughout, for as long as the test runs."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return lift
