"""Which checkpoint a run goes on from."""

from __future__ import annotations

import logging
import os
import uuid
from pathlib import Path

from flow_grpo.runtime.checkpoints.checkpoint import (
    REMOVED,
    TEMPORARY,
    damage,
    path_of,
    published,
    remove,
    saved_step,
    step_of,
)
from flow_grpo.runtime.ranks.process_group import InputError, Ranks

GIVEN_UP = "given_up_"  # before the name of what lies later than where a run went back to
_log = logging.getLogger(__name__)


def find(resume: str, folder: Path, *, ranks: Ranks) -> Path | None:
    """Return the checkpoint to go on from, or None for a fresh start; every rank must call it, and `settle` later.

    Started again by its launcher (`torchrun --max-restarts`), a run that had settled goes on from what it saved.

    Args:
        resume: as in `resolve`.
        folder: the run's checkpoints folder.
        ranks: who takes part.

    Raises:
        ValueError: on every rank alike, for a checkpoint that cannot be used.
    """
    remove_stale(folder, ranks=ranks)
    if ranks.again and (path := latest(folder, ranks=ranks)):
        return path
    return resolve(resume, folder, ranks=ranks)


def settle(resume: str, path: Path | None, folder: Path, *, ranks: Ranks) -> bool:
    """Make a start count, once what `find` returned has been taken; every rank must call it.

    Returns whether that lies among the run's own checkpoints: one that starts from another run's has none yet.

    Where the run goes back, what is later is laid aside: started again before it saves, it would take that. A start
    that is refused before leaves everything in its place, and is refused again when its launcher repeats it.

    Raises:
        RuntimeError: on every rank, if a folder cannot be renamed.
    """
    ranks.raise_together(None, "restoring")  # nothing moves while another rank still reads it
    with ranks.sync_errors("giving up later checkpoints"):
        told = path is not None and resume not in ("", "auto") and path == Path(resume).resolve()
        own = path is not None and path.resolve().parent == folder.resolve()
        if ranks.is_main and path is not None and told and own:
            _go_back(path, path.parent)
    ranks.admit()
    return own


def latest(folder: Path, *, ranks: Ranks) -> Path | None:
    """Return the checkpoint of the highest step that verifies, or None; each damaged one met is warned about.

    Every rank must call it; rank 0 looks.

    Raises:
        InputError: on every rank: there are some, and none verifies; a run that starts afresh would remove them.
    """
    found, problems = "", []
    with ranks.sync_errors("looking for a checkpoint"):
        for path in reversed(published(folder)) if ranks.is_main else ():
            if not (problem := damage(path)):
                found = path.name
                break
            problems.append(f"{path.name}: {problem}")
            _log.warning("checkpoint %s is passed over: %s", path, problem)
        if problems and not found:
            raise InputError(
                f"{folder} holds no checkpoint that is whole ({'; '.join(problems)}); mend what is named, or start "
                "afresh under another run_name"
            )
    found = ranks.broadcast_text(found)
    return folder / found if found else None


def resolve(resume: str, folder: Path, *, ranks: Ranks) -> Path | None:
    """Return the checkpoint that a setting names, or None for a fresh start; every rank must call it.

    Args:
        resume: "" starts afresh, "auto" takes the latest valid checkpoint of the run if there is one, anything else is
            the folder of a checkpoint: of this run, which goes back to it, or of another one.
        folder: the run's checkpoints folder.
        ranks: who takes part.

    Raises:
        ValueError: a path that is no checkpoint, or a start from none or from another run's where this one has some.
    """
    if resume == "auto":
        return latest(folder, ranks=ranks)
    given = Path(resume).resolve()
    problem = ranks.broadcast_text(damage(given) if resume and ranks.is_main else "")
    if problem:
        raise ValueError(
            f"resume={resume!r} is not a usable checkpoint: {problem}; give a folder such as {path_of(folder, 10)} or "
            "'auto'"
        )
    of_another = not resume or given.parent != folder.resolve()
    existing = ranks.broadcast_text(", ".join(path.name for path in published(folder)) if of_another else "")
    if existing:
        raise ValueError(f"{folder} already holds {existing}; use resume='auto' to go on or another run_name")
    return given if resume else None


def _go_back(given: Path, folder: Path) -> None:
    """Lay aside what is later than a checkpoint of the folder, the last first, and put it in its place if it is not."""
    place = path_of(folder, saved_step(given))
    for path in reversed(published(folder)):
        if step_of(path) >= step_of(place) and path != given:
            aside = path.with_name(GIVEN_UP + path.name)
            os.rename(path, aside.with_name(f"{aside.name}-{uuid.uuid4().hex[:8]}") if aside.exists() else aside)
    if place != given:
        os.rename(given, place)


def remove_stale(folder: Path, *, ranks: Ranks) -> None:
    """Remove temporary folders of processes that were killed; call once at start, on every rank.

    One that was complete and whose place is empty is put there: it may be the only one left.

    Raises:
        RuntimeError: on every rank, if a folder cannot be read or put in its place.
    """
    with ranks.sync_errors("removing stale checkpoints"):
        for path in sorted(folder.glob(f"checkpoint_*{TEMPORARY}*")) if ranks.is_main else ():
            final = path.with_name(path.name.partition(TEMPORARY)[0])
            if final.exists() or damage(path):
                remove(path)
            else:
                os.rename(path, final)
        for path in folder.glob(f"checkpoint_*{REMOVED}*") if ranks.is_main else ():
            remove(path)
