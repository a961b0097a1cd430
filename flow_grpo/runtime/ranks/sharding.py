"""DDP and FSDP2 wrappers behind one set of functions; callers need not know which is used.

DDP comes from accelerate. FSDP2 is torch's `fully_shard`, because accelerate skips FSDP on CPU ranks: every device runs
the code that the tests run.

Under FSDP2 every parameter is a DTensor sharded along its first dimension and every forward pass is a collective, so
all ranks must call the network equally often.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.ranks.process_group import World

if TYPE_CHECKING:
    from accelerate import Accelerator


def parallelize(module: nn.Module, kind: str, device: torch.device, world: World) -> nn.Module:
    """Return the module, which is on `device`, wrapped for training on all ranks; in a single process, itself.

    FSDP2 shards each block whose class is named in `module._no_split_modules`.

    Args:
        module: equal on all ranks.
        kind: `train.sharding`.
        device: this rank's.
        world: all ranks of the run.
    """
    if kind == "ddp" or world.all.size == 1:
        prepared: nn.Module = accelerator(device, world).prepare_model(module)
        return prepared
    mesh = init_device_mesh(device.type, (world.all.size,))
    blocks = getattr(module, "_no_split_modules", None) or ()
    # Without resharding, weights gathered in a rollout survive the optimizer's step, and the next forward pass computes
    # with the old ones (observed with torch 2.13).
    for part in [part for part in module.modules() if type(part).__name__ in blocks] + [module]:
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    return module


def accelerator(device: torch.device, world: World) -> Accelerator:
    """Return an Accelerator for DDP; call after `init_ranks`. It handles neither precision nor gradient accumulation.

    Raises:
        RuntimeError: accelerate sees another number of processes, so gradients would not be synchronised, or another
            kind of device, to which it would move the model.
        ValueError: accelerate is configured to shard weights (FSDP, DeepSpeed): the optimizer, average and checkpoints
            of this project hold full weights, which would silently become stale.
    """
    from accelerate import Accelerator

    threads = torch.get_num_threads()
    made = Accelerator(**device_api.accelerator_kwargs(device))
    torch.set_num_threads(threads)  # on CPU ranks, accelerate changes the number if OMP_NUM_THREADS is not set
    if made.num_processes != world.all.size:
        raise RuntimeError(
            f"accelerate sees {made.num_processes} processes where {world.all.size} were started on {device}; "
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
            "with torchrun, and pass --config.train.sharding=fsdp2 to shard"
        )
    return made


def is_sharded(module: nn.Module) -> bool:
    """Return whether the weights are sharded over the ranks (FSDP2)."""
    return isinstance(module, FSDPModule)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the network inside a DDP wrapper, or the module itself."""
    inner: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return inner


def on_every_call(module: nn.Module, callback: Callable[[], object]) -> RemovableHandle:
    """Run `callback` after every forward pass of the network, in rollouts (which bypass the wrapper) and updates.

    The handle that is returned can end it.
    """

    def called(*_: object) -> None:
        callback()

    return unwrap(module).register_forward_hook(called)


@contextlib.contextmanager
def averaging_gradients(module: nn.Module, *, now: bool) -> Iterator[Callable[[Tensor], object]]:
    """Context for one forward and backward pass; yields the backward function to call with the loss.

    Gradients are averaged over ranks if `now`, in the last pass before a step; before, they may accumulate locally.
    """
    # FSDP2 modules have no `no_sync` and average every pass: locally accumulated gradients would be unsharded.
    local_only = getattr(module, "no_sync", contextlib.nullcontext)
    with contextlib.nullcontext() if now else local_only():
        yield Tensor.backward


def sent_weights(module: nn.Module) -> float:
    """Return the bytes of sharded weights that this rank sends when all are gathered once; 0 if they are replicated."""
    return sum(p.numel() * p.element_size() for p in module.parameters()) * _others() if is_sharded(module) else 0.0


def _others() -> float:
    """Return the share of other ranks in what all hold together."""
    return 1 - 1 / dist.get_world_size() if dist.is_initialized() else 0.0


def take_step(optimizer: torch.optim.Optimizer, bound: float) -> Tensor:
    """Clip the gradient's norm to `bound`, update the weights and zero the gradient; return the norm before clipping.

    The norm is a scalar identical on every rank. If it is not finite, the weights are unchanged.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = whole(nn.utils.clip_grad_norm_(parameters, bound))
    if torch.isfinite(norm):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norm


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, sharing its memory, or a plain tensor itself; both detached."""
    part: Tensor = tensor.detach()
    return part.to_local() if isinstance(part, DTensor) else part


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor (collective call), or a plain tensor itself; both detached."""
    part: Tensor = tensor.detach()
    return part.full_tensor() if isinstance(part, DTensor) else part


def part_like(values: Tensor, template: Tensor) -> Tensor:
    """Return full CPU values on the device and in the dtype and sharding of `template`, which has the same shape."""
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
