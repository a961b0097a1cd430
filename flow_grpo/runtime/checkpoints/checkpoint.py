"""Checkpoints: the complete state of a run, as folders that are read and checked here; nothing is pickled.

    checkpoints/checkpoint_000010/
        manifest.json           format, step, world size, identity, size and sha256 of every other file; written last
        state.safetensors .json state shared by all ranks, written by rank 0
        rank_0.safetensors .json ... each rank's own state

`saving` writes them. All ranks must share one file system.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flow_grpo.runtime.checkpoints import state_files
from flow_grpo.runtime.json_files import regular_file
from flow_grpo.runtime.ranks.process_group import InputError, World

MANIFEST = "manifest.json"
FORMAT = 1  # of the files; raise it when older programs would misread them. Absent in the first checkpoints.
FILES = "files"  # the only identity field that may differ on resume: the user may have repaired a data file
TEMPORARY, REMOVED = ".tmp-", ".old-"  # in the names of folders being written, and being removed
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)  # no file can be at such a path
_PUBLISHED = re.compile(r"checkpoint_(\d{6,})")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that `world_size` ranks saved at `step`, with tensors on the CPU.

    `state` is shared by all ranks; `per_rank` is this rank's own, None if fewer ranks saved it.
    """

    path: Path
    step: int
    world_size: int
    state: dict[str, Any]
    per_rank: dict[str, Any] | None


def load(path: Path, *, identity: Mapping[str, str], world: World, partly: bool = False) -> Checkpoint:
    """Verify and read a checkpoint. Collective call: every rank must call it.

    `partly` compares only what `identity` names: the caller goes on with no run.

    Raises:
        ValueError: the checkpoint is missing or damaged, or its identity differs (every differing field is named).
    """
    if problem := shared_damage(path, world):
        latest = "" if partly else " or use resume='auto'"
        raise ValueError(f"{path} cannot be loaded: {problem}; name another checkpoint{latest}")
    manifest = read_manifest(path)
    saved = {field: value for field, value in manifest["identity"].items() if field in identity or not partly}
    _compare_identity(path, saved, identity, world)
    own = path / f"rank_{world.all.rank}"
    return Checkpoint(
        path=path,
        step=manifest["step"],
        world_size=manifest["world_size"],
        state=state_files.read(path / "state"),
        per_rank=state_files.read(own) if world.all.rank < manifest["world_size"] else None,
    )


def published(folder: Path) -> list[Path]:
    """List the published checkpoint folders by ascending step, without verifying them."""
    found = [path for path in folder.glob("checkpoint_*") if _PUBLISHED.fullmatch(path.name)]
    return sorted(found, key=step_of)


def remove(path: Path) -> None:
    """Remove a folder, or warn that it stays: network file systems refuse while a file is open elsewhere."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        _log.warning("%s cannot be removed (%s); the run goes on, remove it yourself", path, error)


def path_of(folder: Path, step: int) -> Path:
    """Path of a run's checkpoint of `step`."""
    return folder / f"checkpoint_{step:06d}"


def step_of(path: Path) -> int:
    """Step of a published checkpoint."""
    return int(path.name.removeprefix("checkpoint_"))


def damage(path: Path) -> str:
    """Say in one line what is wrong with a checkpoint, or "" if all files match the manifest.

    Raises:
        InputError: a file cannot be read, which does not mean that it is damaged.
    """
    try:
        manifest = read_manifest(path)
        return _manifest_problem(manifest) or _file_problem(path, manifest["files"])
    except OSError as error:
        if error.errno in _ABSENT:
            return f"{error.filename} does not exist ({error.strerror})"
        raise InputError(
            f"{path} cannot be read ({error}), which may pass; make it readable, or move it out of its folder"
        ) from error
    except Exception as error:  # noqa: BLE001 - whatever else a manifest holds, it is not that of a checkpoint
        return f"{MANIFEST} is not readable ({type(error).__name__}: {error})"


def shared_damage(path: Path, world: World) -> str:
    """`damage` as rank 0 finds it; InputError on every rank. Collective call."""
    problem = ""
    with world.sync_errors("looking for a checkpoint"):
        problem = damage(path) if world.is_main else ""
    return world.broadcast_text(problem)


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a checkpoint's manifest, not checked.

    Raises:
        OSError: there is none.
        ValueError: it is no JSON.
    """
    manifest: dict[str, Any] = json.loads(regular_file(path / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def _file_problem(path: Path, listed: Mapping[str, Any]) -> str:
    for file, expected in listed.items():
        size = regular_file(path / file).stat().st_size
        if size != expected["size"]:
            return f"{file} has {size} bytes instead of {expected['size']}"
        if sha256(path / file) != expected["sha256"]:
            return f"{file} has another sha256 than when it was written"
    return ""


def _manifest_problem(manifest: dict[str, Any]) -> str:
    # It must list exactly the files of its ranks.
    if (found := manifest.get("format", FORMAT)) != FORMAT:
        return f"{MANIFEST} holds format={found!r:.60}, this version reads {FORMAT}: use the version that saved it"
    for field, kind in (("step", int), ("world_size", int), ("identity", dict), ("files", dict)):
        if type(manifest[field]) is not kind:
            return f"{MANIFEST} holds {field}={manifest[field]!r:.60}, must be of type {kind.__name__}"
    for field, least in (("step", 0), ("world_size", 1)):
        if manifest[field] < least:
            return f"{MANIFEST} holds {field}={manifest[field]}, must be at least {least}"
    listed, ranks = manifest["files"], manifest["world_size"]
    if len(listed) != 2 * (ranks + 1):
        return f"{MANIFEST} lists {len(listed)} files, must be {2 * (ranks + 1)} for world_size={ranks}"
    strange = sorted(listed.keys() ^ {path.name for path in files_of(Path(), ranks)})
    return f"{MANIFEST} lists other files than those of {ranks} rank(s), such as {strange[0]!r}" if strange else ""


def files_of(folder: Path, world_size: int) -> list[Path]:
    """Paths of all files of a complete checkpoint, apart from its manifest."""
    stems = ["state", *(f"rank_{rank}" for rank in range(world_size))]
    return [path for stem in stems for path in state_files.paths(folder / stem)]


def sha256(path: Path) -> str:
    """Hash of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _compare_identity(path: Path, saved: Mapping[str, str], current: Mapping[str, str], world: World) -> None:
    saved, current = dict(saved), dict(current)
    if saved.pop(FILES, None) != current.pop(FILES, None) and world.is_main:
        _log.warning("%s was saved with data files of other sizes: the run resumes, assuming a repair", path)
    differences = []
    for field in sorted(saved):  # what an earlier version did not save is not known
        if saved[field] != current.get(field):
            here = repr(current[field]) if field in current else "absent"
            differences.append(f"{field} is {saved[field]!r} there and {here} here")
    if differences:
        raise ValueError(
            f"{path} belongs to another run: {'; '.join(differences)}; resume with the configuration it was saved "
            "with, or start afresh under another run_name"
        )
