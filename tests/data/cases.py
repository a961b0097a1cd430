"""What the tests of data share: a refusal's text, and videos whose pixels are known."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def refusal(call: Callable[[], object]) -> str:
    """Return the one line with which a call is refused."""
    with pytest.raises(ValueError, match=r".") as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def clip(number: int, frames: int = 5, height: int = 16, width: int = 24) -> Tensor:
    """Return (3, T, h, w) uint8 moving gradients that differ by number."""
    t, y, x = torch.meshgrid(*(torch.arange(size) for size in (frames, height, width)), indexing="ij")
    return torch.stack([8 * x, 10 * y + t, 20 * t + 10 * number]).to(torch.uint8)
