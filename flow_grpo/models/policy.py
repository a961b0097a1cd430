"""The seam between the algorithm and a video model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from flow_grpo.records import Condition, Conditioning


class Policy(Protocol):
    """The handful of things the algorithm asks of a video model.

    `module` is the trainable network, as wrapped for gradient synchronisation: the trainer assigns the wrapped
    network back to it, and `velocity` calls through it whenever gradients are enabled.
    """

    module: nn.Module

    def encode(self, conditions: Sequence[Condition]) -> Conditioning:
        """Run the frozen encoders, each distinct condition once, and expand to one row per condition."""
        ...

    def latent_shape(self, conditions: Sequence[Condition]) -> tuple[int, int, int, int]:
        """Return (C, F, H, W) of the target latents; all conditions share one shape."""
        ...

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the fp32 velocity (B, C, F, H, W), guidance included, for latents at noise levels sigma (B,)."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Return videos (B, 3, T, h, w) fp32 in [0, 1]."""
        ...

    def reference(self) -> AbstractContextManager[None]:
        """Inside, `velocity` is that of the policy training started from."""
        ...

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters the optimizer moves."""
        ...
