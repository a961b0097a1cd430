"""The verdict follows from intervals, directions and what the rewards of the training did not measure."""

import math

import pytest

from flow_grpo.judging.table import Table
from flow_grpo.judging.verdict import DO_NOT_USE, abridged, best_and_worst, direction, judge, worse_by_camera
from flow_grpo.maths.bootstrap import Interval

REWARDS = ["target_view", "room_rot", "room_pose"]


def change(mean: float, half: float = 0.1) -> Interval:
    return Interval(mean, mean - half, mean + half, 8, 4)


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        ("eval/room_pose", 1),
        ("eval/target_view_psnr_db", 1),
        ("eval/rot_err_deg_valid", 1),
        ("eval/located", 1),
        ("eval/rot_err_deg", -1),
        ("eval/trans_err_m", -1),
        ("eval/view_disp_disp_px", -1),
        ("eval/motion_mag_motion", 0),
        ("eval/residual", 0),
    ],
)
def test_rewards_and_shares_should_rise_errors_fall_and_of_the_rest_nothing_is_known(name, sign):
    assert direction(name, REWARDS) == sign


def test_a_change_counts_where_its_interval_excludes_nothing_having_changed():
    changes = {
        "eval/rot_err_deg": change(-0.2),
        "eval/trans_err_m": change(-0.05),
        "eval/room_pose": change(0.2),
        "eval/target_view_psnr_db": Interval(3.0, math.nan, math.nan, 8, 1),
        "eval/residual": change(5.0),
    }
    verdict = judge(changes, REWARDS, {"room_rot": 1.0}, before={})
    assert verdict.metrics == {
        "eval/rot_err_deg": "better",
        "eval/trans_err_m": "unclear",
        "eval/room_pose": "better",
        "eval/target_view_psnr_db": "unclear",
    }
    assert str(verdict) == "better (better: rot_err_deg, room_pose)"


@pytest.mark.parametrize(
    ("rot", "reward", "weights", "overall"),
    [
        (0.3, 0.3, {"target_view": 1.0}, "worse"),  # the reward that was trained on rises, what judges it does not
        (0.3, 0.3, {"target_view": 0.0}, "mixed"),
        (-0.3, -0.3, {"target_view": 1.0}, "better"),
        (0.0, 0.3, {"target_view": 1.0}, "unclear"),
    ],
)
def test_what_was_trained_on_does_not_count_beside_what_was_not(rot, reward, weights, overall):
    changes = {"eval/rot_err_deg": change(rot), "eval/target_view": change(reward)}
    changes["eval/target_view_psnr_db"] = change(reward)
    verdict = judge(changes, REWARDS, weights, before={})
    assert verdict.overall == overall and (DO_NOT_USE in str(verdict)) == (overall == "worse")


def test_beside_a_gold_estimator_a_reward_of_weight_0_decides_nothing():
    """It may be the trained reward under another name: measured here and by a server."""
    changes = {"eval/rot_err_deg": change(0.0), "eval/warmth": change(0.3), "eval/remote:warmth": change(0.3)}
    weights = {"remote:warmth": 1.0, "warmth": 0.0}
    rewards = [*REWARDS, "warmth", "remote:warmth"]
    assert judge(changes, rewards, weights, before={}, gold=True).overall == "unclear"
    assert judge(changes, rewards, weights, before={}).overall == "better"
    likeness = changes | {"eval/target_view_psnr_db": change(-0.3)}
    assert judge(likeness, rewards, weights | {"target_view": 0.0}, before={}, gold=True).overall == "worse"


def test_without_anything_else_the_trained_rewards_are_judged_on_held_out_conditions():
    assert judge({"eval/target_view": change(-0.3)}, REWARDS, {"target_view": 1.0}, before={}).overall == "worse"
    assert str(judge({"eval/target_view": change(0.0)}, REWARDS, {}, before={})) == "unclear (no interval excludes 0)"


def test_too_few_scenes_give_no_verdict_and_it_says_why():
    found = judge({"eval/target_view": Interval(3.0, math.nan, math.nan, 8, 1)}, REWARDS, {}, before={})
    assert str(found) == "unclear (fewer than 5 held-out scenes give no intervals, see the table)"


def test_a_reward_is_not_taken_for_another_whose_name_begins_alike():
    changes = {"eval/room_rot": change(0.3), "eval/room_rotation_deg": change(0.3)}
    assert judge(changes, REWARDS, {"room_rot": 1.0}, before={}).overall == "worse"


def test_what_got_worse_for_a_kind_of_camera_is_named_although_the_mean_got_better():
    by_camera = {
        "zoom_in": {"eval/rot_err_deg": [0.7, 0.3, 1.1], "eval/trans_err_m": [-0.2, -0.3, -0.1]},
        "pan_left": {"eval/rot_err_deg": [0.1, -0.1, 0.3], "eval/room_pose": [-0.2, -0.3, -0.1]},
        "arc_left": {"eval/room_rot": [-0.2, -0.3, -0.1], "eval/residual": [1.0, 0.5, 1.5]},
    }
    names = ["eval/rot_err_deg", "eval/trans_err_m", "eval/room_pose", "eval/residual"]
    rot, pose = "zoom_in rot_err_deg +0.7 [+0.3, +1.1]", "pan_left room_pose -0.2 [-0.3, -0.1]"
    assert worse_by_camera(by_camera, names, REWARDS, {}) == [pose, rot]  # clearer: as large as its interval is wide
    before = {"eval_by_camera/zoom_in/rot_err_deg": 1.8, "eval_by_camera/pan_left/room_pose": -20.0}
    assert worse_by_camera(by_camera, names, REWARDS, before) == [pose, rot]
    assert worse_by_camera(by_camera, names, REWARDS, {"eval_by_camera/zoom_in/rot_err_deg": 50.0}) == [pose]
    by_camera["tilt_up"] = {"eval/trans_err_m": [0.1, 0.1, 0.1]}  # an interval without width is the clearest
    assert worse_by_camera(by_camera, names, REWARDS, before)[0].startswith("tilt_up")


@pytest.mark.parametrize(
    ("changed", "before", "small"),
    [
        ({"rot_err_deg": -0.2}, {"rot_err_deg": 180.0}, True),
        ({"rot_err_deg": -0.2}, {"rot_err_deg": 1.8}, False),
        ({"rot_err_deg": -0.2}, {}, False),
        ({"rot_err_deg": -0.2, "view_disp_disp_px": -3.0}, {"rot_err_deg": 180.0, "view_disp_disp_px": 9.0}, False),
        ({"target_view_psnr_db": 0.45}, {"target_view_psnr_db": 24.0}, False),  # a tenth of the squared error
        ({"target_view_psnr_db": 0.05}, {"target_view_psnr_db": 24.0}, True),
        ({"room_pose": 0.3}, {"room_pose": 100.0}, False),  # of a reward a part says nothing
        ({"room_pose": 0.3, "rot_err_deg": -0.2}, {"room_pose": 1.0, "rot_err_deg": 180.0}, True),
    ],
)
def test_a_small_change_is_called_so_however_clear(changed, before, small):
    changes = {f"eval/{name}": change(mean, abs(mean) / 2) for name, mean in changed.items()}
    verdict = judge(changes, REWARDS, {}, before={f"eval/{name}": value for name, value in before.items()})
    assert str(verdict).startswith("better, but by less than 2% (better: " if small else "better (better: ")


@pytest.mark.parametrize(("count", "last"), [(3, "c2"), (5, "2 more, see change_by_camera in summary.json")])
def test_people_are_shown_the_three_clearest(count, last):
    shown = abridged([f"c{number}" for number in range(count)])
    assert shown[:3] == ["c0", "c1", "c2"] and shown[-1] == last


def row(camera: str, value: float) -> dict:
    return {"scene": "s", "camera": camera, "preset": "", "values": {"deg": value}}


def test_best_and_worst_are_those_that_changed_most_in_the_better_and_the_worse_direction():
    before = Table.of_rows([row(name, 1.0) for name in "abcde"])
    values = {"c": 0.5, "a": 0.9, "e": math.nan, "b": 2.0, "d": 0.1, "new": 0.0}
    after = Table.of_rows([row(name, value) for name, value in values.items()])
    assert best_and_worst(before, after, "deg", -1, 1) == ([4], [3])
    assert best_and_worst(before, after, "deg", -1, 9) == ([4, 0], [3, 1])
    assert best_and_worst(before, after, "deg", 1, 1) == ([3], [4])
    nothing = best_and_worst(before, after, "m", 1, 2)
    assert best_and_worst(Table.of_rows([]), after, "deg", 1, 2) == nothing == ([], [])
