"""What the doctor looks at beside the numbers: disk, shared memory, versions, device, process group."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from flow_grpo.preflight.doctor_checks import check_alike
from flow_grpo.preflight.findings import Finding, finding
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.checkpoints import checkpoint
from flow_grpo.runtime.ranks.process_group import Ranks
from flow_grpo.settings.schema import Config

GIB = 1024**3
SHARED_MEMORY = Path("/dev/shm")  # where loader processes hand over tensors
PREFETCHED = 3  # batches of a loader process at once: two read ahead, one in use
RUN_FILE = "config.json"  # which rank 0 writes when a run starts
SHOWN_AFTER_S = 60.0  # how long network file systems remember by default that a file was missing
ABSENT = "absent"  # said of a package that is not installed, or not by an installer
LIBRARIES = ("diffusers", "transformers", "accelerate", "peft")  # whose versions change numbers


def check_disk(folder: Path, checkpoint_bytes: int, keep: int) -> list[Finding]:
    """Judge the room for a run's checkpoints: those kept and the one being written, less those that lie there already.

    Args:
        folder: the run's, which may not exist yet.
        checkpoint_bytes: of one checkpoint.
        keep: how many are kept.
    """
    place = next(path for path in [folder.resolve(), *folder.resolve().parents] if path.exists())
    more = max(1, keep + 1 - len(checkpoint.published(folder / "checkpoints")))
    free, needed = shutil.disk_usage(place).free, checkpoint_bytes * more
    said = f"{free / GIB:.1f} GiB free at {place}, {needed / GIB:.2f} GiB for {more} more checkpoint(s)"
    way_out = "free some, lower checkpoint.keep, or set output_root to another disk"
    # Twice as much, and a gibibyte for videos, metrics and other runs.
    return [finding("disk", said, fail=way_out if free < needed else "", warn=_if(free < 2 * needed + GIB, way_out))]


def check_shared_memory(batch_bytes: int, workers: int, local_ranks: int, place: Path = SHARED_MEMORY) -> list[Finding]:
    """Judge the room for batches on their way from loader processes to their rank; containers give 64 MiB by default.

    Args:
        batch_bytes: of one batch.
        workers: loader processes per rank.
        local_ranks: ranks of this machine.
        place: the file system.
    """
    if not workers or not place.is_dir():
        return [finding("shared_memory", "not used: no loader processes" if not workers else f"no {place} here")]
    free, needed = shutil.disk_usage(place).free, PREFETCHED * batch_bytes * workers * local_ranks
    said = (
        f"{free / GIB:.2f} GiB free at {place}, {needed / GIB:.2f} GiB for {workers} loader(s) x {local_ranks} rank(s)"
    )
    way_out = "start the container with a larger --shm-size, or lower data.num_workers"
    return [finding("shared_memory", said, fail=_if(free < needed, way_out))]


def check_versions(ranks: Ranks) -> list[Finding]:
    """Judge the software: torch and the vendor's package fit, and all ranks run the same; every rank must call it."""
    versions = {name: _version(name) for name in device_api.packages()}
    wrong = unpaired(versions)
    versions |= {name: _version(name) for name in LIBRARIES}
    said = ", ".join(f"{name} {number}" for name, number in versions.items())
    same = check_alike("versions", ranks.gather_text(said), said, "give every node the same environment")
    if wrong:
        return [finding("versions", said, fail=f"{wrong}: install the pair that requirements-npu.txt names")]
    return same


def unpaired(versions: Mapping[str, str]) -> str:
    """Return what is wrong with the versions of packages that are made for one another, or "": their numbers differ."""
    numbers = {re.split(r"[^\d.]|\.(?=\D)", text)[0].rstrip(".") for text in versions.values() if text != ABSENT}
    made_for = {".".join(number.split(".")[:3]) for number in numbers}
    return "" if len(made_for) == 1 else " beside ".join(f"{name} {number}" for name, number in versions.items())


def check_device(device: torch.device, config: Config, ranks: Ranks) -> list[Finding]:
    """Judge the device: it computes in the model's precision, and no two ranks share one; every rank must call it."""
    here = f"{device_api.physical(device)} of {socket.gethostname()}"
    users = ranks.gather_text(here)
    said = device_api.describe(device, config.device)
    shared = device.type != "cpu" and users.count(here) > 1
    way_out = "start as many as there are devices, or look at what the launcher shows each rank"
    fail = _if(shared, f"{users.count(here)} ranks share {here}, {device_api.visibility(device.type)}: {way_out}")
    if not device_api.supports_bf16(device) and config.model.dtype == "bf16":
        fail = "it has no bf16: pass --config.model.dtype=fp32"
    fell_back = device.type == "cpu" and config.device == "auto" and config.model.dtype == "bf16"
    return [
        finding(
            "device",
            said,
            fail=fail,
            warn=_if(fell_back, "bf16 on a CPU is for tests: see why no accelerator was taken"),
        )
    ]


def check_backends(device: torch.device, ranks: Ranks) -> list[Finding]:
    """Judge both process groups by an exchange over each; every rank must call it."""
    if ranks.control_group is None:
        return [finding("backends", "one process, no process group")]
    heard: Sequence[int] = ranks.all_gather(torch.tensor([ranks.rank])).tolist()
    said = f"{ranks.world_size} ranks, control over gloo"
    wrong = [] if list(heard) == list(range(ranks.world_size)) else [f"ranks answer as {heard}"]
    if dist.is_initialized():
        said = f"{dist.get_backend_config()} over {said}"
        places = dict.fromkeys((torch.device("cpu"), device))
        wrong += [fault for place in places if (fault := _unfit_sum(place, ranks))]
    return [finding("backends", said, fail=_if(bool(wrong), f"{'; '.join(wrong)}: look at RANK and MASTER_ADDR"))]


def _unfit_sum(place: torch.device, ranks: Ranks) -> str:
    """Return what is wrong with an all-reduce over the default group, where gradients are averaged, or ""."""
    total = torch.full((1,), ranks.rank + 1.0, device=place)
    wanted = ranks.world_size * (ranks.world_size + 1) / 2
    try:
        with ranks.waiting_for_peers():
            dist.all_reduce(total)
    except RuntimeError as error:
        return f"no all-reduce of {place}: {' '.join(str(error).split())}"
    return "" if total.item() == wanted else f"an all-reduce on {place} gives {total.item():g} instead of {wanted:g}"


def check_run_folder(folder: Path, ranks: Ranks, patience_s: float = SHOWN_AFTER_S) -> list[Finding]:
    """Judge whether all ranks see the files that rank 0 writes; every rank must call it.

    Args:
        folder: of the run.
        ranks: who takes part.
        patience_s: how long a file system of several machines may take to show a new file.
    """
    wanted = ranks.broadcast_text(_text(folder / RUN_FILE))
    if not wanted:
        return [finding("run_folder", f"not looked at: rank 0 has no {RUN_FILE} in {folder}")]
    deadline = time.monotonic() + patience_s
    while not (seen := _text(folder / RUN_FILE) == wanted) and time.monotonic() < deadline:
        time.sleep(min(1.0, patience_s))
    said = f"rank 0's {RUN_FILE} in {folder} is {'seen' if seen else 'not seen'} by {ranks.world_size} rank(s)"
    way_out = "the ranks' folders are not one: put output_root on a file system that all nodes share"
    return [finding("run_folder", said, fail=_if(not seen, way_out))]


def local_ranks() -> int:
    """Return how many ranks the launcher started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ABSENT


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def _if(wrong: bool, way_out: str) -> str:
    return way_out if wrong else ""
