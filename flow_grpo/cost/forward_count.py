"""The work of a run: in forwards of the network on one sample, which no machine's speed changes, and in operations."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class ForwardCount:
    """Counts forward-equivalents: a forward without gradients is 1 a row, one with a backward 3.

    Recomputing activations in the backward pass adds up to 1. Guidance calls the network with two rows a sample.

    Args:
        network: its calls are counted; the first argument of its forward has a row per sample.
        recomputed: operations that its backward pass computes once more, as a share of a forward's.
        flops: operations of a forward on one row, by its shape in the first argument; None where they are not known.
        rate: operations per second of the device's matrix products; called once, when it is first needed.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        recomputed: float,
        flops: Callable[[tuple[int, ...]], float] | None = None,
        rate: Callable[[], float] = lambda: math.nan,
    ) -> None:
        self.total, self._marked = 0.0, 0.0
        self._trained, self._flops, self._rate = 3.0 + recomputed, flops, rate
        self._forwards: Counter[tuple[int, ...]] = Counter()  # since the mark, by shape of a row; not recomputation
        network.register_forward_pre_hook(self._count)

    def mark(self) -> None:
        """Let `since_mark` count from here on."""
        self._marked = self.total
        self._forwards.clear()

    def since_mark(self) -> tuple[float, float]:
        """Return forward-equivalents and operations on this rank, of these without recomputation; 0 if not known."""
        flops = self._flops
        known = 0.0 if flops is None else sum(count * flops(shape) for shape, count in self._forwards.items())
        return self.total - self._marked, known

    @functools.cached_property
    def rate(self) -> float:
        """Operations per second of the device's matrix products."""
        return self._rate()

    def _count(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        rows, training = len(arguments[0]), torch.is_grad_enabled()
        self.total += rows * (self._trained if training else 1.0)
        self._forwards[tuple(arguments[0].shape[1:])] += rows * (3 if training else 1)
