"""DDP and FSDP2 wrappers behind one set of functions; callers need not know which is used.

DDP comes from accelerate. FSDP2 is torch's `fully_shard`, because accelerate skips FSDP on CPU ranks: every device runs
the code that the tests run.

Under FSDP2 every parameter is a DTensor sharded along its first dimension and every forward pass is a collective, so
all ranks must call the network equally often.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from flow_grpo.runtime.ranks.process_group import World

if TYPE_CHECKING:
    from accelerate import Accelerator


def parallelize(module: nn.Module, kind: str, device: torch.device, world: World) -> nn.Module:
    """Wrap a module, which is equal on all ranks, for training as `train.sharding` says; one rank keeps it as it is.

    FSDP2 shards each block whose class is named in `module._no_split_modules`.
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
    """Make an Accelerator for DDP, without precision or gradient accumulation; call after `init_ranks`.

    Raises:
        RuntimeError: accelerate sees another number of processes, so gradients would not be synchronised, or another
            kind of device, to which it would move the model.
        ValueError: accelerate is configured to shard weights (FSDP, DeepSpeed). The optimizer, average and checkpoints
            here hold full weights, which would silently become stale.
    """
    from accelerate import Accelerator

    threads = torch.get_num_threads()
    made = Accelerator(cpu=device.type == "cpu")  # otherwise it ignores a CPU process group
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
    """Whether the weights are sharded over the ranks (FSDP2)."""
    return isinstance(module, FSDPModule)


def true_on_any_rank(flags: Tensor, module: nn.Module) -> list[bool]:
    """Return which flags hold on any rank that must call the network with this one: sharded, all (collective call)."""
    if is_sharded(module):
        flags = flags.to(next(module.parameters()).device, torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in flags.tolist()]


def unwrap(module: nn.Module) -> nn.Module:
    """Take the network out of a DDP wrapper; any other module is returned."""
    inner: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return inner


def on_every_call(module: nn.Module, callback: Callable[[], object]) -> RemovableHandle:
    """Run `callback` after every forward pass of the network, in rollouts (which bypass the wrapper) and updates."""

    def called(*_: object) -> None:
        callback()

    return unwrap(module).register_forward_hook(called)


def averaging_gradients(module: nn.Module, *, now: bool) -> AbstractContextManager[None]:
    """Context for one forward and backward pass, which averages gradients over ranks if `now`.

    That is needed in the last pass before a step. In the others gradients may accumulate locally.
    """
    # FSDP2 modules have no `no_sync` and average every pass: locally accumulated gradients would be unsharded.
    no_sync: Callable[[], AbstractContextManager[None]] = getattr(module, "no_sync", contextlib.nullcontext)
    return contextlib.nullcontext() if now else no_sync()


def gradient_bytes(sharding: str, trained: int, world_size: int, *, passes: float, steps: float) -> float:
    """Bytes of gradients that a rank sends along a ring.

    Args:
        sharding: `train.sharding`.
        trained: trainable parameters.
        world_size: number of ranks.
        passes: backward passes.
        steps: optimizer steps, before each of which one of the passes averages.
    """
    once = 4.0 * trained * (world_size - 1) / world_size
    if sharding == "ddp":
        return 2 * once * steps  # ring all-reduce: reduce-scatter and all-gather
    return once * passes


def sent_weights(module: nn.Module) -> float:
    """Bytes of sharded weights that a rank sends when all are gathered once; 0 if they are replicated."""
    if not is_sharded(module):
        return 0.0
    return sum(p.numel() * p.element_size() for p in module.parameters()) * (1 - 1 / dist.get_world_size())


def take_step(optimizer: torch.optim.Optimizer, bound: float) -> Tensor:
    """Clip the gradient's norm to `bound`, step and zero the gradient; return the norm before clipping.

    The norm is a scalar identical on every rank. If it is not finite, the weights are unchanged.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = whole(nn.utils.clip_grad_norm_(parameters, bound))
    if torch.isfinite(norm):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norm


def local(tensor: Tensor) -> Tensor:
    """Take this rank's shard of a DTensor, sharing its memory, or a plain tensor itself; both detached."""
    part: Tensor = tensor.detach()
    return part.to_local() if isinstance(part, DTensor) else part


def whole(tensor: Tensor) -> Tensor:
    """Gather the full tensor of a DTensor (collective call), or take a plain one itself; both detached."""
    part: Tensor = tensor.detach()
    return part.full_tensor() if isinstance(part, DTensor) else part


def part_like(values: Tensor, template: Tensor) -> Tensor:
    """Put full CPU values on the device and into the dtype and sharding of `template`, of the same shape."""
    if not isinstance(template, DTensor):
        return values.to(template.device, template.dtype)
    own = values.to(template.device, template.dtype)
    made: Tensor = distribute_tensor(own, template.device_mesh, template.placements, src_data_rank=None)  # nothing sent
    return made
