"""The device door: what is chosen, why, and what each vendor is asked for.

There is no accelerator here. CUDA's functions are replaced one by one; the NPU is torch's spare backend renamed "npu"
in a process of its own, with a module that records how it is called.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from flow_grpo.runtime import device as door
from tests import workers

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        for variable in (
            door.OVERRIDE,
            "LOCAL_RANK",
            "PYTORCH_ALLOC_CONF",
            *door._VISIBLE.values(),
            *door.npu_environment(),
        ):
            os.environ.pop(variable, None)
        yield


def test_packages_are_torch_and_what_is_installed_for_it() -> None:
    assert door.packages() == ("torch",)


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


def test_without_accelerators_the_cpu_is_taken_and_the_line_says_why_the_others_were_not() -> None:
    device = door.resolve()
    assert device == CPU
    line = door.describe(device)
    assert line.startswith("device cpu (")
    assert line.endswith("; no npu: torch_npu is not installed; no cuda: this build of torch has no CUDA support")
    assert "\n" not in line


@pytest.mark.usefixtures("two_cuda_devices")
def test_cuda_is_preferred_to_cpu_and_its_index_is_the_local_rank() -> None:
    os.environ["LOCAL_RANK"] = "1"
    device = door.resolve()
    assert device == torch.device("cuda", 1)
    assert door.describe(device) == "device cuda:1 (Graphics 9000); no npu: torch_npu is not installed"


@pytest.mark.usefixtures("two_cuda_devices")
def test_more_local_ranks_than_devices_are_refused() -> None:
    os.environ["LOCAL_RANK"] = "2"
    with pytest.raises(
        ValueError, match=r"rank 2 has no cuda device: 2 visible \(.* unset\); start at most 2 processes per node$"
    ):
        door.resolve()


@pytest.mark.usefixtures("two_cuda_devices")
def test_a_rank_that_is_shown_one_device_but_given_an_index_is_told_both_ways_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    os.environ |= {"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3"}
    wanted = (
        r"1 visible \(CUDA_VISIBLE_DEVICES 3\);.* or unset CUDA_VISIBLE_DEVICES, or let the launcher set LOCAL_RANK=0"
    )
    with pytest.raises(ValueError, match=wanted):
        door.resolve()
    os.environ["LOCAL_RANK"] = "0"
    assert door.resolve() == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("visible", "index", "wanted"),
    [(None, 2, "cuda:2"), ("5", 0, "cuda:5"), ("4, 7", 1, "cuda:7"), ("", 1, "cuda:1"), ("GPU-8a1", 0, "cuda:GPU-8a1")],
)
def test_a_device_is_named_as_its_machine_counts(visible: str | None, index: int, wanted: str) -> None:
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    assert door.physical(torch.device("cuda", index)) == wanted
    assert door.shown("cuda") == f"CUDA_VISIBLE_DEVICES {'unset' if visible is None else visible}"
    assert door.physical(CPU) == "cpu:0"


@pytest.mark.usefixtures("two_cuda_devices")
def test_an_explicit_request_and_the_environment_win_over_the_order() -> None:
    assert door.resolve("cpu") == CPU
    assert door.describe(CPU, "cpu").endswith(": cpu was requested")
    os.environ[door.OVERRIDE] = "cpu"
    assert door.resolve() == CPU
    assert door.resolve("cuda") == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("request_kind", "text"),
    [
        ("npu", "device='npu' was requested, but torch_npu is not installed"),
        ("cuda", "device='cuda' was requested, but this build of torch has no CUDA support"),
        ("cuda:1", "device='cuda:1' is not known; use one of auto, npu, cuda, cpu"),
    ],
)
def test_a_request_that_cannot_be_met_raises_with_the_reason(request_kind: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        door.resolve(request_kind)


def test_an_unknown_kind_in_the_environment_names_the_variable() -> None:
    os.environ[door.OVERRIDE] = "tpu"
    with pytest.raises(ValueError, match="FLOW_GRPO_DEVICE='tpu' is not known"):
        door.resolve()


def test_cuda_build_without_a_device_says_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert "no cuda: torch sees no device (look at `nvidia-smi`" in door.describe(door.resolve())


def test_torch_npu_without_devices_falls_through_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_npu_that_sees(monkeypatch, 0)
    assert door.resolve() == CPU
    assert "no npu: torch_npu sees no device (look at `npu-smi info`" in door.describe(CPU)
    with pytest.raises(ValueError, match="device='npu' was requested, but torch_npu sees no device"):
        door.resolve("npu")


@pytest.mark.usefixtures("two_cuda_devices")
def test_torch_npu_without_devices_falls_through_to_cuda_before_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_npu_that_sees(monkeypatch, 0)
    device = door.resolve()
    assert device == torch.device("cuda", 0)
    assert door.describe(device).startswith("device cuda:0 (Graphics 9000); no npu: torch_npu sees no device")


@pytest.mark.parametrize("error", ["OSError('libascendcl.so: cannot open')", "RuntimeError('Two accelerators')"])
def test_torch_npu_may_fail_to_load_in_other_ways(error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_npu.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match="torch_npu is installed but cannot be loaded"):
        door.resolve()
    assert "torch_npu" not in sys.modules


@pytest.mark.parametrize("requested", ["auto", "npu", "cpu"])
def test_a_broken_torch_npu_is_one_line_with_both_ways_out_whatever_was_requested(
    requested: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open\\n shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError) as caught:
        door.resolve(requested)
    text = str(caught.value)
    assert "torch_npu is installed but cannot be loaded (libhccl.so: cannot open shared object file)" in text
    assert "set_env.sh" in text and "pip uninstall torch_npu" in text and "\n" not in text
    assert isinstance(caught.value.__cause__, ImportError)


@pytest.mark.parametrize(("users_choice", "loaded"), [(None, "False"), ("1", "True")])
def test_torch_loads_no_plug_in_by_itself_unless_the_user_says_so(
    tmp_path: Path, users_choice: str | None, loaded: str
) -> None:
    (tmp_path / "plugged.py").write_text("def autoload(): ...")
    (tmp_path / "plugged-1.0.dist-info").mkdir()
    (tmp_path / "plugged-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (tmp_path / "plugged-1.0.dist-info" / "entry_points.txt").write_text("[torch.backends]\nown = plugged:autoload\n")
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    environment |= {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    environment |= {} if users_choice is None else {"TORCH_DEVICE_BACKEND_AUTOLOAD": users_choice}
    code = "import flow_grpo, sys, torch; print('plugged' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.strip() == loaded


def test_the_models_ask_the_door_before_their_libraries_load_torch_npu(tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text(
        "import os\nprint(os.environ['HCCL_CONNECT_TIMEOUT'])\nraise ImportError('libhccl.so: cannot open')"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import flow_grpo.models.adapters"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert done.stdout.split() == ["1200"] and done.returncode == 1
    assert last.startswith("RuntimeError: torch_npu is installed but cannot be loaded (libhccl.so: cannot open)")
    assert "set_env.sh" in last and "pip uninstall torch_npu" in last


def test_launch_environment_is_set_before_torch_npu_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_npu.py").write_text("import os\nSEEN = os.environ.get('HCCL_CONNECT_TIMEOUT')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch, "npu", types.SimpleNamespace(is_available=lambda: False), raising=False)
    door.resolve()
    assert sys.modules.pop("torch_npu").SEEN == "1200"


def test_launch_environment_never_overrides_the_user() -> None:
    os.environ["TASK_QUEUE_ENABLE"] = "2"
    assert door.launch_env("npu")["TASK_QUEUE_ENABLE"] == "2"
    assert os.environ["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True"
    assert door.launch_env(CPU) == {}


def test_launch_environment_leaves_the_allocator_alone_when_the_general_variable_is_set() -> None:
    os.environ["PYTORCH_ALLOC_CONF"] = "max_split_size_mb:128"
    assert "PYTORCH_NPU_ALLOC_CONF" not in door.launch_env("npu")
    assert "PYTORCH_NPU_ALLOC_CONF" not in os.environ


def test_cpu_answers_every_question() -> None:
    door.select(CPU)
    door.synchronize(CPU)
    door.empty_cache(CPU)
    door.reset_peak_memory(CPU)
    assert door.process_group_backend(CPU) == "gloo"
    assert door.accelerator_kwargs(CPU) == {"cpu": True}
    assert door.supports_bf16(CPU)
    assert door.attention_backends(CPU) == ("native", "_native_math")
    memory = door.memory(CPU)
    assert 0 < memory["allocated"] <= memory["peak"] < memory["total"]


def test_setup_on_cpu_sets_threads_and_determinism_only_when_asked() -> None:
    threads = torch.get_num_threads()
    try:
        door.setup(CPU)
        assert torch.get_num_threads() == threads and not torch.are_deterministic_algorithms_enabled()
        door.setup(CPU, deterministic=True, num_threads=threads + 1)
        assert torch.get_num_threads() == threads + 1 and torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_autocast_changes_the_dtype_of_a_product_except_for_fp32(dtype: torch.dtype, expected: torch.dtype) -> None:
    with door.autocast(CPU, dtype):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == expected


def test_restored_random_state_repeats_the_draws() -> None:
    state = door.rng_state(CPU)
    first = torch.rand(3)
    door.set_rng_state(CPU, state)
    assert torch.equal(torch.rand(3), first)


def test_random_state_of_another_kind_of_device_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    state = door.rng_state(CPU)
    first = torch.rand(3)
    with caplog.at_level(logging.WARNING):
        door.set_rng_state(CPU, state | {"npu": torch.zeros(16, dtype=torch.uint8)})
    assert torch.equal(torch.rand(3), first)
    assert "this run is on cpu" in caplog.text


def test_profiler_writes_a_trace(tmp_path: Path) -> None:
    with door.profiler(CPU, tmp_path):
        torch.ones(2).sum()
    assert list(tmp_path.glob("*.json"))


class RecordingNpu:
    """Stands for `torch.npu`: answers, and remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.config = types.SimpleNamespace(allow_internal_format=True)
        self.conv = types.SimpleNamespace(allow_hf32=True)

    def __getattr__(self, called: str) -> Callable[..., Any]:
        answers: dict[str, Any] = {
            "is_available": True,
            "device_count": 4,
            "get_device_name": "Ascend910B",
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
    """Ask everything of a fake NPU with local rank 3; the process is of no other use afterwards."""
    npu, library = RecordingNpu(), types.ModuleType("torch_npu")
    torch.utils.rename_privateuse1_backend("npu")  # type: ignore[attr-defined]
    torch._register_device_module("npu", npu)
    sys.modules["torch_npu"] = library
    os.environ["LOCAL_RANK"] = "3"
    library.profiler = mock.Mock()  # type: ignore[attr-defined]

    device = door.resolve()
    seen: dict[str, Any] = {"device": str(device), "line": door.describe(device)}
    npu.calls.clear()
    door.setup(device, deterministic=True)
    seen["no bounds"] = bounds()
    seen["setup"], seen["hccl"] = list(npu.calls), os.environ["HCCL_DETERMINISTIC"]
    seen["formats"] = (npu.config.allow_internal_format, npu.conv.allow_hf32)
    for asked, exec_s, event_s in ((600.0, None, None), (600.0, "3600", None), (600.0, "0", None), (600.0, None, "9")):
        for variable, given in (("HCCL_EXEC_TIMEOUT", exec_s), ("HCCL_EVENT_TIMEOUT", event_s)):
            os.environ.pop(variable, None)
            os.environ |= {variable: given} if given is not None else {}
        door.setup(device, collective_s=asked)
        seen[f"bounds {exec_s} {event_s}"] = bounds()
    state = door.rng_state(device)
    seen["state"] = {key: value.dtype for key, value in state.items()}
    npu.calls.clear()
    door.set_rng_state(device, state)
    door.synchronize(device)
    door.empty_cache(device)
    door.reset_peak_memory(device)
    seen["calls"] = [call[0] for call in npu.calls]
    seen["restored"] = npu.calls[0]
    seen["devices"] = {call[-1] for call in npu.calls if call[0] != "empty_cache"}
    npu.calls.clear()
    door.set_rng_state(device, {"cpu": state["cpu"], "cuda": state["npu"]})
    seen["foreign"] = list(npu.calls)
    os.environ["LOCAL_RANK"] = "4"
    try:
        door.resolve()
    except ValueError as error:
        seen["refused"] = str(error)
    torch.cuda.is_available = lambda: True  # type: ignore[method-assign]
    torch.backends.cuda.is_built = lambda: True
    os.environ["LOCAL_RANK"] = "1"
    seen["beside cuda"] = str(door.resolve())
    seen["memory"] = door.memory(device)
    seen["answers"] = (door.supports_bf16(device), door.attention_backends(device), door.accelerator_kwargs(device))
    seen["backend"] = door.process_group_backend(device)
    with door.autocast(device):
        seen["autocast"] = (torch.is_autocast_enabled("npu"), torch.get_autocast_dtype("npu"))
    door.profiler(device, "traces")
    seen["profiler"] = str(library.profiler.mock_calls)
    return seen


@pytest.fixture(scope="module")
def npu() -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=workers.context()) as pool:
        return pool.submit(observe_npu).result(120)


def test_npu_is_the_first_choice(npu: dict[str, Any]) -> None:
    assert npu["device"] == "npu:3"
    assert npu["line"] == "device npu:3 (Ascend910B)"
    assert npu["beside cuda"] == "npu:1"


def test_more_local_ranks_than_npus_are_refused(npu: dict[str, Any]) -> None:
    text = "local rank 4 has no npu device: 4 visible (ASCEND_RT_VISIBLE_DEVICES unset)"
    assert npu["refused"] == f"{text}; start at most 4 processes per node"


def test_npu_setup_selects_the_device_before_anything_else(npu: dict[str, Any]) -> None:
    assert npu["setup"] == [("set_device", "npu:3"), ("set_compile_mode", ("jit_compile", False))]
    assert npu["formats"] == (False, False)
    assert npu["hccl"] == "true"


def test_what_a_collective_may_take_is_told_to_the_library_and_events_are_waited_for_longer(
    npu: dict[str, Any],
) -> None:
    assert npu["no bounds"] == (None, None)
    assert npu["bounds None None"] == ("600", "668")
    assert npu["bounds 3600 None"] == ("3600", "3668")
    assert npu["bounds 0 None"] == ("0", "0")  # for ever
    assert npu["bounds None 9"] == ("600", "9")  # the user's own


def test_the_audit_is_told_of_every_variable_that_may_be_set() -> None:
    named = {"HCCL_CONNECT_TIMEOUT", "HCCL_DETERMINISTIC", "HCCL_EXEC_TIMEOUT", "HCCL_EVENT_TIMEOUT"}
    assert named <= set(door.npu_environment())


def test_npu_random_state_is_that_of_this_ranks_device_and_the_cpu(npu: dict[str, Any]) -> None:
    assert npu["state"] == {"cpu": torch.uint8, "npu": torch.uint8}
    assert npu["restored"] == ("set_rng_state", str(torch.full((16,), 7, dtype=torch.uint8)), "npu:3")


def test_random_state_of_a_cuda_run_leaves_the_npus_alone(npu: dict[str, Any]) -> None:
    assert npu["foreign"] == []


def test_npu_is_asked_through_its_own_module_for_this_ranks_device(npu: dict[str, Any]) -> None:
    assert npu["calls"] == ["set_rng_state", "synchronize", "empty_cache", "reset_peak_memory_stats"]
    assert npu["devices"] == {"npu:3"}
    assert npu["memory"] == {"allocated": 1.0, "peak": 2.0, "reserved": 3.0, "total": 60.0}


def test_npu_answers(npu: dict[str, Any]) -> None:
    assert npu["answers"] == (True, ("native", "_native_npu"), {})
    assert npu["backend"] == "cpu:gloo,npu:hccl"
    assert npu["autocast"] == (True, torch.bfloat16)
    assert "tensorboard_trace_handler('traces')" in npu["profiler"]
    assert "ProfilerActivity.NPU" in npu["profiler"]


class Moved(torch.nn.Linear):
    """Remembers where it was sent."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.places: list[str] = []

    def to(self, place: Any) -> Any:  # type: ignore[override]
        self.places.append(str(place))
        return self


@pytest.mark.parametrize(("stays", "places"), [(True, ["cuda:0"]), (False, ["cuda:0", "cpu"])])
def test_a_part_visits_the_device_and_goes_home_unless_it_stays(stays: bool, places: list[str]) -> None:
    module = Moved()
    with door.visiting(module, torch.device("cuda", 0), stays=stays):
        assert module.places == ["cuda:0"]
    assert module.places == places


def test_a_part_that_is_there_is_not_moved() -> None:
    module = Moved()
    with door.visiting(module, CPU, stays=False):
        pass
    assert module.places == []
