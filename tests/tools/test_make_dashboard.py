"""A run's metrics become sections and panels of a workspace, in a file and, where wandb can be reached, there."""

import json
import sys
from types import SimpleNamespace

import pytest

from tests.refusals import refusal
from tools.make_dashboard import dashboard, main

NAMES = (
    *("step", "reward/room_rot_mean", "reward/room_rot_group_range_p10", "reward/room_rot_group_range_p90"),
    *("eval/rot_err_deg", "eval_change/rot_err_deg", "eval_change/rot_err_deg_low", "eval_change/rot_err_deg_high"),
    *("eval_by_camera/arc_left/rot_err_deg", "eval_by_camera/pan_left/rot_err_deg", "train/bad_steps", "policy/mine"),
)


@pytest.fixture
def run(tmp_path):
    for number, name in enumerate(NAMES):
        with (tmp_path / "metrics.jsonl").open("a") as lines:
            lines.write(json.dumps({"step": number, name: 1.0}) + "\n")
    return tmp_path


def panels(sections):
    return {one["name"]: {panel["title"]: panel["metrics"] for panel in one["panels"]} for one in sections}


def test_panels_hold_what_belongs_together_in_sections_with_health_first():
    found = dashboard(NAMES)
    assert [one["name"] for one in found][:3] == ["health", "eval", "reward"]
    assert panels(found) == {
        "health": {"train/bad_steps, healthy: 0": ["train/bad_steps"]},
        "eval": {"eval/rot_err_deg, degrees": ["eval/rot_err_deg"]},
        "reward": {
            "reward/room_rot_group_range percentiles": [f"reward/room_rot_group_range_p{n}" for n in (10, 90)],
            "reward/room_rot_mean": ["reward/room_rot_mean"],
        },
        "train": {"train/bad_steps, count": ["train/bad_steps"]},
        "eval_change": {"eval_change/rot_err_deg": sorted(name for name in NAMES if name.startswith("eval_change/"))},
        "eval_by_camera": {"eval_by_camera: rot_err_deg": [n for n in NAMES if n.startswith("eval_by_camera/")]},
    }
    axes = {panel["x"] for one in found if one["name"].startswith("eval") for panel in one["panels"]}
    assert axes == {"eval/epoch"}


def test_the_file_of_a_run_is_what_is_saved_to_wandb(run, monkeypatch, capsys):
    saved = []

    class Workspace(SimpleNamespace):
        def save(self):
            saved.append(self)
            return SimpleNamespace(url="https://wandb.ai/me/mine?nw=1")

    workspaces = SimpleNamespace(Section=SimpleNamespace, Workspace=Workspace)
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", workspaces)
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", SimpleNamespace(LinePlot=SimpleNamespace))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert main([str(run)]) == 0
    assert main([str(run / "dashboard.json"), "--project=me/mine"]) == 0
    assert "saved to https://wandb.ai/me/mine?nw=1" in capsys.readouterr().out
    [workspace] = saved
    assert (workspace.entity, workspace.project) == ("me", "mine")
    written = json.loads((run / "dashboard.json").read_text())["sections"]
    assert [one.name for one in workspace.sections] == [one["name"] for one in written]
    assert [one.panels[0].y for one in workspace.sections] == [one["panels"][0]["metrics"] for one in written]


def test_a_line_that_a_killed_run_left_half_written_is_passed_over(run, capsys):
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 99, "reward/ro')
    assert main([str(run)]) == 0
    assert json.loads((run / "dashboard.json").read_text())["sections"] == dashboard(NAMES)
    (run / "metrics.jsonl").unlink()
    assert main([str(run)]) == 2
    assert f"{run}/metrics.jsonl cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "installed", "said"),
    [
        (["--project=mine"], True, "--project=mine: must be ENTITY/PROJECT"),
        (["--project=me/mine"], False, "wandb-workspaces is not installed: pip install wandb-workspaces"),
        (["--project=me/mine"], True, "there is no API key: wandb login, or set WANDB_API_KEY"),
    ],
)
def test_what_is_missing_is_one_line_and_the_file_is_there(words, installed, said, run, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object() if installed else None)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert refusal(capsys, main, [run, *words]).startswith(f"error: {said}")
    assert (run / "dashboard.json").is_file()


@pytest.mark.parametrize("content", ["{", "[]", "{}", None])
def test_what_is_no_dashboard_is_refused_in_one_line(content, tmp_path, capsys):
    file = tmp_path / "dashboard.json"
    if content is not None:
        file.write_text(content)
    assert str(file) in refusal(capsys, main, [file])
