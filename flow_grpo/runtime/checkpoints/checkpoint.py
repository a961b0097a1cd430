"""Checkpoints: the complete state of a run, published atomically, nothing pickled.

    checkpoints/checkpoint_000010/
        manifest.json           format, step, world size, identity, size and sha256 of every other file; written last
        state.safetensors .json state shared by all ranks, written by rank 0
        rank_0.safetensors .json ... each rank's own state

All files are written into a temporary sibling folder and flushed to disk, the manifest last; then the folder is
renamed. A process killed at any moment leaves the previous checkpoint valid and at most a temporary folder, which the
next start removes. All ranks must share one file system.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flow_grpo.runtime.checkpoints import state_files
from flow_grpo.runtime.ranks.process_group import InputError, Ranks

MANIFEST = "manifest.json"
FORMAT = 1  # of the files; raise it when older programs would misread them. Absent in the first checkpoints.
FILES = "files"  # the only identity field that may differ on resume: the user may have repaired a data file
TEMPORARY, REMOVED = ".tmp-", ".old-"  # in the names of folders being written, and being removed
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)  # no file can be at such a path
_PUBLISHED = re.compile(r"checkpoint_(\d{6,})")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint; tensors are on the CPU.

    Attributes:
        path: its folder.
        step: the step it was saved at.
        world_size: number of ranks that saved it.
        state: shared by all ranks.
        per_rank: this rank's own state, or None if fewer ranks saved it.
    """

    path: Path
    step: int
    world_size: int
    state: dict[str, Any]
    per_rank: dict[str, Any] | None


def save(
    folder: Path,
    step: int,
    *,
    state: Mapping[str, Any],
    per_rank: Mapping[str, Any],
    identity: Mapping[str, str],
    ranks: Ranks,
    keep: int,
    score: float | None = None,
) -> Path:
    """Publish a checkpoint of `step` and return its folder. Collective call: every rank must call it.

    Afterwards only the `keep` newest checkpoints and the one with the highest score are kept. Checkpoints of later
    steps are removed: they were abandoned when the run resumed from an earlier step.

    Args:
        folder: the run's checkpoints folder.
        step: number of finished steps.
        state: shared by all ranks, read on rank 0 only; nested as `state_files.flatten` describes.
        per_rank: this rank's own state, such as random states; nested likewise.
        identity: names the model, data and configuration that the checkpoint belongs to; compared by `load`.
        ranks: of the run.
        keep: number of checkpoints to keep, at least 1.
        score: of this checkpoint, higher is better; None if it was not evaluated.

    Raises:
        RuntimeError: on every rank, if any failed; nothing is published then.
        ValueError: `keep` is below 1.
    """
    if keep < 1:
        raise ValueError(f"checkpoint.keep={keep} must be at least 1, or no checkpoint would survive")
    ranks = ranks.everyone
    final = path_of(folder, step)
    partial = folder / ranks.broadcast_text(f"{final.name}{TEMPORARY}{uuid.uuid4().hex[:8]}")
    try:
        with ranks.sync_errors("saving a checkpoint (folder)"):
            if ranks.is_main:
                partial.mkdir(parents=True)
        with ranks.sync_errors("saving a checkpoint (files)"):
            if ranks.is_main:
                state_files.write(partial / "state", state)
            state_files.write(partial / f"rank_{ranks.rank}", per_rank)
        with ranks.sync_errors("saving a checkpoint (publishing)"):
            if ranks.is_main:
                _write_manifest(partial, step, ranks.world_size, identity, score)
                _publish(partial, final)
                _prune(folder, step, keep)
    except BaseException:
        if ranks.is_main:  # the error was synchronised: no rank is still writing
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def saved_step(path: Path) -> int:
    """Return the step in a checkpoint's manifest; its folder may have been renamed."""
    step: int = _read_manifest(path)["step"]
    return step


def identity_of(path: Path) -> dict[str, str]:
    """Return the identity a checkpoint was saved with.

    Raises:
        ValueError: the checkpoint is missing or damaged.
    """
    if problem := damage(path):
        raise ValueError(f"{path} cannot be loaded: {problem}; name another checkpoint")
    found: dict[str, str] = _read_manifest(path)["identity"]
    return found


def load(path: Path, *, identity: Mapping[str, str], ranks: Ranks) -> Checkpoint:
    """Verify and read a checkpoint. Collective call: every rank must call it.

    Raises:
        ValueError: the checkpoint is missing or damaged, or its identity differs (every differing field is named).
    """
    ranks = ranks.everyone
    if problem := shared_damage(path, ranks):
        raise ValueError(f"{path} cannot be loaded: {problem}; name another checkpoint or use resume='auto'")
    manifest = _read_manifest(path)
    _compare_identity(path, manifest["identity"], identity, ranks)
    own = path / f"rank_{ranks.rank}"
    return Checkpoint(
        path=path,
        step=manifest["step"],
        world_size=manifest["world_size"],
        state=state_files.read(path / "state"),
        per_rank=state_files.read(own) if ranks.rank < manifest["world_size"] else None,
    )


def published(folder: Path) -> list[Path]:
    """Return the published checkpoint folders in ascending order of step, without verifying them."""
    found = [path for path in folder.glob("checkpoint_*") if _PUBLISHED.fullmatch(path.name)]
    return sorted(found, key=step_of)


def remove(path: Path) -> None:
    """Remove a folder, or warn that it stays: network file systems refuse while a file is open elsewhere."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        _log.warning("%s cannot be removed (%s); the run goes on, remove it yourself", path, error)


def path_of(folder: Path, step: int) -> Path:
    """Return the folder of a run's checkpoint of `step`."""
    return folder / f"checkpoint_{step:06d}"


def step_of(path: Path) -> int:
    """Return the step of a published checkpoint."""
    return int(path.name.removeprefix("checkpoint_"))


def damage(path: Path) -> str:
    """Return what is wrong with a checkpoint in one line, or "" if all files match the manifest.

    Raises:
        InputError: a file cannot be read, which does not mean that it is damaged.
    """
    try:
        manifest = _read_manifest(path)
        return _manifest_problem(manifest) or _file_problem(path, manifest["files"])
    except OSError as error:
        if error.errno in _ABSENT:
            return f"{error.filename} does not exist ({error.strerror})"
        raise InputError(
            f"{path} cannot be read ({error}), which may pass; make it readable, or move it out of its folder"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} is not readable ({type(error).__name__}: {error})"


def shared_damage(path: Path, ranks: Ranks) -> str:
    """Return `damage` as rank 0 finds it; InputError on every rank. Collective call."""
    problem = ""
    with ranks.sync_errors("looking for a checkpoint"):
        problem = damage(path) if ranks.is_main else ""
    return ranks.broadcast_text(problem)


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(_regular(path / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def _regular(file: Path) -> Path:
    """Return a path; ValueError for a folder, or for a pipe, which would be waited for without end."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError(f"{file.name} is no regular file")
    return file


def _file_problem(path: Path, listed: Mapping[str, Any]) -> str:
    """Return which file differs from its manifest entry, or ""."""
    for file, expected in listed.items():
        size = _regular(path / file).stat().st_size
        if size != expected["size"]:
            return f"{file} has {size} bytes instead of {expected['size']}"
        if _sha256(path / file) != expected["sha256"]:
            return f"{file} has another sha256 than when it was written"
    return ""


def _manifest_problem(manifest: dict[str, Any]) -> str:
    """Return what is wrong with a manifest, or ""; it must list exactly the files of its ranks."""
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
    strange = sorted(listed.keys() ^ {path.name for path in _files(Path(), ranks)})
    return f"{MANIFEST} lists other files than those of {ranks} rank(s), such as {strange[0]!r}" if strange else ""


def _files(folder: Path, world_size: int) -> list[Path]:
    """Return the paths of all files that a complete checkpoint has, apart from its manifest."""
    stems = ["state", *(f"rank_{rank}" for rank in range(world_size))]
    return [path for stem in stems for path in state_files.paths(folder / stem)]


def _write_manifest(folder: Path, step: int, world_size: int, identity: Mapping[str, str], score: float | None) -> None:
    files = _files(folder, world_size)
    listed = {path.name: {"size": path.stat().st_size, "sha256": _sha256(path)} for path in files}
    manifest: dict[str, Any] = {"format": FORMAT, "step": step, "world_size": world_size}
    manifest |= {"identity": dict(identity), "score": score, "files": listed}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    state_files.fsync(folder / MANIFEST)
    state_files.fsync(folder)


def _publish(partial: Path, final: Path) -> None:
    replaced = _set_aside(final) if final.exists() else None  # rename does not replace a folder
    try:
        os.rename(partial, final)
    except OSError:
        if replaced is not None:
            os.rename(replaced, final)
        raise
    state_files.fsync(final.parent)
    if replaced is not None:
        remove(replaced)


def _prune(folder: Path, step: int, keep: int) -> None:
    existing = published(folder)
    current = [path for path in existing if step_of(path) <= step]
    scores = {path: score for path in current if (score := _score(path)) is not None}
    best = max(scores, key=lambda path: (scores[path], step_of(path)), default=None)
    for path in existing:
        if path not in current[-keep:] and path != best:
            remove(_set_aside(path))  # renamed first: a process killed half-way must not leave a damaged checkpoint


def _score(path: Path) -> float | None:
    """Return the score in a checkpoint's manifest, or None if it is missing, unreadable or not finite."""
    try:
        score = _read_manifest(path)["score"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return score if isinstance(score, float) and math.isfinite(score) else None


def _set_aside(path: Path) -> Path:
    doomed = path.with_name(f"{path.name}{REMOVED}{uuid.uuid4().hex[:8]}")
    os.rename(path, doomed)
    return doomed


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _compare_identity(path: Path, saved: Mapping[str, str], current: Mapping[str, str], ranks: Ranks) -> None:
    saved, current = dict(saved), dict(current)
    if saved.pop(FILES, None) != current.pop(FILES, None) and ranks.is_main:
        _log.warning("%s was saved with data files of other sizes: the run resumes, assuming a repair", path)
    differences = []
    for field in sorted({*saved, *current}):
        if saved.get(field) != current.get(field):
            there, here = (repr(values[field]) if field in values else "absent" for values in (saved, current))
            differences.append(f"{field} is {there} there and {here} here")
    if differences:
        raise ValueError(
            f"{path} belongs to another run: {'; '.join(differences)}; resume with the configuration it was saved "
            "with, or start afresh under another run_name"
        )
