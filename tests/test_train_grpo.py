"""train_grpo.py from recipe to adapter, on a random tiny model and a rendered tiny world."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import train_grpo
from flow_grpo.cost.plan import make_plan
from flow_grpo.data.video_io import read_video
from flow_grpo.judging.evaluate import Evaluator
from flow_grpo.maths.poses import PRESETS
from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.transformers import load_transformer
from flow_grpo.reporting.drawing import plots
from flow_grpo.reporting.metric_names import OUTSIDE_EPOCHS, metric_of
from flow_grpo.rewards import target_view
from flow_grpo.run.assemble import assemble
from flow_grpo.run.command_line import read_command_line
from flow_grpo.run.trainer import Trainer
from flow_grpo.runtime.checkpoints import checkpoint, state_files
from flow_grpo.runtime.checkpoints.state_files import join_shards
from flow_grpo.runtime.ranks.process_group import InputError, World
from flow_grpo.runtime.ranks.start_up import raise_on_all_ranks
from flow_grpo.runtime.video_file import write_video
from tests.command import command
from tests.tiny_models import make_tiny_folder
from tests.untuned import UNTUNED
from tests.workers import already_met, run_ranks

ROOT = Path(__file__).parents[1]
SMALL = UNTUNED | {
    "num_epochs": 2,
    "device": "cpu",
    "max_minutes": 0,
    "log_videos_every": 0,
    "trackers": "",
    "device_tflops": 1,  # or every run measures it
    "data.tiny_world": "unit_test",
    "data.tune_scenes": 0,
    "data.num_frames": 5,
    "sample.k": 4,
    "sample.train_batch_size": 4,
    "sample.num_batches_per_epoch": 2,
    "sample.num_steps": 5,
    "sample.sde_steps": "0,1,2,3",
    "model.boundary_ratio": 0.55,  # below the last of them
    "train.batch_size": 4,
    "reward.weights": "target_view=1,motion_mag=1",
    "eval.every": 0,
    "eval.num_conditions": 2,
    "eval.num_steps": 2,
    "eval.gold": "",
    "eval.videos": 0,
    "eval.signal_groups": 0,
    "checkpoint.every": 1,
}
# Of the runs on one rank and on two that are compared: half a batch on each of two ranks.
ON_ONE = {"sample__num_batches_per_epoch": 1, "train__kl_coef": 0.01, "train__ema_decay": 0.5}
ON_TWO = ON_ONE | {"sample__train_batch_size": 2, "train__batch_size": 2}


@pytest.fixture(autouse=True)
def without_curves(request, monkeypatch):
    """Drawing costs more than these runs; the first test draws."""
    if "leaves_summary" not in request.node.name:
        monkeypatch.setattr(plots, "draw_curves", lambda rows, path, **_: None)


@pytest.fixture(scope="module")
def places(tmp_path_factory, world) -> dict[str, str]:
    return {"model.path": make_tiny_folder(tmp_path_factory.mktemp("line") / "model"), "data.root": str(world)}


def words(places: dict[str, str], output: Path, recipe: str = "tiny_recam", **changes) -> list[str]:
    return command({**SMALL, **places, "output_root": output, "run_name": "run"}, recipe=recipe, **changes)


@pytest.fixture(scope="module")
def made(places, tmp_path_factory) -> Callable[..., Path]:
    """Return how to make a run with some changes and ranks: once each, and not to be changed."""
    runs: dict[str, Path] = {}

    def make(ranks: int = 1, **changes: object) -> Path:
        name = f"{ranks} {sorted(changes.items())}"
        if name not in runs:
            root = tmp_path_factory.mktemp("made")
            given = words(places, root, **changes)
            with mock.patch.object(plots, "draw_curves"):
                codes = [train_grpo.main(given)] if ranks == 1 else run_ranks(_train, ranks, given)
            assert codes == [0] * ranks
            runs[name] = root / "run"
        return runs[name]

    return make


def as_after(epoch: int, run: Path, root: Path) -> Path:
    """Copy a run, as if it had been killed after an epoch, to a folder of runs, which is returned."""
    copy = Path(shutil.copytree(run, root / "run"))
    for path in checkpoint.published(copy / "checkpoints"):
        if path.name > f"checkpoint_{epoch:06d}":
            shutil.rmtree(path)
    shutil.rmtree(copy / "adapter")
    for file in (copy / "summary.json", copy / "metrics.csv"):
        file.unlink()
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines = [line for line in lines if json.loads(line)["step"] <= epoch]
    (copy / "metrics.jsonl").write_text("".join(lines))
    return root


def newest(run: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the newest checkpoint by path."""
    return state_files.flatten(state_files.read(checkpoint.published(run / "checkpoints")[-1] / "state"))[0]


def assert_equal_state(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)  # a reward without a value is NaN


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_summary_metrics_videos_checkpoints_and_an_adapter(places, tmp_path, capsys):
    begun = time.perf_counter()
    shown = {"log_videos_every": 2, "eval__videos": 1, "eval__num_conditions": 4, "eval__signal_groups": 1}
    assert train_grpo.main(words(places, tmp_path, eval__every=1, eval__gold="room_pose", **shown)) == 0
    wall, run = time.perf_counter() - begun, tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary) == {"verdict", "before", "after", "floor", "measured_on", "train_seconds", "ended_by"}
    for name in ("eval/target_view_psnr_db", "eval/trans_err_m", "eval/rot_err_deg"):
        assert {name} <= set(summary["before"]) & set(summary["after"])
    groups = {name.partition("/")[0] for row in metrics_of(run) for name in row if "/" in name}
    by_camera = {"reward_by_camera", "eval_by_camera"}
    assert groups == by_camera | {"reward", "policy", "dyn", "eval", "eval_floor", "fixed", "train", "time", "system"}
    logged = {name for row in metrics_of(run) for name in row} - {"step"}
    unknown = (None, "reward/<reward>_<name>")
    assert not [name for name in logged if getattr(metric_of(name), "name", None) in unknown]
    spent = sum(row.get(f"time/{name}_s", 0.0) for row in metrics_of(run) for name in ("epoch", *OUTSIDE_EPOCHS))
    assert spent == pytest.approx(wall, rel=0.02)
    cameras = {name.split("/")[1] for row in metrics_of(run) for name in row if name.startswith("reward_by_camera/")}
    assert cameras and cameras <= set(PRESETS)
    names = [path.name for path in sorted((run / "videos").glob("*.mp4"))]
    kinds = [name.partition("_val")[0].partition("_train-")[0] for name in names]
    assert kinds == [*(f"eval_00000{step}" for step in range(3)), "group_000002", "train_000002"]
    lines = [json.loads(text) for text in (run / "videos" / "index.jsonl").read_text().splitlines()]
    assert sorted(line["file"] for line in lines) == names
    panels = {(line["kind"], line["step"]): [box["name"] for box in line["panels"]] for line in lines}
    assert panels["eval", 0] == ["source", "base", "true view"] and panels["train", 2] == ["source", "now", "true view"]
    assert panels["eval", 1] == panels["eval", 2] == ["source", "base", "now", "true view"]
    assert [len(line["paths"]["estimated"]) for line in lines if line["kind"] == "eval"] == [5] * 3
    pictures = ("steps.png", "curves.png", "filmstrip.png", "cameras.png")
    assert all((run / name).stat().st_size > 1000 for name in pictures) and len(list((run / "paths").iterdir())) == 1
    assert len(checkpoint.published(run / "checkpoints")) == 2 and list((run / "adapter").iterdir())
    assert "held-out metrics" in capsys.readouterr().out


def test_what_the_backward_recomputes_changes_no_number(made, capsys):
    runs = {"none": made(num_epochs=1)}
    runs |= {mode: made(num_epochs=1, model__checkpointing=mode) for mode in ("keep_attention", "auto")}
    assert "model.checkpointing=auto: none, planned " in capsys.readouterr().out
    states = [newest(run) for run in runs.values()]
    for state in states[1:]:
        assert_equal_state(states[0], state)
    rows = {mode: metrics_of(run) for mode, run in runs.items()}
    work = {m: next(r["system/forward_equivalents"] for r in rows[m] if "train/grad_norm" in r) for m in runs}
    assert work["none"] == work["auto"] < work["keep_attention"] < 2 * work["none"]
    # A resume on another device decides anew.
    assert json.loads((runs["auto"] / "config.json").read_text())["model"]["checkpointing"] == "auto"


def test_a_resumed_run_equals_the_uninterrupted_one_bit_by_bit(places, tmp_path, made):
    rules = {"reward__schedules": "motion_mag=0:1,2:0.5", "reward__gates": "target_view=motion_mag:-0.5"}
    given = rules | {"train__updates_per_epoch": 2, "train__guard": True, "train__warmup_steps": 4, "num_epochs": 3}
    uninterrupted = made(**given)
    assert train_grpo.main(words(places, as_after(1, uninterrupted, tmp_path), resume="auto", **given)) == 0
    whole, parts = newest(uninterrupted), newest(tmp_path / "run")
    assert_equal_state(whole, parts)
    moments = [value for name, value in whole.items() if name.endswith("exp_avg_sq")]
    assert moments and all(value.abs().max() > 0 for value in moments)
    assert any(name.startswith("learned/ema/") for name in whole)
    names = ("reward/mean", "reward/advantage_abs", "reward/motion_mag_weight", "reward/target_view_gated")
    rewards = [
        {row["step"]: [row[name] for name in names] for row in metrics_of(run) if names[0] in row}
        for run in (uninterrupted, tmp_path / "run")
    ]
    assert rewards[0] == rewards[1]
    assert [weight for _, _, weight, _ in rewards[0].values()] == [1.0, 0.75, 0.5]
    assert any(0 < share < 1 for *_, share in rewards[0].values())


def test_learning_on_the_forward_process_from_deterministic_samples_resumes_bit_by_bit(places, tmp_path, made):
    given = {"train__objective": "forward", "sample__sde": "ode", "train__updates_per_epoch": 2}
    whole = made(**given)
    assert train_grpo.main(words(places, as_after(1, whole, tmp_path), resume="auto", **given)) == 0
    assert_equal_state(newest(whole), newest(tmp_path / "run"))
    rows = [row for row in metrics_of(whole) if "policy/ratio_mean" in row]
    assert all(row["policy/ratio_first_max_abs_log"] == 0 and row["train/grad_norm"] > 0 for row in rows)


def test_scoring_concurrently_with_the_rollouts_changes_no_number(made):
    rewards = []
    for run, overlapped in ((made(), True), (made(reward__overlap="false"), False)):
        rows = [row for row in metrics_of(run) if "reward/mean" in row]
        assert rows and all(("time/score_hidden_s" in row) == overlapped for row in rows)
        rewards.append([{name: value for name, value in row.items() if name.startswith("reward/")} for row in rows])
    assert rewards[0] == rewards[1]
    assert_equal_state(newest(made()), newest(made(reward__overlap="false")))


def test_a_run_stopped_by_a_failing_reward_resumes_to_the_weights_of_a_whole_one(places, tmp_path, made, capsys):
    whole = made()
    calls, score = [], target_view.TargetView.__call__

    def breaking(self, videos, conditions):
        calls.append(len(videos))
        if len(calls) > 4:
            raise ConnectionError("nobody there")
        return score(self, videos, conditions)

    with mock.patch.object(target_view.TargetView, "__call__", breaking):
        assert train_grpo.main(words(places, tmp_path)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert "reward target_view failed to measure" in line and "ConnectionError: nobody there" in line
    assert train_grpo.main(words(places, tmp_path, resume="auto")) == 0
    assert_equal_state(newest(whole), newest(tmp_path / "run"))


def test_a_run_whose_last_evaluation_failed_can_be_resumed(places, tmp_path, made, capsys):
    shutil.copytree(made(num_epochs=1), tmp_path / "run")
    summary, broken = tmp_path / "run" / "summary.json", InputError("video x.mp4 cannot be read")
    assert summary.is_file()
    with mock.patch.object(Evaluator, "run", side_effect=broken):
        assert train_grpo.main(words(places, tmp_path, resume="auto")) == 2
    assert not summary.exists() and len(checkpoint.published(tmp_path / "run" / "checkpoints")) == 2
    assert [line for line in capsys.readouterr().err.splitlines() if "x.mp4" in line] == [f"error: {broken}"]
    assert train_grpo.main(words(places, tmp_path, resume="auto")) == 0
    assert summary.is_file()


def test_a_crash_in_the_last_evaluation_does_not_lose_the_checkpoint_that_is_being_written(places, tmp_path):
    write, evaluate, evaluated = state_files.write, Evaluator.run, []

    def slowly(*args):
        time.sleep(1)
        write(*args)

    def once(*args):
        if evaluated:
            raise RuntimeError("a crash")
        evaluated.append(True)
        return evaluate(*args)

    given = words(places, tmp_path, num_epochs=1, checkpoint__every=5, eval__fixed_conditions=0)
    with (
        mock.patch.object(Evaluator, "run", once),
        mock.patch.object(state_files, "write", slowly),
        pytest.raises(RuntimeError, match="a crash"),
    ):
        train_grpo.main(given)
    assert [path.name for path in checkpoint.published(tmp_path / "run" / "checkpoints")] == ["checkpoint_000001"]


def test_a_run_out_of_minutes_saves_and_writes_its_summary_and_one_without_epochs_its_configuration(
    places, tmp_path, capsys
):
    assert train_grpo.main(words(places, tmp_path, num_epochs=50, max_minutes=1e-4)) == 0
    assert len(checkpoint.published(tmp_path / "run" / "checkpoints")) == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ended_by"] == "max_minutes"
    said = capsys.readouterr().out
    assert "ended by max_minutes after epoch 1 of 50\n" in said
    (further,) = [line for line in said.splitlines() if "train further:" in line]
    assert "--config.max_minutes=0" in further and "num_epochs" not in further  # epochs are left
    assert train_grpo.main(words(places, tmp_path, num_epochs=0, run_name="none")) == 0
    assert json.loads((tmp_path / "none" / "config.json").read_text())["num_epochs"] == 0


def _train(world: World, given: list[str]) -> int:
    with already_met(train_grpo, world), mock.patch.object(plots, "draw_curves"):
        return train_grpo.main(given)


def test_policy_raise_saves_and_stops_with_one_line(places, tmp_path, capsys):
    """The random model scores the same everywhere, so the first epoch has no signal."""
    given = {"dynamic_sampling__enabled": "true", "reward__weights": "target_view=1"}
    assert train_grpo.main(words(places, tmp_path, **given, dynamic_sampling__policy="raise")) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert "only 0 of 8 samples lie in groups that carry a signal after 3 resample(s)" in line


def test_scenes_of_two_video_sizes_train_in_one_run(places, tmp_path):
    world = tmp_path / "world"
    shutil.copytree(places["data.root"], world)
    for file in (world / "train").glob("*/scene2/videos/*.mp4"):
        write_video(file, read_video(file, 5).transpose(2, 3), lossless=True)
    changes = {"data__root": world, "data__buckets": "5x24x32,5x32x24", "data__tiny_world": "", "num_epochs": 3}
    changes |= {"sample__train_batch_size": 2, "train__batch_size": 2, "sample__layout": "shuffled"}
    changes |= {"dynamic_sampling__enabled": "true", "dynamic_sampling__policy": "fill_flat"}
    changes |= {"reward__weights": "motion_mag=1", "reward__flat_eps": 0.045}
    assert run_ranks(_train, 2, words(places, tmp_path, **changes)) == [0, 0]
    rows = [row for row in metrics_of(tmp_path / "run") if "policy/ratio_mean" in row]
    assert len(rows) == 3 and all(row["train/grad_norm"] > 0 for row in rows)
    assert sum(row["dyn/resample_rounds"] for row in rows) > 0
    assert all(row["policy/ratio_first_max_abs_log"] < 1e-5 for row in rows)


@pytest.mark.slow
def test_8_ranks_of_the_dapo_twin_resample_and_fall_back(tmp_path):
    """The trained model on its own tiny world, with a coarse floor."""
    knobs = {
        "num_epochs": 3,
        "output_root": str(tmp_path),
        "run_name": "run",
        "trackers": "",
        "eval.num_conditions": 8,
        "eval.num_steps": 2,
        "eval.gold": "",
        "eval.videos": 1,
        "reward.flat_eps": 0.15,  # coarser than the recipe: pools stay short
        "doctor": "off",
        "data.root": str(tmp_path / "world"),
    }
    assert run_ranks(_train, 8, command(knobs, recipe="my_recam_8npu_dapo_tiny")) == [0] * 8
    rows = [row for row in metrics_of(tmp_path / "run") if "policy/ratio_mean" in row]
    assert sum(row["dyn/resample_rounds"] for row in rows) >= 1
    assert sum(row["dyn/fallback"] for row in rows) >= 1
    assert all(row["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6) for row in rows)
    assert rows[-1]["dyn/fallback_rate"] == sum(row["dyn/fallback"] for row in rows) / 3
    for row in rows:
        assert row["dyn/fallback"] == (row["dyn/pool_samples"] < 32)


def test_a_resumed_run_with_dynamic_sampling_equals_the_uninterrupted_one(places, tmp_path, made):
    """Resampling advances the sampler by more than one round; the checkpoint holds its position."""
    pooled = {"dynamic_sampling__enabled": "true", "reward__weights": "motion_mag=1", "dynamic_sampling__policy": "pad"}
    # A floor that about half of the random model's groups pass.
    pooled |= {"reward__flat_eps": 0.045, "train__batch_size": 2, "num_epochs": 3}
    whole = made(**pooled)
    assert train_grpo.main(words(places, as_after(1, whole, tmp_path), resume="auto", **pooled)) == 0
    assert_equal_state(newest(whole), newest(tmp_path / "run"))
    names = ("dyn/resample_rounds", "dyn/pool_samples", "dyn/fallback_rate", "dyn/padded_samples")
    seen, resumed = (
        [[row[name] for name in names] for row in metrics_of(run) if "dyn/fallback" in row]
        for run in (whole, tmp_path / "run")
    )
    assert seen == resumed and len(seen) == 3
    assert sum(rounds for rounds, *_ in seen) > 0 and any(valid >= 4 for _, valid, *_ in seen)


def learned(run: Path) -> dict[str, torch.Tensor]:
    """Return weights, moments and average of the newest checkpoint by path, joined from shards."""
    path = checkpoint.published(run / "checkpoints")[-1]
    state = state_files.read(path / "state")
    stems = sorted(file.with_suffix("") for file in path.glob("rank_*.json"))
    whole = state["learned"] if "learned" in state else join_shards(stems, "learned", lambda _, tensor: tensor)
    return state_files.flatten(whole)[0]


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_two_ranks_make_the_run_of_one(made, sharding):
    runs = made(**ON_ONE), made(2, **ON_TWO, train__sharding=sharding)
    one, two = map(learned, runs)
    assert set(one) == set(two)
    for name in (name for name in one if name.endswith("exp_avg_sq")):
        assert one[name].max() > 0
        torch.testing.assert_close(two[name], one[name], rtol=1e-2, atol=1e-3 * float(one[name].max()))
    for name in (name for name in one if name.startswith(("trained/", "ema/"))):
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=1e-4)
    saved = [load_transformer(ReCamTransformer3DModel, run / "adapter").state_dict() for run in runs]
    assert all(torch.allclose(saved[0][name], saved[1][name], rtol=0, atol=1e-4) for name in saved[0])


def test_a_run_resumes_on_another_number_of_ranks_with_the_same_draws(places, tmp_path, made):
    whole, of_two = made(**ON_ONE), made(2, **ON_TWO, train__sharding="ddp")
    on_one = words(places, as_after(1, of_two, tmp_path / "from_two"), resume="auto", **ON_ONE)
    assert train_grpo.main(on_one) == 0
    on_two = words(places, as_after(1, whole, tmp_path / "from_one"), resume="auto", **ON_TWO)
    assert run_ranks(_train, 2, on_two) == [0, 0]
    runs = whole, tmp_path / "from_two" / "run", tmp_path / "from_one" / "run"
    expected, *others = map(learned, runs)
    for other in others:
        assert set(other) == set(expected)
        for name in (name for name in expected if name.startswith(("trained/", "ema/"))):
            torch.testing.assert_close(other[name], expected[name], rtol=0, atol=2e-4)
    # The draws are the same: other conditions, copies or noise would give other rewards at once.
    rewards = [[row["reward/mean"] for row in metrics_of(run) if "reward/mean" in row] for run in runs]
    assert len(rewards[0]) == 2
    assert rewards[1] == pytest.approx(rewards[0], abs=1e-3) and rewards[2] == pytest.approx(rewards[0], abs=1e-3)


def test_a_sharded_run_resumes_bit_by_bit(places, tmp_path, made):
    given = ON_TWO | {"train__sharding": "fsdp2"}
    whole = made(2, **given)
    assert run_ranks(_train, 2, words(places, as_after(1, whole, tmp_path), resume="auto", **given)) == [0, 0]
    assert_equal_state(learned(whole), learned(tmp_path / "run"))


def test_a_run_that_starts_from_another_s_checkpoint_saves_its_own(places, tmp_path, made, capsys):
    (first,) = checkpoint.published(made(num_epochs=1) / "checkpoints")
    capsys.readouterr()
    assert train_grpo.main(words(places, tmp_path, num_epochs=1, resume=str(first), run_name="other")) == 0
    assert [path.name for path in checkpoint.published(tmp_path / "other" / "checkpoints")] == [first.name]
    said = capsys.readouterr().out
    assert f"resumes from {first}, saved after epoch 1 of 1: trained weights, optimizer," in said


def test_a_run_does_not_go_on_with_another_codec(places, tmp_path, made, capsys):
    root = as_after(1, made(), tmp_path)
    other = Path(shutil.copytree(places["model.path"], tmp_path / "model"))
    settings = json.loads((other / "vae" / "config.json").read_text())
    settings["latents_std"] = [2 * value for value in settings["latents_std"]]
    (other / "vae" / "config.json").write_text(json.dumps(settings))
    assert train_grpo.main(words(places | {"model.path": str(other)}, root, resume="auto")) == 2
    assert re.search(r"belongs to another run: vae is '\w+' there and '\w+' here;", capsys.readouterr().err)


def test_a_run_goes_on_with_its_own_configuration_and_evaluation(places, tmp_path, capsys):
    assert train_grpo.main(words(places, tmp_path, num_epochs=1, train__learning_rate=2e-5)) == 0
    run = tmp_path / "run"
    before = (run / "config.json").read_bytes()
    again = ["--config", f"{ROOT}/config/grpo.py:tiny_recam", f"--config.output_root={tmp_path}"]
    again += ["--config.run_name=run", "--config.resume=auto"]
    capsys.readouterr()
    assert train_grpo.main([*again, "--config.eval.num_conditions=1", "--config.num_epochs=2"]) == 2
    assert "config.eval.num_conditions: got 1, must be" in capsys.readouterr().err
    assert (run / "config.json").read_bytes() == before and len(list((run / "starts").iterdir())) == 1
    assert train_grpo.main([*again, "--config.num_epochs=2"]) == 0
    said = capsys.readouterr().out
    assert "\nrewards and their weights: " in said and "motion_mag 1 (not in the recipe)" in said
    assert "\n  num_epochs: 1 -> 2\n" in said and "resumes from " in said and "saved after epoch 1 of 2\n" in said
    now, start = (json.loads((run / name).read_text()) for name in ("config.json", "starts/002.json"))
    assert now == start["config"] and now["train"]["learning_rate"] == 2e-5
    assert [row["train/learning_rate"] for row in metrics_of(run) if "train/learning_rate" in row] == [2e-5, 2e-5]
    assert train_grpo.main([*again, "--config.train.learning_rate=1e-3"]) == 0  # trains nothing, so it decides nothing
    assert "nothing left to train after epoch 2, a larger --config.num_epochs goes on: " in capsys.readouterr().out
    assert json.loads((run / "config.json").read_text()) == now


def test_the_curves_are_told_which_metrics_decide_and_which_way_they_should_go(places, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "draw_curves", lambda rows, path, title, **told: drawn.append(told))
    scheduled = {"reward__weights": "target_view=0,motion_mag=1", "reward__schedules": "target_view=0:0,1:1"}
    config, recipe = read_command_line(words(places, tmp_path, **scheduled))
    trainer = assemble(config, recipe, torch.device("cpu"), World())
    trainer.tracker.log({"eval/trans_err_m": 0.5}, 0)
    trainer.tracker.close()
    direction, deciding = drawn[0]["direction"], drawn[0]["deciding"]
    assert [direction(f"eval/{name}") for name in ("trans_err_m", "motion_mag", "residual")] == [-1, 1, -1]
    # A reward that a schedule trains decides nothing.
    assert deciding(["eval/target_view", "eval/motion_mag", "eval/trans_err_m"]) == ["eval/trans_err_m"]


def test_a_file_that_may_not_be_read_is_a_refusal_with_its_name():
    said = r"^\[Errno 13\] Permission denied: 'a.mp4'; see that the file or folder can be used$"
    with pytest.raises(ValueError, match=said), raise_on_all_ranks(World()):
        raise PermissionError(13, "Permission denied", "a.mp4")


def test_the_time_left_counts_the_minutes_that_earlier_starts_of_a_run_have_used(places, tmp_path, made):
    shutil.copytree(made(num_epochs=1), tmp_path / "run")
    again = words(places, tmp_path, resume="auto", max_minutes=2)
    config, recipe = read_command_line(again)
    trainer = assemble(config, recipe, torch.device("cpu"), World())
    used = trainer.state.train_seconds
    assert used > 0 and trainer.progress._seconds == 120 - used


def _train_into_a_broken_video(world: World, given: list[str], data: str) -> tuple[int, str]:
    broken = Path(data)
    if world.is_main:
        videos = sorted((broken / "train").rglob("cam0*.mp4"))
        videos[0].write_bytes(videos[0].read_bytes()[:100])
    world.broadcast_text("")
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = _train(world, given)
    return code, said.getvalue()


def test_under_fsdp2_a_broken_video_on_one_rank_stops_all_ranks(places, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(places["data.root"], data)
    changes = {"data__root": data, "sample__k": 2, "sample__train_batch_size": 1, "train__batch_size": 1}
    changes |= {"train__sharding": "fsdp2", "num_epochs": 30, "sample__layout": "contiguous", "data__num_workers": 0}
    changes |= {"sample__num_batches_per_epoch": 2}
    ends = run_ranks(_train_into_a_broken_video, 2, words(places, tmp_path, **changes), str(data))
    assert [code for code, _ in ends] == [2, 2]
    (line,) = [line for _, said in ends for line in said.splitlines() if line.startswith("error: ")]
    assert "error: video" in line and "fetch or encode it again" in line


def test_torchrun_exits_with_one_line_without_the_data(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "train_grpo.py"]
    command += ["--config", "config/grpo.py:my_recam_8npu", "--config.device=cpu", f"--config.output_root={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "dataset folder data/MultiCamVideo-Dataset does not exist; set data.root" in line
    assert "AND model.path 'models/recammaster-wan2.1-1.3b' does not exist" in line  # what is missing is told at once
    assert "exitcode  : 2" in done.stderr


def test_torchrun_says_why_a_knob_is_refused_also_where_rank_0_is_slow(tmp_path):
    (tmp_path / "slow.py").write_text(
        f"import os, sys, time\nsys.path.insert(0, {str(ROOT)!r})\nimport train_grpo\n"
        "time.sleep(2 * (os.environ['RANK'] == '0'))\nsys.exit(train_grpo.main())\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(tmp_path / "slow.py")]
    command += ["--config", "config/grpo.py:tiny_recam", "--config.sample.k=0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "config.sample.k: got 0" in line and f"traceback : {line.removeprefix('error: ')}" in done.stderr


@pytest.mark.parametrize("calls", ["exact", "sparse"])
def test_work_is_counted_as_hooks_on_the_transformer_count_it_and_as_planned(places, tmp_path, monkeypatch, calls):
    rows = {"forward": 0, "backward": 0, "counting": False}

    def count(module, _, output):
        real = not isinstance(output[0], FakeTensor)  # operations are counted on fake ones
        if rows["counting"] and isinstance(module, ReCamTransformer3DModel) and real:
            rows["forward"] += len(output[0])
            if output[0].requires_grad:
                output[0].register_hook(lambda gradient: rows.update(backward=rows["backward"] + len(gradient)))

    train_epoch = Trainer.train_epoch

    def counted_epoch(*given):
        rows["counting"] = True
        train_epoch(*given)
        rows["counting"] = False

    monkeypatch.setattr(Trainer, "train_epoch", counted_epoch)
    changes = {"sample__num_batches_per_epoch": 4, "sample__guidance_scale": 2.0, "num_epochs": 1}
    changes |= {"sample__sde_window": 1, "sample__tail_steps": 2}
    changes |= {"sample__same_initial_noise": True, "sample__share_prefix": True}
    changes |= {"reward__weights": "target_view=1,target_psnr=1,exposure=1"}  # no group is flat
    changes |= {"device_tflops": 0.25, "sample__ode_calls": calls}
    hook = torch.nn.modules.module.register_module_forward_hook(count)
    try:
        assert train_grpo.main(words(places, tmp_path, doctor="off", **changes)) == 0
    finally:
        hook.remove()
    (row,) = [row for row in metrics_of(tmp_path / "run") if "system/forward_equivalents" in row]
    assert rows["backward"] == 2 * 4  # 4 groups, with and without prompt
    work = row["system/forward_equivalents"] + row["system/tail_forward_equivalents"]
    config, _ = read_command_line(words(places, tmp_path, **changes))
    planned = make_plan(config, 1, 1e12)
    assert 2 < planned.update_forwards < 3  # frozen weights have no gradient
    called = rows["forward"] + (planned.update_forwards - 1) * rows["backward"]
    assert (work == pytest.approx(called)) == (calls == "exact")
    assert ("tail/attention_kept" in row) == (calls == "sparse")
    near = 1e-6 if calls == "exact" else 0.01  # of prefixes of several lengths in one call more compute the source
    planned_work = planned.forward_equivalents_per_sample
    assert row["system/forward_equivalents_per_sample"] == pytest.approx(planned_work, rel=near)
    operations = work * planned.forward_tflop / 2  # planned with and without prompt
    assert row["system/tflops_per_device"] * row["time/epoch_s"] == pytest.approx(operations)
    assert row["system/mfu"] == pytest.approx(row["system/tflops_per_device"] / 0.25)
