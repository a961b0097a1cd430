"""Checks of disk, shared memory, versions, device, process groups and run folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import torch

from flow_grpo.preflight.doctor import machine
from flow_grpo.preflight.doctor.machine import GIB
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.ranks.process_group import Group, World
from flow_grpo.settings.loading import load_config
from tests.doctor_cases import status
from tests.workers import run_ranks

CPU = torch.device("cpu")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def with_free(gib: float):
    return mock.patch.object(machine.shutil, "disk_usage", return_value=mock.Mock(free=int(gib * GIB)))


@pytest.mark.parametrize(("free", "wanted"), [(10.0, "ok"), (6.0, "warn"), (3.0, "fail")])
def test_checkpoints_must_fit_on_the_disk(tmp_path, free, wanted):
    with with_free(free):
        assert status(machine.check_disk(tmp_path / "not" / "yet", GIB, keep=3)) == wanted


def test_checkpoints_already_written_need_no_further_space(tmp_path):
    (tmp_path / "checkpoints" / "checkpoint_000001").mkdir(parents=True)
    with with_free(3.5):
        assert status(machine.check_disk(tmp_path, GIB, keep=3)) == "warn"
    for step in range(2, 6):
        (tmp_path / "checkpoints" / f"checkpoint_{step:06}").mkdir()
    with with_free(1.5):  # one more is written before the oldest goes
        assert status(machine.check_disk(tmp_path, GIB, keep=3)) == "warn"
    with with_free(0.5):
        assert status(machine.check_disk(tmp_path, GIB, keep=3)) == "fail"


def test_the_loaders_batches_must_fit_into_shared_memory(tmp_path):
    with with_free(1.0):
        assert status(machine.check_shared_memory(GIB // 24, 2, 4, tmp_path)) == "ok"
        assert status(machine.check_shared_memory(GIB // 23, 2, 4, tmp_path)) == "fail"
        assert status(machine.check_shared_memory(GIB, 0, 4, tmp_path)) == "ok"
        assert status(machine.check_shared_memory(GIB, 2, 4, tmp_path / "none")) == "ok"


@pytest.mark.parametrize(
    ("versions", "fits"),
    [
        ({"torch": "2.13.0+cpu"}, True),
        ({"torch": "2.13.0+cpu", "torch-npu": "2.13.0.post2"}, True),
        ({"torch": "2.13.0", "torch-npu": "2.13.0rc1"}, True),
        ({"torch": "2.13.0", "torch-npu": "absent"}, True),  # built by hand: no installer knows its version
        ({"torch": "2.13.0", "torch-npu": "2.13.1"}, False),
        ({"torch": "2.13.0", "torch-npu": "2.9.0.post1"}, False),
    ],
)
def test_torch_npu_must_have_the_version_of_torch(versions, fits):
    said = machine.mismatched(versions)
    assert (said == "") is fits
    assert fits or said == f"torch {versions['torch']} with torch-npu {versions['torch-npu']}"


def test_a_vendor_s_package_for_another_torch_fails():
    assert status(machine.check_versions(World())) == "ok"
    with (
        mock.patch.object(machine, "version", lambda name: "2.9.0" if name == "torch-npu" else "2.13.0"),
        mock.patch.object(device_api, "packages", return_value=("torch", "torch-npu")),
    ):
        assert status(machine.check_versions(World())) == "fail"


def test_a_package_that_no_installer_knows_is_no_reason_to_stop():
    with mock.patch.object(device_api, "packages", return_value=("torch", "torch-npu")):  # which is not installed here
        found = machine.check_versions(World())
    assert found.status == "ok" and "torch-npu absent" in found.measured


def _with_own_versions(world: World) -> str:
    with mock.patch.object(machine, "version", lambda name: "2.13" if name == "torch" else f"1.{world.data.rank}"):
        return status(machine.check_versions(world))


def test_other_versions_on_another_rank_fail():
    assert run_ranks(_with_own_versions, 2) == ["fail", "fail"]


def config(**changes):
    made = load_config("config/grpo.py:tiny_recam")
    model = dataclasses.replace(made.model, dtype=changes.pop("dtype", "fp32"))
    return dataclasses.replace(made, model=model, **changes)


def test_the_device_must_support_the_model_s_dtype_and_be_intended():
    assert status(machine.check_device(CPU, config(), World())) == "ok"
    assert status(machine.check_device(CPU, config(dtype="bf16", device="cpu"), World())) == "ok"
    with mock.patch.dict("os.environ", {device_api.OVERRIDE: "auto"}):
        assert status(machine.check_device(CPU, config(dtype="bf16", device="auto"), World())) == "warn"
    with mock.patch.object(device_api, "supports_bf16", return_value=False):
        assert status(machine.check_device(CPU, config(dtype="bf16"), World())) == "fail"


def test_a_chip_without_fused_attention_is_named():
    with (
        mock.patch.object(device_api, "fuses_attention", return_value=False),
        mock.patch.object(device_api, "name", return_value="Ascend910A"),
    ):
        found = machine.check_device(CPU, config(), World())
    assert found.status == "warn" and found.way_out.startswith("Ascend910A has no fused attention kernel")


@pytest.fixture
def accelerators():
    with (
        mock.patch.object(device_api, "supports_bf16", return_value=True),
        mock.patch.object(device_api, "describe", return_value="device"),
    ):
        yield torch.device("cuda:0")


class Two(Group):
    """Two ranks, the other of which says what it was made to say."""

    def __init__(self, other):
        super().__init__()
        object.__setattr__(self, "other", other)

    def gather_text(self, text: str) -> list[str]:
        return [text, self.other or text]


def two(other: str) -> World:
    return World.of(Two(other))


def test_two_ranks_on_one_accelerator_fail(accelerators, monkeypatch):
    monkeypatch.setenv(VISIBLE, "3")
    found = machine.check_device(accelerators, config(), two(""))
    assert found.status == "fail" and f"{VISIBLE} 3" in found.way_out
    assert status(machine.check_device(accelerators, config(), World())) == "ok"


def test_ranks_that_each_see_one_device_as_their_first_share_none(accelerators, monkeypatch):
    said = []
    for shown in ("3", "4"):
        monkeypatch.setenv(VISIBLE, shown)
        with mock.patch.object(Group, "gather_text", lambda self, text: said.append(text) or [text]):
            machine.check_device(accelerators, config(), World())
    assert status(machine.check_device(accelerators, config(), two(said[0]))) == "ok"
    assert status(machine.check_device(accelerators, config(), two(said[1]))) == "fail"


def _group(world: World) -> list[str]:
    fine = machine.check_backends(CPU, world)
    with mock.patch.object(Group, "all_gather", return_value=torch.tensor([0, 0])):
        mixed_up = status(machine.check_backends(CPU, world))
    with mock.patch.object(torch.distributed, "all_reduce"):  # every rank keeps its own
        alone = machine.check_backends(CPU, world)
    with mock.patch.object(torch.distributed, "all_reduce", side_effect=RuntimeError("No backend type")):
        refused = status(machine.check_backends(CPU, world))
    bytes_too = status(machine.check_backends(CPU, world, gathers_bytes=True))
    with mock.patch.object(torch.distributed, "all_gather_into_tensor", side_effect=RuntimeError("type 1")):
        no_bytes = machine.check_backends(CPU, world, gathers_bytes=True)
        assert status(machine.check_backends(CPU, world)) == bytes_too == "ok"
    assert no_bytes.status == "fail" and no_bytes.way_out.startswith("no all-gather of uint8 on cpu")
    return [f"{fine.status} {fine.measured}", mixed_up, f"{alone.status} {alone.way_out}", refused]


def test_a_process_group_that_mixes_up_ranks_or_sums_wrongly_fails():
    for rank, (fine, mixed_up, alone, refused) in enumerate(run_ranks(_group, 2)):
        assert fine.startswith("ok cpu:gloo") and fine.endswith(" over 2 ranks, control over gloo")
        assert mixed_up == refused == "fail"
        assert alone.startswith(f"fail an all-reduce on cpu gives {rank + 1} instead of 3")
    assert status(machine.check_backends(CPU, World())) == "ok"


# --- the run's folder


def _looks(world: World, folders: list[Path]) -> list[str]:
    found = machine.check_run_folder(folders[world.data.rank], world, timeout_s=0.1)
    return [found.status, found.measured]


def test_a_run_s_folder_must_be_one_for_all_ranks(tmp_path):
    nodes = [tmp_path / "a", tmp_path / "b"]
    for node in nodes:
        node.mkdir()
    (told, why), _ = run_ranks(_looks, 2, [nodes[0], nodes[0]])
    assert told == "ok" and why.startswith("not checked")
    (nodes[0] / ".lock").write_text("{}")
    assert [told for told, _ in run_ranks(_looks, 2, [nodes[0], nodes[0]])] == ["ok", "ok"]
    assert [told for told, _ in run_ranks(_looks, 2, nodes)] == ["ok", "fail"]
    (nodes[1] / ".lock").write_text("{'of': 'a run before'}")
    assert [told for told, _ in run_ranks(_looks, 2, nodes)] == ["ok", "fail"]


def test_a_file_that_shows_up_late_is_waited_for(tmp_path):
    (tmp_path / ".lock").write_text("{}")
    with mock.patch.object(machine, "_text", side_effect=["{}", "", "{}"]):
        found = machine.check_run_folder(tmp_path, World(), timeout_s=5)
    assert found.status == "ok" and " is seen by " in found.measured
