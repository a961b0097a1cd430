"""The audit finds a missing name, a wrong argument, an unregistered operator and float64 on a device."""

import ast
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests import workers
from tests.refusals import refusal
from tools.dev import audit_npu
from tools.dev.audit import names, step
from tools.dev.audit.names import Use
from tools.dev.audit.wheel import Wheel

FILES = {
    "__init__.py": "from torch_npu import npu",
    "setup.py": (
        "torch._register_device_module('npu', torch_npu.npu)\n"
        "torch.distributed.Backend.register_backend(\n    'hccl', None, devices=['npu'])"
    ),
    "npu/__init__.py": (
        "from .memory import *\n"
        "from .utils import Event, set_device, synchronize\n"
        "from . import npu_config\n"
        "from .npu_config import set_compile_mode\n"
        "config = npu_config._Config()\n"
        "conv = npu_config._Conv()\n"
        "def is_available(): ...\n"
        "def device_count(): ...\n"
        "def get_device_name(device=None): ...\n"
        "def is_bf16_supported(): ...\n"
        "if True:\n    from torch_npu.npu.random import get_rng_state, set_rng_state"
    ),
    "npu/memory.py": (
        "__all__ = ['empty_cache', 'memory_allocated', 'max_memory_allocated', 'memory_reserved', 'mem_get_info',\n"
        "           'reset_peak_memory_stats']\n"
        "def empty_cache(): ...\n"
        "def memory_allocated(device=None): ...\n"
        "def memory_reserved(device=None): ...\n"
        "def mem_get_info(device=None): ...\n"
        "def reset_peak_memory_stats(device=None): ...\n"
        "def hidden(): ...\n"
        "max_memory_allocated = memory_allocated"
    ),
    "npu/utils.py": "class Event: ...\ndef set_device(device): ...\ndef synchronize(device=None): ...",
    "npu/npu_config.py": (
        "def set_compile_mode(jit_compile=False): ...\n"
        "class _Config:\n    def __setattr__(self, name, value):\n        if name == 'allow_internal_format': ...\n"
        "class _Conv:\n    def __setattr__(self, name, value):\n        if name == 'allow_hf32': ..."
    ),
    "npu/random.py": "def get_rng_state(device='npu'): ...\ndef set_rng_state(new_state, device='npu'): ...",
    "_C.cpython-311-x86_64-linux-gnu.so": "HCCL_CONNECT_TIMEOUT\0",
    "csrc/aten/npu_native_functions.yaml": "supported:\n  - view\n  - func: clone\n    op_api: True\ncustom:\n  - own",
    "csrc/aten/npu_native_functions_by_codegen.yaml": (
        "custom:\n- func: npu_own(Tensor self) -> Tensor\nsupported:\n- device_check: NoCheck\n"
        "  func: add.Tensor(Tensor self, Tensor other) -> Tensor\n- func: gelu.out(Tensor self) -> Tensor\n"
    ),
}


@pytest.fixture
def wheel(tmp_path: Path) -> Callable[..., Path]:
    def build(**changes: tuple[str, str]) -> Path:
        path = tmp_path / "torch_npu-9.0.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in FILES.items():
                for old, new in changes.values():
                    text = text.replace(old, new)
                archive.writestr(f"torch_npu/{name}", text)
        return path

    return build


@pytest.fixture(scope="module")
def project_uses() -> list[Use]:
    return names.uses([audit_npu.ROOT / source for source in audit_npu.SOURCES], audit_npu.ROOT)


def test_a_wheel_that_has_every_name_the_project_uses_passes_and_a_misfit_is_exit_code_1(
    tmp_path: Path, wheel: Callable[..., Path]
) -> None:
    out = tmp_path / "found.json"
    words = ["--names-only", "--json", str(out), "--wheel"]
    assert audit_npu.main([*words, str(wheel(change=("'hccl'", "'lccl'")))]) == 1
    assert audit_npu.main([*words, str(wheel())]) == 0
    found = {finding["subject"]: finding for finding in json.loads(out.read_text())["findings"]}
    assert found["torch.npu.set_rng_state(_, _)"]["text"] == "(new_state, device='npu') in torch_npu.npu.random"
    assert found["torch.npu.max_memory_allocated(_)"]["status"] == "ok"
    assert found["torch.npu.conv.allow_hf32"]["status"] == "ok"
    assert found["HCCL_CONNECT_TIMEOUT"]["status"] == "ok"
    assert found["TASK_QUEUE_ENABLE"]["status"] == "warn"


@pytest.mark.parametrize(
    ("change", "subject", "text"),
    [
        (("jit_compile=False", "jit=False"), "torch.npu.set_compile_mode(jit_compile=_)", "unexpected keyword"),
        (("set_device(device)", "set_device()"), "torch.npu.set_device(_)", "too many positional"),
        (("'empty_cache', ", ""), "torch.npu.empty_cache()", "not in torch_npu-9"),
        (("'allow_hf32'", "'hf32'"), "torch.npu.conv.allow_hf32", "not in torch_npu-9"),
        (("_register_device_module", "pass_"), "torch.npu", "not in torch_npu-9"),
        (("'hccl'", "'lccl'"), "hccl", "no such process group backend"),
    ],
)
def test_missing_names_and_changed_signatures_fail(
    wheel: Callable[..., Path], project_uses: list[Use], change: tuple[str, str], subject: str, text: str
) -> None:
    found = {finding.subject: finding for finding in names.check_names(Wheel(wheel(change=change)), project_uses)}
    called = next(finding for name, finding in found.items() if name.split("(")[0] == subject.split("(")[0])
    assert called.status == "fail" and text in called.text, called


@pytest.mark.parametrize(
    ("code", "name", "arguments", "keywords"),
    [
        ("torch.npu.f(1, x=2)", "torch.npu.f", 1, ("x",)),
        ("import torch_npu\ntorch_npu.a.b", "torch_npu.a.b", None, ()),
        ("_module(kind).f()", "torch.npu.f", 0, ()),
        ("getattr(torch, device.type).f(1)", "torch.npu.f", 1, ()),
        ("def g():\n    m = _module('npu')\n    m.config.x = 1", "torch.npu.config.x", None, ()),
        ("importlib.import_module('torch_npu').f()", "torch_npu.f", 0, ()),
    ],
)
def test_uses_are_found_however_they_are_written(
    tmp_path: Path, code: str, name: str, arguments: int | None, keywords: tuple[str, ...]
) -> None:
    file = tmp_path / "x.py"
    file.write_text(code)
    line = len(ast.parse(code).body) if "def" not in code else 3
    assert Use(name, f"x.py:{line}", arguments, keywords) in names.uses([file], tmp_path)
    # Another vendor's names are no uses.
    file.write_text("torch.cuda.f()\n_module('cuda').f()\nm = other(kind)\nm.f()")
    assert names.uses([file], tmp_path) == []


def test_operators_are_registered_or_composite_or_named(wheel: Callable[..., Path]) -> None:
    registered = Wheel(wheel()).operators
    assert registered == {"view", "clone", "add.Tensor", "gelu.out"}
    seen = ("view", "add.Tensor", "expand", "gelu", "mm", "no_such_operator")
    found = {name: step.check_operator(name, registered) for name in seen}
    assert {name: finding.text for name, finding in found.items() if finding.status == "ok"} == {
        "view": "registered",
        "add.Tensor": "registered",
        "expand": "composite",
        "gelu": "composite over gelu.out",
    }
    assert {name for name, finding in found.items() if finding.status == "fail"} == {"mm", "no_such_operator"}


def test_another_file_than_a_torch_npu_wheel_and_a_step_that_fails_are_refused_in_one_line(
    tmp_path: Path, wheel: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.whl").write_text("no archive")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("numpy/__init__.py", "")
    for name, text in (("broken", "cannot be opened"), ("other", "holds no package torch_npu"), ("none", "none.whl")):
        assert text in refusal(capsys, audit_npu.main, ["--wheel", tmp_path / f"{name}.whl"])
    with mock.patch.object(step, "observe", side_effect=RuntimeError("tensors of two devices")):
        assert refusal(capsys, audit_npu.main, ["--wheel", wheel()]) == "error: tensors of two devices"
    with pytest.raises(ValueError, match="lists no operators"):
        _ = Wheel(wheel(change=("supported:", "other:"))).operators


def test_the_downloaded_version_is_the_one_that_is_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = mock.Mock(return_value=mock.Mock(returncode=1, stderr="no network"))
    monkeypatch.setattr(audit_npu.subprocess, "run", failed)
    assert audit_npu.main([]) == 2
    (version,) = re.findall(r"^torch==(\S+)$", (audit_npu.ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert failed.call_args.args[0][-1] == f"torch-npu=={version}" and "no network" in capsys.readouterr().err
    monkeypatch.setattr(audit_npu, "ROOT", tmp_path)
    (tmp_path / "requirements-npu.txt").write_text("# torch-npu==2.13.0")
    assert audit_npu.main([]) == 2
    assert "pins no torch-npu" in capsys.readouterr().err


def small_step() -> dict[str, Any]:
    """Train one layer on the fake device, then use float64 and mix devices."""
    with step.recording() as record:
        device = torch.device("npu", 0)
        layer = torch.nn.Linear(4, 2).to(device)
        optimizer = torch.optim.AdamW(layer.parameters(), foreach=True)
        layer(torch.ones(3, 4, device=device)).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0).item()
        optimizer.step()
        torch.ones(3, dtype=torch.float64).sum()  # not on the device
        operators, clean = dict(record.operators), dict(record.wide)
        layer.weight.detach().double()
        errors = []
        for wrong in (lambda: layer(torch.ones(3, 4)), lambda: layer.weight.detach().numpy()):
            try:
                wrong()
            except (RuntimeError, TypeError) as error:
                errors.append(str(error))
    return {"operators": operators, "clean": clean, "wide": dict(record.wide), "norm": norm, "errors": errors}


def test_the_fake_records_forward_backward_and_optimizer_and_nothing_of_the_cpu() -> None:
    with workers.without_npu() as pool:
        seen = pool.submit(small_step).result(100)
    wanted = {"addmm", "mm", "pow.Tensor_Scalar", "linalg_vector_norm", "_foreach_addcdiv_.ScalarList"}
    assert wanted <= set(seen["operators"])
    assert seen["norm"] > 0 and seen["clean"] == {}
    assert [finding.status for finding in step.check_dtypes(seen["clean"])] == ["ok"]
    assert seen["wide"] == {("_to_copy", torch.float64): 1}
    (finding,) = step.check_dtypes(seen["wide"])
    assert finding.status == "fail" and finding.text.startswith("float64 x 1 on the device")
    assert len(seen["errors"]) == 2 and "tensors of two devices, npu:0 and cpu" in seen["errors"][0]


@pytest.mark.slow
def test_a_training_step_meets_the_device_in_both_directions_without_float64() -> None:
    with workers.without_npu() as pool:
        record = pool.submit(step.observe).result(600)
    wanted = {step.ATTENTION, "convolution", "gelu_backward", "native_layer_norm_backward", "linalg_vector_norm"}
    assert wanted <= set(record.operators)
    assert any(name.startswith("_foreach_addcdiv_") for name in record.operators)
    assert not record.wide
