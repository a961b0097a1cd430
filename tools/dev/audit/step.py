"""Records which ATen operators a tiny training step runs on the device, and with which dtypes.

An epoch of the tiny recipe runs on a fake NPU: wrapper tensors that report device `npu:0`, hold their values in CPU
memory, and record every operator below autograd. Operators on CPU tensors are not recorded, and reading a device
tensor's memory (`.numpy()`) fails as on a real device. Kernels are not tested.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.machinery
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from flow_grpo.runtime import device as device_api
from tools.dev.audit.names import UnknownName
from tools.dev.same_numbers import BARE

ROOT = Path(__file__).resolve().parents[3]
REGISTERED = "registered"
WIDE = (torch.float64, torch.complex64, torch.complex128)
# One fused operator on an NPU, forward and backward; elsewhere only its parts reach the dispatcher.
ATTENTION = "scaled_dot_product_attention"
MIXED = ("_to_copy", "copy_", "index.Tensor", "index_put_", "_index_put_impl_")  # accept tensors on two devices
KNOBS = BARE | {
    "device": "npu",
    "sample.num_steps": 3,
    "sample.sde_steps": "0,1",
    "sample.guidance_scale": 2.0,
    "train.kl_coef": 0.01,
    "reward.weights": "target_view=1",
    "eval.signal_groups": 0,
    "eval.num_steps": 1,
    "eval.videos": 1,
}


@dataclasses.dataclass
class Record:
    """What ran on the fake device."""

    # Calls of each ATen operator by name: "add.Tensor", or "add" for the default overload.
    operators: Counter[str] = dataclasses.field(default_factory=Counter)
    # float64 or complex results, by operator and dtype.
    wide: Counter[tuple[str, torch.dtype]] = dataclasses.field(default_factory=Counter)


class DeviceTensor(Tensor):
    """A tensor that reports device npu:0; `values` is the CPU tensor with its data."""

    values: Tensor
    record: Record

    @staticmethod
    def __new__(cls, values: Tensor, record: Record) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device("npu", 0),
        )
        made.values, made.record = values, record
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator where the mode is inactive: in autograd's backward thread."""
        leaves = tree_leaves((args, kwargs))
        return run(func, args, kwargs or {}, next(leaf.record for leaf in leaves if isinstance(leaf, cls)))


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], record: Record) -> Any:
    """Run one operator on the CPU tensors behind its arguments, and record it if it involves the fake device."""
    leaves = tree_leaves((args, kwargs))
    elsewhere = any(isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor) and leaf.dim() for leaf in leaves)
    if elsewhere and any(isinstance(leaf, DeviceTensor) for leaf in leaves) and _name(func) not in MIXED:
        raise RuntimeError(f"{_name(func)} was given tensors of two devices, npu:0 and cpu")
    wrappers: dict[int, DeviceTensor] = {}

    def values_of(tensor: DeviceTensor) -> Tensor:
        wrappers[id(tensor.values)] = tensor
        return tensor.values

    args, kwargs = tree_map_only(DeviceTensor, values_of, (args, kwargs))
    wanted = kwargs.get("device")
    there = torch.device(wanted).type == "npu" if wanted is not None else bool(wrappers)
    if wanted is not None and there:
        kwargs["device"] = torch.device("cpu")
    if there or wrappers:
        record.operators[_name(func)] += 1
    result = func(*args, **kwargs)

    def on_device(tensor: Tensor) -> Tensor:
        record.wide.update([(_name(func), tensor.dtype)] if tensor.dtype in WIDE else [])
        return wrappers[id(tensor)] if id(tensor) in wrappers else DeviceTensor(tensor, record)

    return tree_map_only(Tensor, on_device, result) if there else result


def _name(func: Any) -> str:
    return str(func).removeprefix("aten.").removesuffix(".default")


@contextlib.contextmanager
def recording() -> Iterator[Record]:
    """Context in which `torch.device("npu", 0)` is a recording fake; use the process for nothing else afterwards."""
    if hasattr(torch, "npu"):
        raise ValueError(
            "torch_npu is loaded in this process, so its device cannot be faked; unset TORCH_DEVICE_BACKEND_AUTOLOAD"
        )
    library = types.ModuleType("torch_npu")
    library.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)  # accelerate looks for it
    _setup_privateuseone_for_python_backend("npu", _fake_module())
    torch._C._set_only_lift_cpu_tensors(True)  # else `torch.tensor(..., device=...)` looks for memory on the device
    record = Record()

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return run(func, args, kwargs or {}, record)

    class Attention(TorchFunctionMode):
        def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.nn.functional.scaled_dot_product_attention and args and args[0].device.type == "npu":
                record.operators[ATTENTION] += 1
            return func(*args, **(kwargs or {}))

    with mock.patch.dict(sys.modules, {"torch_npu": library}), Operators(), Attention():
        yield record


def _fake_module() -> Any:
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "_is_in_bad_fork": False,
        "get_device_name": "fake",
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "mem_get_info": (0, 0),
    }
    numbers = ("memory_allocated", "max_memory_allocated", "memory_reserved")
    orders = ("set_device", "set_compile_mode", "synchronize", "empty_cache", "reset_peak_memory_stats")
    answers |= dict.fromkeys((*numbers, *orders, "set_rng_state", "manual_seed_all"), 0)
    functions = {name: lambda *_, value=value, **__: value for name, value in answers.items()}
    return types.SimpleNamespace(**functions, config=types.SimpleNamespace(), conv=types.SimpleNamespace())


def observe() -> Record:
    """Train the tiny model for one epoch on the fake device, with evaluation and checkpoint, and return what ran."""
    device_api.hide_plug_in("the audit fakes its device")
    # Here, because they load every model library, which the other checks do not need.
    from flow_grpo.run.assemble import assemble
    from flow_grpo.run.command_line import read_command_line
    from flow_grpo.runtime.ranks.start_up import set_up_rank

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        places = {"model.path": ROOT / "assets" / "tiny_recam", "data.root": f"{folder}/world", "output_root": folder}
        knobs = KNOBS | places | {"run_name": "audit"}
        words = ["--config", f"{ROOT}/config/grpo.py:tiny_recam"]
        config, spec = read_command_line([*words, *(f"--config.{name}={value}" for name, value in knobs.items())])
        with recording() as record:
            device, world = set_up_rank(config)
            trainer = assemble(config, spec, device, world)
            with trainer.progress:
                trainer.evaluate_before()
                trainer.train_epoch(0)
            trainer.save()
            trainer.tracker.close()
    return record


def check_dtypes(wide: Mapping[tuple[str, torch.dtype], int]) -> list[UnknownName]:
    if not wide:
        return [UnknownName("dtype", "ok", "float64, complex", "none on the device")]
    way_out = "on the device: compute it on the CPU, or in float32"
    return [
        UnknownName("dtype", "fail", name, f"{str(dtype).removeprefix('torch.')} x {count} {way_out}")
        for (name, dtype), count in sorted(wide.items(), key=str)
    ]


def check_operator(name: str, registered: Collection[str]) -> UnknownName:
    """Return whether an operator has an NPU kernel, decomposes into others, or falls back to the CPU."""
    if name in registered:
        return UnknownName("operator", "ok", name, REGISTERED)
    if _has_kernel(name, "CompositeImplicitAutograd") or _has_kernel(name, "CompositeExplicitAutograd"):
        return UnknownName("operator", "ok", name, "composite")
    into = [other for other in registered if other.split(".")[0] == name.split(".")[0] and other.endswith("out")]
    if into and _has_kernel(name, "CompositeExplicitAutogradNonFunctional"):
        return UnknownName("operator", "ok", name, f"composite over {min(into)}")
    text = "not registered, runs on the CPU: use other operators, or accept the copies"
    return UnknownName("operator", "fail", name, text)


def _has_kernel(name: str, key: str) -> bool:
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key))
    except RuntimeError:  # no such operator in torch
        return False
