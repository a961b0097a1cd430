"""Console output of rank 0."""

import io
import math
import re
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

from flow_grpo.maths.bootstrap import Interval
from flow_grpo.reporting.console import Progress, print_before_after
from flow_grpo.runtime.ranks.process_group import Group, World

METRICS = {
    "reward/mean": 18.5,  # of metres and decibels
    "reward/target_view_weight": 1.0,
    "reward/target_view_mean": -0.12345,
    "reward/target_view_group_std": 0.0412,
    "reward/target_psnr_weight": 0.5,
    "reward/target_psnr_mean": 18.6789,
    "reward/watched_weight": 0.0,
    "reward/watched_mean": 3.0,
    "train/grad_norm": 0.04,
    "train/unlisted": 1.0,
}


def run(progress: Progress, epochs: int) -> None:
    with progress:
        for _ in range(epochs):
            progress.start_epoch(rollouts=2)
            progress.rollout(2)
            progress.start_update(1)
            progress.update()
            progress.finish_epoch(METRICS)


def test_without_a_terminal_there_is_one_plain_line_per_epoch() -> None:
    out = io.StringIO()
    run(Progress(12, World(), finished=8, console=Console(file=out, width=40)), 2)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    rewards = r"target_view -0\.1235 \+- 0\.041  target_psnr 18\.68"
    assert re.fullmatch(rf"epoch  9/12  {rewards}  train/grad_norm 0\.04     \d+\.\d s  ETA [\d:]+", lines[0])
    assert lines[1].startswith("epoch 10/12  ")


def test_the_time_left_is_estimated_from_this_processs_epochs_and_ends_at_the_minutes_of_the_run(monkeypatch):
    out, clock = io.StringIO(), mock.Mock(return_value=0.0)
    monkeypatch.setattr("flow_grpo.reporting.console.time.monotonic", clock)
    progress = Progress(100, World(), finished=90, console=Console(file=out))
    progress.start_epoch(rollouts=1)
    clock.return_value = 10.0
    progress.finish_epoch({})
    assert out.getvalue().strip() == "epoch  91/100  10.0 s  ETA 0:01:30"
    out, clock.return_value = io.StringIO(), 100.0
    progress = Progress(100, World(), seconds=25.0, console=Console(file=out))
    for _ in range(3):
        progress.start_epoch(rollouts=1)
        clock.return_value += 10.0
        progress.finish_epoch({})
    ends = [line.partition("ETA ")[2] for line in out.getvalue().splitlines()]
    assert ends == [f"0:00:{left} by max_minutes" for left in ("15", "05", "00")]


def test_a_terminal_shows_the_bars_of_the_epoch_with_all_its_rounds() -> None:
    out = io.StringIO()
    progress = Progress(3, World(), console=Console(file=out, force_terminal=True, width=100))
    with progress:
        progress.start_epoch(rollouts=4)
        progress.rollout(4)
        progress.more_rollouts(8)
    assert "4/12" in out.getvalue()
    run(progress, 1)
    text = out.getvalue()
    assert "epochs" in text and "rollouts" in text and "updates" in text and "1/3" in text
    assert "epoch 1/3" in text


def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    others = World.of(Group(1, 2))
    run(Progress(3, others), 1)
    print_before_after({"eval/a": 1.0}, {"eval/a": 2.0}, {}, Path("x"), others, floor={})
    assert capsys.readouterr() == ("", "")


def test_the_final_table_shows_both_values_their_change_and_the_folder() -> None:
    out = io.StringIO()
    before = {"eval/trans_err_m": 0.5, "eval/psnr": 18.0, "eval/zero": 0.0, "eval/only_before": 1.0}
    after = {"eval/trans_err_m": 0.4, "eval/psnr": 18.9, "eval/zero": 0.1}
    changes = {
        "eval/trans_err_m": Interval(-0.1, -0.1234567, -0.08, 64, 16),
        "eval/psnr": Interval(0.9, math.nan, math.nan, 10, 1),  # of one scene there is no interval
    }
    folder = Path("outputs") / ("long_name_" * 12)
    floor = {"eval_floor/trans_err_m": 0.042, "eval_floor/psnr": 30.0}
    print_before_after(before, after, changes, folder, World(), floor=floor, console=Console(file=out, width=80))
    lines = [line.strip() for line in out.getvalue().splitlines()]
    rows = [line.replace(", ", ",").split() for line in lines if line.startswith(("eval/", "floor"))]
    assert rows == [
        ["eval/trans_err_m", "0.5000", "0.4000", "-0.1000", "[-0.1235,-0.0800]", "-20.0"],
        ["floor", "0.0420"],
        ["eval/psnr", "18.0000", "18.9000", "+0.9000", "+5.0"],
        ["floor", "30.0000"],
        ["eval/zero", "0.0000", "0.1000", "+0.1000"],
    ]
    assert out.getvalue().splitlines()[-1] == f"run folder: {folder}"
