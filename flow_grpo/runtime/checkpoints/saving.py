"""Writing checkpoints behind training.

The state is copied to the CPU; a thread of every rank writes its files into a temporary sibling folder and flushes them
to disk, and then leaves a note with their sizes and hashes. When rank 0's thread finds all notes, it writes the
manifest, last of all, and renames the folder. No thread makes a collective call, so training goes on meanwhile; `wait`
tells all ranks how it ended.

A process killed at any moment leaves the previous checkpoint valid and at most a temporary folder, which the next start
removes, or publishes where it is complete (`resume.remove_stale`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import shutil
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from flow_grpo.runtime.checkpoints import checkpoint, state_files
from flow_grpo.runtime.ranks.process_group import World

_log = logging.getLogger(__name__)
LOOK_S = 0.05  # between two looks for the notes of other ranks


@dataclasses.dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written."""

    path: Path  # of the folder, once it is published
    world: World
    partial: Path  # the folder that is written
    written: Future[None]  # done when this rank's files are
    published: Future[None]  # on rank 0, done when the checkpoint is published
    given_up: threading.Event  # set when another rank has failed

    def wait(self) -> Path:
        """Wait for the published checkpoint, return its folder. Collective call: every rank must call it.

        Raises:
            RuntimeError: on every rank, if any failed; nothing is published then.
        """
        try:
            with self.world.sync_errors("saving a checkpoint (files)"):
                self.written.result()
            with self.world.sync_errors("saving a checkpoint (publishing)"):
                self.published.result()
        except BaseException:
            self.given_up.set()
            if self.world.is_main:  # the error was synchronised: no rank is still writing
                with contextlib.suppress(Exception):
                    self.published.result()
                shutil.rmtree(self.partial, ignore_errors=True)
            raise
        return self.path

    def linger(self, seconds: float) -> None:
        """Wait for the publication, so long at most, without a word to the other ranks: they may have failed."""
        end = time.monotonic() + seconds
        if self.world.is_main and not self.published.done():
            _log.warning("waiting %.0f s at most until %s is written", seconds, self.path.name)
        wait([self.written], seconds)
        if not self.written.done() or self.written.exception() is not None:
            return
        if self.world.is_main:
            wait([self.published], max(0.0, end - time.monotonic()))
            if self.published.done() and (error := self.published.exception()):
                _log.warning("%s is not published: %s", self.path.name, error)
            return
        while self.partial.exists() and time.monotonic() < end:  # until rank 0 renames it
            time.sleep(LOOK_S)


def begin(
    folder: Path,
    step: int,
    *,
    state: Mapping[str, Any],
    per_rank: Mapping[str, Any],
    identity: Mapping[str, str],
    world: World,
    keep: int,
    score: float | None = None,
) -> Saving:
    """Copy the state of `step` and begin to write it. Collective call: every rank must call it.

    Once it is published, only the `keep` newest checkpoints and the one with the highest score are kept. Checkpoints of
    later steps are removed: they were abandoned when the run resumed from an earlier step.

    Args:
        folder: the run's checkpoints folder.
        step: number of finished steps.
        state: shared by all ranks, read on rank 0 only; nested as `state_files.flatten` describes.
        per_rank: this rank's own state, such as random states; nested likewise.
        identity: names the model, data and configuration that the checkpoint belongs to; compared by `checkpoint.load`.
        world: all ranks of the run.
        keep: number of checkpoints to keep, at least 1.
        score: score of this checkpoint, higher is better; None if it was not evaluated.

    Raises:
        RuntimeError: on every rank, if the folder cannot be made on rank 0 or a state cannot be saved.
    """
    final = checkpoint.path_of(folder, step)
    partial = folder / world.broadcast_text(f"{final.name}{checkpoint.TEMPORARY}{uuid.uuid4().hex[:8]}")
    trees = ({"state": state} if world.is_main else {}) | {f"rank_{world.all.rank}": per_rank}
    copies = _copied(trees, partial, world)
    given_up = threading.Event()

    def write() -> None:
        for stem in list(copies):
            state_files.write(partial / stem, copies.pop(stem))
        _leave_note(partial, world.all.rank, list(trees))

    def publish() -> None:
        files = _noted(partial, world.all.size, given_up) if world.is_main else None
        if files is not None:
            manifest: dict[str, Any] = {"format": checkpoint.FORMAT, "step": step, "world_size": world.all.size}
            manifest |= {"identity": dict(identity), "score": score, "files": files}
            (partial / checkpoint.MANIFEST).write_text(json.dumps(manifest, indent=1))
            state_files.fsync(partial / checkpoint.MANIFEST)
            state_files.fsync(partial)
            _publish(partial, final)
            _prune(folder, step, keep)

    thread = ThreadPoolExecutor(1, "checkpoint")
    written, published = thread.submit(write), thread.submit(publish)
    thread.shutdown(wait=False)
    return Saving(final, world, partial, written, published, given_up)


def _copied(trees: Mapping[str, Mapping[str, Any]], partial: Path, world: World) -> dict[str, state_files.Copy]:
    # By file name, once rank 0 has made the folder (collective call).
    try:
        with world.sync_errors("saving a checkpoint (files)"):
            copies = {stem: state_files.copied(tree) for stem, tree in trees.items()}
            if world.is_main:
                partial.mkdir(parents=True)
    except BaseException:
        if world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return copies


def _leave_note(partial: Path, rank: int, stems: Sequence[str]) -> None:
    # Sizes and hashes of this rank's files, beside them; renamed, so that they are there at once.
    files = [path for stem in stems for path in state_files.paths(partial / stem)]
    listed = {path.name: {"size": path.stat().st_size, "sha256": checkpoint.sha256(path)} for path in files}
    note = _note(partial, rank)
    begun = note.with_suffix(".begun")
    begun.write_text(json.dumps(listed))
    os.rename(begun, note)


def _note(partial: Path, rank: int) -> Path:
    return partial / f"rank_{rank}.written"


def _noted(partial: Path, world_size: int, given_up: threading.Event) -> dict[str, Any] | None:
    # Files of all ranks, once all are written and visible here, and without their notes; None if given up.
    listed: dict[str, Any] = {}
    for rank in range(world_size):
        note = _note(partial, rank)
        while not note.exists():
            if given_up.wait(LOOK_S):
                return None
        listed |= json.loads(note.read_text())
        note.unlink()
    ordered = [path.name for path in checkpoint.files_of(partial, world_size)]
    for name in ordered:  # a network file system may show a note before its files
        while not (partial / name).exists() or (partial / name).stat().st_size != listed[name]["size"]:
            if given_up.wait(LOOK_S):
                return None
    return {name: listed[name] for name in ordered}


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
        checkpoint.remove(replaced)


def _prune(folder: Path, step: int, keep: int) -> None:
    existing = checkpoint.published(folder)
    current = [path for path in existing if checkpoint.step_of(path) <= step]
    scores = {path: score for path in current if (score := _score(path)) is not None}
    best = max(scores, key=lambda path: (scores[path], checkpoint.step_of(path)), default=None)
    for path in existing:
        if path not in current[-keep:] and path != best:
            checkpoint.remove(_set_aside(path))  # renamed first: a process killed half-way must leave no damaged one


def _score(path: Path) -> float | None:
    # None if it is missing, unreadable or not finite.
    try:
        score = checkpoint.read_manifest(path)["score"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return score if isinstance(score, float) and math.isfinite(score) else None


def _set_aside(path: Path) -> Path:
    doomed = path.with_name(f"{path.name}{checkpoint.REMOVED}{uuid.uuid4().hex[:8]}")
    os.rename(path, doomed)
    return doomed
