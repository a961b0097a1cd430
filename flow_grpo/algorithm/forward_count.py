"""The work of a run, counted in forwards of the network on one sample: a measure that no machine's speed changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class ForwardCount:
    """Counts forward-equivalents: a forward without gradients is 1 a row, one with a backward 3.

    Recomputing activations in the backward pass adds up to 1. Guidance calls the network with two rows a sample.

    Args:
        network: whose calls are counted; the first argument of its forward has a row per sample.
        recomputed: operations that its backward pass computes once more, as a share of a forward's.

    Attributes:
        total: counted so far on this rank.
    """

    def __init__(self, network: nn.Module, *, recomputed: float) -> None:
        self.total = 0.0
        self._trained = 3.0 + recomputed
        network.register_forward_pre_hook(self._count)

    def _count(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.total += len(arguments[0]) * (self._trained if torch.is_grad_enabled() else 1.0)
