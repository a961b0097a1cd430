"""The work of a run: in forwards of the network on one sample, which no machine's speed changes, and in operations."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch import nn

from flow_grpo.cost.plan import counted, counted_sparse
from flow_grpo.models.registry import is_video_model, video_model
from flow_grpo.runtime import device as device_api
from flow_grpo.settings.schema import Config


class ForwardCount:
    """Counts forward-equivalents: a forward of a row is 1, one with a backward what its operations make of it.

    A policy of one's own, whose operations are not known, is taken to train all weights: 3, or 4 where it recomputes
    activations. Guidance calls the network with two rows a sample; the first argument of its forward has the rows.
    """

    def __init__(self, network: nn.Module, config: Config, device: torch.device) -> None:
        self._config, self._device, kind = config, device, config.model.kind
        self._videos = video_model(kind).videos if is_video_model(kind) else 0
        # Rows since the mark, by their shape and what of a call they took; recomputation is no call.
        self._rows: Counter[tuple[tuple[int, ...], str]] = Counter()
        network.register_forward_hook(self._count)

    def mark(self) -> None:
        """Let `since_mark` count from here on."""
        self._rows.clear()

    def since_mark(self) -> tuple[float, float]:
        """Return forward-equivalents and operations on this rank, of these without recomputation; 0 if not known."""
        forwards = operations = 0.0
        for (shape, kind), rows in self._rows.items():
            training = kind == "training"
            if not self._videos:
                recomputes = self._config.model.checkpointing != "none"
                forwards += rows * (3.0 + recomputes if training else 1.0)
                continue
            channels, frames, height, width = shape  # of the latents, source included
            latents = channels, frames // self._videos, height, width
            cost = counted(self._config.model, latents, 1)
            needed = cost.train_flops if training else cost.forward_flops
            if kind in {"renewing", "keeping"}:
                sparse = counted_sparse(self._config.model, latents, 1)
                needed = sparse.renewing_flops if kind == "renewing" else sparse.keeping_flops
            operations += rows * needed
            forwards += rows * (needed + cost.recomputed_flops * training) / cost.forward_flops
        return forwards, operations

    @functools.cached_property
    def rate(self) -> float:
        """Operations per second of the device's matrix products, measured when first needed unless configured."""
        asked, dtype = 1e12 * self._config.device_tflops, device_api.DTYPES[self._config.model.dtype]
        return asked or device_api.matrix_rate(self._device, dtype)

    def _count(self, network: nn.Module, arguments: tuple[Any, ...], _: Any) -> None:
        kind, walk = "training" if torch.is_grad_enabled() else "exact", getattr(network, "walk", None)
        if walk is not None:
            kind = "renewing" if walk.renewing else "keeping"
        self._rows[tuple(arguments[0].shape[1:]), kind] += len(arguments[0])
