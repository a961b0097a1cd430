"""Gradients and optimizer state in parts over the ranks, by DeepSpeed (ZeRO-2); weights stay whole on every rank.

DeepSpeed is called here and not through accelerate, which leaves it out on CPU ranks: this way every device runs the
code that the tests run. Of an accelerate configuration file for DeepSpeed, the section on ZeRO is read.

DeepSpeed hears nothing of precision, for it would cast the network, frozen weights included. It hears of no gradient
accumulation either: it would divide by the number, and the update's losses are already weighed.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_BUCKET = 50_000_000  # trained weights reduced at a time; DeepSpeed's own 5e8 would reserve 2 GB


class Zero2(nn.Module):
    """A network whose gradients and optimizer state DeepSpeed keeps in parts.

    Every backward pass is an exchange, so all ranks must take equally many. A forward with gradients must go through
    this module; one without may go through the network itself.

    Args:
        module: on `device`, alike on every rank.
        optimizer: over the trained weights of `module`, all fp32; from here on it holds this rank's part of them.
        bound: of the gradient's norm.
        device: of this rank.

    Raises:
        ValueError: DeepSpeed is missing or runs on another device, or accelerate asks for something else.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, bound: float, device: torch.device) -> None:
        super().__init__()
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        config = _settings(bound, sum(parameter.numel() for parameter in trained))
        self.engine: Any = _deepspeed(device).initialize(
            model=module, optimizer=optimizer, model_parameters=trained, config=config
        )[0]

    @property
    def network(self) -> nn.Module:
        """The network itself."""
        network: nn.Module = self.engine.module
        return network

    def forward(self, *args: object, **options: object) -> Any:
        """Call the network."""
        return self.engine(*args, **options)

    def backward_pass(self, *, last: bool) -> Callable[[Tensor], object]:
        """Return what takes a loss back to the gradients; ask before the forward. The last one completes the parts."""
        self.engine.set_gradient_accumulation_boundary(last)
        backward: Callable[[Tensor], object] = self.engine.backward
        return backward

    def step(self, bound: float) -> Tensor:
        """Bound the gradient, move the weights, forget the gradient; return its norm, the same on every rank.

        If the gradient is not finite on any rank, return NaN and leave the weights as they are.
        """
        assert bound == self.engine.gradient_clipping(), "the engine was made for another bound"
        # DeepSpeed steps a copy of this rank's part; what was put into the weights from outside is not in it.
        self.engine.optimizer.refresh_fp32_params()
        # Some versions (0.16, 0.17) ask for it in fp16 only and otherwise take the step: DeepSpeed's pull request 8035.
        if self.engine.optimizer.has_overflow():
            return torch.tensor(math.nan)
        self.engine.step()
        return torch.as_tensor(self.engine.get_global_grad_norm())


def _settings(bound: float, elements: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration; ValueError for what accelerate asks for and a run here would not do."""
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": bound,
        "steps_per_print": math.inf,
    }
    zero: dict[str, Any] = {"stage": 2}
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        from accelerate import DeepSpeedPlugin

        told = dict(DeepSpeedPlugin().deepspeed_config)
        zero |= told.pop("zero_optimization")
        wrong = [f"{name}={value!r}" for name, value in told.items() if value not in ("auto", ours.get(name))]
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        wrong += [f"mixed_precision={precision!r}"] * (precision != "no")
        wrong += [f"stage={zero['stage']}"] * (zero["stage"] != 2)
        for name in ("offload_optimizer", "offload_param"):
            kept = (zero.pop(name, None) or {}).get("device") or "none"
            wrong += [f"{name}={kept!r}"] * (kept != "none")
        if wrong:
            raise ValueError(
                f"accelerate's configuration of DeepSpeed sets {', '.join(wrong)}, which train.sharding='zero2' does "
                f"not do (gradient_clipping is train.max_grad_norm, {bound:g}); start from config/accelerate/zero2.yaml"
            )
    return {**ours, "zero_optimization": {"reduce_bucket_size": min(_BUCKET, elements), **zero}}


def _deepspeed(device: torch.device) -> Any:
    """Return the library, made to run on this rank's kind of device."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        library = importlib.import_module("deepspeed")
    except ImportError as error:
        raise ValueError(
            f"train.sharding is 'zero2', but DeepSpeed cannot be imported ({error}); pip install deepspeed, or pass "
            "--config.train.sharding=fsdp2, which needs no further package"
        ) from error
    found = library.accelerator.get_accelerator().device_name()
    if found != device.type:
        raise ValueError(f"DeepSpeed runs on {found!r}, this run on {device.type!r}; set DS_ACCELERATOR={device.type}")
    return library
