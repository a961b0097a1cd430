"""tools/watch.py: what it says of a run at every stage of its life, and that it changes nothing."""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from flow_grpo.reporting.metric_files import MetricFiles
from flow_grpo.runtime.checkpoints.checkpoint import published
from flow_grpo.runtime.checkpoints.run_lock import LOCK, RunLock
from tests.refusals import refusal
from tests.tools.run_files import change
from tools import watch

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, str(ROOT / "tools" / "watch.py")]
BARE = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "COLUMNS", "LINES")}
GO_ON = "torchrun --standalone --nproc_per_node=8 train_grpo.py --config config/grpo.py:mine --config.resume=auto"
SUMMARY = {"verdict": {"overall": "better", "in_words": "better (better: trans_err_m)"}}


def make_run(folder: Path, epochs: int = 10, num_epochs: int = 40, **changed: float) -> Path:
    """Write a run of 2 s epochs, evaluated before training and after the last epoch, whose lock nobody holds."""
    (folder / "starts").mkdir(parents=True)
    config = {"num_epochs": num_epochs, "max_minutes": 0.0, "output_root": "outputs"}
    start = {"time": "2026-01-02 03:04:05 +0000", "recipe": "config/grpo.py:mine", "ranks": 8, "epoch": 0}
    start |= {"go_on": f"{GO_ON} --config.run_name=first"}
    (folder / "starts" / "001.json").write_text(json.dumps(start | {"device": "device npu (8)", "config": config}))
    files = MetricFiles(folder)
    files.append({"eval/trans_err_m": 0.2, "eval/located": 1.0, "time/evaluation_s": 3.0}, 0)
    files.append({"eval_floor/trans_err_m": 0.05}, 0)
    for epoch in range(1, epochs + 1):
        row = {
            "reward/pose_mean": -3.0 + 0.1 * epoch,
            "reward/pose_group_std": 0.25,
            "reward/pose_weight": 1.0,
            "reward/sharp_mean": 7.0,
            "reward/sharp_weight": 0.0,
            "policy/clip_fraction": 0.0,
            "train/grad_norm": 0.5,
            "time/rollout_s": 1.5,
            "time/update_s": 0.5,
            "time/epoch_s": 2.0,
            "system/memory_peak_gib": 30.5,
            "system/memory_total_gib": 64.0,
        }
        files.append(row | changed, epoch)
    ends = {"": -0.1, "_low": -0.2, "_high": -0.05}
    change = {f"eval_change/trans_err_m{end}": value for end, value in ends.items()}
    files.append({"eval/trans_err_m": 0.1, "eval/located": 1.0, "policy/credit_share": 0.9} | change, epochs)
    (folder / LOCK).write_text(f"process {os.getpid()} on elsewhere")
    return folder


def shown(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert watch.main([str(folder), "--once", *words]) == 0
    return capsys.readouterr().out


def older(folder: Path, seconds: float) -> None:
    for file in [folder, *folder.rglob("*")]:
        then = file.stat().st_mtime - seconds
        os.utime(file, (then, then))


def test_epochs_without_length_and_a_summary_without_verdict_are_shown(tmp_path, capsys):
    run = make_run(tmp_path / "first", epochs=40, **{"time/epoch_s": 0.0})
    (run / "summary.json").write_text(json.dumps({"verdict": None}))
    text = shown(run, capsys)
    assert "no verdict on record" in text and "40/40" in text and "30.5 of 64 GiB" in text


def test_a_live_run_shows_who_runs_it_how_far_it_is_how_long_it_takes_and_that_it_may_hang(tmp_path, capsys):
    run = make_run(tmp_path / "first", num_epochs=1000)
    lock = RunLock(run)
    lock.take()
    text = shown(run, capsys)
    older(run, 3600.0)
    later = shown(run, capsys)
    lock.release()
    assert "but its last record was 1:0" in later and "it may hang" in later
    assert f"running, process {os.getpid()} on {socket.gethostname()}; last record " in text
    assert "config/grpo.py:mine, 8 rank(s) on npu (8)" in text
    assert "10/1000" in text and "2 s an epoch" in text and re.search(r"ETA 0:3[23]:\d\d", text)
    assert "rollout 75 %  update 25 %" in text and "30.5 of 64 GiB" in text


def test_rewards_in_training_held_out_metrics_and_health_have_their_curves_and_remedies(tmp_path, capsys):
    text = shown(make_run(tmp_path / "first", **{"train/zero_std_ratio": 0.75, "train/bad_steps": 0.0}), capsys)
    assert "! train/zero_std_ratio is 0.75, healthy: 0 to 0.5; most groups" in text
    assert "docs/dynamic_sampling.md" in text and "](" not in text and "train/bad_steps" not in text
    lines = text.splitlines()
    row = {line.split()[0]: line for line in lines if "/" in line.split()[0]}
    assert "-2.9        -2 ▁▂▃▃▄▅▆▆▇█" in row["reward/pose_mean"] and "+- 0.25 within groups" in row["reward/pose_mean"]
    assert "0.2       0.1 █▁" in row["eval/trans_err_m"] and "-0.1 [-0.2, -0.05]" in row["eval/trans_err_m"]
    assert {"policy/credit_share", "policy/clip_fraction", "train/grad_norm"} <= row.keys()
    assert "reward/sharp_mean" not in row, "its weight is 0"
    assert "eval/located" not in row, "the gold estimator has no floor of it"


def test_watching_changes_nothing_in_the_folder_and_takes_no_lock(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path / "runs" / "first")
    (run / "summary.json").write_text(json.dumps(SUMMARY))

    def files() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in [tmp_path, *tmp_path.rglob("*")]}

    def refused(*_: object) -> None:
        raise AssertionError("a lock was tried")

    monkeypatch.setattr("fcntl.flock", refused)
    monkeypatch.setattr("fcntl.lockf", refused)
    before = files()
    assert len(before) > 6
    shown(run, capsys)
    shown(tmp_path / "runs", capsys)
    assert files() == before


def test_a_half_written_line_and_a_half_written_caption_are_passed_over(tmp_path, capsys):
    run = make_run(tmp_path / "first")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "time/epoch_s": 2.0, "rew')
    (run / "videos").mkdir()
    (run / "videos" / "eval_000010_a.mp4").touch()
    (run / "filmstrip.png").touch()
    line = json.dumps({"file": "eval_000010_a.mp4", "step": 10, "caption": "The camera turns left."})
    (run / "videos" / "index.jsonl").write_text(f'{line}\n{{"file": "ev')
    text = shown(run, capsys)
    assert "10/40" in text
    assert f"strip   {run}/filmstrip.png\nvideo   {run}/videos/eval_000010_a.mp4\n" in text
    assert "\n        The camera turns left.\n" in text


def test_a_killed_run_is_told_with_the_command_that_goes_on_with_it(tmp_path, capsys):
    run = make_run(tmp_path / "first")
    (run / "checkpoints" / "checkpoint_000010").mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    (run / LOCK).write_text(f"process {gone.pid} on {socket.gethostname()}")
    text = shown(run, capsys)
    assert "stopped or crashed after epoch 10, without a verdict" in text and "ETA" not in text
    command = text.partition("go on from checkpoint_000010:\n")[2].splitlines()[:2]
    assert shlex.split("\n".join(command).replace("\\\n", " ")) == [*GO_ON.split(), "--config.run_name=first"]
    assert max(map(len, command)) < 100


def test_a_run_that_a_signal_ended_says_so_and_not_that_it_crashed(tmp_path, capsys):
    run = make_run(tmp_path / "first")
    change(run / "starts" / "001.json", ended_by="SIGINT")
    (run / "config.json").write_text('{"num_epochs": 40}')
    text = shown(run, capsys)
    assert "ended by SIGINT after epoch 10 of 40, without a verdict; last record" in text and "--config.resume" in text
    assert "crashed" not in text and "running" not in text
    (run / "summary.json").write_text(json.dumps(SUMMARY | {"ended_by": "max_minutes"}))
    assert "ended by max_minutes after epoch 10 of 40: verdict better (better: trans_err_m)\n" in shown(run, capsys)


def test_a_checkpoint_counts_as_saved_once_it_is_published(tmp_path, capsys):
    run = make_run(tmp_path / "first")
    whole = ("checkpoint_000010", "checkpoint_999999", "checkpoint_1000000")
    half = ("checkpoint_000011.tmp-1a2b3c4d", "checkpoint_999998.old-1a2b3c4d", "checkpoint_1000001.tmp-1a2b3c4d")
    for names, said in ((half, None), (whole[:1], whole[0]), (whole, whole[-1])):
        for name in names:
            (run / "checkpoints" / name).mkdir(parents=True, exist_ok=True)
        shown_there = re.findall(r"^saved .*/(.*)$", shown(run, capsys), re.MULTILINE)
        assert shown_there == [path.name for path in published(run / "checkpoints")][-1:] == ([said] if said else [])


def test_a_run_of_another_machine_is_judged_by_the_age_of_its_last_record(tmp_path, capsys):
    run = make_run(tmp_path / "first")
    older(run, 60.0)
    text = shown(run, capsys)
    assert "running, process" in text and "its lock cannot be seen from here" in text
    older(run, 600.0)
    assert "stopped or crashed after epoch 10, without a verdict; last record 0:11:" in shown(run, capsys)


def test_a_complete_run_shows_its_verdict_until_it_is_resumed(tmp_path, capsys):
    run = make_run(tmp_path / "first")
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    assert "ended: verdict better (better: trans_err_m)\n" in shown(run, capsys)
    again = shutil.copy(run / "starts" / "001.json", run / "starts" / "002.json")
    change(again, time=time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(time.time() + 2)))
    text = shown(run, capsys)
    assert "verdict" not in text and "running" in text


def test_a_run_that_has_only_begun_is_starting(tmp_path, capsys):
    lock = RunLock(tmp_path / "first")
    lock.take()
    assert "starting, process" in shown(tmp_path / "first", capsys)
    lock.release()
    make_run(tmp_path / "second", epochs=0)
    assert "0/40" in shown(tmp_path / "second", capsys)


def test_of_several_runs_the_newest_is_shown_and_where_there_is_none_one_line_says_so(tmp_path, capsys):
    make_run(tmp_path / "outputs" / "new")
    make_run(tmp_path / "outputs" / "old")
    (tmp_path / "outputs" / "no_run").mkdir()
    older(tmp_path / "outputs" / "old", 60.0)
    first = shown(tmp_path / "outputs", capsys).splitlines()[0]
    assert first == f"{tmp_path}/outputs/new  the newest of 2 runs in {tmp_path}/outputs"
    for folder, what in ((tmp_path / "missing", "is no folder"), (tmp_path / "outputs" / "no_run", "holds no run")):
        assert refusal(capsys, watch.main, [folder]).startswith(f"error: RUN: {folder} {what}, must be")


def test_time_left_respects_the_runs_limit_of_minutes(tmp_path):
    run = make_run(tmp_path / "first", epochs=10, num_epochs=1000)
    change(run / "starts" / "001.json", config={"num_epochs": 1000, "max_minutes": 1.0})
    assert re.fullmatch(r"ETA (3[89]|40) s by max_minutes", watch.take(run).time_left)


def test_a_sparkline_goes_from_the_lowest_to_the_highest_value():
    assert watch.sparkline([0, 1, 2, 3], "abcd", 24) == "abcd"
    assert watch.sparkline([0, 0, 3, 3, 1, 1], "abcd", 3) == "adb"
    assert watch.sparkline([0.7] * 5000, "abcd", 24) == "a" * 24


def test_without_utf8_the_output_is_ascii(tmp_path):
    run = make_run(tmp_path / "first")
    bare = BARE | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*PROGRAM, str(run)], env=bare, capture_output=True, check=True)
    assert done.stdout.isascii() and b"_..-~=+*" not in done.stderr
    assert b"######......" in done.stdout and b"_" in done.stdout


def test_neither_help_nor_a_look_imports_torch(tmp_path):
    make_run(tmp_path / "first")
    for words in (["--help"], [str(tmp_path / "first"), "--once"]):
        command = [sys.executable, "-X", "importtime", PROGRAM[1], *words]
        done = subprocess.run(command, cwd=tmp_path, env=BARE, capture_output=True, text=True, check=True)
        loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "rich.live" in loaded and not loaded & {"torch", "numpy", "diffusers"}


@pytest.mark.parametrize("how", ["q", "Ctrl-C"])
def test_the_live_view_ends_by_key_or_signal_and_leaves_the_terminal_as_it_was(tmp_path, how):
    run = make_run(tmp_path / "first")
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    wide = BARE | {"COLUMNS": "200", "TERM": "xterm"}  # no line is folded
    with subprocess.Popen(
        [*PROGRAM, str(run), "--every", "0.2"], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=wide
    ) as live:
        text = b""
        while text.count(b"q: leave") < 2:  # drawn, and drawn again: it reads keys
            text += os.read(ours, 65536)
        if how == "q":
            os.write(ours, b"q")
        else:
            live.send_signal(signal.SIGINT)
        while b"\x1b[?1049l" not in text:  # back from the alternate screen
            text += os.read(ours, 65536)
        assert live.wait() == 0
        assert live.stderr is not None and live.stderr.read() == b""
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)
