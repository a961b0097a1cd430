"""The page of a run: what it says, what it leaves out and why, and what it refuses."""

import json
import math
import os
import re
import subprocess
from html import unescape

import pytest

from flow_grpo.judging.verdict import plainly
from flow_grpo.reporting.metric_names import Metric
from tests.refusals import refusal
from tests.tools.run_files import EPOCHS, MEASURED_ON, RECIPE, ROOT, change, make_run
from tools import report
from tools.run_folder import read_run
from tools.run_report import figures
from tools.run_report.acceptance import record
from tools.run_report.clips import choose
from tools.run_report.configuration import changes, knobs
from tools.run_report.health import findings
from tools.run_report.held_out import TRAINED, camera_changes, deciding, held_out
from tools.run_report.page import FIRST_KNOBS
from tools.run_report.words import changed, duration, number, pair, percent, signed, span, tidy


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("drawn") / "first")
    assert report.main([str(run)]) == 0
    return (run / "report.html").read_text()


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Leave out matplotlib's work, which most of these tests do not look at."""
    monkeypatch.setattr(figures, "as_svg", lambda figure, name: f"<svg>{name}</svg>")


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "first")


def page_of(*runs):
    """Return the text of the page that the command writes, tags left out."""
    assert report.main([*map(str, runs), "--out", str(runs[0] / "page.html")]) == 0
    return plain((runs[0] / "page.html").read_text())


def plain(html):
    body = re.sub(r"(?s)<(style|script)>.*?</\1>", "", html).replace("<wbr>", "")
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", body)))


# --- what it says


@pytest.mark.parametrize(
    "said",
    [
        "mixed The camera path is better, but the picture is worse. "  # before any metric's name
        "Camera better (trans_err_m 0.25 → 0.15), picture worse (residual 0.0348 → 0.041). "
        "Measured on 8 held-out conditions. "
        "Worse for a kind of camera: zoom_in trans_err_m +0.05 [+0.01, +0.09]. "
        "The run ended by max_minutes after epoch 40 of 120.",
        # The meaning is read, not hovered over.
        "trans_err_m m distance from the commanded camera by the estimator that no reward uses ( eval.gold ); falls "
        "0.250 0.150 −0.100 −40 % −0.120 to −0.080 0.04 better",
        "target_view_psnr_db dB peak signal-to-noise ratio to the true view; rises or holds "
        "24.0 25.0 +1.00 +4.2 % −0.20 to +2.20 unclear",
        "room_rot −2.40 → −1.90",  # of a video, before and after training
        "arc left zoom in",  # labels of the axis, and the bars in numbers
        "zoom_in m 0.200 0.250 +0.0500 +25 % +0.0100 to +0.0900 worse",
        "eval/trans_err_m 0.250 epoch 0 0.150 epoch 40 0.150 epoch 40 0.250 epoch 0",  # the ends of a curve
        "MFU 21 % (0.04 TFLOP/s a device) share of the device's peak arithmetic rate that the transformer reached",
        "forward-equivalents 28 000 transformer work so far; one forward pass of one sample is 1",
        "phase in all an epoch share rollout 60 s 1.5 s 75 % update 20 s 0.5 s 25 % Configuration",  # not score_hidden
        "policy/credit_share 3 % healthy: 0.2 to 1; 20 of 40 values outside, first at epoch 21, last at 40",
        "train/bad_steps 0 healthy: 0; 1 of 40 values outside, at epoch 3; fine at the end",
        "Every knob is as recipe config/grpo.py:tiny_recam says now.",
    ],
)
def test_the_page_of_a_finished_run_says(drawn, said):
    assert said in plain(drawn)


def test_the_verdict_in_a_sentence_names_what_became_of_each_aspect():
    said = "The camera path and the picture are neither clearly better nor worse, but the likeness to the true view is "
    assert plainly({"camera": "unclear", "picture": "unclear", "true view": "better"}) == f"{said}better."


def begun_from_another_s(run):
    """Leave of a run what one that began from its checkpoint of epoch 20 has on record, but for the summary."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] >= 20))


def test_before_the_training_of_a_run_that_began_from_another_s_checkpoint_is_before_that_one_s(run):
    begun_from_another_s(run)
    by_camera = camera_changes(read_run(run), "eval/trans_err_m")
    assert [(change.name, *change.ends) for change in by_camera] == [
        ("arc_left", "0.300", "0.120"),
        ("zoom_in", "0.200", "0.250"),
    ]
    (run / "summary.json").unlink()
    found = read_run(run)
    changes = {change.name: change for change in held_out(found)}
    assert changes["eval/trans_err_m"].before == pytest.approx(0.25)
    assert camera_changes(found, "eval/trans_err_m") == []  # no change by camera is on record
    text = page_of(run)
    assert "falls 0.250 0.150 −0.100 −40 %" in text
    assert "rises or holds – 25 – – unclear" in text  # no change is on record


def test_a_branched_run_that_measured_its_own_before_shows_that(run):
    begun_from_another_s(run)
    (run / "summary.json").unlink()
    change(run / "starts/001.json", epoch=20)
    found = read_run(run)
    changes = {change.name: change for change in held_out(found)}
    assert changes["eval/trans_err_m"].before == found.rows[20]["eval/trans_err_m"]
    assert len(camera_changes(found, "eval/trans_err_m")) == 2


def test_a_run_that_still_trains_shows_what_there_is(run):
    (run / "summary.json").unlink()
    (run / "videos/index.jsonl").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:30]) + "\n" + lines[31][:50])  # a line is being written
    text = page_of(run)
    assert (
        "no verdict The run has no verdict in a summary.json: it is still training, or ended early. 28 of 120" in text
    )
    assert "falls 0.250 0.200" in text
    change(run / "starts/001.json", ended_by="SIGINT")
    assert "The run has no verdict in a summary.json: it was ended by SIGINT after epoch 28 of 120." in page_of(run)
    assert "The run has no videos/index.jsonl, so no video is shown here" in text
    # Before any evaluation there is a page as well.
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/room_rot_mean": -1.0, "train/loss": null}\n')
    text = page_of(run)
    assert "No evaluation is on record yet" in text and "Too little is on record for a curve" in text


@pytest.mark.parametrize(
    ("healthy", "found", "now"),
    [((0.0, 1.0), 0, None), ((0.0, 0.1), 1, True), ((0.0, 0.4), 1, False), (None, 0, None)],
)
def test_a_finding_is_a_value_outside_of_the_registry_s_bounds(run, healthy, found, now):
    lines = [json.dumps({"step": step, "train/x": 0.5 if step < 5 else 0.3}) for step in range(20)]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    metric = Metric("train/x", "x", "share", healthy, "turn `a.knob`")
    said, bounded = findings(read_run(run), lambda name: metric if name == "train/x" else None)
    assert len(said) == found and [one["now"] for one in said] == [now] * found
    assert bounded == (healthy is not None)


def test_the_configuration_is_shown_where_it_departs_from_the_recipe_and_a_recipe_that_is_gone_is_named(tmp_path):
    text = page_of(make_run(tmp_path / "other", "--config.train.learning_rate=0.001"))
    assert "Set otherwise than recipe config/grpo.py:tiny_recam says now" in text
    assert re.search(r"train\.learning_rate [^→]{,90} 0\.0004 0\.001", text)
    change(tmp_path / "other/starts/001.json", recipe="mine/gone.py:best")
    assert "The recipe mine/gone.py:best is not there any more" in page_of(tmp_path / "other")


def test_a_reward_that_a_schedule_trains_is_a_trained_one(tmp_path):
    scheduled = ("--config.reward.weights.room_rot=0", "--config.reward.schedules.room_rot=0:0,20:1")
    run = read_run(make_run(tmp_path / "run", *scheduled, "--config.eval.gold=", videos=False))
    assert deciding(run, ["eval/room_rot", "eval/trans_err_m"]) == ["eval/trans_err_m"]
    assert {change.name: change.group for change in held_out(run)}["eval/room_rot"] == TRAINED
    assert "room_rot" in record(run)["rewards"]


def test_a_recipe_outside_of_config_is_not_run_unless_the_user_names_it(run, tmp_path):
    mine, marker = tmp_path / "mine.py", tmp_path / "marker"
    mine.write_text(
        "import pathlib\nfrom config.base import get_config\n"
        f"def best():\n    pathlib.Path({str(marker)!r}).touch()\n    return get_config()\n"
    )
    change(run / "starts/001.json", recipe=f"{mine}:best")
    found, why_not = knobs(read_run(run))
    assert "lies outside of config/ and is code, which a report does not run" in why_not
    assert not marker.exists() and not any(knob.own for knob in found)
    found, why_not = knobs(read_run(run), asked=f"{mine}:best")
    assert marker.exists() and not why_not and found[0].own


def resume(run, number, epoch, weights=(), **train):
    """Write the record of another start of a run, after `epoch`, with other weights and other knobs of `train`."""
    config = json.loads((run / "config.json").read_text())
    config["train"] |= train
    config["reward"]["weights"] |= dict(weights)
    (run / f"starts/{number:03d}.json").write_bytes((run / "starts/001.json").read_bytes())
    change(run / f"starts/{number:03d}.json", epoch=epoch, config=config)
    (run / "config.json").write_text(json.dumps(config))


def test_a_knob_that_a_resumed_run_changed_is_shown_with_both_values(run):
    assert changes(read_run(run)) == {}
    resume(run, 2, 20, learning_rate=0.001)
    text = page_of(run)
    assert "Changed when the run was resumed: train.learning_rate 0.0004 → 0.001 after epoch 20" in text
    assert re.search(r"train\.learning_rate [^→]{,90} 0\.0004 0\.0004 → 0\.001 after epoch 20", text)
    resume(run, 3, 30, learning_rate=0.0004)  # as in the recipe again
    text = page_of(run)
    assert "train.learning_rate 0.0004 → 0.001 after epoch 20 → 0.0004 after epoch 30" in text
    assert "Every knob is now as recipe" in text


def test_changes_are_named_alone_and_what_is_not_on_record_or_was_not_known_is_none(run):
    resume(run, 2, 20, learning_rate=0.5)
    resume(run, 3, 10, learning_rate=0.001)  # from an earlier checkpoint: what start 2 trained is gone
    assert changes(read_run(run)) == {"train.learning_rate": "0.0004 → 0.001 after epoch 10"}
    (run / "starts/003.json").unlink()
    (run / "config.json").write_text(json.dumps(json.loads((run / "starts/001.json").read_text())["config"]))
    resume(run, 2, 20, {"room_rot": 2.0})
    assert list(changes(read_run(run))) == ["reward.weights.room_rot"]
    resume(run, 2, 20, {"sharpness": 1.0})  # of which start 1 knew nothing
    assert changes(read_run(run))["reward.weights.sharpness"] == "– → 1.0 after epoch 20"
    config = json.loads((run / "starts/002.json").read_text())["config"]
    del config["train"]["learning_rate"]
    change(run / "starts/001.json", config=config | {"gone": {"knob": 3}})
    assert changes(read_run(run)) == {}


def test_every_start_is_on_the_page_with_commit_and_versions(run):
    (run / "starts/002.json").write_bytes((run / "starts/001.json").read_bytes())
    change(run / "starts/002.json", epoch=20, command="train_grpo.py --config.resume=auto", commit="abc1234+")
    text = page_of(run)
    assert "after epoch 20 train_grpo.py --config.resume=auto" in text
    assert "abc1234+ (files differed from it)" in text and "torch 2." in text


# --- videos


def test_the_best_and_the_worst_come_first_whether_or_not_they_were_filmed_before_training(run):
    lines = [json.loads(line) for line in (run / "videos/index.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "best":
            line["panels"] = [panel for panel in line["panels"] if panel["name"] != "base"]
    (run / "videos/index.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    clips, _ = choose(read_run(run))
    assert [clip["compares"] for clip in clips] == [False, True, True]
    assert "Where there is no line, the condition was not filmed before training." in page_of(run)


def test_the_best_the_worst_and_the_latest_held_out_videos_are_shown_as_far_as_they_fit_and_can_be_read(run):
    clips, without = choose(read_run(run))
    shown = [clip["video"] for clip in clips]
    assert [(video.kind, video.step) for video in shown] == [(kind, EPOCHS) for kind in ("best", "worst", "eval")]
    assert not without
    size = (run / "videos/best_000040_scene.mp4").stat().st_size
    clips, without = choose(read_run(run), 2 * size)
    assert [clip["video"].kind for clip in clips] == ["best", "worst"]
    assert without == ["1 of 3 videos are left out, so that this page stays small; see videos/."]
    (run / "videos/best_000040_scene.mp4").write_bytes(b"no video")
    (run / "videos/worst_000040_scene.mp4").unlink()
    text = page_of(run)
    assert "1 videos cannot be read and are left out." in text
    assert "1 videos of videos/index.jsonl are not there." in text


def test_a_condition_is_shown_once_and_one_without_a_camera_by_its_prompt(run):
    lines = [json.loads(line) for line in (run / "videos/index.jsonl").read_text().splitlines()]
    prompts = {"eval": "a cat", "best": "a <b>dog</b>, a", "worst": "a cat"}
    lines = [
        line
        | {"condition": len(prompts.get(line["kind"], "")), "scene": "prompt", "camera": "", "preset": ""}
        | {"prompt": prompts.get(line["kind"], "")}
        for line in lines
    ]
    (run / "videos/index.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(clip["video"].kind, clip["about"]) for clip in choose(read_run(run))[0]] == [
        ("best", prompts["best"]),
        ("worst", "a cat"),
    ]
    assert "a <b>dog</b>, a" in page_of(run)


def test_no_file_outside_of_videos_is_read(run):
    line = json.loads((run / "videos/index.jsonl").read_text().splitlines()[2])
    (run / "secret.mp4").write_bytes((run / "videos/best_000040_scene.mp4").read_bytes())
    (run / "videos/link.mp4").symlink_to(run / "secret.mp4")
    for file in ("../secret.mp4", str(run / "secret.mp4"), "link.mp4"):
        (run / "videos/index.jsonl").write_text(json.dumps(line | {"file": file}) + "\n")
        assert read_run(run).videos == []


# --- plots


def test_the_curves_are_those_of_curves_png(drawn):
    titles = re.findall(r"<figcaption><b>([^<]*)</b><small>([^<]*)</small></figcaption><svg", drawn)
    assert titles[1:4] == [
        ("eval/target_view_psnr_db", "24 → 25, higher is better"),
        ("eval/trans_err_m", "0.25 → 0.15, lower is better"),
        ("reward/room_rot_mean", "higher is better"),
    ]
    assert ("time of an epoch", "by phase") in titles
    assert drawn.index("credit_share</code> 3 %") < drawn.index("bad_steps</code> 0")  # what is unhealthy now is first
    # Plots share no identifier.
    found = re.findall(r' id="([^"]*)"', drawn)
    assert len(found) == len(set(found)) > 30


# --- several runs


def test_runs_measured_alike_stand_side_by_side(tmp_path, run):
    text = page_of(run, make_run(tmp_path / "second"))
    assert "Comparison of 2 runs" in text
    assert "trans_err_m m 0.150 −0.100 −0.120 to −0.080 0.150 −0.100 −0.120 to −0.080" in text
    assert "What differs Every knob is the same in all runs." in text
    # Without --out, the first run's own page is not replaced.
    assert report.main([str(run), str(tmp_path / "second")]) == 0
    assert (run / "comparison.html").exists() and not (run / "report.html").exists()


def test_the_knobs_in_which_runs_differ_stand_in_a_table(tmp_path, run):
    weights = "--config.reward.weights.room_rot=2"
    second = make_run(tmp_path / "second", weights, "--config.run_name=x", f"--config.output_root={tmp_path}")
    resume(second, 2, 20, learning_rate=0.001)
    text = page_of(run, second)
    table = text[text.index("knob first second") : text.index("After training, and the change")]
    differ = "reward.weights.room_rot 1.0 2.0 train.learning_rate 0.0004 0.0004 → 0.001 after epoch 20"
    assert table.startswith(f"knob first second {differ} ") and "more" not in table


def test_many_knobs_that_differ_stand_behind_a_fold(tmp_path, run):
    second = make_run(tmp_path / "second")
    config = json.loads((second / "config.json").read_text())
    config["reward"]["weights"] = {f"mine_{place}": 1.0 for place in range(FIRST_KNOBS)}  # beside the recipe's four
    (second / "config.json").write_text(json.dumps(config))
    change(second / "starts/001.json", config=config)
    report.main([str(run), str(second), "--out", str(run / "page.html")])
    html = (run / "page.html").read_text()
    table, fold = html[html.index('id="differences"') : html.index('id="side-by-side"')].split("<details>")
    assert table.count("<tr>") == 1 + FIRST_KNOBS and fold.count("<tr>") == 1 + 4
    assert "<summary>4 more</summary>" in fold


def test_a_run_measured_otherwise_is_left_out_and_named_and_shares_no_axis(tmp_path, run, monkeypatch):
    second, third = make_run(tmp_path / "second"), make_run(tmp_path / "third")
    change(second / "summary.json", measured_on=MEASURED_ON | {"eval.num_conditions": 4})
    (third / "summary.json").unlink()
    text = page_of(run, second, third)
    assert "second is left out: it was measured otherwise than first, with eval.num_conditions 4 instead of 8." in text
    assert "third is left out: it has no summary.json" in text
    assert "drawn of the runs in the table above alone, health of all" in text
    numbers = text[text.index("The curves in numbers") :]
    assert re.findall(r"eval/trans_err_m (\w+) 0.250", numbers) == ["first"]
    assert re.findall(r"train/grad_norm (\w+) ", numbers) == ["first", "second", "third"]
    monkeypatch.setattr(figures, "_curve", lambda panel, name: panel.draw.keywords["runs"])
    (drawn, *_) = figures.curves([read_run(run), read_run(second)], [read_run(run)])
    assert drawn[0].names == ["eval/trans_err_m"] and drawn[1][0] and not drawn[1][1]


# --- safety


def test_text_from_a_run_cannot_become_markup(run):
    bad = "<script>alert(1)</script>'\"><img src=x onerror=alert(2)>"
    line = json.loads((run / "videos/index.jsonl").read_text().splitlines()[2])
    line |= {"scene": bad, "caption": bad, "scores": {bad: 1.0}}
    line["panels"][0]["name"] = bad
    (run / "videos/index.jsonl").write_text(json.dumps(line))
    change(run / "starts/001.json", command=bad, device=bad, commit=bad, versions={bad: bad})
    report.main([str(run)])
    html = (run / "report.html").read_text()
    assert "alert(1)" in html and "<script>alert" not in html and "<img" not in html and "'\">" not in html


# --- what is refused


def broken(file, content):
    return lambda run: (run / file).write_text(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), "holds no metrics.jsonl, must be the folder of a run"),
        (broken("metrics.jsonl", '{"step": 3, "ev'), "holds no record of metrics"),
        (broken("config.json", "{"), "config.json is not JSON"),
        (lambda run: (run / "config.json").unlink(), "config.json cannot be read"),
        (lambda run: (run / "starts/001.json").unlink(), "holds no record of a start"),
        (broken("starts/001.json", '{"time": 3}'), "starts/001.json: time: Input should be a valid string"),
        (broken("summary.json", "[1]"), "summary.json holds a list"),
        (broken("summary.json", '{"before": {}, "after": 3}'), "summary.json: after: Input should be a valid dict"),
    ],
)
def test_a_damaged_run_is_one_line_and_exit_code_2(run, capsys, damage, message):
    damage(run)
    assert message in refusal(capsys, report.main, [run])
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("words", [[], ["run", "--config", RECIPE], ["run", "--config.seed=1"], ["run", "--wrong"]])
def test_a_command_that_is_not_understood_is_one_line(capsys, words):
    assert "must be folders of runs, or --config and its overrides" in refusal(capsys, report.main, words)


# --- one row, and the demo


def test_the_acceptance_row_has_ends_of_rewards_intervals_speed_and_versions(run, capsys):
    assert report.main([str(run), "--acceptance"]) == 0
    _head, _line, row = capsys.readouterr().out.splitlines()
    for said in (
        "cpu (x86_64, 2 cores) x 2",
        "40 epochs, 40 updates, 80 s",
        "target_psnr 24.1 → 24.9",
        "trans_err_m 0.250 → 0.150 [−0.120 to\u00a0−0.080]",
        "| 50 | 21 % | 0.9 GiB |",
    ):
        assert said in row
    assert report.main([str(run), "--acceptance", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["held_out"]["eval/trans_err_m"]["change_ci95"] == [-0.12, -0.08]
    assert found["samples_per_s"] == 50.0 and found["versions"]["torch"]


def test_the_words_of_a_training_command_find_the_run_that_they_started_last(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    root = "--config.output_root=elsewhere"
    recipe = f"{ROOT}/config/grpo.py:tiny_recam"
    words = ["--config", recipe, root, "--config.reward.weights=room_rot=1"]
    for name, time, own in (("a", "10:00:00", words), ("b", "11:00:00", words), ("c", "12:00:00", words[:3])):
        folder = make_run(tmp_path / "elsewhere" / name, videos=False, command=f"train_grpo.py {' '.join(own)}")
        change(folder / "starts/001.json", time=f"2026-11-24 {time} +0000")
    assert report.main(words) == 0
    assert capsys.readouterr().out == "report: elsewhere/b/report.html\n"
    assert report.main([*words, "--config.seed=3"]) == 2
    assert "no run in elsewhere was started with" in capsys.readouterr().err
    assert report.main([*words, "--config.dry_run=True"]) == 0  # which leaves nothing


@pytest.mark.parametrize(("trained", "code"), [(0, 0), (3, 2)])
def test_the_demo_ends_with_the_report_and_fails_where_training_fails(tmp_path, trained, code):
    (tmp_path / "bin").mkdir()
    for name, line in (("torchrun", f"exit {trained}"), ("python", f'echo "$@" >> {tmp_path}/asked')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / ".ready").touch()
    command = ["make", "demo", f"VENV={tmp_path}", "ARGS=--config.run_name=second"]
    bare = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    assert subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, check=False).returncode == code
    asked = tmp_path / "asked"
    assert asked.exists() == (not trained)
    if not trained:
        assert asked.read_text() == f"tools/report.py --config {RECIPE} --config.run_name=second\n"


def test_numbers_are_short_and_signs_are_true():
    assert [number(v) for v in (0.123456, -1.5, 123456.0, math.nan)] == ["0.123", "−1.5", "123\u00a0456", "–"]
    assert [signed(v) for v in (0.5, -0.25, 0.0, 9.996)] == ["+0.500", "−0.250", "0", "+10.0"]
    ends = ((-0.00009, 0.002), (0, 0), (math.nan, 1), (-1e-7, 3e-5))
    spans = [span(low, high).replace("\u00a0", " ") for low, high in ends]
    assert spans == ["−0.00009 to +0.00200", "0 to 0", "–", "−0.0000001 to +0.0000300"]
    assert [duration(v) for v in (0.25, 365, 7300)] == ["0.25 s", "6 min 05 s", "2 h 01 min"]
    assert [duration(v) for v in (0.0058, 0.0996)] == ["5.8 ms", "100 ms"]
    assert [percent(v) for v in (0.21, 0.00002, 0.999)] == ["21 %", "< 0.01 %", "100 %"]


def test_a_number_between_a_thousandth_and_a_hundred_thousand_has_no_exponent():
    for power in range(-3, 5):
        for first in (1.0, 3.333, 9.996):
            for value in (first * 10.0**power, -first * 10.0**power):
                for said in (number(value), number(value, 2), signed(value)):
                    assert "e" not in said and "-" not in said
                    plain_number = float(said.replace("−", "-").replace("\u00a0", ""))
                    assert plain_number == pytest.approx(value, rel=0.051)
    assert [signed(3.33e-5), number(-4.96e-7), number(2e12)] == ["+0.0000333", "−4.96e−7", "2e12"]


def test_values_show_how_far_they_are_apart_and_a_change_has_the_decimals_of_its_interval():
    assert pair(24.438, 24.457) == ("24.44", "24.46")
    assert pair(2.02, 1.999) == ("2.02", "2.00")
    assert pair(0.0308982, 0.0308977) == ("0.030898", "0.030898")  # five digits are enough
    assert pair(None, 1.0) == ("–", "1")
    assert changed(1.91e-5, -2.65e-5, 5.65e-5) == "+0.0000191"
    assert changed(-5e-7, -5e-5, 4e-5) == "−0.0000005"
    assert changed(-4e-9, -5e-5, 4e-5) == "0"  # and no sign
    assert changed(0.5, math.nan, math.nan) == "+0.500"
    assert changed(1e-9, -2e-9, 4e-9) == "+1.00e−9"  # no dozen of noughts


def test_numbers_that_another_part_of_the_program_wrote_look_like_the_others():
    assert tidy("zoom_in x_m +0.05 [-0.01, +6.43e-05]") == "zoom_in x_m +0.05 [−0.01, +0.0000643]"
    assert tidy("1e-05 to 1") == "0.00001 to 1"
    for name in ("f17_2/scene-4, 2026-11-24, v1.2.3", "007 rot_err_deg", "cam 010", "20240517"):
        assert tidy(name) == name


def test_no_number_of_a_page_has_another_minus_sign(tmp_path, run, drawn):
    verdict = json.loads((run / "summary.json").read_text())["verdict"]
    verdict["worse_by_camera"] = ["zoom_in psnr_db -0.05 [-0.09, -1e-05]"]
    change(run / "summary.json", verdict=verdict)
    report.main([str(run), str(make_run(tmp_path / "second")), "--out", str(run / "page.html")])
    html = (run / "page.html").read_text()
    text = plain(re.sub(r"(?s)<code>.*?</code>", "", html + drawn))  # what one types is as one types it
    assert "−0.05 [−0.09, −0.00001]" in text
    assert re.findall(r"(?<![\w.])-\d\S*|\de[-−+]?\d+", re.sub(r"commit \S+", "", text)) == []
