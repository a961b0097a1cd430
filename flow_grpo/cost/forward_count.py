"""The work of a run: in forwards of the network on one sample, which no machine's speed changes, and in operations."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flow_grpo.cost.footprint import Footprint


class ForwardCount:
    """Counts forward-equivalents: a forward of a row is 1, one with a backward what its operations make of it.

    A policy of one's own, whose operations are not known, is taken to train all weights: 3, or 4 where it recomputes
    activations. Guidance calls the network with two rows a sample.

    Args:
        network: its calls are counted; the first argument of its forward has a row per sample.
        recomputes: its backward pass computes activations once more.
        costs: of one row, by its shape in the first argument; None where they are not known.
        rate: operations per second of the device's matrix products; called once, when it is first needed.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        recomputes: bool,
        costs: Callable[[tuple[int, ...]], Footprint] | None = None,
        rate: Callable[[], float] = lambda: math.nan,
    ) -> None:
        self._recomputes, self._costs, self._rate = recomputes, costs, rate
        # Rows since the mark, by their shape and whether they have a backward; recomputation is no call.
        self._rows: Counter[tuple[tuple[int, ...], bool]] = Counter()
        network.register_forward_pre_hook(self._count)

    def mark(self) -> None:
        """Let `since_mark` count from here on."""
        self._rows.clear()

    def since_mark(self) -> tuple[float, float]:
        """Return forward-equivalents and operations on this rank, of these without recomputation; 0 if not known."""
        forwards = operations = 0.0
        for (shape, training), rows in self._rows.items():
            if self._costs is None:
                forwards += rows * (3.0 + self._recomputes if training else 1.0)
                continue
            cost = self._costs(shape)
            needed = cost.train_flops if training else cost.forward_flops
            operations += rows * needed
            forwards += rows * (needed + cost.recomputed_flops * training) / cost.forward_flops
        return forwards, operations

    @functools.cached_property
    def rate(self) -> float:
        """Operations per second of the device's matrix products."""
        return self._rate()

    def _count(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._rows[tuple(arguments[0].shape[1:]), torch.is_grad_enabled()] += len(arguments[0])
