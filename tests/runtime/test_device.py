"""Which device is chosen, why, and how each vendor's module is called.

There is no accelerator here. CUDA's functions are replaced one by one; the NPU is torch's spare backend renamed "npu"
in a separate process, with a module that records its calls.
"""

import logging
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from flow_grpo.runtime import device as device_api
from tests import workers

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
VISIBLE = ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clear the variables that the device door reads, and hide a torch_npu that is installed."""
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    monkeypatch.setattr(device_api, "_hidden", {})
    with mock.patch.dict(os.environ):
        for variable in (device_api.OVERRIDE, "LOCAL_RANK", "PYTORCH_ALLOC_CONF", *VISIBLE, *device_api.NPU_VARIABLES):
            os.environ.pop(variable, None)
        yield


@pytest.fixture
def two_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Graphics 9000")


def torch_npu_that_sees(monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    module = types.SimpleNamespace(is_available=lambda: devices > 0, device_count=lambda: devices)
    monkeypatch.setattr(torch, "npu", module, raising=False)
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))


def run_python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    given = kept | {"PYTHONPATH": f"{folder}:{ROOT}"} | environment
    return subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=False)


def test_without_accelerators_the_cpu_is_taken_and_one_line_says_why_the_others_were_not() -> None:
    device = device_api.resolve()
    line = device_api.describe(device)
    assert device == CPU and line.startswith("device cpu (") and "\n" not in line
    assert "no npu: torch_npu is not installed" in line and "no cuda: " in line
    assert device_api.packages() == ("torch",)


@pytest.mark.usefixtures("two_cuda_devices")
def test_cuda_is_preferred_to_cpu_with_the_local_rank_as_index_also_where_torch_npu_sees_no_device(monkeypatch):
    os.environ["LOCAL_RANK"] = "1"
    device = device_api.resolve()
    assert device == torch.device("cuda", 1)
    assert device_api.describe(device) == "device cuda:1 (Graphics 9000); no npu: torch_npu is not installed"
    torch_npu_that_sees(monkeypatch, 0)
    assert device_api.resolve() == torch.device("cuda", 1)


@pytest.mark.usefixtures("two_cuda_devices")
@pytest.mark.parametrize(
    ("count", "local_rank", "visible", "words"),
    [
        (2, "2", None, ["rank 2", "2 visible (CUDA_VISIBLE_DEVICES unset)", "at most 2 processes"]),
        (1, "3", "3", ["1 visible (CUDA_VISIBLE_DEVICES 3)", "unset CUDA_VISIBLE_DEVICES", "LOCAL_RANK=0"]),
    ],
)
def test_more_local_ranks_than_devices_are_refused(count, local_rank, visible, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    os.environ |= {"LOCAL_RANK": local_rank} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    with pytest.raises(ValueError, match="has no cuda device") as caught:
        device_api.resolve()
    assert all(word in str(caught.value) for word in words)
    os.environ["LOCAL_RANK"] = "0"
    assert device_api.resolve() == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("visible", "index", "wanted"),
    [(None, 2, "cuda:2"), ("5", 0, "cuda:5"), ("4, 7", 1, "cuda:7"), ("", 1, "cuda:1"), ("GPU-8a1", 0, "cuda:GPU-8a1")],
)
def test_the_physical_device_is_the_visible_one_at_its_index(visible: str | None, index: int, wanted: str) -> None:
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    assert device_api.physical(torch.device("cuda", index)) == wanted
    assert device_api.visibility("cuda") == f"CUDA_VISIBLE_DEVICES {'unset' if visible is None else visible}"
    assert device_api.physical(CPU) == "cpu:0"


@pytest.mark.usefixtures("two_cuda_devices")
def test_a_request_and_the_environment_override_the_order() -> None:
    assert device_api.resolve("cpu") == CPU
    assert device_api.describe(CPU, "cpu").endswith(": cpu was requested")
    os.environ[device_api.OVERRIDE] = "cpu"
    assert device_api.resolve() == CPU
    assert device_api.resolve("cuda") == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("requested", "environment", "words"),
    [
        ("npu", "auto", ["device='npu'", "torch_npu is not installed", "device='auto'"]),
        ("cuda", "auto", ["device='cuda'", "no CUDA support", "device='auto'"]),
        ("cuda:1", "auto", ["device='cuda:1'", "auto, npu, cuda, cpu"]),
        ("auto", "tpu", ["FLOW_GRPO_DEVICE='tpu'", "auto, npu, cuda, cpu"]),
    ],
)
def test_an_unusable_request_is_refused_with_reason_and_way_out(requested, environment, words):
    os.environ[device_api.OVERRIDE] = environment
    with pytest.raises(ValueError, match=r"device|DEVICE") as caught:
        device_api.resolve(requested)
    assert all(word in str(caught.value) for word in words)


def test_libraries_without_a_device_are_passed_over_and_say_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_npu_that_sees(monkeypatch, 0)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_api.resolve() == CPU
    line = device_api.describe(CPU)
    assert "no npu: torch_npu sees no device" in line and "npu-smi info" in line
    assert "no cuda: torch sees no device" in line and "nvidia-smi" in line
    with pytest.raises(ValueError, match="torch_npu sees no device"):
        device_api.resolve("npu")


def installed_torch_npu(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    (folder / "torch_npu.py").write_text(code)
    monkeypatch.delitem(sys.modules, "torch_npu")
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize(
    "error",
    [
        "ImportError('libhccl.so:\\n cannot open')",
        "OSError('libhccl.so: cannot open')",
        "RuntimeError('Two accelerators')",
        "AttributeError('no _C')",
        "KeyError('ASCEND_OPP_PATH')",
        "TypeError('an integer is required')",
    ],
)
def test_a_torch_npu_that_cannot_be_loaded_is_refused_or_passed_over_in_one_line(error, tmp_path, monkeypatch):
    installed_torch_npu(monkeypatch, tmp_path, f"raise {error}")
    why = f"torch_npu is installed but cannot be loaded ({error.split('(')[0]}: "
    with pytest.raises(ValueError, match="device='npu' was requested") as caught:
        device_api.resolve("npu")
    assert device_api.resolve("cpu") == device_api.resolve() == CPU
    for line in (str(caught.value), device_api.describe(CPU)):
        assert why in line and "set_env.sh" in line and "npu-smi info" in line and "\n" not in line
        assert "-r requirements-npu.txt" in line
    assert device_api.packages() == ("torch",)


@pytest.mark.parametrize("seen", ["", "torch.npu.is_available = lambda: [][0]"])
def test_a_torch_npu_that_registers_nothing_or_fails_when_asked_is_passed_over(seen, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "npu", types.SimpleNamespace(), raising=False)
    installed_torch_npu(monkeypatch, tmp_path, f"import torch\n{seen}")
    assert device_api.resolve() == CPU
    assert "no npu: torch_npu cannot look for devices (" in device_api.describe(CPU)


LATE_FAILURE = """
import types, torch
torch.utils.rename_privateuse1_backend("npu")
def count(): raise RuntimeError("no driver")
torch._register_device_module("npu", types.SimpleNamespace(is_available=lambda: True, device_count=count))
"""
RECOMPUTE = """
import flow_grpo, torch, warnings
from flow_grpo.runtime import device
warnings.simplefilter("error")
found = device.resolve("{}")
device.setup(found)
torch.manual_seed(1)
values = torch.ones(2, 4, requires_grad=True)
torch.utils.checkpoint.checkpoint(torch.nn.Linear(4, 4), values, use_reentrant=False).sum().backward()
import diffusers.utils.torch_utils
print(device.describe(found))
"""


@pytest.mark.parametrize(
    ("failure", "requested"), [("", "cpu"), ("import no_sympy", "auto"), ("raise SystemExit(0)", "auto")]
)
def test_a_torch_npu_that_fails_after_it_has_registered_breaks_no_other_device(failure, requested, tmp_path):
    (tmp_path / "torch_npu.py").write_text(LATE_FAILURE + failure)
    done = run_python(RECOMPUTE.format(requested), tmp_path)
    assert done.returncode == 0 and "no npu: torch_npu " in done.stdout and done.stdout.count("\n") == 1, done.stderr


def test_the_packages_that_cann_needs_are_required_and_those_that_are_absent_are_named(tmp_path, monkeypatch):
    required = (ROOT / "requirements-npu.txt").read_text().split()
    assert set(device_api.CANN_PACKAGES) <= set(required)
    monkeypatch.setattr(device_api, "CANN_PACKAGES", {"numpy": "numpy", "some-package": "no_such_module"})
    installed_torch_npu(monkeypatch, tmp_path, "raise RuntimeError('error code 500001')")
    device_api.resolve()
    assert "requirements-npu.txt, which lacks some-package here)" in device_api.describe(CPU)


@pytest.mark.parametrize("call", [device_api.select, device_api.setup])
@pytest.mark.parametrize("error", [RuntimeError("initialize:\n error code is 500001"), AttributeError("_C")])
def test_a_device_that_does_not_start_is_refused_in_one_line(call, error, monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", mock.Mock(side_effect=error))
    with pytest.raises(ValueError, match="cuda:0 cannot be started") as caught:
        call(torch.device("cuda", 0))
    text = str(caught.value)
    assert type(error).__name__ in text and "nvidia-smi" in text and "FLOW_GRPO_DEVICE=cpu" in text and "\n" not in text


@pytest.mark.parametrize(
    ("chip", "fused"),
    [
        *((name, True) for name in ("Ascend910B1", "Ascend910B4-1", "Ascend910_9391", "Ascend950PR", "of tomorrow")),
        *((name, False) for name in ("Ascend910A", "Ascend910B", "Ascend910ProB", "Ascend910PremiumA", "Ascend310P3")),
    ],
)
def test_chips_before_the_910b_have_no_fused_attention(chip: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_api, "name", lambda _device: chip)
    npu = mock.Mock(type="npu")
    assert device_api.fuses_attention(npu) is fused and device_api.fuses_attention(CPU)
    assert not device_api.chooses_sdpa_kernel(npu) and device_api.chooses_sdpa_kernel(CPU)


@pytest.mark.parametrize(("users_choice", "loaded"), [(None, "False"), ("1", "True")])
def test_torch_loads_a_plug_in_by_itself_only_if_the_user_says_so(tmp_path, users_choice, loaded):
    (tmp_path / "torch_npu.py").write_text("def _autoload(): ...")  # shadows an installed one, which torch loads, too
    (tmp_path / "plugged.py").write_text("def autoload(): ...")
    (tmp_path / "plugged-1.0.dist-info").mkdir()
    (tmp_path / "plugged-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (tmp_path / "plugged-1.0.dist-info" / "entry_points.txt").write_text("[torch.backends]\nown = plugged:autoload\n")
    environment = {} if users_choice is None else {"TORCH_DEVICE_BACKEND_AUTOLOAD": users_choice}
    done = run_python("import flow_grpo, sys, torch; print('plugged' in sys.modules)", tmp_path, **environment)
    assert done.stdout.strip() == loaded, done.stderr


def test_importing_the_models_loads_torch_npu_first_with_its_environment_or_does_without_it(tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text(
        "import os\nprint(os.environ['HCCL_CONNECT_TIMEOUT'])\nraise ImportError('x')"
    )
    load = "import flow_grpo.models.encoders.codec; from flow_grpo.runtime.device import resolve"
    code = f"{load}; resolve('cpu'); resolve('npu')"
    done = run_python(code, tmp_path)
    assert done.stdout.split() == ["1200"]  # once
    assert "ValueError: device='npu' was requested, but torch_npu is installed but cannot" in done.stderr


def test_a_training_that_asks_for_an_npu_which_cannot_start_ends_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text("raise OSError('libascendcl.so: cannot open')")
    words = ["--config", "config/grpo.py:tiny_recam", "--config.device=npu"]
    code = f"import sys, train_grpo; sys.exit(train_grpo.main({words}))"
    done = run_python(code, tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: device='npu' was requested, but torch_npu is")
    assert done.stderr.count("\n") == 1 and "libascendcl.so" in done.stderr


def test_environment_defaults_never_override_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_npu_that_sees(monkeypatch, 1)
    os.environ |= {"TASK_QUEUE_ENABLE": "2", "PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}
    device_api.load_plug_in()
    assert os.environ["TASK_QUEUE_ENABLE"] == "2" and os.environ["CPU_AFFINITY_CONF"] == "1"
    assert "PYTORCH_NPU_ALLOC_CONF" not in os.environ  # the general one is set
    del os.environ["PYTORCH_ALLOC_CONF"]
    device_api.load_plug_in()
    assert os.environ["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True"
    may_be_set = {"HCCL_CONNECT_TIMEOUT", "HCCL_DETERMINISTIC", "HCCL_EXEC_TIMEOUT", "HCCL_EVENT_TIMEOUT"}
    assert may_be_set <= set(device_api.NPU_VARIABLES)


def test_every_function_works_on_the_cpu(tmp_path: Path) -> None:
    device_api.select(CPU)
    device_api.synchronize(CPU)
    device_api.empty_cache(CPU)
    device_api.reset_peak_memory(CPU)
    assert device_api.process_group_backend(CPU) == "gloo"
    assert device_api.supports_bf16(CPU)
    assert device_api.attention_backends(CPU) == ("native", "_native_math")
    for dtype in (torch.float32, torch.bfloat16):
        with device_api.autocast(CPU, dtype):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    memory = device_api.memory(CPU)
    assert 0 < memory["allocated"] <= memory["peak"] < memory["total"]


def test_setup_on_the_cpu_sets_threads_and_determinism_only_if_asked() -> None:
    threads = torch.get_num_threads()
    try:
        device_api.setup(CPU)
        assert torch.get_num_threads() == threads and not torch.are_deterministic_algorithms_enabled()
        device_api.setup(CPU, deterministic=True, num_threads=threads + 1)
        assert torch.get_num_threads() == threads + 1 and torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


def test_a_restored_random_state_repeats_the_draws_and_another_device_s_is_skipped_with_a_warning(caplog):
    state = device_api.rng_state(CPU)
    first = torch.rand(3)
    for foreign in ({}, {"npu": torch.zeros(16, dtype=torch.uint8)}):
        with caplog.at_level(logging.WARNING):
            device_api.set_rng_state(CPU, state | foreign)
        assert torch.equal(torch.rand(3), first)
        assert ("this run is on cpu" in caplog.text) == bool(foreign)


class RecordingNpu:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.config = types.SimpleNamespace(allow_internal_format=True)
        self.conv = types.SimpleNamespace(allow_hf32=True)

    def __getattr__(self, called: str) -> Callable[..., Any]:
        answers: dict[str, Any] = {
            "is_available": True,
            "device_count": 4,
            "get_device_name": "Ascend910B3",
            "get_rng_state": torch.full((16,), 7, dtype=torch.uint8),
            "is_bf16_supported": True,
            "memory_allocated": 1 << 30,
            "max_memory_allocated": 2 << 30,
            "memory_reserved": 3 << 30,
            "mem_get_info": (0, 60 << 30),
            "get_amp_supported_dtype": [torch.bfloat16],
        }

        def record(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((called, *map(str, args), *kwargs.items()))
            return answers.get(called)

        return record


def bounds() -> tuple[str | None, ...]:
    return tuple(os.environ.get(f"HCCL_{name}_TIMEOUT") for name in ("EXEC", "EVENT"))


def observe_npu() -> dict[str, Any]:
    """Call everything on a fake NPU with local rank 3; changes the process for good."""
    npu, library = RecordingNpu(), types.ModuleType("torch_npu")
    torch.utils.rename_privateuse1_backend("npu")  # type: ignore[attr-defined]
    torch._register_device_module("npu", npu)
    sys.modules["torch_npu"] = library
    os.environ["LOCAL_RANK"] = "3"

    device = device_api.resolve()
    seen: dict[str, Any] = {"device": str(device), "line": device_api.describe(device)}
    npu.calls.clear()
    device_api.setup(device, deterministic=True)
    seen["no bounds"] = bounds()
    seen["setup"], seen["hccl"] = list(npu.calls), os.environ["HCCL_DETERMINISTIC"]
    seen["formats"] = (npu.config.allow_internal_format, npu.conv.allow_hf32)
    with device_api.rounded_convolutions(device):
        seen["rounded inside"] = npu.conv.allow_hf32
    seen["rounded outside"] = npu.conv.allow_hf32
    for asked, exec_s, event_s in ((600.0, None, None), (600.0, "3600", None), (600.0, "0", None), (600.0, None, "9")):
        for variable, given in (("HCCL_EXEC_TIMEOUT", exec_s), ("HCCL_EVENT_TIMEOUT", event_s)):
            os.environ.pop(variable, None)
            os.environ |= {variable: given} if given is not None else {}
        device_api.setup(device, collective_s=asked)
        seen[f"bounds {exec_s} {event_s}"] = bounds()
    state = device_api.rng_state(device)
    seen["state"] = {key: value.dtype for key, value in state.items()}
    npu.calls.clear()
    device_api.set_rng_state(device, state)
    device_api.synchronize(device)
    device_api.empty_cache(device)
    device_api.reset_peak_memory(device)
    seen["calls"] = [call[0] for call in npu.calls]
    seen["restored"] = npu.calls[0]
    seen["devices"] = {call[-1] for call in npu.calls if call[0] != "empty_cache"}
    npu.calls.clear()
    device_api.set_rng_state(device, {"cpu": state["cpu"], "cuda": state["npu"]})
    seen["foreign"] = list(npu.calls)
    os.environ["LOCAL_RANK"] = "4"
    try:
        device_api.resolve()
    except ValueError as error:
        seen["refused"] = str(error)
    torch.cuda.is_available = lambda: True  # type: ignore[method-assign]
    torch.backends.cuda.is_built = lambda: True
    os.environ["LOCAL_RANK"] = "1"
    seen["with cuda"] = str(device_api.resolve())
    seen["memory"] = device_api.memory(device)
    seen["answers"] = device_api.supports_bf16(device), device_api.attention_backends(device)
    seen["backend"] = device_api.process_group_backend(device)
    with device_api.autocast(device):
        seen["autocast"] = (torch.is_autocast_enabled("npu"), torch.get_autocast_dtype("npu"))
    return seen


@pytest.fixture(scope="module")
def npu() -> dict[str, Any]:
    with workers.without_npu() as pool:
        return pool.submit(observe_npu).result(120)


def test_the_npu_is_the_first_choice_and_set_up_for_this_rank_before_anything_else(npu: dict[str, Any]) -> None:
    assert (npu["device"], npu["line"]) == ("npu:3", "device npu:3 (Ascend910B3)")
    assert npu["with cuda"] == "npu:1"
    words = ("local rank 4", "4 visible (ASCEND_RT_VISIBLE_DEVICES unset)", "at most 4 processes")
    assert all(word in npu["refused"] for word in words)
    assert npu["setup"] == [("set_device", "npu:3"), ("set_compile_mode", ("jit_compile", False))]
    assert npu["formats"] == (False, False)
    assert (npu["rounded inside"], npu["rounded outside"]) == (True, False)
    assert npu["hccl"] == "true"


def test_the_npus_event_timeout_exceeds_its_collective_timeout(npu: dict[str, Any]) -> None:
    assert npu["no bounds"] == (None, None)
    assert npu["bounds None None"] == ("600", "668")
    assert npu["bounds 3600 None"] == ("3600", "3668")
    assert npu["bounds 0 None"] == ("0", "0")  # no limit
    assert npu["bounds None 9"] == ("600", "9")  # the user's own


def test_the_npus_module_is_called_for_this_ranks_device(npu: dict[str, Any]) -> None:
    assert npu["calls"] == ["set_rng_state", "synchronize", "empty_cache", "reset_peak_memory_stats"]
    assert npu["devices"] == {"npu:3"}
    assert npu["memory"] == {"allocated": 1.0, "peak": 2.0, "reserved": 3.0, "total": 60.0}
    assert npu["state"] == {"cpu": torch.uint8, "npu": torch.uint8}
    assert npu["restored"] == ("set_rng_state", str(torch.full((16,), 7, dtype=torch.uint8)), "npu:3")
    assert npu["foreign"] == [], "the random state of a CUDA run"
    assert npu["answers"] == (True, ("native", "_native_npu"))
    assert npu["backend"] == "cpu:gloo,npu:hccl"
    assert npu["autocast"] == (True, torch.bfloat16)


class Moved(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)
        self.places: list[str] = []

    def to(self, place: Any) -> Any:  # type: ignore[override]
        self.places.append(str(place))
        return self


@pytest.mark.parametrize(("stays", "places"), [(True, ["cuda:0"]), (False, ["cuda:0", "cpu"])])
def test_a_module_is_on_the_device_for_the_block_and_offloaded_unless_it_stays(stays: bool, places: list[str]) -> None:
    module = Moved()
    with device_api.visiting(module, torch.device("cuda", 0), stays=stays):
        assert module.places == ["cuda:0"]
    assert module.places == places
    module.places.clear()
    with device_api.visiting(module, CPU, stays=stays):
        pass
    assert module.places == [], "it is there already"


def test_the_matrix_rate_is_that_of_products_and_draws_nothing_at_random() -> None:
    before = torch.get_rng_state()
    assert 1e8 < device_api.matrix_rate(CPU, torch.float32) < 1e14
    assert torch.equal(torch.get_rng_state(), before)
