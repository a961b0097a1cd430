"""DeepSpeed ZeRO-2: gradients and optimizer state are sharded over the ranks, weights are replicated.

DeepSpeed is called directly and not through accelerate, which skips it on CPU ranks: every device runs the code that
the tests run. Of an accelerate configuration file for DeepSpeed, only the ZeRO section is used.

DeepSpeed is given no precision, because it would cast the whole network, frozen weights included, and no number of
gradient accumulation steps, because it would divide by it and the update's losses are already weighted.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_BUCKET = 50_000_000  # elements reduced at a time; DeepSpeed's default 5e8 would reserve 2 GB


class Zero2(nn.Module):
    """A network whose gradients and optimizer state are sharded by DeepSpeed.

    Every backward pass is a collective, so all ranks must make equally many. A forward pass with gradients must go
    through this module; one without may call the network itself.

    Args:
        module: on `device`, identical on every rank.
        optimizer: over the trained weights of `module`, all fp32; afterwards it holds this rank's shard of them.
        bound: maximum norm of the gradient.
        device: of this rank.

    Raises:
        ValueError: DeepSpeed is missing or runs on another device, or accelerate's configuration contradicts the run's.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, bound: float, device: torch.device) -> None:
        super().__init__()
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        config = deepspeed_config(bound, sum(parameter.numel() for parameter in trained))
        self.engine: Any = _deepspeed(device).initialize(
            model=module, optimizer=optimizer, model_parameters=trained, config=config
        )[0]

    @property
    def network(self) -> nn.Module:
        """The wrapped network."""
        network: nn.Module = self.engine.module
        return network

    def forward(self, *args: object, **options: object) -> Any:
        """Call the network."""
        return self.engine(*args, **options)

    def backward_pass(self, *, last: bool) -> Callable[[Tensor], object]:
        """Return the backward function for one loss; call before the forward pass. The `last` one reduces gradients."""
        self.engine.set_gradient_accumulation_boundary(last)
        backward: Callable[[Tensor], object] = self.engine.backward
        return backward

    def step(self, bound: float) -> Tensor:
        """Clip the gradient, update the weights, zero the gradient; return its norm before clipping.

        If the gradient is not finite on any rank, return NaN and leave the weights unchanged. Collective call.
        """
        self.engine.optimizer.clip_grad = bound  # what its step reads; the configuration's is the first value
        # DeepSpeed updates a copy of this rank's shard, which misses changes made to the weights from outside.
        self.engine.optimizer.refresh_fp32_params()
        # DeepSpeed 0.16 and 0.17 check this in fp16 only and step regardless otherwise (their pull request 8035).
        if self.engine.optimizer.has_overflow():
            return torch.tensor(math.nan)
        self.engine.step()
        return torch.as_tensor(self.engine.get_global_grad_norm())


def deepspeed_config(bound: float, elements: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for ZeRO-2, merged with accelerate's where it configures DeepSpeed.

    Args:
        bound: largest gradient norm, for DeepSpeed to clip at.
        elements: number of trained parameters; the gradient buckets are no larger.

    Raises:
        ValueError: accelerate's configuration contradicts the run's, for example in the ZeRO stage or the precision.
    """
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": bound,
        "steps_per_print": math.inf,
    }
    zero: dict[str, Any] = {"stage": 2}
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        from accelerate import DeepSpeedPlugin

        given = dict(DeepSpeedPlugin().deepspeed_config)
        zero |= given.pop("zero_optimization")
        wrong = [f"{name}={value!r}" for name, value in given.items() if value not in ("auto", ours.get(name))]
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        wrong += [f"mixed_precision={precision!r}"] * (precision != "no")
        wrong += [f"stage={zero['stage']}"] * (zero["stage"] != 2)
        for name in ("offload_optimizer", "offload_param"):
            target = (zero.pop(name, None) or {}).get("device") or "none"
            wrong += [f"{name}={target!r}"] * (target != "none")
        if wrong:
            raise ValueError(
                f"accelerate's configuration of DeepSpeed sets {', '.join(wrong)}, which train.sharding='zero2' does "
                f"not do (gradient_clipping is train.max_grad_norm, {bound:g}); start from config/accelerate/zero2.yaml"
            )
    return {**ours, "zero_optimization": {"reduce_bucket_size": min(_BUCKET, elements), **zero}}


def _deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for this rank's kind of device."""
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
