"""The table that compares kinds of runs."""

from __future__ import annotations

import json

import pytest

from tools.dev import run_table


@pytest.fixture
def runs(tmp_path):
    for name, rows in {
        "a": [{"step": 0, "eval/x": 1.0}, {"step": 3, "eval/x": 4.0}, {"step": 2, "train/y": 9.0}],
        "b": [{"step": 5, "eval/x": 2.0}, {"step": 0, "eval/x": 1.0}],
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_row_has_the_first_value_the_last_of_every_run_and_the_mean_change(runs, capsys):
    assert (
        run_table.main(["--metrics", "eval/x", "--runs", f"both={runs / 'a'},{runs / 'b'}", f"one={runs / 'b'}"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == ["| both | `eval/x` | 1 | 4 / 2 | +2 |", "| one | `eval/x` | 1 | 2 | +1 |"]


@pytest.mark.parametrize(
    ("metric", "given", "message"),
    [
        ("eval/x", "no folders", "must be NAME=FOLDER,FOLDER"),
        ("eval/x", "kind=nowhere", "nowhere holds no metrics.jsonl"),
        ("eval/z", "kind={runs}/a", "has 0 values of eval/z, needs 2; it knows eval/x"),
        ("train/y", "kind={runs}/a", "has 1 values of train/y"),
    ],
)
def test_what_is_not_there_is_one_line(runs, capsys, metric, given, message):
    assert run_table.main(["--metrics", metric, "--runs", given.format(runs=runs)]) == 2
    assert message in capsys.readouterr().err


def test_runs_that_were_measured_otherwise_are_not_put_beside_each_other(runs, capsys):
    command = ["--metrics", "eval/x", "--runs", f"one={runs / 'a'}", f"other={runs / 'b'}"]
    (runs / "a" / "summary.json").write_text(json.dumps({"measured_on": {"eval.num_conditions": 4, "eval.gold": ""}}))
    for count, code in ((4, 0), (8, 2)):
        (runs / "b" / "summary.json").write_text(json.dumps({"measured_on": {"eval.num_conditions": count}}))
        assert run_table.main(command) == code
    assert "were measured with eval.num_conditions 4 and 8 and cannot be compared" in capsys.readouterr().err
