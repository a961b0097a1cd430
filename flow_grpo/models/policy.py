"""The interface between the algorithm and a video model.

Letters: B rows (samples), C F H W latent channels, frames, height, width, T h w video frames, rows, columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from flow_grpo.records import Condition, Conditioning, Guidance


class Policy(Protocol):
    """Everything a training run and its preflight checks ask of a video model.

    Attributes:
        module: the trainable network. The start-up replaces it with its DDP or FSDP2 wrapper; `velocity` must
            call the wrapper whenever gradients are enabled.
    """

    module: nn.Module

    def encode(self, conditions: Sequence[Condition], guidance: Guidance | None = None) -> Conditioning:
        """Return one row per condition, in order; frozen encoders run once for each distinct video and prompt.

        `velocity` guides the rows by `guidance`, by default the training's.
        """
        ...

    def encode_targets(self, conditions: Sequence[Condition]) -> Tensor:
        """Return clean latents (B, C, F, H, W) of the true target videos; ValueError where there is none."""
        ...

    def latent_shape(self, conditions: Sequence[Condition]) -> tuple[int, int, int, int]:
        """Return (C, F, H, W) of the target latents; ValueError if videos differ in size or do not fit the model."""
        ...

    def latent_size(self, size: tuple[int, int, int]) -> tuple[int, int, int, int]:
        """Return (C, F, H, W) of the latents of a video of (T, h, w), without checking that it fits."""
        ...

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the fp32 velocity (B, C, F, H, W), guidance included, of latents at noise levels sigma (B,)."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Return videos (B, 3, T, h, w) fp32 in [0, 1] of clean latents (B, C, F, H, W).

        On a CPU it runs in a thread of its own, beside `velocity` for the next batch.
        """
        ...

    def keep_reference(self, *, offload: bool = False) -> None:
        """Prepare `reference`: call once before training, after `module` was wrapped and placed.

        A policy that must copy weights keeps the copy in CPU memory if `offload` is set.
        """
        ...

    def reference(self) -> AbstractContextManager[None]:
        """Context manager in which `velocity` is that of the policy before training."""
        ...

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters to optimize, in a fixed order."""
        ...

    def camera_parameters(self) -> list[nn.Parameter]:
        """Return those of them that read the camera path, in the same order; they may have their own learning rate."""
        ...


@runtime_checkable
class SharesEncodings(Protocol):
    """What a policy may have besides: ranks then encode a source video that several of them need only once."""

    def lacking(self, conditions: Sequence[Condition]) -> dict[str, Callable[[], Tensor]]:
        """Return key -> encoder of what `encode` would encode now; equal keys mean equal results on every rank.

        An encoder returns fp32, and keeps what it has encoded for `encode`.
        """
        ...

    def learn(self, latents: Mapping[str, Tensor]) -> None:
        """Keep what another rank has encoded, by these keys."""
        ...


@runtime_checkable
class Approximates(Protocol):
    """What a policy may have besides: cheaper calls for steps of a rollout that no update repeats."""

    def approximate(self, calls: int) -> AbstractContextManager[None]:
        """Context manager in which `velocity` is approximate: `calls` ones along the ODE, of the same rows."""
        ...

    def attention_kept(self) -> float:
        """Return the share of attention that such calls kept since this was asked last; NaN without any."""
        ...
