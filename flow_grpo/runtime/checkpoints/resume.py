"""Which checkpoint a run resumes from, and what happens to the later ones."""

from __future__ import annotations

import logging
import os
import uuid
from pathlib import Path

from flow_grpo.runtime.checkpoints import checkpoint
from flow_grpo.runtime.ranks.process_group import InputError, World

GIVEN_UP = "given_up_"  # prefix of checkpoints later than the one a run went back to
SUMMARY = "summary.json"  # its existence marks a run as complete
_log = logging.getLogger(__name__)


def find(resume: str, folder: Path, *, world: World) -> Path | None:
    """Find the checkpoint to resume from, None for a fresh start; call `commit` once it is loaded.

    Collective call, otherwise like `resolve`. After a restart by the launcher (`torchrun --max-restarts`), a run that
    had committed before resumes from its own latest checkpoint, whatever `resume` says.

    Raises:
        ValueError: on every rank, as `resolve`.
    """
    remove_stale(folder, world=world)
    if world.restarted and (path := latest(folder, world=world)):
        return path
    return resolve(resume, folder, world=world)


def is_own(path: Path, folder: Path) -> bool:
    """Whether a checkpoint is one of the run with this folder of checkpoints."""
    return path.resolve().parent == folder.resolve()


def commit(resume: str, path: Path | None, folder: Path, *, world: World) -> bool:
    """Make the resume permanent once the checkpoint that `find` returned is loaded. Collective call.

    If the run goes back to an earlier checkpoint, the later ones are archived: a restart before the next save must not
    resume from them. A start that fails before this call changes nothing, and fails again when the launcher repeats it.

    Returns:
        Whether the checkpoint is one of the run's own; False for a fresh start or another run's checkpoint.

    Raises:
        RuntimeError: on every rank, if a folder cannot be renamed.
    """
    world.raise_if_any_failed(None, "restoring")  # barrier: another rank may still be reading
    with world.sync_errors("giving up later checkpoints"):
        own = path is not None and is_own(path, folder)
        if world.is_main and path is not None and own and resume not in ("", "auto") and path == Path(resume).resolve():
            _go_back(path, path.parent)
    world.mark_started()
    return own


def latest(folder: Path, *, world: World) -> Path | None:
    """Find the valid checkpoint of the highest step, None without any; warn about damaged ones.

    Collective call; rank 0 reads.

    Raises:
        InputError: on every rank, if all checkpoints are damaged: a fresh start would remove them.
    """
    found, problems = "", []
    with world.sync_errors("looking for a checkpoint"):
        for path in reversed(checkpoint.published(folder)) if world.is_main else ():
            if not (problem := checkpoint.damage(path)):
                found = path.name
                break
            problems.append(f"{path.name}: {problem}")
            _log.warning("checkpoint %s is passed over: %s", path, problem)
        if problems and not found:
            raise InputError(
                f"{folder} holds no checkpoint that is whole ({'; '.join(problems)}); mend what is named, or start "
                "afresh under another run_name"
            )
    found = world.broadcast_text(found)
    return folder / found if found else None


def resolve(resume: str, folder: Path, *, world: World) -> Path | None:
    """Find the checkpoint that a setting names, None for a fresh start. Collective call.

    "" is a fresh start, "auto" takes the latest valid checkpoint in the run's `folder` if there is one, anything else
    is the path of a checkpoint, of this run or of another.

    Raises:
        ValueError: the path is no valid checkpoint, or a fresh start or a start from another run's checkpoint would
            replace the run's checkpoints or, where it is complete and they are gone, empty its metrics.
    """
    if resume == "auto":
        path = latest(folder, world=world)
        if path is None:
            _refuse_complete(folder, world)
        return path
    given = Path(os.path.realpath(resume))  # Path.resolve raises at a link to itself
    if resume and (problem := checkpoint.shared_damage(given, world)):
        raise ValueError(
            f"resume={resume!r} is not a usable checkpoint: {problem}; give a folder such as "
            f"{checkpoint.path_of(folder, 10)} or 'auto'"
        )
    foreign = not resume or given.parent != folder.resolve()
    existing = world.broadcast_text(", ".join(path.name for path in checkpoint.published(folder)) if foreign else "")
    if existing:
        raise ValueError(f"{folder} already holds {existing}; use resume='auto' to go on or another run_name")
    if foreign:
        _refuse_complete(folder, world)
    return given if resume else None


def _refuse_complete(folder: Path, world: World) -> None:
    # On every rank (collective call).
    summary = folder.parent / SUMMARY
    if world.broadcast_text("it is there" if summary.exists() else ""):
        raise ValueError(
            f"{summary} says that this run is complete, and {folder} holds no checkpoint to go on from: a start under "
            "its name would empty its metrics; use another run_name"
        )


def _go_back(given: Path, folder: Path) -> None:
    # All checkpoints later than `given` are archived, the last first. An archived one gets its published name back: its
    # step is that of its manifest.
    place = checkpoint.path_of(folder, checkpoint.read_manifest(given)["step"])
    for path in reversed(checkpoint.published(folder)):
        if checkpoint.step_of(path) >= checkpoint.step_of(place) and path != given:
            aside = path.with_name(GIVEN_UP + path.name)
            os.rename(path, aside.with_name(f"{aside.name}-{uuid.uuid4().hex[:8]}") if aside.exists() else aside)
    if place != given:
        os.rename(given, place)


def remove_stale(folder: Path, *, world: World) -> None:
    """Remove temporary folders of killed processes. Collective call, once at start.

    A temporary checkpoint that is complete, and whose final name is free, is published instead: it may be the only one.

    Raises:
        RuntimeError: on every rank, if a folder cannot be read or renamed.
    """
    with world.sync_errors("removing stale checkpoints"):
        for path in sorted(folder.glob(f"checkpoint_*{checkpoint.TEMPORARY}*")) if world.is_main else ():
            final = path.with_name(path.name.partition(checkpoint.TEMPORARY)[0])
            if final.exists() or checkpoint.damage(path):
                checkpoint.remove(path)
            else:
                os.rename(path, final)
        for path in folder.glob(f"checkpoint_*{checkpoint.REMOVED}*") if world.is_main else ():
            checkpoint.remove(path)
