"""The evaluation command with a fake estimator: rows, failures, resuming, processes, tables, plots."""

import csv
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flow_grpo.data.video_io import read_video
from flow_grpo.maths.path_errors import CONVENTIONS, path_errors
from flow_grpo.maths.poses import preset_path
from flow_grpo.rewards.camera.matched_motion import Estimate
from flow_grpo.runtime.video_file import write_video
from tests.refusals import refusal
from tools import evaluate
from tools.evaluation import inputs

FRAMES = 5
CALLS: list[str] = []
# How the fake estimator treats a video, by its brightness.
FINE, WORSE, PARTLY, LOST, BROKEN, DEADLY, LATE = (round(0.1 + 0.1 * step, 1) for step in range(7))


def stand_in(video: Path, num_frames: int, frames: list[int], focal_px: float) -> Estimate:
    """Return the arc with a rotation error that depends on the brightness, scaled by 7."""
    CALLS.append(video.name)
    level = round(float(read_video(video, num_frames).float().mean() / 255), 1)
    if level == LATE:
        time.sleep(60)
    if level == DEADLY:
        os._exit(1)
    if level == BROKEN:
        raise RuntimeError("the estimator is broken")
    poses = preset_path("arc_left", num_frames, rotation_scale=1 + level)[frames].numpy().copy()
    poses[:, :3, 3] *= 7
    lost = {PARTLY: 2, LOST: 3}.get(level, 0)
    poses[len(poses) - lost :] = np.nan
    return Estimate(poses, points=100, parallax_deg=level)


def film(path: Path, level: float) -> None:
    write_video(path, torch.full((3, FRAMES, 24, 32), level), lossless=True)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return a folder with a folder of videos, cameras and a stand-in for the estimator."""
    monkeypatch.setattr(evaluate, "estimate", stand_in)
    CALLS.clear()
    path = preset_path("arc_left", FRAMES).tolist()
    levels = {"a.mp4": FINE, "b.mp4": WORSE, "sub/c.mp4": PARTLY, "d.mp4": LOST}
    for name, level in levels.items():
        film(tmp_path / "videos" / name, level)
    cameras = dict.fromkeys(levels, path) | {"a.mp4": {"poses": path, "source": "s", "camera_type": "mine"}}
    (tmp_path / "cameras.json").write_text(json.dumps(cameras))
    return tmp_path


def words(place: Path, *more: object) -> list[str]:
    """Return a command line; in this process unless `more` says otherwise."""
    given = ["--videos", place / "videos", "--cameras", place / "cameras.json", "--focal-px", 30, "--workers", 0]
    return list(map(str, [*given, "--out", place / "out", *more]))


def run(place: Path, *more: object, plots: bool = False) -> dict:
    assert evaluate.main(words(place, *more) + ["--no-plots"] * (not plots)) == 0
    return json.loads((place / "out" / "metrics.json").read_text())


def by_name(metrics: dict) -> dict[str, dict]:
    return {row["video"]: row for row in metrics["rows"]}


def test_rows_contain_the_path_errors_and_a_lost_video_is_a_failed_row(place):
    metrics = run(place)
    rows = by_name(metrics)
    assert list(rows) == ["a.mp4", "b.mp4", "d.mp4", "sub/c.mp4"]
    commanded = preset_path("arc_left", FRAMES)
    for name, level in (("a.mp4", FINE), ("b.mp4", WORSE)):
        errors = path_errors(commanded, preset_path("arc_left", FRAMES, rotation_scale=1 + level))
        assert rows[name]["rot_deg_mean"] == pytest.approx(29.82 * level * 0.5, rel=1e-6)  # mean over pairs: half
        assert {key: rows[name][key] for key in CONVENTIONS} == pytest.approx(errors, abs=1e-9)
        assert rows[name]["registered"] and rows[name]["cause"] == "" and rows[name]["frames_registered"] == FRAMES
    assert (rows["a.mp4"]["source"], rows["a.mp4"]["camera_type"]) == ("s", "mine")
    assert (rows["b.mp4"]["source"], rows["b.mp4"]["camera_type"]) == ("b.mp4", "arc_left")
    assert rows["b.mp4"]["shares_estimator"] is False and rows["b.mp4"]["trans_m_mean"] is None
    partly, lost = rows["sub/c.mp4"], rows["d.mp4"]
    assert partly["registered"] and partly["frames_registered"] == 3 and partly["rot_rad_sum"] is None
    assert partly["rot_deg_mean"] > 0
    assert not lost["registered"] and lost["cause"] == "2 of 5 frames registered, needs half and 3"
    assert all(lost[name] is None for name in CONVENTIONS) and not lost["fault"]
    summary = metrics["summary"]
    assert summary["videos"] == 4 and summary["registered"] == 3 and summary["failure_rate"] == 0.25
    assert summary["partly_registered"] == 1 and summary["frames_registered_share"] == (5 + 5 + 3 + 2) / 20
    assert summary["metrics"]["rot_deg_mean"]["rows"] == 3 and summary["metrics"]["rot_rad_sum"]["rows"] == 2
    assert summary["camera_types"]["arc_left"]["failure_rate"] == pytest.approx(1 / 3)
    assert summary["camera_types"]["mine"]["videos"] == 1
    # CSV and Markdown hold the numbers of the JSON.
    texts = ((place / "out" / name).read_text() for name in ("rows.csv", "summary.csv"))
    lines, groups = (list(csv.DictReader(text.splitlines())) for text in texts)
    assert [line["video"] for line in lines] == list(rows)
    assert float(lines[1]["rot_deg_mean"]) == rows["b.mp4"]["rot_deg_mean"] and lines[2]["rot_deg_mean"] == ""
    every, overall = summary["metrics"]["rot_deg_mean"], groups[-1]
    assert [line["camera_type"] for line in groups] == ["arc_left", "mine", "all"] and overall["failure_rate"] == "0.25"
    for end, part in (("", "mean"), ("_low", "low"), ("_high", "high"), ("_rows", "rows")):
        assert float(overall[f"rot_deg_mean{end}"]) == every[part]
    text = (place / "out" / "summary.md").read_text()
    assert f"| all | 4 | 1 (25%) | 75% | {every['mean']:.3g} [{every['low']:.3g}, {every['high']:.3g}] |" in text
    assert "| d.mp4 | arc_left | no | 2 of 5 | – |" in text


def test_a_crash_of_the_estimator_is_a_failed_row_and_is_retried(place):
    film(place / "videos" / "b.mp4", BROKEN)
    row = by_name(run(place))["b.mp4"]
    assert not row["registered"] and row["fault"] and row["cause"] == "RuntimeError: the estimator is broken"
    assert run(place)["summary"]["estimator_faults"] == 1
    assert CALLS == ["a.mp4", "b.mp4", "d.mp4", "c.mp4", "b.mp4"]


def edit_cameras(place: Path, **changes: object) -> None:
    cameras = json.loads((place / "cameras.json").read_text())
    cameras |= {name.replace("_", "."): entry for name, entry in changes.items()}
    (place / "cameras.json").write_text(json.dumps(cameras))


def test_drift_is_reported_where_the_command_only_turns_and_a_shared_estimator_is_flagged(place):
    edit_cameras(place, b_mp4={"poses": preset_path("pan_left", FRAMES).tolist(), "shares_estimator": True})
    metrics = run(place)
    assert [row["video"] for row in metrics["rows"] if row["shares_estimator"]] == ["b.mp4"]
    assert metrics["summary"]["shares_estimator"] == 1
    rows = by_name(metrics)
    assert rows["b.mp4"]["drift_parallax_deg"] == WORSE and rows["b.mp4"]["trans_sim3_rel"] is None
    assert rows["a.mp4"]["drift_parallax_deg"] is None and rows["a.mp4"]["trans_sim3_rel"] is not None


def test_a_plot_is_drawn_of_every_registered_video_once(place):
    run(place)
    assert not list((place / "out").rglob("*.png"))
    run(place, plots=True)
    drawn = {file.relative_to(place / "out" / "plots").as_posix(): file for file in (place / "out").rglob("*.png")}
    assert set(drawn) == {"a.mp4.png", "b.mp4.png", "sub/c.mp4.png"}
    with Image.open(drawn["sub/c.mp4.png"]) as picture:
        assert min(picture.size) > 200 and len(np.unique(np.asarray(picture.convert("L")))) > 20
    before = {name: file.stat().st_mtime_ns for name, file in drawn.items()}
    drawn["b.mp4.png"].unlink()
    film(place / "videos" / "a.mp4", LOST)
    run(place, plots=True)
    assert not drawn["a.mp4.png"].exists() and drawn["b.mp4.png"].is_file()
    assert drawn["sub/c.mp4.png"].stat().st_mtime_ns == before["sub/c.mp4.png"]


def test_a_second_call_measures_only_what_changed(place):
    first = run(place)
    CALLS.clear()
    assert run(place) == first and CALLS == []
    film(place / "videos" / "a.mp4", WORSE)
    edit_cameras(place, d_mp4=preset_path("zoom_in", FRAMES).tolist())
    (place / "out" / "rows" / "sub" / "c.mp4.json").write_text("{")
    assert by_name(run(place))["a.mp4"]["rot_deg_mean"] > by_name(first)["a.mp4"]["rot_deg_mean"]
    assert CALLS == ["a.mp4", "d.mp4", "c.mp4"]
    CALLS.clear()
    run(place, "--focal-px", 31)
    assert len(CALLS) == 4


def test_an_interrupted_call_is_resumed(place, monkeypatch):
    def interrupted(video, *others):
        if video.name == "d.mp4":
            raise KeyboardInterrupt
        return stand_in(video, *others)

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "estimate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            evaluate.main(words(place))
    done = CALLS.copy()
    CALLS.clear()
    run(place)
    assert {"a.mp4", "b.mp4"} <= set(done) and sorted(CALLS) == sorted({"a.mp4", "b.mp4", "c.mp4", "d.mp4"} - set(done))


def test_processes_find_the_same_rows_and_one_that_dies_loses_its_own_video(place):
    serial = run(place)
    film(place / "videos" / "dead.mp4", DEADLY)
    edit_cameras(place, dead_mp4=preset_path("arc_left", FRAMES).tolist())
    shutil.rmtree(place / "out")
    rows = by_name(run(place, "--workers", 2))
    dead = rows.pop("dead.mp4")
    assert not dead["registered"] and dead["fault"] and "died" in dead["cause"]
    assert list(rows.values()) == serial["rows"]
    assert CALLS == ["a.mp4", "b.mp4", "d.mp4", "c.mp4"]  # of the first call; the second ones were elsewhere


def test_a_video_that_takes_too_long_is_a_failed_row(place):
    for name in ("b.mp4", "d.mp4", "sub/c.mp4"):
        (place / "videos" / name).unlink()
    film(place / "videos" / "a.mp4", LATE)
    (row,) = run(place, "--workers", 1, "--seconds", 5)["rows"]
    assert not row["registered"] and row["fault"] and "5 s" in row["cause"]  # however long a process takes to start


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["settings"].update(estimator="another"), "evaluate the baseline again"),
        (lambda content: content["rows"][0].update(asked="else"), "a.mp4"),
        (lambda content: content.update(rows=[]), "has no video of the same name"),
        (lambda content: content.pop("rows"), "must be a metrics.json"),
    ],
)
def test_an_incomparable_baseline_is_refused(place, capsys, change, message):
    content = run(place)
    (place / "baseline.json").write_text(json.dumps(content))
    assert run(place, "--baseline", place / "baseline.json")["summary"]["baseline"]["videos"] == 4
    change(content)
    (place / "baseline.json").write_text(json.dumps(content))
    assert message in refusal(capsys, evaluate.main, words(place, "--baseline", place / "baseline.json"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--focal-px", "0"], "--focal-px is 0, must be the focal length in pixels, above 0"),
        (["--focal-px", "nan"], "--focal-px is nan"),
        (["--workers", "-1"], "--workers is -1"),
        (["--seconds", "0"], "--seconds 0, must be"),
        (["--out", __file__], "is a file, must be a folder"),
        (["--videos", "nowhere"], "--videos nowhere"),
        (["--cameras", "nowhere.json"], "nowhere.json"),
        (["--baseline", "nowhere.json"], "nowhere.json"),
    ],
)
def test_unusable_arguments_are_one_line_and_exit_code_2_before_anything_is_measured(place, capsys, given, message):
    assert message in refusal(capsys, evaluate.main, words(place, *given))
    assert CALLS == [] and not (place / "out").exists()


def test_a_folder_of_generated_videos_is_measured_before_and_after_in_pairs(place, capsys, monkeypatch):
    """Recorded focal length and poses are taken; the picture beside the source is no video to judge."""
    folder = place / "generated"
    for name, after, before in (("a", FINE, WORSE), ("b", PARTLY, LOST)):
        film(folder / f"{name}.mp4", after)
        film(folder / f"{name}_before.mp4", before)
        film(folder / f"{name}_beside.mp4", FINE)
        record = {"tool": "tools/generate.py", "poses": preset_path("arc_left", FRAMES).tolist(), "source": name}
        (folder / f"{name}.json").write_text(json.dumps(record | {"camera_name": "arc_left", "before": True}))
    given = [str(folder), "--workers", "0", "--no-plots"]
    small = refusal(capsys, evaluate.main, given)  # before it asks for what would not help
    assert "a.mp4 is 24 rows high, must be at least 96" in small and "a_beside.mp4" in small
    monkeypatch.setattr(inputs, "LEAST_ROWS", 24)
    assert "--focal-px is None, must be the focal length in pixels" in refusal(capsys, evaluate.main, given)
    given += ["--focal-px", "30"]
    assert evaluate.main(given) == 0
    out = folder / "evaluation"
    after, before = (json.loads((part / "metrics.json").read_text()) for part in (out, out / "before"))
    assert list(by_name(after)) == list(by_name(before)) == ["a.mp4", "b.mp4"]
    compared = after["summary"]["baseline"]
    change = by_name(after)["a.mp4"]["rot_deg_mean"] - by_name(before)["a.mp4"]["rot_deg_mean"]
    assert compared["metrics"]["rot_deg_mean"]["mean"] == pytest.approx(change)
    assert compared["metrics"]["rot_deg_mean"]["rows"] == 1 and compared["only_registered_here"] == 1
    said = capsys.readouterr().out
    assert "measuring 2 videos, and 2 before training" in said and "Minus the same before training, over 2" in said
    CALLS.clear()
    assert evaluate.main([*given, "--no-before", "--out", str(place / "alone")]) == 0
    assert CALLS == ["a.mp4", "b.mp4"]
    assert "baseline" not in json.loads((place / "alone" / "metrics.json").read_text())["summary"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "got none, must be one of FOLDER, --run, --checkpoint, --config, or --videos"),
        (["somewhere", "--run", "else"], "got FOLDER and --run, must be one of"),
        (["--videos", "a"], "--videos and --cameras are both needed"),
        (["--run", "nowhere"], "--out FOLDER is needed"),
        (["--run", "nowhere", "--out", "out"], "nowhere has no config.json, must be the folder of a run"),
        (["nowhere"], "nowhere holds no record of tools/generate.py; for other videos give --videos and --cameras"),
        (["somewhere", "--config.sample.k=3"], "--config.sample.k=3 is no option without --config"),
        (["--videos", "a", "--cameras", "b", "--out", "c", "--adapter", "d"], "--adapter is no option without --"),
    ],
)
def test_one_origin_of_the_videos_must_be_given(capsys, given, message):
    assert message in refusal(capsys, evaluate.main, given)
