"""Which checkpoint a run resumes from: its latest valid one, a given one, or none."""

import dataclasses
import errno
import shutil
import time
from pathlib import Path
from typing import IO

import pytest
import torch
import torch.distributed as dist

from flow_grpo.data.k_repeat_sampler import DistributedKRepeatSampler
from flow_grpo.models.adapters import Ema
from flow_grpo.run.run_state import RunState
from flow_grpo.runtime.checkpoints import checkpoint, resume
from flow_grpo.runtime.checkpoints.resume import SUMMARY
from flow_grpo.runtime.ranks.process_group import InputError, World
from flow_grpo.runtime.ranks.rendezvous import join_attempt
from flow_grpo.runtime.tensor_store import weights_key
from tests.runtime.test_checkpoint import ALONE, flip_a_bit, names, save
from tests.workers import run_ranks


def test_resume_is_empty_auto_or_a_path(tmp_path: Path) -> None:
    assert resume.resolve("", tmp_path, world=ALONE) is None
    assert resume.resolve("auto", tmp_path / "missing", world=ALONE) is None
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    assert resume.resolve("auto", tmp_path, world=ALONE) == second
    with pytest.raises(ValueError, match=r"already holds checkpoint_000001, checkpoint_000002; use resume='auto'"):
        resume.resolve("", tmp_path, world=ALONE)
    assert resume.resolve(str(second), tmp_path, world=ALONE) == second
    assert resume.resolve(str(first), tmp_path / "new", world=ALONE) == first
    with pytest.raises(ValueError, match=r"nowhere.* is not a usable checkpoint: .*does not exist"):
        resume.resolve(str(tmp_path / "nowhere"), tmp_path, world=ALONE)


@pytest.mark.parametrize("setting", ["", "auto", "other"])
def test_a_complete_run_without_its_checkpoints_is_not_started_over(tmp_path: Path, setting: str) -> None:
    folder, other = tmp_path / "run" / "checkpoints", save(tmp_path / "other", 1)
    setting = str(other) if setting == "other" else setting
    assert resume.resolve(setting, folder, world=ALONE) == (other if setting == str(other) else None)
    folder.parent.mkdir()
    (folder.parent / SUMMARY).write_text("{}")
    with pytest.raises(ValueError, match=r"summary\.json says that this run is complete.*use another run_name"):
        resume.resolve(setting, folder, world=ALONE)
    own = save(folder, 2)
    assert resume.resolve("auto", folder, world=ALONE) == own == resume.resolve(str(own), folder, world=ALONE)


def test_temporary_folders_are_removed_unless_complete_with_a_free_name_and_nothing_else(tmp_path: Path) -> None:
    whole, taken = save(tmp_path, 1), save(tmp_path, 2)
    (tmp_path / "checkpoint_000005.tmp-abc").mkdir()
    (tmp_path / "notes").mkdir()
    shutil.copytree(taken, tmp_path / "checkpoint_000002.tmp-abc")
    whole.rename(tmp_path / "checkpoint_000001.tmp-abc")
    shutil.copytree(taken, tmp_path / "checkpoint_000003.old-abc")
    torn = tmp_path / "checkpoint_000004.tmp-abc"
    shutil.copytree(taken, torn)
    flip_a_bit(torn / "state.safetensors")
    resume.remove_stale(tmp_path, world=ALONE)
    assert names(tmp_path) == ["checkpoint_000001", "checkpoint_000002", "notes"]


def test_a_run_with_only_damaged_checkpoints_is_refused(tmp_path: Path) -> None:
    for step in (1, 2):
        flip_a_bit(save(tmp_path, step) / "state.safetensors")
    with pytest.raises(InputError, match=r"no checkpoint that is whole \(checkpoint_000002: .*checkpoint_000001: "):
        resume.resolve("auto", tmp_path, world=ALONE)


def test_a_read_error_does_not_count_as_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)

    read = Path.open

    def broken(path: Path, *args: str, **named: str) -> IO[bytes]:
        if path.name == "state.safetensors":
            raise OSError(errno.EIO, "Input/output error")
        return read(path, *args, **named)

    monkeypatch.setattr(Path, "open", broken)
    for setting in ("auto", str(tmp_path / "checkpoint_000002")):
        with pytest.raises(InputError, match=r"checkpoint_000002 cannot be read .*Input/output error"):
            resume.resolve(setting, tmp_path, world=ALONE)


def go_back(path: Path, world: World = ALONE) -> None:
    found = resume.resolve(str(path), path.parent, world=world)
    assert found == path
    assert resume.commit(str(path), found, path.parent, world=world)


def test_going_back_archives_the_later_checkpoints_each_time(tmp_path: Path) -> None:
    first, _ = save(tmp_path, 1), save(tmp_path, 2)
    for aside in (1, 2):
        go_back(first)
        assert len([name for name in names(tmp_path) if name.startswith("given_up_checkpoint_000002")]) == aside
        assert resume.latest(tmp_path, world=ALONE) == first
        save(tmp_path, 2)


def test_a_run_can_go_back_to_an_archived_checkpoint(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    go_back(first)
    (tmp_path / f"given_up_{second.name}" / "mark").touch()
    save(tmp_path, 2)
    save(tmp_path, 3)
    go_back(tmp_path / f"given_up_{second.name}")
    assert (second / "mark").exists() and resume.latest(tmp_path, world=ALONE) == second
    assert [path.name for path in checkpoint.published(tmp_path)] == [first.name, second.name]
    assert len(names(tmp_path)) == 4  # and those of the course that is given up now


def _go_back_while_one_reads(world: World, path: Path) -> bool:
    found = resume.find(str(path), path.parent, world=world)
    if world.data.rank == 1:
        time.sleep(0.5)
    still = path.is_dir()
    resume.commit(str(path), found, path.parent, world=world)
    return still


def test_an_archived_checkpoint_is_not_moved_while_another_rank_reads_it(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    go_back(first)
    aside = tmp_path / f"given_up_{second.name}"
    assert run_ranks(_go_back_while_one_reads, 2, aside) == [True, True]
    assert second.is_dir() and not aside.exists()


def test_resuming_from_the_latest_archives_nothing_not_even_a_damaged_one(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    flip_a_bit(second / "state.safetensors")
    found = resume.find("auto", tmp_path, world=ALONE)
    assert resume.commit("auto", found, tmp_path, world=ALONE)
    assert found == first and names(tmp_path) == [first.name, second.name]


def test_another_runs_checkpoint_does_not_replace_ones_own(tmp_path: Path) -> None:
    own, other = save(tmp_path / "run", 2), save(tmp_path / "other", 1)
    with pytest.raises(ValueError, match=r"already holds checkpoint_000002; use resume='auto' to go on or another run"):
        resume.resolve(str(other), tmp_path / "run", world=ALONE)
    found = resume.resolve(str(other), tmp_path / "new", world=ALONE)
    assert not resume.commit(str(other), found, tmp_path / "new", world=ALONE)
    assert names(tmp_path / "run") == [own.name] and names(tmp_path / "other") == [other.name]


def start(setting: str, folder: Path, launcher: dist.Store, *, refused: bool = False) -> Path | None:
    """Start as the only rank of a launcher; `refused` after a checkpoint was found."""
    world = dataclasses.replace(ALONE, restarted=join_attempt(launcher, 0, 1)[1], store=launcher)
    path = resume.find(setting, folder, world=world)
    if not refused:
        resume.commit(setting, path, folder, world=world)
    return path


def test_after_a_restart_by_its_launcher_a_run_resumes_by_itself(tmp_path: Path) -> None:
    launcher = dist.HashStore()
    assert start("", tmp_path, launcher) is None
    assert start("", tmp_path, launcher) is None  # it died before its first save
    newest = save(tmp_path, 3)
    assert start("", tmp_path, launcher) == newest == start("", tmp_path, launcher)


def test_after_a_restart_a_run_does_not_go_back_twice(tmp_path: Path) -> None:
    launcher, first = dist.HashStore(), save(tmp_path, 1)
    save(tmp_path, 2)
    assert start(str(first), tmp_path, launcher) == first == start(str(first), tmp_path, launcher)
    newest = save(tmp_path, 2)
    assert start(str(first), tmp_path, launcher) == newest


def test_a_failed_start_fails_again_after_a_restart_and_moves_nothing(tmp_path: Path) -> None:
    launcher, first, second = dist.HashStore(), save(tmp_path, 1), save(tmp_path, 2)
    for _ in range(2):
        with pytest.raises(ValueError, match="already holds checkpoint_000001, checkpoint_000002"):
            start("", tmp_path, launcher)
        assert start(str(first), tmp_path, launcher, refused=True) == first  # it is of another model
        assert names(tmp_path) == [first.name, second.name]


def test_a_checkpoint_of_the_first_version_is_restored(tmp_path: Path) -> None:
    """It was written by that version after one step of AdamW from the weights below."""
    shutil.copytree(Path(__file__).parent / "first_version", tmp_path, dirs_exist_ok=True)
    module = torch.nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, -2.0]]))
        module.bias.fill_(0.5)
    state = RunState(
        module=module,
        optimizer=torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.0),
        sampler=DistributedKRepeatSampler(24, 4, 4, 1, 0, seed=1),
        ema=Ema(list(module.parameters()), 0.5),
        device=torch.device("cpu"),
        identity={"model": weights_key(module.named_parameters()), "trained": "full"},
    )
    path = resume.find("auto", tmp_path, world=ALONE)
    assert path == tmp_path / "checkpoint_000003"
    state.restore(path, world=ALONE)
    torch.testing.assert_close(module.weight.data, torch.tensor([[0.9, -2.1]]))
    with state.ema.applied():
        torch.testing.assert_close(module.weight.data, torch.tensor([[0.95, -2.05]]))
    moments = state.optimizer.state[module.bias]
    assert moments["step"] == 1 and moments["exp_avg"].item() == pytest.approx(0.1)
    assert (state.finished, state.train_seconds, state.before) == (3, 1.5, {"eval/x": 0.25})
    assert (state.shortages, state.history.bad_steps) == ([1], ["loss is nan"])
    assert torch.rand(1).item() == pytest.approx(0.5349, abs=1e-4)  # the saved random state was seeded with 7
