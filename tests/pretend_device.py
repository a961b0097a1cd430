"""A pretend accelerator: computes what a CPU does, and notes where a real device makes the program wait.

Tensors on it say that they are on "meta"; their values are in CPU memory behind them. A device works behind the
program, which waits for it only where it needs a value: a number of a tensor, a copy to CPU memory, a count of nonzero
entries, or a copy to the device that is not declared `non_blocking`. An operation on tensors of both places is an
error, as on a real device.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

PRETEND = torch.device("meta")
_COUNTS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero", "equal")  # sizes, numbers
_COPIES = ("_to_copy", "copy_")
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")


class OnDevice(Tensor):
    """A tensor on the pretend accelerator."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        """Return the device's tensor of these values."""
        made: Any = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=PRETEND, requires_grad=False
        )
        made.held = held.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _compute(func, args, kwargs or {})


class Watch(TorchDispatchMode):
    """Computes on the pretend accelerator, and counts what its program waits for.

    Attributes:
        waits: where in the package the program waits and for what, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._note(func.overloadpacket.__name__, args, kwargs or {})
        return _compute(func, args, kwargs or {})

    def _note(self, name: str, args: Any, kwargs: Any) -> None:
        given = _tensors((args, kwargs))
        on_device = [isinstance(tensor, OnDevice) for tensor in given]
        if name in _COPIES:
            source, target = (args[1], args[0]) if name == "copy_" else (args[0], None)
            onto = isinstance(target, OnDevice) if target is not None else _goes_to_device(given, kwargs)
            if isinstance(source, OnDevice) and not onto:
                self._waits("a copy to CPU memory")
            elif onto and not isinstance(source, OnDevice) and not _non_blocking(name, args, kwargs):
                self._waits("a copy to the device that is not non_blocking")
        elif not any(on_device):
            return
        elif name in _COUNTS:
            self._waits(name)
        elif name in _INDEXED:
            for place in args[1]:
                if isinstance(place, OnDevice) and place.dtype == torch.bool:
                    self._waits(f"{name} by a mask")
                elif place is not None and not isinstance(place, OnDevice) and place.ndim:
                    self._waits(f"{name} by places in CPU memory, which are copied")
        else:
            strays = [tuple(t.shape) for t, there in zip(given, on_device, strict=True) if not there and t.ndim]
            assert not strays, f"{name} takes tensors of the device and of CPU memory, {strays}"

    def _waits(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/flow_grpo/" in frame.filename]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "outside of the package"
        self.waits.append(f"{where}: {what}")


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what the CPU computes, on the device if an argument is there or the result shall be."""
    there = _goes_to_device(_tensors((args, kwargs)), kwargs)
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    held_args, held_kwargs = tree_map_only(OnDevice, lambda tensor: tensor.held, (args, kwargs))
    result = func(*held_args, **held_kwargs)
    if args and isinstance(args[0], Tensor) and func._schema.arguments[0].is_write:
        return args[0]
    return tree_map_only(Tensor, OnDevice, result) if there else result


def _goes_to_device(given: list[Tensor], kwargs: Any) -> bool:
    onto = kwargs.get("device")
    return any(isinstance(tensor, OnDevice) for tensor in given) if onto is None else torch.device(onto) == PRETEND


def _non_blocking(name: str, args: Any, kwargs: Any) -> bool:
    default = args[2] if name == "copy_" and len(args) > 2 else False
    return bool(kwargs.get("non_blocking", default))


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map_only(Tensor, found.append, tree)
    return found


def move(network: nn.Module) -> None:
    """Place a network's parameters and buffers on the pretend accelerator, in place."""
    for module in network.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                moved = nn.Parameter(OnDevice(parameter.data), requires_grad=parameter.requires_grad)
                module._parameters[name] = moved
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = OnDevice(buffer)
