"""Checks of the machine: disk, shared memory, versions, device, process groups, run folder."""

from __future__ import annotations

import functools
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from flow_grpo.models.adapters import trained_parameters
from flow_grpo.preflight.doctor.findings import Finding, equal_on_ranks, finding
from flow_grpo.preflight.doctor.probe import planned_keys
from flow_grpo.run.trainer import Trainer
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.checkpoints import checkpoint
from flow_grpo.runtime.checkpoints.run_lock import LOCK
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.schema import Config

GIB = 1024**3
SHARED_MEMORY = Path("/dev/shm")  # loader workers hand over tensors here
PREFETCHED = 3  # batches per loader worker at once: two prefetched, one in use
CACHED_S = 60.0  # network file systems cache the absence of a file this long by default
ABSENT = "absent"  # not installed, or not by a package installer
LIBRARIES = ("diffusers", "transformers", "accelerate", "peft")  # their versions affect numbers


def examine_machine(trainer: Trainer) -> Iterator[Finding]:
    """Check the machine of every rank."""
    config, device, world, folder = trainer.config, trainer.device, trainer.world, trainer.run_folder
    copies = 3 + (trainer.state.ema is not None)  # weights, two moments, EMA
    weights = sum(parameter.numel() for parameter in trained_parameters(trainer.updater.policy.module).values())
    yield check_disk(folder, 4 * copies * weights, config.checkpoint.keep + bool(config.checkpoint.best))
    pixels = sum(math.prod(trainer.training_data.size_of(index)) for *_, index in planned_keys(trainer))
    batch_bytes = pixels * 3 * 4 * 2  # channels, bytes of fp32, source and target
    yield check_shared_memory(batch_bytes, config.data.num_workers, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    yield check_versions(world)
    yield check_device(device, config, world)
    yield check_backends(device, world, gathers_bytes=config.train.sharding == "fsdp2")
    yield check_run_folder(folder, world)


def check_disk(folder: Path, checkpoint_bytes: int, keep: int) -> Finding:
    """Check the space in a run's folder for `keep` checkpoints and the one being written, less those it has."""
    place = next(path for path in [folder.resolve(), *folder.resolve().parents] if path.exists())
    more = max(1, keep + 1 - len(checkpoint.published(folder / "checkpoints")))
    free, needed = shutil.disk_usage(place).free, checkpoint_bytes * more
    message = f"{free / GIB:.1f} GiB free at {place}, {needed / GIB:.2f} GiB for {more} more checkpoint(s)"
    way_out = "free some, lower checkpoint.keep, or set output_root to another disk"
    # Warn below twice that and 1 GiB for videos, metrics and other runs.
    scarce = free < 2 * needed + GIB
    return finding("disk", message, fail=way_out if free < needed else "", warn=way_out if scarce else "")


def check_shared_memory(batch_bytes: int, workers: int, local_ranks: int, place: Path = SHARED_MEMORY) -> Finding:
    """Check the space for batches between the workers of each rank and the rank; containers have 64 MiB by default."""
    if not workers or not place.is_dir():
        return finding("shared_memory", f"no {place} here" if workers else "not used: no loader workers")
    free, needed = shutil.disk_usage(place).free, PREFETCHED * batch_bytes * workers * local_ranks
    message = (
        f"{free / GIB:.2f} GiB free at {place}, {needed / GIB:.2f} GiB for {workers} worker(s) x {local_ranks} rank(s)"
    )
    way_out = "start the container with a larger --shm-size, or lower data.num_workers"
    return finding("shared_memory", message, fail=way_out if free < needed else "")


def check_versions(world: World) -> Finding:
    """Check that torch and the vendor's package fit, and that versions are identical on every rank."""

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return ABSENT

    versions = {name: installed(name) for name in device_api.packages()}
    numbers = [re.split(r"[^\d.]", text)[0].rstrip(".") for text in versions.values() if text != ABSENT]
    releases = {".".join(number.split(".")[:3]) for number in numbers}
    pair = " with ".join(f"{name} {number}" for name, number in versions.items())
    versions |= {name: installed(name) for name in LIBRARIES}
    message = ", ".join(f"{name} {number}" for name, number in versions.items())
    same = equal_on_ranks("versions", message, message, world, "give every node the same environment")
    if len(releases) == 1:
        return same
    return finding("versions", message, fail=f"{pair}: install the pair that requirements-npu.txt names")


def check_device(device: torch.device, config: Config, world: World) -> Finding:
    """Check that the device supports the model's dtype and belongs to one rank alone."""
    here = f"{device_api.physical(device)} of {socket.gethostname()}"
    users = world.all.gather_text(here).count(here)
    fail = ""
    if device.type != "cpu" and users > 1:
        fail = f"{users} ranks share {here}, {device_api.visibility(device.type)}: start as many ranks as there are "
        fail += "devices, or check which devices the launcher makes visible to each rank"
    if not device_api.supports_bf16(device) and config.model.dtype == "bf16":
        fail = "it has no bf16: pass --config.model.dtype=fp32"
    fell_back = device.type == "cpu" and config.device == "auto" and config.model.dtype == "bf16"
    warn = "bf16 on a CPU is for tests: find out why no accelerator was used" if fell_back else ""
    if not device_api.fuses_attention(device):
        warn = f"{device_api.name(device)} has no fused attention kernel: memory grows with the square of the tokens "
        warn += "(96 GiB a video of 81x480x832 on Wan 1.3B); use smaller videos, or an Ascend 910B or later"
    return finding("device", device_api.describe(device, config.device), fail=fail, warn=warn)


def check_backends(device: torch.device, world: World, *, gathers_bytes: bool = False) -> Finding:
    """Check both process groups by a collective over each.

    With `gathers_bytes` also gather uint8 on the device, as FSDP2 does with weights of two dtypes.
    """
    if world.all.gloo is None:
        return finding("backends", "one process, no process group")
    rank, size = world.all.rank, world.all.size
    heard = world.all.all_gather(torch.tensor([rank])).tolist()
    message = f"{dist.get_backend_config()} over {size} ranks, control over gloo"
    wrong = [] if heard == list(range(size)) else [f"ranks answer as {heard}"]
    for place in dict.fromkeys((torch.device("cpu"), device)):
        total = torch.full((1,), rank + 1.0, device=place)  # as gradients are averaged
        reduce = functools.partial(dist.all_reduce, total)
        wrong += _fault(f"all-reduce on {place}", reduce, total, [size * (size + 1) / 2], world)
    if gathers_bytes:
        own = torch.full((1,), rank % 256, dtype=torch.uint8, device=device)
        everyone = own.new_empty(size)
        gather = functools.partial(dist.all_gather_into_tensor, everyone, own)
        what = f"all-gather of uint8 on {device}, which train.sharding='fsdp2' needs,"
        wrong += _fault(what, gather, everyone, [other % 256 for other in range(size)], world)
    return finding("backends", message, fail=f"{'; '.join(wrong)}: check RANK and MASTER_ADDR" if wrong else "")


def _fault(what: str, call: Callable[[], object], result: Tensor, wanted: Sequence[float], world: World) -> list[str]:
    try:
        with world.all.waiting_for_peers():
            call()
    except RuntimeError as error:
        return [f"no {what}: {' '.join(str(error).split())}"]
    heard, due = (" ".join(f"{value:g}" for value in values) for values in (result.tolist(), wanted))
    return [] if heard == due else [f"an {what} gives {heard} instead of {due}"]


def check_run_folder(folder: Path, world: World, timeout_s: float = CACHED_S) -> Finding:
    """Check that every rank sees the files that rank 0 writes, by its lock file, which differs from start to start.

    `timeout_s` is how long a shared file system may take to show a new file.
    """
    wanted = world.broadcast_text(_text(folder / LOCK))
    if not wanted:
        return finding("run_folder", f"not checked: rank 0 has no {LOCK} in {folder}")
    deadline = time.monotonic() + timeout_s
    while not (seen := _text(folder / LOCK) == wanted) and time.monotonic() < deadline:
        time.sleep(min(1.0, timeout_s))
    message = f"rank 0's lock file {LOCK} in {folder} is {'seen' if seen else 'not seen'} by {world.all.size} rank(s)"
    way_out = "ranks write to different folders: put output_root on a file system that all nodes share"
    return finding("run_folder", message, fail="" if seen else way_out)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
