"""Checkpoints: atomic, verified, bound to their run, consistent over ranks."""

import errno
import json
import logging
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from flow_grpo.runtime.checkpoints import checkpoint, resume, saving, state_files
from flow_grpo.runtime.ranks.process_group import Group, World
from tests import workers
from tests.limits import LIMIT_S
from tests.workers import run_ranks

ALONE = World()
IDENTITY = {"model": "tiny", "k": "4"}


def save(folder: Path, step: int, world: World = ALONE, keep: int = 3, identity: dict[str, str] = IDENTITY) -> Path:
    state = {"weights": torch.full((5,), float(step)), "step": step}
    mine = {"rng": torch.tensor([world.data.rank, step])}
    return saving.begin(folder, step, state=state, per_rank=mine, identity=identity, world=world, keep=keep).wait()


def load_latest(folder: Path, identity=IDENTITY, world: World = ALONE) -> checkpoint.Checkpoint | None:
    path = resume.latest(folder, world=world)
    return None if path is None else checkpoint.load(path, identity=identity, world=world)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_saved_checkpoint_is_loaded_and_nothing_temporary_remains(tmp_path: Path) -> None:
    path = save(tmp_path / "run" / "checkpoints", 7)
    loaded = load_latest(path.parent)
    assert loaded is not None and (loaded.path, loaded.step, loaded.world_size) == (path, 7, 1)
    assert torch.equal(loaded.state["weights"], torch.full((5,), 7.0)) and loaded.state["step"] == 7
    assert loaded.per_rank is not None and loaded.per_rank["rng"].tolist() == [0, 7]
    assert names(path.parent) == ["checkpoint_000007"]
    files = ["manifest.json", "rank_0.json", "rank_0.safetensors", "state.json", "state.safetensors"]
    assert names(path) == files
    assert sorted(json.loads((path / "manifest.json").read_text())["files"]) == files[1:]


def test_the_best_checkpoint_is_kept_as_well_as_the_newest(tmp_path: Path) -> None:
    def kept(step: int, score: float | None) -> list[str]:
        identity = {"model": "m"}
        saving.begin(tmp_path, step, state={}, per_rank={}, identity=identity, world=ALONE, keep=1, score=score).wait()
        return [path.name[-1] for path in checkpoint.published(tmp_path)]

    assert kept(1, 0.5) == ["1"]
    assert kept(2, 0.7) == ["2"]
    assert kept(3, None) == ["2", "3"]
    assert kept(4, 0.6) == ["2", "4"]
    assert kept(5, float("nan")) == ["2", "5"]
    assert kept(6, 0.7) == ["6"]  # of equals the newest
    for step in (10, 11, 1000000):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["checkpoint_000006", "checkpoint_000011", "checkpoint_1000000"]
    assert [path.name for path in checkpoint.published(tmp_path)] == names(tmp_path)


def test_saving_after_going_back_replaces_the_abandoned_steps(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    state = {"again": True}
    saving.begin(tmp_path, 2, state=state, per_rank={}, identity=IDENTITY, world=ALONE, keep=3).wait()
    loaded = load_latest(tmp_path)
    assert names(tmp_path) == ["checkpoint_000001", "checkpoint_000002"]
    assert loaded is not None and loaded.state == state


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def rewrite(path: Path, **fields: object) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | fields))


def replace(path: Path, make: Callable[[Path], object]) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(path)


DAMAGES = [
    ("state.safetensors has another sha256", lambda path: flip_a_bit(path / "state.safetensors")),
    ("rank_0.json has 0 bytes instead of", lambda path: (path / "rank_0.json").write_bytes(b"")),
    ("rank_0.safetensors does not exist", lambda path: (path / "rank_0.safetensors").unlink()),
    ("manifest.json does not exist", lambda path: (path / "manifest.json").unlink()),
    ("manifest.json is not readable", lambda path: (path / "manifest.json").write_text('{"files"')),
    ("manifest.json is not readable", lambda path: (path / "manifest.json").write_text("[]")),
    ("manifest.json is not readable", lambda path: (path / "manifest.json").write_text("[" * 100_000)),
    ("manifest.json holds step='1', must be of type int", lambda path: rewrite(path, step="1")),
    ("manifest.json holds identity=5, must be of type dict", lambda path: rewrite(path, identity=5)),
    ("manifest.json lists 0 files, must be 4", lambda path: rewrite(path, files={})),
    ("manifest.json lists 4 files, must be 2000000002", lambda path: rewrite(path, world_size=10**9)),
    ("manifest.json holds step=-1, must be at least 0", lambda path: rewrite(path, step=-1)),
    ("manifest.json holds world_size=0, must be at least 1", lambda path: rewrite(path, world_size=0)),
    ("manifest.json holds format=99, this version reads 1", lambda path: rewrite(path, format=99)),
    ("manifest.json does not exist", lambda path: replace(path / "manifest.json", Path.mkdir)),
    ("manifest.json does not exist", lambda path: replace(path, lambda _: path.symlink_to(path))),
]


@pytest.mark.parametrize(("text", "damage"), DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_loaded(text, damage, tmp_path, caplog):
    save(tmp_path, 1)
    damaged = save(tmp_path, 2)
    damage(damaged)
    with caplog.at_level(logging.WARNING):
        loaded = load_latest(tmp_path)
    assert loaded is not None and loaded.step == 1
    assert str(damaged) in caplog.text and text in caplog.text
    with pytest.raises(ValueError, match=text):
        checkpoint.load(damaged, identity=IDENTITY, world=ALONE)
    with pytest.raises(ValueError, match=text):
        resume.resolve(str(damaged), tmp_path, world=ALONE)
    with pytest.raises(ValueError, match=f"{text}.*name another checkpoint$"):
        checkpoint.load(damaged, identity={}, world=ALONE, partly=True)
    assert checkpoint.load(tmp_path / "checkpoint_000001", identity={"k": "4"}, world=ALONE, partly=True).step == 1


def test_a_checkpoint_of_another_model_is_refused_field_by_field(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(ValueError, match="belongs to another run") as caught:
        load_latest(tmp_path, {"model": "large", "of a later version": "rooms"})
    text = str(caught.value)
    assert "k is '4' there and absent here; model is 'tiny' there and 'large' here" in text
    assert "later" not in text and "another run_name" in text and "\n" not in text


def test_repaired_data_files_are_a_warning_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, identity=IDENTITY | {checkpoint.FILES: "one"})
    with caplog.at_level(logging.WARNING):
        assert load_latest(tmp_path, IDENTITY | {checkpoint.FILES: "one"}) is not None
        assert not caplog.text
        assert load_latest(tmp_path, IDENTITY | {checkpoint.FILES: "other"}) is not None
    assert "checkpoint_000001 was saved with data files of other sizes" in caplog.text


def test_a_process_killed_while_replacing_a_checkpoint_leaves_the_new_one(tmp_path, monkeypatch):
    save(tmp_path, 1)
    rename, killed = os.rename, ConnectionAbortedError("killed")

    def until_killed(source: Path, target: Path) -> None:
        if target.name == "checkpoint_000001":
            raise killed
        rename(source, target)

    monkeypatch.setattr(os, "rename", until_killed)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # what a killed process does not come to
    with pytest.raises(RuntimeError, match="killed"):
        saving.begin(tmp_path, 1, state={"new": 1}, per_rank={}, identity=IDENTITY, world=ALONE, keep=1).wait()
    monkeypatch.undo()
    resume.remove_stale(tmp_path, world=ALONE)
    loaded = load_latest(tmp_path)
    assert loaded is not None and loaded.state == {"new": 1} and names(tmp_path) == ["checkpoint_000001"]


def test_a_replaced_checkpoint_is_restored_if_the_new_one_cannot_be_published(tmp_path, monkeypatch):
    save(tmp_path, 1)
    rename = os.rename

    def stale(source: Path, target: Path) -> None:
        if ".tmp-" in source.name:
            raise OSError(errno.ESTALE, "Stale file handle")
        rename(source, target)

    monkeypatch.setattr(os, "rename", stale)
    with pytest.raises(RuntimeError, match="Stale file handle"):
        saving.begin(tmp_path, 1, state={"new": 1}, per_rank={}, identity=IDENTITY, world=ALONE, keep=1).wait()
    assert names(tmp_path) == ["checkpoint_000001"]
    assert "weights" in load_latest(tmp_path).state


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning_only(tmp_path, monkeypatch, caplog):
    def busy(path: Path, **_: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(shutil, "rmtree", busy)
    for step in (1, 2):
        save(tmp_path, step, keep=1)
    assert [path.name for path in checkpoint.published(tmp_path)] == ["checkpoint_000002"]
    resume.remove_stale(tmp_path, world=ALONE)
    assert caplog.text.count("cannot be removed") == 2


def test_the_manifest_is_written_last_and_all_files_are_flushed_before_the_rename(tmp_path, monkeypatch):
    events: list[str] = []
    fsync, rename = state_files.fsync, os.rename

    def watched_fsync(path: Path) -> None:
        events.append(path.name)
        fsync(path)

    def watched_rename(source: Path, target: Path) -> None:
        if not Path(target).name.startswith("rank_"):  # a note of what this rank has written
            events.append("rename")
        rename(source, target)

    monkeypatch.setattr(state_files, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    save(tmp_path / "c", 3)
    assert events[:4] == ["state.safetensors", "state.json", "rank_0.safetensors", "rank_0.json"]
    assert events[4] == "manifest.json" and events[5].startswith("checkpoint_000003.tmp-")
    assert events[6:] == ["rename", "c"]


def test_what_is_saved_is_the_state_as_it_was_however_late_it_is_written(tmp_path, monkeypatch) -> None:
    go_on, write = threading.Event(), state_files.write

    def slowly(*given: Any) -> None:
        assert go_on.wait(20)
        write(*given)

    monkeypatch.setattr(state_files, "write", slowly)
    state = {"weights": torch.zeros(3), "losses": [1.0]}
    begun = saving.begin(tmp_path, 1, state=state, per_rank={}, identity=IDENTITY, world=ALONE, keep=1)
    state["weights"] += 1  # the next optimizer step
    state["losses"].append(2.0)
    assert checkpoint.published(tmp_path) == [] and not begun.written.done()
    go_on.set()
    loaded = checkpoint.load(begun.wait(), identity=IDENTITY, world=ALONE)
    assert loaded.state["losses"] == [1.0] and torch.equal(loaded.state["weights"], torch.zeros(3))
    listed = json.loads((begun.path / "manifest.json").read_text())["files"]
    assert {path.name for path in begun.path.iterdir()} == {"manifest.json", *listed}


def begin_and_look(world: World, folder: Path) -> bool:
    mine = {"rng": torch.tensor([world.data.rank])}
    begun = saving.begin(folder, 1, state={}, per_rank=mine, identity=IDENTITY, world=world, keep=1)
    begun.published.result(20)
    world.raise_if_any_failed(None, "looking")
    seen = checkpoint.damage(begun.path) == ""
    begun.wait()
    return seen


@pytest.mark.parametrize("step", ["write", "publish"])
@pytest.mark.parametrize("error", [None, OSError(errno.ENOSPC, "No space left on device")])
def test_after_an_error_a_checkpoint_is_awaited_unless_it_cannot_be_written(tmp_path, monkeypatch, caplog, step, error):
    save(tmp_path, 1, ALONE)  # is replaced: that the folder exists says nothing
    before = (tmp_path / "checkpoint_000001").stat().st_ino
    owner, name = (state_files, "write") if step == "write" else (saving, "_publish")
    write = getattr(owner, name)

    def slowly(*args) -> None:
        time.sleep(0.3)
        if error:
            raise error
        write(*args)

    monkeypatch.setattr(owner, name, slowly)
    begun = saving.begin(tmp_path, 1, state={}, per_rank={}, identity=IDENTITY, world=ALONE, keep=1)
    begun.linger(3600)
    assert (begun.path.stat().st_ino != before) == (error is None)
    assert ("is not published: [Errno 28]" in caplog.text) == (error is not None and step == "publish")
    if error:
        with pytest.raises(RuntimeError, match=r"^rank 0 failed in saving a checkpoint \(.*\): OSError.*No space left"):
            begun.wait()
        assert names(tmp_path) == ["checkpoint_000001"]


def linger_and_look(world: World, folder: Path) -> bool:
    write = saving._publish

    def slowly(*args) -> None:
        time.sleep(0.5)
        write(*args)

    with mock.patch.object(saving, "_publish", slowly):
        begun = saving.begin(folder, 1, state={}, per_rank={}, identity=IDENTITY, world=world, keep=1)
        begun.linger(LIMIT_S)
    seen = checkpoint.damage(begun.path) == ""
    begun.wait()
    return seen


def test_every_rank_awaits_a_checkpoint_after_an_error(tmp_path: Path) -> None:
    assert run_ranks(linger_and_look, 2, tmp_path) == [True] * 2


def test_a_checkpoint_is_published_without_anybody_waiting_for_it(tmp_path: Path) -> None:
    assert run_ranks(begin_and_look, 3, tmp_path) == [True] * 3


def save_on_all(world: World, folder: Path, unpicklable_rank: int | None) -> str:
    save(folder, 1, world)
    if unpicklable_rank is None:
        loaded = load_latest(folder, world=world)
        return f"{loaded.path.name} {loaded.world_size} {loaded.per_rank['rng'].tolist()}"
    mine = {"rng": object() if world.data.rank == unpicklable_rank else 0}
    with pytest.raises(RuntimeError) as caught:
        saving.begin(folder, 2, state={}, per_rank=mine, identity={}, world=world, keep=3).wait()
    return str(caught.value)


def test_every_rank_gets_its_own_state_back_and_a_new_rank_gets_none(tmp_path: Path) -> None:
    results = run_ranks(save_on_all, 3, tmp_path, None)
    assert results == [f"checkpoint_000001 3 [{rank}, 1]" for rank in range(3)]
    newcomer = World.of(Group(3))
    loaded = checkpoint.load(tmp_path / "checkpoint_000001", identity=IDENTITY, world=newcomer)
    assert loaded.per_rank is None and loaded.world_size == 3


def test_one_failing_rank_means_that_nothing_is_published(tmp_path: Path) -> None:
    results = run_ranks(save_on_all, 3, tmp_path, 2)
    assert set(results) == {results[0]}
    assert "rank 2 failed in saving a checkpoint (files): ValueError: rng cannot be saved: object" in results[0]
    assert names(tmp_path) == ["checkpoint_000001"]


def save_for_ever(folder: Path, step: int) -> None:
    while True:
        step += 1
        state = {"weights": torch.full((20000,), float(step)), "step": step}
        saving.begin(folder, step, state=state, per_rank={}, identity=IDENTITY, world=ALONE, keep=2).wait()


def newest(folder: Path) -> int:
    return max((int(path.name.split("_")[1]) for path in checkpoint.published(folder)), default=0)


@pytest.mark.parametrize("seed", range(3))
def test_killing_a_process_while_it_saves_leaves_a_checkpoint_that_loads(seed: int, tmp_path: Path) -> None:
    delay = random.Random(seed)
    for _ in range(4):
        before = newest(tmp_path)
        process = workers.context().Process(target=save_for_ever, args=(tmp_path, before))
        process.start()
        while newest(tmp_path) == before and process.is_alive():
            time.sleep(0.002)
        time.sleep(delay.uniform(0.0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        loaded = load_latest(tmp_path)
        assert loaded is not None and loaded.step == newest(tmp_path) > before
        assert torch.equal(loaded.state["weights"], torch.full((20000,), float(loaded.step)))
        resume.remove_stale(tmp_path, world=ALONE)
        assert names(tmp_path) == [path.name for path in checkpoint.published(tmp_path)]
