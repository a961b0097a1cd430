"""metrics.jsonl and metrics.csv."""

import csv
import json
import logging
import math
from pathlib import Path

import pytest

from flow_grpo.reporting import metric_files
from flow_grpo.reporting.metric_files import MetricFiles, MetricReader, read_rows


def lines(folder: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_full_disk_is_named_with_the_file_and_the_way_out(tmp_path: Path) -> None:
    files = MetricFiles(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"set output_root to another disk: '.*metrics\.jsonl'"):
        files.append({"reward/mean": 0.1}, 1)


def test_every_call_is_a_line_and_every_step_a_row_and_a_fresh_run_starts_empty_files(tmp_path: Path) -> None:
    files = MetricFiles(tmp_path, resumed_step=5)  # without files to resume from
    files.append({"reward/mean": 0.1, "train/loss": 2.0}, 1)
    files.append({"eval/psnr": 20.0}, 1)
    files.append({"reward/mean": 0.2, "train/loss": 1.5}, 2)
    files.append({"eval/psnr": 21.0}, 2)
    assert lines(tmp_path) == [
        {"step": 1, "reward/mean": 0.1, "train/loss": 2.0},
        {"step": 1, "eval/psnr": 20.0},
        {"step": 2, "reward/mean": 0.2, "train/loss": 1.5},
        {"step": 2, "eval/psnr": 21.0},
    ]
    assert table(tmp_path) == [
        {"step": "1", "reward/mean": "0.1", "train/loss": "2.0", "eval/psnr": "20.0"},
        {"step": "2", "reward/mean": "0.2", "train/loss": "1.5", "eval/psnr": "21.0"},
    ]
    assert MetricFiles(tmp_path).rows == {} and lines(tmp_path) == [] and table(tmp_path) == []


def test_a_new_metric_is_a_column_that_is_empty_in_older_rows_and_nan_is_null(tmp_path: Path) -> None:
    files = MetricFiles(tmp_path)
    files.append({"a": 1.0}, 1)
    files.append({"b": 2.0, "a": 3.0}, 2)
    files.append({"b": 4.0}, 3)
    assert table(tmp_path) == [
        {"step": "1", "a": "1.0", "b": ""},
        {"step": "2", "a": "3.0", "b": "2.0"},
        {"step": "3", "a": "", "b": "4.0"},
    ]
    MetricFiles(tmp_path).append({"a": math.nan, "b": math.inf}, 1)
    assert lines(tmp_path) == [{"step": 1, "a": None, "b": None}]
    assert table(tmp_path) == [{"step": "1", "a": "nan", "b": "inf"}]


def test_a_resumed_run_keeps_nothing_past_the_resumed_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = MetricFiles(tmp_path)
    for step in (0, 1, 2, 3):
        files.append({"a": float(step), "b": math.nan}, step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "a": 4')  # killed while writing
    with caplog.at_level(logging.WARNING):
        files = MetricFiles(tmp_path, resumed_step=2)
    assert "metrics.jsonl: line 5 is no record of metrics and is dropped" in caplog.text
    assert math.isnan(files.rows[1]["b"])
    files.append({"a": 30.0, "c": 1.0}, 3)
    assert [(line["step"], line["a"]) for line in lines(tmp_path)] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]
    assert [(row["step"], row["a"], row["c"]) for row in table(tmp_path)] == [
        ("0", "0.0", ""),
        ("1", "1.0", ""),
        ("2", "2.0", ""),
        ("3", "30.0", "1.0"),
    ]


def test_metrics_logged_after_their_steps_checkpoint_are_recorded_once(tmp_path: Path) -> None:
    files = MetricFiles(tmp_path)
    assert files.append({"a": 1.0}, 2) and files.append({"held_out": 2.0}, 2)
    files = MetricFiles(tmp_path, resumed_step=2)
    assert not files.append({"held_out": 2.5}, 2)
    assert files.append({"other": 3.0}, 2) and files.append({"held_out": 4.0}, 3)
    assert lines(tmp_path) == [
        {"step": 2, "a": 1.0},
        {"step": 2, "held_out": 2.0},
        {"step": 2, "other": 3.0},
        {"step": 3, "held_out": 4.0},
    ]


def test_what_is_no_record_of_metrics_is_dropped_by_line_and_the_run_goes_on(tmp_path, caplog):
    MetricFiles(tmp_path).append({"a": 1.0}, 1)
    bad = [b"\xff\xfe", b"7", b"[1]", b"null", b'{"a": 1}', b'{"step": "2"}', b'{"step": 1, "a": "x"}']
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\n".join([*bad, b'{"step": 2, "a": null}', b""]))
    files = MetricFiles(tmp_path, resumed_step=2)
    assert [f"line {number} is no record" in caplog.text for number in range(1, 10)] == [False, *[True] * 7, False]
    assert [*files.rows] == [1, 2] and math.isnan(files.rows[2]["a"])
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_a_reader_takes_every_record_and_leaves_out_a_line_that_is_being_written(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 2, "a/x": 1.0}\n{"step": 1, "a/x": null}\n{"step": 2, "a/y": 3}\n{"step": 3, "a/')
    rows = read_rows(file)
    assert list(rows) == [1, 2] and rows[2] == {"a/x": 1.0, "a/y": 3} and math.isnan(rows[1]["a/x"])
    for content in ("", "nothing\n"):
        file.write_text(content)
        with pytest.raises(ValueError, match="holds no record of metrics; wait for the run's first"):
            read_rows(file)
    with pytest.raises(ValueError, match="cannot be read"):
        read_rows(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(ValueError, match=r"metrics\.jsonl cannot be read .*; make it readable"):
        MetricFiles(tmp_path, resumed_step=1)


def test_the_table_is_rewritten_only_where_a_metric_is_new_or_it_was_touched(tmp_path, monkeypatch):
    whole, write = [], metric_files.write_atomically
    monkeypatch.setattr(metric_files, "write_atomically", lambda *words: (whole.append(1), write(*words)))
    files = MetricFiles(tmp_path)
    files.append({"a": 1.0, "bü, c": 2.0}, 0)
    for step in (1, 2, 3):
        files.append({"a": 123456.789}, step)
        files.append({"a": float(step), "bü, c": 0.5}, step)  # a shorter row in its place
    assert len(whole) == 3 and table(tmp_path)[3] == {"step": "3", "a": "3.0", "bü, c": "0.5"}
    (tmp_path / "metrics.csv").write_text("step,a\n")
    for metrics, step in (({"a": 4.0}, 4), ({"a": 9.0}, 2), ({"d": 6.0}, 6)):
        files.append(metrics, step)
    assert len(whole) == 6 and [row["a"] for row in table(tmp_path)] == ["1.0", "1.0", "9.0", "3.0", "4.0", ""]


def test_a_reader_of_a_running_run_reads_what_is_new_and_begins_again_where_the_run_was_resumed(tmp_path, monkeypatch):
    parsed, record = [], metric_files._record
    monkeypatch.setattr(metric_files, "_record", lambda text: (parsed.append(text), record(text))[1])
    files, reader = MetricFiles(tmp_path), MetricReader(tmp_path / "metrics.jsonl")
    for step in range(100):
        files.append({"a": float(step), "b": math.nan}, step)
    reader.look()
    assert len(parsed) == 100 and list(reader.columns["a"]) == list(range(100)) and reader.columns["b"] == {}
    files.append({"c": 1.0}, 99)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 100, "a')
        file.flush()
        reader.look()
        file.write('": 7.0}\n')
    reader.look()
    assert len(parsed) == 103 and reader.rows[100] == {"a": 7.0} and reader.rows[99]["c"] == 1.0
    MetricFiles(tmp_path, resumed_step=1)
    reader.look()
    assert list(reader.rows) == list(reader.columns["a"]) == [0, 1]
