"""Checks of disk, shared memory, versions, device, process groups and run folder."""

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


@pytest.mark.parametrize(
    ("written", "free", "wanted"),
    [(0, 10.0, "ok"), (0, 6.0, "warn"), (0, 3.0, "fail"), (1, 3.5, "warn"), (5, 1.5, "warn"), (5, 0.5, "fail")],
)
def test_checkpoints_must_fit_on_the_disk_less_those_written_already(tmp_path, written, free, wanted):
    folder = tmp_path / "not" / "yet"
    for step in range(1, written + 1):  # one more is written before the oldest goes
        (folder / "checkpoints" / f"checkpoint_{step:06}").mkdir(parents=True)
    with with_free(free):
        assert status(machine.check_disk(folder, GIB, keep=3)) == wanted


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
        ({"torch": "2.13.0", "torch-npu": "2.13.1"}, False),
        ({"torch": "2.13.0", "torch-npu": "2.9.0.post1"}, False),
    ],
)
def test_torch_npu_must_have_the_version_of_torch(versions, fits):
    with (
        mock.patch.object(machine, "version", lambda name: versions.get(name, "1.0")),
        mock.patch.object(device_api, "packages", return_value=tuple(versions)),
    ):
        found = machine.check_versions(World())
    assert status(found) == ("ok" if fits else "fail")
    assert fits or found.way_out.startswith(f"torch {versions['torch']} with torch-npu {versions['torch-npu']}")


def test_a_package_built_by_hand_whose_version_no_installer_knows_is_no_reason_to_stop():
    with mock.patch.object(device_api, "packages", return_value=("torch", "torch-npu")):  # which is not installed here
        found = machine.check_versions(World())
    assert found.status == "ok" and "torch-npu absent" in found.measured


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
    # A chip without fused attention is named.
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


# --- between ranks


def _versions(world: World) -> str:
    with mock.patch.object(machine, "version", lambda name: "2.13" if name == "torch" else f"1.{world.data.rank}"):
        return status(machine.check_versions(world))


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


def _folders(world: World, nodes: list[Path]) -> list[str]:
    """Look for the lock: before there is one, in one folder, in a folder of each rank's own, beside an older one."""
    rank = world.data.rank

    def look(folder: Path) -> str:
        found = machine.check_run_folder(folder, world, timeout_s=0.1)
        return f"{found.status}: {found.measured}"

    looks = [look(nodes[0])]
    if rank == 0:
        (nodes[0] / ".lock").write_text("{}")
    looks += [look(nodes[0]), look(nodes[rank])]
    if rank == 1:
        (nodes[1] / ".lock").write_text("{'of': 'a run before'}")
    return [*looks, look(nodes[rank])]


def _together(world: World, nodes: list[Path]) -> tuple[str, list[str], list[str]]:
    return _versions(world), _group(world), _folders(world, nodes)


def test_what_differs_between_ranks_is_found(tmp_path):
    nodes = [tmp_path / "a", tmp_path / "b"]
    for node in nodes:
        node.mkdir()
    for rank, (versions, group, folders) in enumerate(run_ranks(_together, 2, nodes)):
        assert versions == "fail"
        fine, mixed_up, alone, refused = group
        assert fine.startswith("ok cpu:gloo") and fine.endswith(" over 2 ranks, control over gloo")
        assert mixed_up == refused == "fail"
        assert alone.startswith(f"fail an all-reduce on cpu gives {rank + 1} instead of 3")
        assert folders[0].startswith("ok: not checked")
        assert [look.partition(":")[0] for look in folders[1:]] == [["ok"] * 3, ["ok", "fail", "fail"]][rank]
    assert status(machine.check_backends(CPU, World())) == "ok"


def test_a_file_that_shows_up_late_is_waited_for(tmp_path):
    (tmp_path / ".lock").write_text("{}")
    with mock.patch.object(machine, "_text", side_effect=["{}", "", "{}"]):
        found = machine.check_run_folder(tmp_path, World(), timeout_s=5)
    assert found.status == "ok" and " is seen by " in found.measured
