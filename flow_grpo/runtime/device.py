"""Everything that differs between npu, cuda and cpu; no other file may name a vendor.

Other code holds a `torch.device` from `resolve` and calls the functions below. `torch.npu` (created by importing
torch_npu) and `torch.cuda` share the functions used here, so most of them are one line over
`getattr(torch, device.type)`; `torch.accelerator` has no random states and no device names.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import platform
import re
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

KINDS = ("npu", "cuda", "cpu")  # in order of preference
OVERRIDE = "FLOW_GRPO_DEVICE"  # environment variable, read when the configuration says "auto"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # name in a configuration -> number format
EVENT_AFTER_EXEC_S = 68  # the event timeout must exceed the collective timeout; the vendor's defaults differ by this
_EXEC, _EVENT = "HCCL_EXEC_TIMEOUT", "HCCL_EVENT_TIMEOUT"  # in seconds, 0 for no limit
# Below autograd; what `scaled_dot_product_attention` and diffusers' attention backends end in.
_ATTENTION_OPERATORS = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "flash_attn._flash_attn_forward",
    "npu.npu_fusion_attention",
    "npu.npu_fusion_attention_v2",
    "npu.npu_fusion_attention_v3",
)
_VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
_GIB = 1024**3
_log = logging.getLogger(__name__)

_NPU_ENVIRONMENT = {
    "HCCL_CONNECT_TIMEOUT": "1200",  # seconds; the default 120 is too short for a cold start of many ranks
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",  # reduces fragmentation
    "TASK_QUEUE_ENABLE": "1",  # 2 raises peak memory
    "CPU_AFFINITY_CONF": "1",
}
# CANN's own Python code imports them but nothing installs them: package -> module. requirements-npu.txt has the same.
CANN_PACKAGES = {
    "attrs": "attr",
    "cffi": "cffi",
    "cython": "Cython",
    "decorator": "decorator",
    "pathlib2": "pathlib2",
    "scipy": "scipy",
}
_UNFUSED_CHIPS = re.compile(r"Ascend(310|610|710|910(A|B|Pro[AB]|PremiumA)?$)")  # the A2's chips are 910B1 to 910B4
_hidden: dict[str, str] = {}  # an installed package that the process does without -> why
_DETERMINISTIC_ENVIRONMENT = {
    "npu": {"HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1", "ATB_MATMUL_SHUFFLE_K_ENABLE": "0"},
    "cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    "cpu": {},
}
NPU_VARIABLES = (*_NPU_ENVIRONMENT, *_DETERMINISTIC_ENVIRONMENT["npu"], _EXEC, _EVENT)  # all that may be set here


def resolve(requested: str = "auto") -> torch.device:
    """This rank's device: the requested kind, or for "auto" the first usable one of npu, cuda, cpu.

    The device index is LOCAL_RANK. For "auto" the environment variable FLOW_GRPO_DEVICE may name the kind.

    Raises:
        ValueError: the kind is unknown or unusable, or there are fewer devices than local ranks.
    """
    kind = _requested_kind(requested)
    problems = _problems()
    if kind == "auto":
        kind = next(candidate for candidate in KINDS if not problems[candidate])
    if problems[kind]:
        raise ValueError(f"device={kind!r} was requested, but {problems[kind]}; repair that or use device='auto'")
    if kind == "cpu":
        return torch.device("cpu")
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), _module(kind).device_count()
    if local_rank >= count:
        way_out = f"start at most {count} processes per node"
        if count == 1 and _VISIBLE[kind] in os.environ:  # the launcher may give each rank one device, always index 0
            way_out += f", or unset {_VISIBLE[kind]}, or let the launcher set LOCAL_RANK=0 for every rank"
        raise ValueError(
            f"local rank {local_rank} has no {kind} device: {count} visible ({visibility(kind)}); {way_out}"
        )
    return torch.device(kind, local_rank)


def visibility(kind: str) -> str:
    """Environment variable that limits the visible devices, and its value."""
    return f"{_VISIBLE.get(kind)} {os.environ.get(_VISIBLE.get(kind, ''), 'unset')}"


def physical(device: torch.device) -> str:
    """Device by its number on the machine: index 0 may be another device for every rank."""
    names, index = os.environ.get(_VISIBLE.get(device.type, ""), "").split(","), device.index or 0
    return f"{device.type}:{(names[index].strip() if index < len(names) else '') or index}"


def describe(device: torch.device, requested: str = "auto") -> str:
    """Describe the device in one line, and why each more preferred kind was not taken."""
    kind = _requested_kind(requested)
    line = f"device {device} ({name(device)})"
    if kind != "auto":
        return f"{line}: {kind} was requested"
    skipped = [f"no {better}: {why}" for better, why in _problems().items() if why]
    return "; ".join([line, *skipped[: KINDS.index(device.type)]])


def load_plug_in() -> str:
    """Import torch_npu with environment defaults where the user has set none; return why it is absent, or "".

    Call before importing the model libraries, which import torch_npu unguarded whenever it is installed. One that
    cannot be loaded is hidden from them: the process can use every other kind of device.
    """
    if sys.modules.get("torch_npu") is None and importlib.util.find_spec("torch_npu") is None:
        return _hidden.get("torch_npu", "torch_npu is not installed")
    for variable, value in _NPU_ENVIRONMENT.items():  # before the backend is loaded
        # torch_npu aborts the process if both allocator variables are set.
        if variable != "PYTORCH_NPU_ALLOC_CONF" or "PYTORCH_ALLOC_CONF" not in os.environ:
            os.environ.setdefault(variable, value)
    try:
        importlib.import_module("torch_npu")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - without its libraries it raises errors of many types, or exits
        hide_plug_in(
            f"torch_npu is installed but cannot be loaded ({_reason(error)}): {_start_npu()}; torch must be the CPU "
            "build of the same version"
        )
        return _hidden["torch_npu"]
    return ""


def hide_plug_in(why: str) -> None:
    """Make torch_npu look not installed to torch, and to every library that is imported from now on."""
    _hidden["torch_npu"] = why
    if hasattr(torch, "npu"):  # registered before its import failed: torch and diffusers would ask it
        vars(torch)["npu"] = types.SimpleNamespace(
            is_available=lambda: False, device_count=lambda: 0, _is_in_bad_fork=lambda: True, manual_seed_all=id
        )
    sys.modules["torch_npu"] = None  # type: ignore[assignment]  # Python's mark for "do not import"


def setup(device: torch.device, deterministic: bool = False, num_threads: int = 0, collective_s: float = 0.0) -> None:
    """Configure the process for its device; call before any operation on it.

    Args:
        device: from `resolve`.
        deterministic: use bitwise repeatable kernels and collectives, which are slower.
        num_threads: CPU threads of this process; 0 keeps torch's default.
        collective_s: timeout of the vendor's collectives in seconds (NPU only), unless the user has set one; 0 keeps
            the vendor's default.

    Raises:
        ValueError: the device cannot be started.
    """
    select(device)
    if num_threads:
        torch.set_num_threads(num_threads)
    if deterministic:
        for variable, value in _DETERMINISTIC_ENVIRONMENT[device.type].items():
            os.environ.setdefault(variable, value)
        torch.use_deterministic_algorithms(True)
    if device.type == "npu":
        if collective_s:
            os.environ.setdefault(_EXEC, f"{collective_s:.0f}")
        if _EXEC in os.environ:
            bound = float(os.environ[_EXEC])
            os.environ.setdefault(_EVENT, f"{bound + EVENT_AFTER_EXEC_S:.0f}" if bound else "0")
        module = _module("npu")
        with _starting(device):
            module.set_compile_mode(jit_compile=False)
            module.config.allow_internal_format = False  # private tensor formats cost precision in the video codec
            module.conv.allow_hf32 = False  # on by default; keep fp32 exact
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # on by default; keep fp32 exact


@contextlib.contextmanager
def rounded_convolutions(device: torch.device) -> Iterator[None]:
    """Context manager in which fp32 convolutions round their inputs: on CUDA to TF32, on an NPU to HF32."""
    if device.type == "npu":
        _module("npu").conv.allow_hf32 = True
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        if device.type == "npu":
            _module("npu").conv.allow_hf32 = False
        if device.type == "cuda":
            torch.backends.cudnn.allow_tf32 = False


def select(device: torch.device) -> None:
    """Make `device` the current device of this process; ValueError if it cannot be started."""
    if device.type != "cpu":
        with _starting(device):
            _module(device.type).set_device(device)


def process_group_backend(device: torch.device) -> str:
    """Backend for `init_process_group`; CPU tensors always use gloo."""
    return {"npu": "cpu:gloo,npu:hccl", "cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}[device.type]


def autocast(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> AbstractContextManager[Any]:
    """Autocast context for `dtype`; for fp32 a null context."""
    return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """Read the states (CPU uint8 tensors) of torch's CPU generator and of this device's generator."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = _module(device.type).get_rng_state(device)
    return states


def set_rng_state(device: torch.device, state: dict[str, Tensor]) -> None:
    """Restore what `rng_state` returned; the state of another kind of device is skipped with a warning."""
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu" and device.type in state:
        _module(device.type).set_rng_state(state[device.type], device)
    if set(state) != {"cpu", device.type}:
        _log.warning(
            "random states of %s were saved, this run is on %s: its generator is not restored", set(state), device
        )


def synchronize(device: torch.device) -> None:
    """Wait for all queued work of the device."""
    if device.type != "cpu":
        _module(device.type).synchronize(device)


def to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to CPU memory; calling what is returned waits for the copy and returns it.

    On an accelerator the copy is queued behind the work so far, into pinned memory, and the program goes on.
    """
    if tensor.device.type == "cpu":
        return lambda: tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    copied = _module(tensor.device.type).Event()
    copied.record()

    def ready() -> Tensor:
        copied.synchronize()
        return host

    return ready


def empty_cache(device: torch.device) -> None:
    """Release the allocator's cached memory."""
    if device.type != "cpu":
        _module(device.type).empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that device memory ran out; not every vendor raises torch's own error."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


def place(module: nn.Module, device: torch.device) -> None:
    """Move a module to the device unless it is there already: fake tensors cannot be moved, not even in place."""
    if any(parameter.device != device for parameter in module.parameters()):
        module.to(device)


@contextlib.contextmanager
def visiting(module: nn.Module, device: torch.device, *, stays: bool) -> Iterator[None]:
    """Move the module to the device for the block; unless `stays`, offload it to CPU memory afterwards."""
    place(module, device)
    try:
        yield
    finally:
        if not stays and device.type != "cpu":
            module.to("cpu")
            empty_cache(device)


def memory(device: torch.device) -> dict[str, float]:
    """Read memory in GiB: `allocated`, `peak`, `reserved`, `total`.

    On the CPU: this process's `allocated` and `peak` and the machine's `total`; empty where /proc is missing.
    """
    if device.type != "cpu":
        module = _module(device.type)
        used = {"allocated": module.memory_allocated(device), "peak": module.max_memory_allocated(device)}
        used |= {"reserved": module.memory_reserved(device), "total": module.mem_get_info(device)[1]}
    elif (status := Path("/proc/self/status")).is_file():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        used = {key: int(fields[name].split()[0]) * 1024 for key, name in (("allocated", "VmRSS"), ("peak", "VmHWM"))}
        used["total"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        used = {}
    return {key: value / _GIB for key, value in used.items()}


def reset_peak_memory(device: torch.device) -> None:
    """Reset `memory()["peak"]`; has no effect on the CPU."""
    if device.type != "cpu":
        _module(device.type).reset_peak_memory_stats(device)


def name(device: torch.device) -> str:
    """Product name of the device."""
    if device.type == "cpu":
        return f"{platform.machine()}, {os.cpu_count()} cores"
    return str(_module(device.type).get_device_name(device))


def packages() -> tuple[str, ...]:
    """Installed packages whose versions must be the same on every rank: torch and its vendor plug-in."""
    return tuple(name for name in ("torch", "torch-npu") if importlib.util.find_spec(name.replace("-", "_")))


def supports_bf16(device: torch.device) -> bool:
    """Whether bf16 is native; always True on the CPU."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" or bool(_module(device.type).is_bf16_supported())


def attention_backends(device: torch.device) -> tuple[str, ...]:
    """Diffusers' names of the attention backends with a forward and a backward pass, the default first.

    "flash" needs its own package. "_native_npu" misreads additive float masks; it is safe with boolean masks or none.
    """
    return {
        "npu": ("native", "_native_npu"),
        "cuda": ("native", "_native_cudnn", "_native_flash", "_native_efficient", "flash"),
        "cpu": ("native", "_native_math"),
    }[device.type]


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the operations per second of matrix products, the best of a few: what a share of the device refers to."""
    side = 1024 if device.type == "cpu" else 8192
    left = torch.linspace(-1, 1, side * side, device=device).view(side, side).to(dtype)  # draws nothing at random
    best, until = math.inf, time.perf_counter() + 1.0
    for _ in range(10):
        synchronize(device)
        begun = time.perf_counter()
        left @ left
        synchronize(device)
        best = min(best, time.perf_counter() - begun)
        if time.perf_counter() > until:
            break
    return 2.0 * side**3 / best


def attention_operators() -> frozenset[Any]:
    """Operators, of those this build of torch has, in which some device computes attention."""
    return frozenset(
        getattr(packet, overload)
        for space, name in (full.split(".") for full in _ATTENTION_OPERATORS)
        if (packet := getattr(getattr(torch.ops, space), name, None)) is not None
        for overload in packet.overloads()
    )


def fuses_attention(device: torch.device) -> bool:
    """Whether attention runs in one kernel, without memory for the scores of all pairs of tokens.

    Before the 910B, torch_npu computes `scaled_dot_product_attention` by its definition.
    """
    return device.type != "npu" or not _UNFUSED_CHIPS.match(name(device))


def chooses_sdpa_kernel(device: torch.device) -> bool:
    """Whether `torch.nn.attention.sdpa_kernel` has an effect; torch_npu ignores it."""
    return device.type != "npu"


def has_flex_attention(device: torch.device) -> bool:
    """Whether torch's flex attention compiles to a kernel that skips blocks; said of CUDA by its documents."""
    return device.type == "cuda"


def supports_compile(device: torch.device) -> bool:
    """Whether `torch.compile` may be used; the NPU's graph back ends are experimental."""
    return device.type != "npu"


def _requested_kind(requested: str) -> str:
    # By the configuration or the environment.
    kind = os.environ.get(OVERRIDE, "auto") if requested == "auto" else requested
    if kind not in (*KINDS, "auto"):
        where = OVERRIDE if requested == "auto" else "device"
        raise ValueError(f"{where}={kind!r} is not known; use one of auto, {', '.join(KINDS)}")
    return kind


def _problems() -> dict[str, str]:
    """Say of each kind why it cannot be used on this machine, "" if it can."""
    npu, cuda = load_plug_in(), ""
    try:
        if not npu and not (_module("npu").is_available() and _module("npu").device_count()):
            npu = "torch_npu sees no device (look at `npu-smi info` and ASCEND_RT_VISIBLE_DEVICES)"
    except Exception as error:  # noqa: BLE001 - as in load_plug_in
        npu = f"torch_npu cannot look for devices ({_reason(error)}): {_start_npu()}"
        hide_plug_in(npu)
    if not torch.backends.cuda.is_built():
        cuda = "this build of torch has no CUDA support"
    elif not torch.cuda.is_available():
        cuda = "torch sees no device (look at `nvidia-smi` and CUDA_VISIBLE_DEVICES)"
    return {"npu": npu, "cuda": cuda, "cpu": ""}


@contextlib.contextmanager
def _starting(device: torch.device) -> Iterator[None]:
    """Raise whatever a device's first calls raise as a ValueError of one line, with the way out."""
    try:
        yield
    except Exception as error:
        way_out = _start_npu() if device.type == "npu" else "look at `nvidia-smi` and at the driver's version"
        raise ValueError(
            f"{device} cannot be started ({_reason(error)}): {way_out}; to run without it set {OVERRIDE}=cpu"
        ) from error


def _start_npu() -> str:
    absent = [package for package, module in CANN_PACKAGES.items() if importlib.util.find_spec(module) is None]
    lacking = f", which lacks {', '.join(absent)} here" if absent else ""
    return (
        "source set_env.sh of the CANN toolkit, install the Python packages that CANN needs (pip install -r "
        f"requirements-npu.txt{lacking}), look at `npu-smi info`"
    )


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _module(kind: str) -> Any:
    return getattr(torch, kind)
