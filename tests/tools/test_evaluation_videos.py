"""Generating a recipe's held-out conditions: those of a run's evaluations, each once, and refusals."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from flow_grpo.data.multicam import MultiCamDataset
from flow_grpo.data.video_io import video_size
from flow_grpo.judging.evaluate import held_out_indices
from flow_grpo.maths.keys import key
from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.transformers import load_transformer
from flow_grpo.records import Guidance
from flow_grpo.run import starts
from flow_grpo.settings.loading import load_config, to_dict
from tests.command import command
from tests.refusals import refusal
from tools import evaluate
from tools.evaluation import videos
from tools.generate import generate

ROOT = Path(__file__).parents[2]
FRAMES, COUNT = 5, 3


def words(world: Path, out: Path, *more: str, **knobs: object) -> list[str]:
    small = {"data.root": world, "data.tiny_world": "unit_test", "eval.num_conditions": COUNT, "eval.videos": 0}
    small |= {"eval.num_steps": 2, "model.path": ROOT / "assets" / "tiny_recam", "device": "cpu"}
    return [*command(small, **knobs), "--out", str(out), "--workers", "0", *more]


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """Have videos of the smallest world taken, which are too small for structure from motion."""
    monkeypatch.setattr(starts, "LEAST_ROWS", 1)


def test_the_generated_conditions_are_those_of_a_runs_evaluations(world, tmp_path, monkeypatch):
    """A run's evaluation seeds noise of condition i with gid i and this seed; videos are too small to measure."""
    asked = []

    def recorded(policy, condition, sigmas, seed):
        asked.append((condition.index, condition.gid, seed))
        return generate(policy, condition, sigmas, seed)

    monkeypatch.setattr(videos, "generate", recorded)
    assert evaluate.main(words(world, tmp_path)) == 0
    dataset = MultiCamDataset(world, "val", (FRAMES, 24, 32), prompt="", reference="source")
    conditions = [dataset.condition(index) for index in held_out_indices(dataset, COUNT)]
    cameras = json.loads((tmp_path / videos.CAMERAS).read_text())
    assert len(cameras) == len(list((tmp_path / videos.VIDEOS).iterdir())) == COUNT
    for condition, (name, entry) in zip(conditions, cameras.items(), strict=True):
        assert name.startswith(f"{condition.index:05d}_") and f"_to_{condition.target_camera}.mp4" in name
        assert torch.equal(torch.tensor(entry["poses"], dtype=torch.float64), condition.target_poses)
        assert entry["focal_px"] == float(condition.intrinsics[0]) and entry["shares_estimator"] is False
        assert entry["source"] == f"{condition.scene}/{condition.source_camera}"
        assert video_size(tmp_path / videos.VIDEOS / name) == (FRAMES, 24, 32)
    assert asked == [(condition.index, condition.index, key("eval", "noise")) for condition in conditions]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert [row["registered"] for row in metrics["rows"]] == [False] * COUNT
    assert {row["cause"] for row in metrics["rows"]} == {"0 of 5 frames registered, needs half and 3"}
    assert metrics["summary"]["failure_rate"] == 1 and metrics["summary"]["metrics"] == {}
    assert metrics["summary"]["estimator_faults"] == 0 and metrics["summary"]["shares_estimator"] == 0
    assert f"| all | {COUNT} | {COUNT} (100%) | 0% |" in (tmp_path / "summary.md").read_text()


def test_a_run_s_conditions_are_generated_before_and_after_training(world, tmp_path, capsys):
    run, out = tmp_path / "first", tmp_path / "out"
    given = words(world, out, eval__num_conditions=2)
    config = load_config(given[1], [word for word in given if word.startswith("--config.")])
    starts.record(run, config, "config/grpo.py:tiny_recam", checkpoint=None, epoch=0, ranks=1, device="cpu", served={})
    starts.begin(run)
    transformer = load_transformer(ReCamTransformer3DModel, ROOT / "assets" / "tiny_recam" / "transformer")
    transformer.proj_out.weight.data *= 1.05
    transformer.save_pretrained(run / "adapter")
    asked = ["--run", str(run), "--out", str(out), "--workers", "0", "--no-plots"]
    assert evaluate.main([*asked, "--config.eval.num_steps", "1"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"2 held-out conditions in {out / videos.VIDEOS}, {run / 'adapter'}"
    assert said[1] == "generating the 2 that are missing"
    assert f"2 held-out conditions in {out / 'before' / videos.VIDEOS}, without an adapter" in said
    assert "measuring 2 videos, and 2 before training" in said
    after, before = (sorted((place / videos.VIDEOS).iterdir()) for place in (out, out / "before"))
    assert [film.name for film in after] == [film.name for film in before]
    assert all(one.read_bytes() != other.read_bytes() for one, other in zip(after, before, strict=True))
    record = json.loads((out / videos.RECORD).read_text())["settings"]
    assert (record["eval"]["num_steps"], record["eval"]["num_conditions"]) == (1, 2)


def test_videos_are_sampled_with_the_evaluation_s_guidance(world, tmp_path, monkeypatch):
    asked, made = [], videos.adapted_policy
    monkeypatch.setattr(videos, "adapted_policy", lambda *given: (asked.extend(given), made(*given))[1])
    assert evaluate.main(words(world, tmp_path, eval__guidance_scale=3, eval__negative_prompt="dark")) == 0
    assert Guidance(3.0, "dark") in asked


def test_a_second_call_generates_missing_videos_and_none_among_other_ones(world, tmp_path, monkeypatch, capsys):
    evaluate.main(words(world, tmp_path))
    films = sorted((tmp_path / videos.VIDEOS).iterdir())
    before = [film.read_bytes() for film in films]
    with monkeypatch.context() as patch:
        patch.setattr(videos, "generate", None)
        assert evaluate.main(words(world, tmp_path)) == 0
    films[1].unlink()
    assert evaluate.main(words(world, tmp_path)) == 0
    assert [film.read_bytes() for film in films] == before
    capsys.readouterr()
    for given in (words(world, tmp_path, eval__num_steps=3), words(world, tmp_path, sample__guidance_scale=2)):
        assert evaluate.main(given) == 2
        assert "holds videos of another recipe, adapter or origin" in capsys.readouterr().err
    (tmp_path / videos.RECORD).unlink()
    assert evaluate.main(words(world, tmp_path)) == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--videos", "x"], "got --config and --videos, must be one of"),
        (["--adapter", "nowhere"], "--adapter nowhere is no folder"),
        (["--config.eval.num_conditions=1000"], "eval.num_conditions=1000 must be within 1.."),
        (["--config.model.path=nowhere"], "model.path 'nowhere'"),
    ],
)
def test_unusable_arguments_are_one_line(world, tmp_path, capsys, more, message):
    assert message in refusal(capsys, evaluate.main, [*words(world, tmp_path / "out"), *more])
    assert not (tmp_path / "out" / videos.VIDEOS).exists()


@pytest.mark.parametrize("of", [[], ["--checkpoint"], ["--run"]])
def test_videos_too_small_to_measure_are_not_made(world, tmp_path, capsys, monkeypatch, of):
    monkeypatch.setattr(starts, "LEAST_ROWS", 96)
    given = words(world, tmp_path / "out")
    if of:
        folder = tmp_path / "run/checkpoints/checkpoint_000001"
        folder.mkdir(parents=True)
        (tmp_path / "run" / starts.CONFIG).write_text(json.dumps(to_dict(load_config(given[1], given[2:-4]))))
        given = [*of, str(folder if of == ["--checkpoint"] else tmp_path / "run"), "--out", str(tmp_path / "out")]
    assert "24 rows high, must be at least 96" in refusal(capsys, evaluate.main, given)
    assert not (tmp_path / "out").exists()


def test_a_scene_without_a_focal_length_needs_one_from_outside(world, tmp_path, capsys):
    """The published held-out scene is such a one."""
    root = tmp_path / "world"
    shutil.copytree(world, root)
    scene = next((root / "val").glob("*/*"))
    scene.rename(root / "val" / "10basic_trajectories")
    scene.parent.rmdir()
    given = words(root, tmp_path / "out", data__tiny_world="")
    said = "10basic_trajectories has no known focal length: give that of the videos with --focal-px"
    assert said in refusal(capsys, evaluate.main, given)
    assert evaluate.main([*given, "--focal-px", "28"]) == 0
    assert {row["focal_px"] for row in json.loads((tmp_path / "out" / "metrics.json").read_text())["rows"]} == {28.0}
