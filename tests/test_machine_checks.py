"""Disk, shared memory, versions, device, process group: what is missing is found."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from flow_grpo.algorithm import machine_checks
from flow_grpo.algorithm.machine_checks import GIB
from flow_grpo.config import load_config
from flow_grpo.runtime import device as device_door
from flow_grpo.runtime.distributed import Ranks
from tests.workers import run_ranks

CPU = torch.device("cpu")


def status(found) -> str:
    (only,) = found
    assert bool(only.way_out) == (only.status != "ok")
    return only.status


def with_free(gib: float):
    return mock.patch.object(machine_checks.shutil, "disk_usage", return_value=mock.Mock(free=int(gib * GIB)))


@pytest.mark.parametrize(("free", "wanted"), [(10.0, "ok"), (6.0, "warn"), (3.0, "fail")])
def test_checkpoints_must_fit_on_the_disk(tmp_path, free, wanted):
    with with_free(free):
        assert status(machine_checks.check_disk(tmp_path / "not" / "yet", GIB, keep=3)) == wanted


def test_the_loaders_batches_must_fit_into_shared_memory(tmp_path):
    with with_free(1.0):
        assert status(machine_checks.check_shared_memory(GIB // 24, 2, 4, tmp_path)) == "ok"
        assert status(machine_checks.check_shared_memory(GIB // 23, 2, 4, tmp_path)) == "fail"
        assert status(machine_checks.check_shared_memory(GIB, 0, 4, tmp_path)) == "ok"
        assert status(machine_checks.check_shared_memory(GIB, 2, 4, tmp_path / "none")) == "ok"


def test_a_vendor_s_package_for_another_torch_fails():
    assert status(machine_checks.check_versions(Ranks())) == "ok"
    with mock.patch.object(device_door, "software", return_value={"torch": "2.13.0", "torch-npu": "2.9.0"}):
        assert status(machine_checks.check_versions(Ranks())) == "fail"


def _with_own_versions(ranks: Ranks) -> str:
    with mock.patch.object(machine_checks, "version", return_value=f"1.{ranks.rank}"):
        return status(machine_checks.check_versions(ranks))


def test_other_versions_on_another_rank_fail():
    assert run_ranks(_with_own_versions, 2) == ["fail", "fail"]


def config(**changes):
    made = load_config("config/grpo.py:tiny_recam")
    model = dataclasses.replace(made.model, dtype=changes.pop("dtype", "fp32"))
    return dataclasses.replace(made, model=model, **changes)


def test_the_device_must_know_the_model_s_precision_and_be_meant():
    assert status(machine_checks.check_device(CPU, config(), Ranks())) == "ok"
    assert status(machine_checks.check_device(CPU, config(dtype="bf16", device="cpu"), Ranks())) == "ok"
    with mock.patch.dict("os.environ", {device_door.OVERRIDE: "auto"}):
        assert status(machine_checks.check_device(CPU, config(dtype="bf16", device="auto"), Ranks())) == "warn"
    with mock.patch.object(device_door, "supports_bf16", return_value=False):
        assert status(machine_checks.check_device(CPU, config(dtype="bf16"), Ranks())) == "fail"


class TwoOfOnePlace(Ranks):
    """Two ranks that say the same of themselves."""

    def gather_text(self, text: str) -> list[str]:
        return [text, text]


def test_two_ranks_on_one_accelerator_fail():
    with (
        mock.patch.object(device_door, "supports_bf16", return_value=True),
        mock.patch.object(device_door, "describe", return_value="device"),
    ):
        assert status(machine_checks.check_device(torch.device("xpu:0"), config(), TwoOfOnePlace())) == "fail"
        assert status(machine_checks.check_device(torch.device("xpu:0"), config(), Ranks())) == "ok"


def _group(ranks: Ranks) -> list[str]:
    fine = status(machine_checks.check_backends(CPU, ranks))
    with mock.patch.object(Ranks, "all_gather", return_value=torch.tensor([0, 0])):
        return [fine, status(machine_checks.check_backends(CPU, ranks))]


def test_a_process_group_that_mixes_up_its_ranks_fails():
    assert run_ranks(_group, 2) == [["ok", "fail"]] * 2
    assert status(machine_checks.check_backends(CPU, Ranks())) == "ok"


def test_ranks_of_this_machine_are_the_launcher_s(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert machine_checks.local_ranks() == 8
