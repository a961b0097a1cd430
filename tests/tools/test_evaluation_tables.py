"""Means, failure rates, differences and their tables, from rows written by hand."""

import json

import pytest

from flow_grpo.maths.bootstrap import widening
from tools.evaluation.tables import METRICS, as_markdown, compare, read_baseline, summarise, write_tables

SETTINGS = {"estimator": "an estimator", "most_frames": 21}


def row(video: str, value: float | None, source: str = "", kind: str = "arc", **changes: object) -> dict:
    """Return the row of a video whose errors all have one value; None: not registered."""
    made = dict.fromkeys(METRICS, value) | {
        "video": video,
        "source": source or video,
        "camera_type": kind,
        "registered": value is not None,
        "cause": "" if value is not None else "lost",
        "fault": False,
        "frames": 21,
        "frames_registered": 21 if value is not None else 4,
        "shares_estimator": False,
        "asked": "path",
    }
    return made | changes


def test_means_are_over_registered_rows_next_to_the_failure_rate():
    summary = summarise([row("a", 1.0), row("b", 3.0), row("c", None), row("d", None, kind="pan")])
    assert summary["failure_rate"] == 0.5 and summary["registered"] == 2
    cell = summary["metrics"]["rot_deg_mean"]
    half = widening(2)  # of 1, as far as the two sources are from their mean
    assert (cell["mean"], cell["low"], cell["high"]) == pytest.approx((2, 2 - half, 2 + half))
    assert (cell["rows"], cell["sources"]) == (2, 2)
    assert summary["failure_rate_interval"] == [0, 1]
    assert summary["camera_types"]["pan"]["metrics"] == {} and summary["camera_types"]["pan"]["failure_rate"] == 1
    assert "read them beside failure_rate" in summary["reading"]
    # An undefined error is left out of its own mean only, and counted.
    rows = [row("a", 1.0), row("b", 5.0, trans_sim3_rel=None)]
    metrics = summarise(rows)["metrics"]
    assert metrics["rot_deg_mean"]["mean"] == 3
    assert metrics["trans_sim3_rel"] == {"mean": 1.0, "low": None, "high": None, "rows": 1, "sources": 1}
    assert "] | 1 (n=1) |" in as_markdown(SETTINGS, rows, summarise(rows))


def test_camera_types_are_in_the_order_of_their_numbers():
    rows = [row(kind, 1.0, kind=kind) for kind in ("cam_type10", "cam_type9", "other", "cam_type1", "arc_left")]
    kinds = list(summarise(rows)["camera_types"])
    assert kinds == ["arc_left", "cam_type1", "cam_type9", "cam_type10", "other"]


def test_intervals_are_over_sources():
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    apart = summarise([row(str(v), v) for v in values])["metrics"]["rot_deg_mean"]
    hung = summarise([row(str(v), v, source=str(v > 4)) for v in values])["metrics"]["rot_deg_mean"]
    half = 2 * widening(2)
    assert hung["sources"] == 2 and (hung["low"], hung["high"]) == pytest.approx((4.5 - half, 4.5 + half))
    assert apart["sources"] == 8 and 2.3 < apart["low"] < apart["high"] < 6.7


def test_differences_are_taken_video_by_video():
    ours = [row("a", 1.0), row("b", 5.0), row("c", 3.0), row("d", None)]
    theirs = [row("a", 2.0), row("b", 6.0), row("c", None), row("d", 0.1)]
    compared = compare(ours, theirs, "theirs")
    cell = compared["metrics"]["rot_deg_mean"]
    assert (cell["mean"], cell["low"], cell["high"], cell["rows"]) == (-1, -1, -1, 2)
    assert (compared["only_registered_here"], compared["only_registered_in_baseline"]) == (1, 1)
    assert compared["failure_rate"]["mean"] == 0
    lost = compare(ours[3:], theirs[3:], "theirs")
    assert lost["failure_rate"]["mean"] == 1 and lost["metrics"] == {}
    text = as_markdown(SETTINGS, ours, summarise(ours) | {"baseline": compared})
    assert "over 4 common videos" in text and "| rot_deg_mean | -1 [-1, -1] | 2 |" in text


def test_a_baseline_gives_the_rows_in_common(tmp_path):
    theirs = [row("b", 2.0), row("a", 1.0), row("x", 9.0)]
    write_tables(tmp_path, SETTINGS, theirs, summarise(theirs))
    asked = [{"video": name, "asked": "path"} for name in ("a", "b", "new")]
    found = read_baseline(tmp_path / "metrics.json", SETTINGS, asked)
    assert [each["video"] for each in found] == ["a", "b"]


def test_cells_are_escaped_in_every_format(tmp_path):
    rows = [row("a", 1.0), row("b|c", None, cause="two\nlines")]
    write_tables(tmp_path, SETTINGS, rows, summarise(rows))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.json", "rows.csv", "summary.csv", "summary.md"]
    content = json.loads((tmp_path / "metrics.json").read_text())
    assert content["rows"] == rows and content["settings"] == SETTINGS
    text = (tmp_path / "summary.md").read_text()
    assert "| b\\|c | arc | no | 4 of 21 |" in text and "| two lines |" in text
    widths = {line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith(("| a ", "| b"))}
    assert len(widths) == 1
