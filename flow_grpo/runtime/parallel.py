"""How a trained network lies over the ranks: whole on each with gradients averaged (DDP), or cut into shards (FSDP2).

accelerate wraps for DDP. For shards torch's own `fully_shard` is called, since accelerate leaves FSDP out on CPU ranks:
this way every device runs the code that the tests run.

Under shards every parameter is a DTensor cut along its first dimension, every forward is a collective, and so all ranks
must call the network equally often.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flow_grpo.runtime import distributed
from flow_grpo.runtime.distributed import Ranks

KINDS = ("ddp", "fsdp2")


def parallelize(module: nn.Module, kind: str, device: torch.device, ranks: Ranks) -> nn.Module:
    """Return the module as the ranks hold it; a single process keeps it as it is.

    Args:
        module: on `device`; its `_no_split_modules` names the classes of the repeated blocks, each a shard of its own.
        kind: "ddp" or "fsdp2".
        device: of this rank.
        ranks: who takes part.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"train.sharding is {kind!r}, must be one of {', '.join(KINDS)}")
    if kind == "ddp" or ranks.world_size == 1:
        prepared: nn.Module = distributed.accelerator(device, ranks).prepare_model(module)
        return prepared
    mesh = init_device_mesh(device.type, (ranks.world_size,))
    blocks = getattr(module, "_no_split_modules", None) or ()
    # Parameters are given back after every forward. Without that, weights gathered in a rollout outlive the optimizer's
    # step, and the next forward computes with the old ones (measured with torch 2.13).
    for part in [part for part in module.modules() if type(part).__name__ in blocks] + [module]:
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    return module


def is_sharded(module: nn.Module) -> bool:
    """Tell whether the ranks hold different parts of the module."""
    return isinstance(module, FSDPModule)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the network inside the gradient-averaging wrapper, or the module itself when it has none."""
    inner: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return inner


@contextlib.contextmanager
def averaging_gradients(module: nn.Module, *, now: bool) -> Iterator[None]:
    """Inside, a backward pass averages gradients over ranks, or only adds to this rank's."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(now)
        yield
        return
    local_only = getattr(module, "no_sync", contextlib.nullcontext)
    with contextlib.nullcontext() if now else local_only():
        yield


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
