"""How a trained network lies over the ranks.

Whole on each with gradients averaged (DDP), whole with gradients and optimizer state in parts (ZeRO-2), or all cut into
shards (FSDP2). Who calls a function here need not ask which.

accelerate wraps for DDP. For shards torch's own `fully_shard` is called, since accelerate leaves FSDP out on CPU ranks:
this way every device runs the code that the tests run.

Under shards every parameter is a DTensor cut along its first dimension, every forward is a collective, and so all ranks
must call the network equally often.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flow_grpo.runtime import device as device_door
from flow_grpo.runtime.ranks.process_group import Ranks
from flow_grpo.runtime.ranks.zero2 import Zero2
from flow_grpo.settings.schema import TrainConfig

if TYPE_CHECKING:
    from accelerate import Accelerator

KINDS = ("ddp", "zero2", "fsdp2")


def parallelize(module: nn.Module, kind: str, device: torch.device, ranks: Ranks) -> nn.Module:
    """Return the module as the ranks hold it; a single process keeps it as it is.

    Args:
        module: on `device`; its `_no_split_modules` names the classes of the repeated blocks, each a shard of its own.
        kind: "ddp", "fsdp2", or "zero2", for which `partition` follows once there is an optimizer.
        device: of this rank.
        ranks: who takes part.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"train.sharding is {kind!r}, must be one of {', '.join(KINDS)}")
    if kind == "zero2":
        return module
    if kind == "ddp" or ranks.world_size == 1:
        prepared: nn.Module = accelerator(device, ranks).prepare_model(module)
        return prepared
    mesh = init_device_mesh(device.type, (ranks.world_size,))
    blocks = getattr(module, "_no_split_modules", None) or ()
    # Parameters are given back after every forward. Without that, weights gathered in a rollout outlive the optimizer's
    # step, and the next forward computes with the old ones (measured with torch 2.13).
    for part in [part for part in module.modules() if type(part).__name__ in blocks] + [module]:
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    return module


def accelerator(device: torch.device, ranks: Ranks) -> Accelerator:
    """Return an Accelerator that agrees with `ranks` on who takes part; call after `start`.

    Precision is not its business (`device.autocast` is used), gradient accumulation neither.

    Raises:
        RuntimeError: accelerate sees another number of processes, which would leave gradients unsynchronised, or
            another kind of device, to which it would move the model.
        ValueError: accelerate was told to shard weights (FSDP, DeepSpeed): optimizer, average and checkpoints here hold
            whole weights, and would quietly hold stale ones.
    """
    from accelerate import Accelerator

    threads = torch.get_num_threads()
    made = Accelerator(**device_door.accelerator_kwargs(device))
    torch.set_num_threads(threads)  # on CPU ranks, accelerate replaces the number when OMP_NUM_THREADS is not set
    if made.num_processes != ranks.world_size:
        raise RuntimeError(
            f"accelerate sees {made.num_processes} processes where {ranks.world_size} were started on {device}; "
            "gradients would not be synchronised"
        )
    if made.device.type != device.type:
        raise RuntimeError(
            f"accelerate would move the model to {made.device}, this rank's device is {device}; "
            "unset ACCELERATE_USE_CPU and look at `accelerate env`"
        )
    if str(made.distributed_type.value).startswith(("FSDP", "DEEPSPEED", "MEGATRON", "TP")):
        raise ValueError(
            f"accelerate is configured for {made.distributed_type.value}, but sharding is not left to it here: start "
            "with torchrun, and pass --config.train.sharding=fsdp2 to shard, or =zero2 for DeepSpeed's ZeRO-2"
        )
    return made


def partition(
    module: nn.Module, optimizer: torch.optim.Optimizer, train: TrainConfig, device: torch.device, ranks: Ranks
) -> nn.Module:
    """Return what `parallelize` made, for "zero2" with gradients and optimizer state in parts.

    Args:
        module: from `parallelize`.
        optimizer: over its trained weights; for "zero2" it holds this rank's part of them afterwards.
        train: says the kind and the bound of the gradient's norm.
        device: of this rank.
        ranks: who takes part.

    Raises:
        ValueError: "zero2" without DeepSpeed, or asked by accelerate for what it does not do.
    """
    if train.sharding != "zero2" or ranks.world_size == 1:
        return module
    return Zero2(module, optimizer, train.max_grad_norm, device)


def is_partitioned(module: nn.Module) -> bool:
    """Tell whether each rank's optimizer holds the state of its own part of the weights."""
    return isinstance(module, Zero2)


def is_sharded(module: nn.Module) -> bool:
    """Tell whether the ranks hold different parts of the module."""
    return isinstance(module, FSDPModule)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the network inside the wrapper that exchanges gradients, or the module itself when it has none."""
    if isinstance(module, Zero2):
        return module.network
    inner: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return inner


def on_every_call(module: nn.Module, tell: Callable[[], object]) -> None:
    """Have `tell` called after every call of the network: in rollouts, which go past the wrapper, and in updates."""
    unwrap(module).register_forward_hook(lambda *_: tell())


@contextlib.contextmanager
def averaging_gradients(module: nn.Module, *, now: bool) -> Iterator[Callable[[Tensor], object]]:
    """Make one forward and backward pass inside; the last before a step averages gradients over ranks.

    Args:
        module: as the ranks hold it.
        now: False for a pass that is followed by others before the step; most kinds then only add up.

    Yields:
        what takes a loss back to the gradients, in place of the loss's own `backward`.
    """
    if isinstance(module, Zero2):
        yield module.backward_pass(last=now)
        return
    # Under shards every pass is averaged: what is only added up stays whole on every rank until it is.
    local_only = getattr(module, "no_sync", contextlib.nullcontext)
    with contextlib.nullcontext() if now else local_only():
        yield Tensor.backward


def take_step(module: nn.Module, optimizer: torch.optim.Optimizer, bound: float) -> Tensor:
    """Bound the gradient's norm, move the weights and forget the gradient.

    Returns:
        the norm before it was bounded, a scalar alike on every rank. If it is not finite, weights are as they were.
    """
    if isinstance(module, Zero2):
        return module.step(bound)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = whole(nn.utils.clip_grad_norm_(parameters, bound))
    if torch.isfinite(norm):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norm


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the tensor's own memory; all of it when it is not sharded."""
    part: Tensor = tensor.detach()
    return part.to_local() if isinstance(part, DTensor) else part


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor on this rank; for a shard every rank must call it."""
    part: Tensor = tensor.detach()
    return part.full_tensor() if isinstance(part, DTensor) else part


def part_like(values: Tensor, template: Tensor) -> Tensor:
    """Return this rank's part of whole CPU values, on the device and in the layout of `template`, of the same shape."""
    if not isinstance(template, DTensor):
        return values.to(template.device, template.dtype)
    mesh, rank = template.device_mesh, template.device_mesh.get_local_rank()
    chunks = values.chunk(mesh.size())  # as `fully_shard` cuts
    own = chunks[rank] if rank < len(chunks) else values[:0]
    made: Tensor = DTensor.from_local(
        own.to(local(template).device, template.dtype).contiguous(),
        mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )
    return made
