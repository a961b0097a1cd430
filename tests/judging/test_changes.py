"""Paired changes between two evaluations, with their intervals."""

import math

import pytest

from flow_grpo.judging.changes import LEAST_SCENES, as_metrics, changes_by_camera, paired_changes, with_intervals
from flow_grpo.judging.table import Table
from flow_grpo.maths.bootstrap import LEVEL, Interval, mean_interval


def row(scene: int, camera: int, **values: float) -> dict:
    return {"scene": f"val/scene{scene}", "camera": f"cam{camera:02d}", "preset": "", "values": values}


def paired(before: list[dict], after: list[dict], level: float = LEVEL) -> dict[str, Interval]:
    return paired_changes(Table.of_rows(before), Table.of_rows(after), level)


def test_changes_are_means_of_differences_with_intervals_over_scenes():
    before = [row(scene, camera, err=float(10 * scene + camera)) for scene in range(5) for camera in range(3)]
    differences = [0.1, 0.2, 0.3, 1.0, 1.1, 1.2, -0.5, -0.4, -0.3, 2.0, 2.0, 2.3, 0.6, 0.5, 0.4]
    after = [
        row(number // 3, number % 3, err=old["values"]["err"] + change)
        for number, (old, change) in enumerate(zip(before, differences, strict=True))
    ]
    found = paired(before, after[::-1])["eval/err"]
    expected = mean_interval(differences[::-1], [number // 3 for number in reversed(range(15))])
    assert (found.rows, found.groups) == (15, 5)
    for name in ("mean", "low", "high"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=1e-12)
    wider = mean_interval(differences, range(15))
    assert found.high - found.low > 1.3 * (wider.high - wider.low)  # the scenes differ more than their videos


def test_few_scenes_give_a_change_without_an_interval():
    for scenes, known in ((LEAST_SCENES, True), (LEAST_SCENES - 1, False)):
        before = [row(scene, camera, err=1.0) for scene in range(scenes) for camera in range(9)]
        after = [row(scene, camera, err=1.5 + 0.1 * scene) for scene in range(scenes) for camera in range(9)]
        found = paired(before, after)["eval/err"]
        assert found.mean > 0.5 and found.groups == scenes
        assert (math.isfinite(found.low), math.isfinite(found.high)) == (known, known)


def test_only_conditions_with_a_value_both_times_count_and_shares_change_over_all():
    before = [row(0, 0, err=1.0), row(1, 0, err=math.nan), row(2, 0, err=3.0), row(3, 0, err=9.0)]
    after = [row(0, 0, err=2.0), row(1, 0, err=100.0), row(2, 0, err=5.0), row(4, 0, err=50.0)]
    found = paired(before, after)
    assert (found["eval/err"].mean, found["eval/err"].rows) == (pytest.approx(1.5), 2)
    assert (found["eval/err_valid"].mean, found["eval/err_valid"].rows) == (pytest.approx(1 / 3), 3)


@pytest.mark.parametrize(("before", "after"), [([], [row(0, 0, a=1.0)]), ([row(0, 0, a=1.0)], [row(1, 0, a=1.0)])])
def test_evaluations_without_a_common_condition_have_no_changes(before, after):
    assert paired(before, after) == {}


def test_changes_by_camera_are_those_of_its_conditions_alone_where_these_have_an_interval():
    presets = ((0, ""), (1, "pan"))
    before = [row(scene, camera, err=1.0) | {"preset": name} for scene in range(5) for camera, name in presets]
    after = [one | {"values": {"err": 1.0 + 0.1 * n}} for n, one in enumerate(before)]
    lonely = row(0, 2, err=5.0)
    found = changes_by_camera(Table.of_rows([*before, lonely]), Table.of_rows([lonely, *after]))
    assert set(found) == {"cam00", "pan"}  # one scene has no interval
    for kind, camera in (("cam00", 0), ("pan", 1)):
        own = paired(before[camera::2], after[camera::2], 1 - 0.05 / 2)["eval/err"]  # two kinds have an interval
        assert found[kind] == {"eval/err": [own.mean, own.low, own.high], "eval/err_valid": [0.0, 0.0, 0.0]}


def test_metrics_are_followed_by_the_intervals_there_are():
    after = {"eval/a": 1.5, "eval/b": 1.0, "eval/d": 0.0}
    changes = {"eval/a": Interval(0.4, 0.1, 0.7, 9, 3), "eval/b": Interval(-1.0, math.nan, math.nan, 9, 1)}
    assert with_intervals(after, changes) == after | {"eval/a_ci95": [0.1, 0.7]}
    assert list(with_intervals(after, changes))[:2] == ["eval/a", "eval/a_ci95"]
    assert with_intervals(after, {}) == after
    wanted = {"eval_change/a": 0.4, "eval_change/a_low": 0.1, "eval_change/a_high": 0.7}
    assert as_metrics(changes, list(after)) == wanted
