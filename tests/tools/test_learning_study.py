"""The learning study: what a record holds, what is trained again, and the generated part of its page."""

import json
import subprocess

import pytest

from flow_grpo.settings.checks import largest_weights
from flow_grpo.settings.loading import load_config
from tools import learning_study as study
from tools.run_folder import read_run

MEASURES = list(study.MEASURES)


@pytest.fixture
def places(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(study, "PAGE", tmp_path / "learning.md")
    monkeypatch.setattr(study, "PLOT", tmp_path / "learning.png")
    return tmp_path


def leave_run(folder, *, errors: list[float], verdict: str = "mixed") -> None:
    """Write what a finished run of two epochs leaves; `errors` are the measures before, between and after."""
    (folder / "starts").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    start = {"time": "", "recipe": "", "ranks": 2, "device": "device cpu", "config": {}}
    (folder / "starts" / "001.json").write_text(json.dumps(start))
    rows = [
        {"step": 0} | dict.fromkeys(MEASURES, errors[0]),
        {"step": 1, "time/epoch_s": 30.0, "system/forward_equivalents": 500.0},
        {"step": 2, "time/epoch_s": 60.0, "system/forward_equivalents": 1000.0} | dict.fromkeys(MEASURES, 0.25),
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    after = dict.fromkeys(MEASURES, errors[-1]) | {f"{name}_ci95": [-0.9, -0.1] for name in MEASURES}
    by_camera = {"pan_left": {name: [errors[-1] - errors[0], -0.3, 0.1] for name in MEASURES}}
    summary = {"before": dict.fromkeys(MEASURES, errors[0]), "after": after, "change_by_camera": by_camera}
    summary |= {"verdict": {"overall": verdict, "in_words": ""}}
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize("name", study.VARIANTS)
def test_every_variant_is_a_setting_that_works_and_trains_psnr(name):
    variant = study.VARIANTS[name]
    words = [f"--config.{knob}={value}" for knob, value in variant.overrides.items()]
    config = load_config(f"{study.ROOT}/config/grpo.py:{variant.recipe}", words)
    assert largest_weights(config)["target_psnr"] > 0


def test_a_run_leaves_a_record_once_and_goes_on_from_its_checkpoint(places, monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command)
        if "train_grpo.py" in command:
            leave_run(places / "out" / "today_3", errors=[1.0, 0.5])
        return subprocess.CompletedProcess(command, 0, stdout="abc\n")

    monkeypatch.setattr(study.subprocess, "run", run)
    words = ["--only", "today", "--seeds", "3", "--out", str(places / "out")]
    assert study.main(words) == 0
    (training,) = [command for command in commands if "train_grpo.py" in command]
    assert "--config.resume=auto" in training and "--config.run_name=today_3" in training
    assert "--config.seed=3" in training and "--config.reward.weights=target_view=1,target_psnr=1" in training
    record = json.loads((places / "records" / "today_3.json").read_text())
    assert [point["epoch"] for point in record["curve"]] == [0, 2]
    place = {"epoch": 2, "forward_equivalents": 1000, "minutes": 1.5}
    assert record["curve"][1] == place | dict.fromkeys(MEASURES, 0.25)
    assert record["commit"] == "abc" and record["overrides"] == study.TODAY
    commands.clear()
    assert study.main(words) == 0 and not commands


def test_a_run_that_failed_leaves_no_record_and_an_unknown_variant_is_one_line(places, monkeypatch, capsys):
    monkeypatch.setattr(study.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    assert study.main(["--only", "today", "--seeds", "0", "--out", str(places / "out")]) == 1
    assert "today_0.log" in capsys.readouterr().err and not list(places.glob("records/*"))
    assert study.main(["--only", "todya"]) == 2
    assert "--only: got 'todya', must be one of today" in capsys.readouterr().err


def test_the_report_replaces_only_its_own_part_and_marks_what_is_certain(places, monkeypatch):
    monkeypatch.setattr(study, "BY_CAMERA", ("today",))
    study.RECORDS.mkdir()
    for seed, end, verdict in ((0, 0.8, "better"), (1, 0.6, "mixed"), (2, 0.6, "better")):
        folder = places / str(seed)
        leave_run(folder, errors=[1.0, end], verdict=verdict)
        record = {"variant": "today", "seed": seed} | study.outcome(read_run(folder))
        if seed == 0:
            record["before"].pop("eval/found_path_psnr_db")  # as in records of earlier versions
        (study.RECORDS / f"today_{seed}.json").write_text(json.dumps(record))
    study.PAGE.write_text(f"above\n{study.BEGIN}\nstale\n{study.END}\nbelow\n")
    assert study.main(["--report"]) == 0
    text = study.PAGE.read_text()
    assert text.startswith(f"above\n{study.BEGIN}\n") and text.endswith(f"{study.END}\nbelow\n") and "stale" not in text
    assert (
        "| the demo before this study | 0, 1, 2 | better ×2, mixed | **-0.333** (-0.200*, -0.400*, -0.400*) |" in text
    )
    assert "| **-0.3333** (-0.2000*, -0.4000*, -0.4000*) |" in text
    assert text.count("change of PSNR on the found path dB") == 1  # by camera, where both have it
    assert "| 1.0 | 1.5 |" in text
    assert "| pan_left | **-0.333** (-0.200, -0.400, -0.400) |" in text
    assert study.PLOT.stat().st_size > 10_000
