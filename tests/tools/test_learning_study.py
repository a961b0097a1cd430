"""The learning study: what a record holds, what is trained again, and the generated part of its page."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from flow_grpo.maths.poses import preset_path
from flow_grpo.settings.checks import largest_weights
from flow_grpo.settings.loading import load_config
from tools import learning_study as study
from tools.study.scaled_recam import scaled

MEASURES = [*study.MEASURES, study.TRAVEL]
KINDS = {"labelled": "pan_left", "unlabelled": "far_arc_left", "unseen": "crane_up"}


@pytest.fixture
def places(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(study, "PAGE", tmp_path / "learning.md")
    monkeypatch.setattr(study, "PLOT", tmp_path / "learning.png")
    return tmp_path


def leave_run(folder: Path, error: float) -> None:
    """Write what a finished run of two epochs leaves: of six scenes a condition of each kind."""
    folder.mkdir(parents=True)
    rows = [
        {"step": 0} | {f"eval/{name}": 1.0 for name in MEASURES},
        {"step": 1, "time/epoch_s": 30.0, "system/forward_equivalents": 500.0, "train/items_per_s": 32.0},
        {"step": 2, "time/epoch_s": 60.0, "system/forward_equivalents": 1000.0}
        | {f"eval/{name}": error for name in MEASURES},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"verdict": {"overall": "better"}}))
    held_out = [
        {"scene": f"s{n}", "camera": kind, "preset": kind, "values": dict.fromkeys(MEASURES, error + n / 100)}
        for n in range(6)
        for kind in KINDS.values()
    ]
    (folder / "held_out.json").write_text(json.dumps({"before": [], "after": held_out}))


@pytest.fixture
def commands(places, monkeypatch):
    """Return the commands that the study runs; each leaves a run whose error depends on its variant."""
    ran = []

    def run(command, **_):
        ran.append(command)
        (name,) = re.findall(r"run.name=(\w+)", " ".join(command))
        kind, _, number = name.rpartition("_")
        error = {"rl": 0.5, "sft": 0.8}.get(kind, 1.0)
        if kind.startswith("constant_"):
            error = abs(int(kind.removeprefix("constant_")) - 120) + abs(int(number) - 135)
        leave_run(places / "out" / name, error)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(study.subprocess, "run", run)
    monkeypatch.setattr(study, "commit", lambda: "abc")
    return ran


@pytest.mark.parametrize("name", study.VARIANTS)
def test_every_variant_is_a_setting_that_works_and_in_the_rooms_without_true_views(name):
    variant = study.VARIANTS[name]
    words = [f"--config.{knob}={value}" for knob, value in variant.knobs.items()]
    weights = largest_weights(load_config(f"{study.ROOT}/config/grpo.py:{variant.recipe}", words))
    assert any(weights.get(name) for name in ("room_trans", "pose_trans"))
    assert variant.recipe in study.DEMO or not {"target_psnr", "target_view"} & {*weights}


def test_a_run_leaves_a_record_once_and_goes_on_from_its_checkpoint(places, commands):
    words = ["--only", "rl", "--seeds", "3", "--out", str(places / "out")]
    assert study.main(words) == 0
    (training,) = commands
    assert {"--config.resume=auto", "--config.run_name=rl_3", "--config.seed=3"} <= {*training}
    record = json.loads((places / "records" / "rl_3.json").read_text())
    assert [(point["epoch"], point["minutes"]) for point in record["curve"]] == [(0, 0), (2, 1.5)]
    assert record["forward_equivalents"] == 1000 and record["minutes"] == 1.5 and record["commit"] == "abc"
    assert len(record["rows"]) == 18 and record["rows"]["s1 far_arc_left"] == {"kind": "far_arc_left"} | dict.fromkeys(
        MEASURES, 0.51
    )
    commands.clear()
    assert study.main(words) == 0 and not commands


def test_an_epoch_has_as_many_samples_on_one_rank(places, commands):
    assert study.main(["--only", "rl", "twin", "--seeds", "3", "--ranks", "1", "--out", str(places / "out")]) == 0
    rl, twin = commands
    assert "--config.sample.num_batches_per_epoch=8" in rl
    assert "--config.sample.num_batches_per_epoch=4" in twin


def test_labels_come_first_and_count_and_the_constant_is_chosen_on_the_split_for_tuning(places, commands):
    names = ["bound", "sft_rl", "constant"]
    assert study.main(["--only", *names, "--seeds", "1", "--out", str(places / "out")]) == 0
    of_all, _, labels, then, *rest = commands
    assert "--config.data.tiny_world=furnished_all_labelled" in of_all
    assert "tools/finetune_recam.py" in labels and "--config.data.train_split=labelled" in labels
    assert "--config.data.tiny_world=furnished_labelled" in labels  # the demo's own world has no such split
    assert f"--config.model.path={places / 'out' / 'sft_rl_1_labels' / 'model'}" in then
    record = json.loads((places / "records" / "sft_rl_1.json").read_text())
    assert record["forward_equivalents"] == 1000 + 3 * study.VARIANTS["sft_rl"].labels
    assert record["minutes"] == round((90 + 10) / 60, 2)
    assert all("--config.eval.split=tune" in each for each in rest[:-1]) and len(rest) == 12
    assert "--config.model.kind=tools/study/scaled_recam.py:by_120_135" in rest[-1]


def test_a_run_that_failed_leaves_no_record_and_an_unknown_variant_is_one_line(places, monkeypatch, capsys):
    monkeypatch.setattr(study.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    assert study.main(["--only", "rl", "--seeds", "0", "--out", str(places / "out")]) == 1
    assert "rl_0.log" in capsys.readouterr().err and not list(places.glob("records/*"))
    assert study.main(["--only", "lr"]) == 2
    assert "--only: got 'lr', must be one of base" in capsys.readouterr().err


def test_the_report_replaces_only_its_own_part_and_marks_what_is_certain(places, commands):
    study.RECORDS.mkdir()
    assert study.main(["--only", "base", "sft", "rl", "--seeds", "0", "1", "--out", str(places / "out")]) == 0
    study.PAGE.write_text(f"above\n{study.BEGIN}\nstale\n{study.END}\nbelow\n")
    assert study.main(["--report"]) == 0
    text = study.PAGE.read_text()
    assert text.startswith(f"above\n{study.BEGIN}\n") and text.endswith(f"{study.END}\nbelow\n") and "stale" not in text
    assert text.count("| RL | **0.525** (0.525, 0.525) |") == 3  # a table for each group
    assert "| unseen | 1 | -0.300* (-36 %) [-0.300, -0.300] |" in text
    assert study.PLOT.stat().st_size > 10_000


def test_a_scaled_command_moves_and_turns_by_the_constants():
    path, told = preset_path("arc_left", 9), scaled(preset_path("arc_left", 9), 1.2, 0.5)
    assert told.allclose(preset_path("arc_left", 9, translation_scale=1.2, rotation_scale=0.5))
    assert scaled(path, 1.0, 1.0).allclose(path)
