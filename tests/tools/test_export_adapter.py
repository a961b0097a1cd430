"""An exported checkpoint equals the adapter that a run ending there writes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train_grpo
from flow_grpo.reporting.drawing import plots
from flow_grpo.run import starts
from tests.command import command
from tests.refusals import error_line, refusal
from tests.tiny_models import make_tiny_folder
from tools import evaluate, export_adapter
from tools.evaluation import videos


@pytest.fixture(scope="module")
def run(world, tmp_path_factory) -> dict[str, str]:
    """A finished run of two epochs and a checkpoint after each; returns its knobs."""
    folder = tmp_path_factory.mktemp("export")
    knobs = {"output_root": folder, "run_name": "run", "model.path": make_tiny_folder(folder / "model")}
    knobs |= {"data.root": world, "data.tiny_world": "unit_test", "data.tune_scenes": 0, "device": "cpu"}
    knobs |= {"trackers": ""}
    knobs |= {"num_epochs": 2, "checkpoint.every": 1, "log_videos_every": 0, "sample.num_steps": 3, "eval.every": 0}
    knobs |= {"sample.sde_steps": "0,1", "sample.k": 4, "sample.train_batch_size": 4, "sample.num_batches_per_epoch": 1}
    knobs |= {"train.batch_size": 4, "train.ema_decay": 0.5, "reward.weights": "motion_mag=1"}
    knobs |= {"eval.num_conditions": 2, "eval.num_steps": 2, "eval.videos": 0, "eval.gold": ""}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw_curves", lambda rows, path, **_: None)
        assert train_grpo.main(command(knobs)) == 0
    return {name: str(value) for name, value in knobs.items()}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = {file.name: load_file(file) for file in folder.glob("*.safetensors")}
    return {f"{file}/{name}": tensor for file, tensors in files.items() for name, tensor in tensors.items()}


def exported(run: dict[str, str], step: int, out: Path, *more: str) -> int:
    place = Path(run["output_root"]) / "run" / "checkpoints" / f"checkpoint_{step:06d}"
    return export_adapter.main(["--checkpoint", str(place), "--out", str(out), *more])


def test_the_last_checkpoint_exports_the_adapter_of_the_run_and_an_earlier_one_another(run, tmp_path):
    left = weights(Path(run["output_root"]) / "run" / "adapter")
    assert exported(run, 2, tmp_path / "last") == 0 == exported(run, 1, tmp_path / "first")
    last, first = (weights(tmp_path / name) for name in ("last", "first"))
    assert left.keys() == last.keys() == first.keys() and len(left) > 0
    assert all(torch.equal(left[name], last[name]) for name in left)
    assert any(not torch.equal(left[name], first[name]) for name in left)


def test_unusable_arguments_are_refused_in_one_line(run, tmp_path, capsys):
    assert exported(run, 2, tmp_path / "a", "--config.model.trained=camera") == 2
    assert "trained is" in capsys.readouterr().err
    assert exported(run, 7, tmp_path / "b") == 2
    assert "checkpoint_000007" in capsys.readouterr().err
    assert exported(run, 2, tmp_path) == 2
    assert error_line(capsys).startswith("error: --out")


def test_the_evaluation_takes_a_checkpoint_like_its_adapter_and_keeps_other_videos(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(starts, "LEAST_ROWS", 1)  # videos too small for structure from motion are taken
    checkpoint = Path(run["output_root"]) / "run" / "checkpoints" / "checkpoint_000002"
    adapter = Path(run["output_root"]) / "run" / "adapter"
    of_recipe = [*command(run), "--adapter", str(adapter)]
    for name, given in (("a", of_recipe), ("c", ["--checkpoint", str(checkpoint)])):
        assert evaluate.main([*given, "--out", str(tmp_path / name), "--workers", "0"]) == 0
    films = sorted((tmp_path / "a" / videos.VIDEOS).iterdir())
    assert len(films) == 2
    for render_views in films:
        assert render_views.read_bytes() == (tmp_path / "c" / videos.VIDEOS / render_views.name).read_bytes()
    before = {file: file.read_bytes() for file in (tmp_path / "a").rglob("*") if file.is_file()}
    again = ["--checkpoint", str(checkpoint), "--out", str(tmp_path / "c"), "--workers", "0"]
    assert evaluate.main(again) == 0
    earlier = checkpoint.with_name("checkpoint_000001")
    other = ["--checkpoint", str(earlier), "--out", str(tmp_path / "a"), "--workers", "0"]
    assert "holds videos of another recipe, adapter or origin" in refusal(capsys, evaluate.main, other)
    assert before == {file: file.read_bytes() for file in (tmp_path / "a").rglob("*") if file.is_file()}
