"""Paired changes between two evaluations, with their intervals."""

import math

import pytest
import torch

from flow_grpo.judging.changes import (
    LEAST_SCENES,
    as_metrics,
    at_equal_travel,
    changes_by_camera,
    paired_changes,
    with_intervals,
)
from flow_grpo.judging.table import Table, means_by_camera
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


@pytest.mark.parametrize("damage", [0.0, 0.4])
def test_a_picture_is_compared_at_equal_travel(damage):
    draws = torch.Generator().manual_seed(0)
    before, after, scenes = [], [], 20
    for number in range(6 * scenes):
        start, moved, noise, other = torch.randn(4, generator=draws, dtype=torch.float64).tolist()
        went = 0.2 + 0.1 * moved  # farther in the mean, which costs 4 dB a metre
        values = {"camera_travel": 1.0, "found_path_psnr_db": 27 + start, "residual": 0.04}
        before.append(row(number % scenes, number // scenes, **values))
        psnr = 27 + start - 4 * went - damage + 0.2 * noise
        values = {"camera_travel": 1.0 + went, "found_path_psnr_db": psnr, "residual": 0.04 + 1e-4 * other}
        after.append(row(number % scenes, number // scenes, **values))
    first, last = Table.of_rows(before), Table.of_rows(after)
    assert torch.equal(at_equal_travel(first, first).values["equal_travel_residual"], first.values["residual"])
    first, last = at_equal_travel(first, first), at_equal_travel(first, last)
    found = paired_changes(first, last)
    assert found["eval/found_path_psnr_db"].high < -0.6
    change = found["eval/equal_travel_found_path_psnr_db"]
    assert change.low < -damage < change.high and change.high - change.low < 0.4
    assert (change.high < 0) == bool(damage)
    # The line is fitted to 120 points two of its spreads away from where it is read: its slope counts four times.
    deviations = last.values["equal_travel_found_path_psnr_db"] - first.values["found_path_psnr_db"]
    expected = 2 * 1.96 * math.sqrt(1 + 4) * float(deviations.std()) / math.sqrt(120)
    assert change.high - change.low == pytest.approx(expected, rel=0.35)
    kinds = changes_by_camera(first, last)
    alone = at_equal_travel(first.by_camera()["cam03"], last.by_camera()["cam03"])
    own = paired_changes(first, alone, 1 - 0.05 / 6)["eval/equal_travel_residual"]
    assert kinds["cam03"]["eval/equal_travel_residual"] == [own.mean, own.low, own.high]
    assert not any("equal_travel" in name for name in means_by_camera(last))


def test_without_travel_in_both_tables_nothing_is_compared_at_equal_travel():
    own = Table.of_rows([row(0, 0, camera_travel=2.0)])  # of a judge that looks at cameras only
    assert at_equal_travel(own, own).values.keys() == own.values.keys()
    old, new = Table.of_rows([row(0, 0, residual=1.0)]), Table.of_rows([row(0, 0, residual=1.0, camera_travel=2.0)])
    assert at_equal_travel(old, new) is new and at_equal_travel(new, old) is old


def test_a_condition_without_a_camera_has_no_value_at_equal_travel():
    lost = {"camera_travel": math.nan, "found_path_psnr_db": 20.0, "residual": 1.0}
    rows = [row(n, 0, camera_travel=0.1 * n, found_path_psnr_db=20.0, residual=1.0) for n in range(6)]
    table = at_equal_travel(Table.of_rows(rows), Table.of_rows([row(0, 0, **lost), *rows[1:]]))
    assert table.values["equal_travel_residual"].isfinite().tolist() == [False] + 5 * [True]
