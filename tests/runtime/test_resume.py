"""Which checkpoint a run goes on from: its newest that is whole, one it is told, or none."""

from __future__ import annotations

import dataclasses
import errno
import shutil
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from flow_grpo.runtime.checkpoints import checkpoint, resume
from flow_grpo.runtime.ranks.process_group import InputError, Ranks
from flow_grpo.runtime.ranks.rendezvous import meet
from tests.runtime.test_checkpoint import ALONE, flip_a_bit, names, save
from tests.workers import run_ranks


def test_resume_means_fresh_latest_or_a_path(tmp_path: Path) -> None:
    assert resume.resolve("", tmp_path, ranks=ALONE) is None
    assert resume.resolve("auto", tmp_path / "missing", ranks=ALONE) is None
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    assert resume.resolve("auto", tmp_path, ranks=ALONE) == second
    with pytest.raises(ValueError, match=r"already holds checkpoint_000001, checkpoint_000002; use resume='auto'"):
        resume.resolve("", tmp_path, ranks=ALONE)
    assert resume.resolve(str(second), tmp_path, ranks=ALONE) == second
    assert resume.resolve(str(first), tmp_path / "new", ranks=ALONE) == first
    with pytest.raises(ValueError, match=r"nowhere.* is not a usable checkpoint: .*does not exist"):
        resume.resolve(str(tmp_path / "nowhere"), tmp_path, ranks=ALONE)


def test_stale_temporary_folders_are_removed_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "checkpoint_000002.tmp-abc").mkdir()
    (tmp_path / "notes").mkdir()
    resume.remove_stale(tmp_path, ranks=ALONE)
    assert names(tmp_path) == ["checkpoint_000001", "notes"]


def test_one_that_was_complete_when_its_process_was_killed_is_put_in_its_empty_place(tmp_path: Path) -> None:
    whole, taken = save(tmp_path, 1), save(tmp_path, 2)
    shutil.copytree(taken, tmp_path / "checkpoint_000002.tmp-abc")
    whole.rename(tmp_path / "checkpoint_000001.tmp-abc")
    shutil.copytree(taken, tmp_path / "checkpoint_000003.old-abc")
    torn = tmp_path / "checkpoint_000004.tmp-abc"
    shutil.copytree(taken, torn)
    flip_a_bit(torn / "state.safetensors")
    resume.remove_stale(tmp_path, ranks=ALONE)
    assert names(tmp_path) == ["checkpoint_000001", "checkpoint_000002"]


def test_checkpoints_of_which_none_is_whole_are_no_reason_to_start_afresh(tmp_path: Path) -> None:
    for step in (1, 2):
        flip_a_bit(save(tmp_path, step) / "state.safetensors")
    with pytest.raises(InputError, match=r"no checkpoint that is whole \(checkpoint_000002: .*checkpoint_000001: "):
        resume.resolve("auto", tmp_path, ranks=ALONE)


def test_one_that_cannot_be_read_is_not_taken_for_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)

    def broken(_path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint, "_sha256", broken)
    with pytest.raises(RuntimeError, match=r"looking for a checkpoint: OSError.*Input/output error"):
        resume.resolve("auto", tmp_path, ranks=ALONE)


def go_back(path: Path, ranks: Ranks = ALONE) -> None:
    found = resume.resolve(str(path), path.parent, ranks=ranks)
    assert found == path
    assert resume.commit(str(path), found, path.parent, ranks=ranks)


def test_going_back_lays_what_is_later_aside_each_time(tmp_path: Path) -> None:
    first, _ = save(tmp_path, 1), save(tmp_path, 2)
    for aside in (1, 2):
        go_back(first)
        assert len([name for name in names(tmp_path) if name.startswith("given_up_checkpoint_000002")]) == aside
        assert resume.latest(tmp_path, ranks=ALONE) == first
        save(tmp_path, 2)


def test_what_was_laid_aside_can_take_its_place_again(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    go_back(first)
    (tmp_path / f"given_up_{second.name}" / "mark").touch()
    save(tmp_path, 2)
    save(tmp_path, 3)
    go_back(tmp_path / f"given_up_{second.name}")
    assert (second / "mark").exists() and resume.latest(tmp_path, ranks=ALONE) == second
    assert [path.name for path in checkpoint.published(tmp_path)] == [first.name, second.name]
    assert len(names(tmp_path)) == 4  # and those of the course that is given up now


def _go_back_while_one_reads(ranks: Ranks, path: Path) -> bool:
    found = resume.find(str(path), path.parent, ranks=ranks)
    if ranks.rank == 1:
        time.sleep(0.5)
    still = path.is_dir()
    resume.commit(str(path), found, path.parent, ranks=ranks)
    return still


def test_what_takes_its_place_again_is_not_moved_while_another_rank_reads_it(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    go_back(first)
    aside = tmp_path / f"given_up_{second.name}"
    assert run_ranks(_go_back_while_one_reads, 2, aside) == [True, True]
    assert second.is_dir() and not aside.exists()


def test_going_on_from_the_newest_lays_nothing_aside_not_even_a_damaged_one(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    flip_a_bit(second / "state.safetensors")
    found = resume.find("auto", tmp_path, ranks=ALONE)
    assert resume.commit("auto", found, tmp_path, ranks=ALONE)
    assert found == first and names(tmp_path) == [first.name, second.name]


def test_another_run_s_checkpoint_does_not_replace_one_s_own(tmp_path: Path) -> None:
    own, other = save(tmp_path / "run", 2), save(tmp_path / "other", 1)
    with pytest.raises(ValueError, match=r"already holds checkpoint_000002; use resume='auto' to go on or another run"):
        resume.resolve(str(other), tmp_path / "run", ranks=ALONE)
    found = resume.resolve(str(other), tmp_path / "new", ranks=ALONE)
    assert not resume.commit(str(other), found, tmp_path / "new", ranks=ALONE)
    assert names(tmp_path / "run") == [own.name] and names(tmp_path / "other") == [other.name]


def start(told: str, folder: Path, launcher: dist.Store, *, refused: bool = False) -> Path | None:
    """Start as the only rank of a launcher; `refused` after a checkpoint was found."""
    ranks = dataclasses.replace(ALONE, again=meet(launcher, 0, 1)[1], store=launcher)
    path = resume.find(told, folder, ranks=ranks)
    if not refused:
        resume.commit(told, path, folder, ranks=ranks)
    return path


def test_started_again_by_its_launcher_a_run_goes_on_by_itself(tmp_path: Path) -> None:
    launcher = dist.HashStore()
    assert start("", tmp_path, launcher) is None
    assert start("", tmp_path, launcher) is None  # it died before its first save
    newest = save(tmp_path, 3)
    assert start("", tmp_path, launcher) == newest == start("", tmp_path, launcher)


def test_started_again_after_going_back_it_does_not_go_back_twice(tmp_path: Path) -> None:
    launcher, first = dist.HashStore(), save(tmp_path, 1)
    save(tmp_path, 2)
    assert start(str(first), tmp_path, launcher) == first == start(str(first), tmp_path, launcher)
    newest = save(tmp_path, 2)
    assert start(str(first), tmp_path, launcher) == newest


def test_a_start_that_is_refused_is_refused_again_and_moves_nothing(tmp_path: Path) -> None:
    launcher, first, second = dist.HashStore(), save(tmp_path, 1), save(tmp_path, 2)
    for _ in range(2):
        with pytest.raises(ValueError, match="already holds checkpoint_000001, checkpoint_000002"):
            start("", tmp_path, launcher)
        assert start(str(first), tmp_path, launcher, refused=True) == first  # it is of another model
        assert names(tmp_path) == [first.name, second.name]
