"""The verdict follows from intervals, directions and what the rewards of the training did not measure."""

import dataclasses
import math

import pytest
import torch

from flow_grpo.judging.changes import paired_changes
from flow_grpo.judging.table import Table
from flow_grpo.judging.verdict import DO_NOT_USE, abridged, aspect, best_and_worst, direction, judge, worse_by_camera
from flow_grpo.maths.bootstrap import Interval, widening

REWARDS = ["target_view", "room_rot", "room_pose"]


def change(mean: float, half: float = 0.1) -> Interval:
    return Interval(mean, mean - half, mean + half, 8, 4)


@pytest.mark.parametrize(
    ("name", "sign", "part"),
    [
        ("eval/room_pose", 1, "other rewards"),
        ("eval/rot_err_deg_valid", 1, "camera"),
        ("eval/located", 1, "camera"),
        ("eval/rot_err_deg", -1, "camera"),
        ("eval/trans_err_m", -1, "camera"),
        ("eval/view_disp_disp_px", -1, "camera"),
        ("eval/target_view_displacement", -1, "camera"),
        ("eval/residual", -1, "picture"),
        ("eval/found_path_psnr_db", 1, "picture"),
        ("eval/target_view_mismatch", -1, "picture"),
        ("eval/target_view_psnr_db", 1, "true view"),
        ("eval/target_view", 1, "true view"),
        ("eval/motion_mag_motion", 0, "other rewards"),
        ("eval/smooth_shake_deg", -1, "other rewards"),  # a static camera does not tremble
        ("eval/remote:judge_valid", 1, "other rewards"),
        ("eval/residual_valid", 1, "picture"),
        ("eval/equal_travel_found_path_psnr_db", 1, "picture"),
        ("eval/camera_travel", 0, "other rewards"),
    ],
)
def test_a_metric_has_a_direction_and_an_aspect(name, sign, part):
    assert (direction(name, REWARDS), aspect(name)) == (sign, part)


DEMO = {  # change and half of its interval, value before
    "eval/rot_err_deg": (-0.34, 0.12, 1.8),
    "eval/trans_err_m": (-0.08, 0.01, 0.18),
    "eval/target_view_psnr_db": (1.1, 0.2, 24.65),
    "eval/target_psnr": (1.1, 0.2, 24.65),
    "eval/residual": (0.0054, 0.0005, 0.0348),
    "eval/room_rot": (0.4, 0.1, -1.96),
}
TRAINED = ["room_rot", "target_psnr"]
NAMES = [*REWARDS, "target_psnr"]


def judged(wanted=DEMO, twins=(), floors=None, **change):
    found = {name: Interval(mean, mean - half, mean + half, 160, 16) for name, (mean, half, _) in wanted.items()}
    found |= {f"eval/{name}": interval for name, interval in change.items()}
    before = {name: value for name, (*_, value) in wanted.items()}
    return judge(found, NAMES, TRAINED, before=before, floors=floors or {}, twins=twins)


def test_a_better_camera_with_a_spoiled_picture_is_mixed_and_the_verdict_says_which():
    verdict = judged(twins={"eval/target_view_psnr_db"})
    assert verdict.overall == "mixed" and verdict.aspects == {"camera": "better", "picture": "worse"}
    assert verdict.in_words == (
        "mixed: camera better (rot_err_deg 1.8 → 1.46, trans_err_m 0.18 → 0.1), "
        "picture worse (residual 0.0348 → 0.0402)"
    )
    assert set(verdict.deciding) == {"eval/rot_err_deg", "eval/trans_err_m", "eval/residual"}


def test_a_measure_does_not_decide_where_it_is_known_at_equal_travel():
    verdict = judged(DEMO | {"eval/equal_travel_residual": (0.0001, 0.0005, 0.0348)})
    assert verdict.overall == "better" and verdict.metrics["eval/residual"] == "worse"
    assert "eval/residual" not in verdict.deciding and "eval/equal_travel_residual" in verdict.deciding


def test_where_only_what_was_trained_rises_the_run_is_unclear():
    flat = {
        name: (0.0 if name.endswith(("_deg", "_m", "residual")) else mean, *rest)
        for name, (mean, *rest) in DEMO.items()
    }
    verdict = judged(flat, twins={"eval/target_view_psnr_db"})
    assert (verdict.overall, verdict.aspects) == ("unclear", {"camera": "unclear", "picture": "unclear"})
    # Neither does the true view alone, if it were not the trained reward under another name.
    assert (judged(flat).overall, judged(flat).aspects["true view"]) == ("unclear", "better")


def test_a_spoiled_picture_alone_and_both_aspects_worse():
    worse = DEMO | {"eval/rot_err_deg": (0.3, 0.1, 1.8), "eval/trans_err_m": (0.0, 0.01, 0.18)}
    verdict = judged(worse, twins={"eval/target_view_psnr_db"})
    assert verdict.overall == "worse" and verdict.in_words.endswith(DO_NOT_USE)


def test_a_change_below_the_least_effect_is_unclear_however_narrow_its_interval():
    tiny = {name: (0.0002 * value, 1e-9, value) for name, (*_, value) in DEMO.items()}
    assert judged(tiny).overall == "unclear" and judged(tiny).metrics["eval/room_rot"] == "worse"
    # A reward's zero lies anywhere, so only its own noise bounds it.
    assert judged(tiny, floors={"eval/room_rot": 0.1}).metrics["eval/room_rot"] == "unclear"
    turn = {"eval/rot_err_deg": (-0.06, 0.01, 1.8)}
    assert judged(turn).metrics == {"eval/rot_err_deg": "better"}
    assert judged(turn, floors={"eval/rot_err_deg": 0.73}).metrics == {"eval/rot_err_deg": "unclear"}
    decibels = {"eval/target_view_psnr_db": (0.05, 0.01, 24.0), "eval/target_psnr": (0.05, 0.01, 24.0)}
    assert set(judged(decibels).metrics.values()) == {"unclear"}  # one number under two names is judged once


def test_better_is_claimed_only_where_camera_and_picture_are_judged():
    verdict = judged({name: DEMO[name] for name in ("eval/trans_err_m", "eval/room_rot")})
    said = "camera better (trans_err_m 0.18 → 0.1); picture: not judged by an untrained measure"
    assert verdict.in_words == f"{verdict.overall}: {said}" and verdict.overall == "unclear"
    trained = judged({"eval/room_rot": DEMO["eval/room_rot"]})
    assert trained.in_words.startswith("unclear; camera: not judged by an independent estimator; picture: not judged")


def test_videos_without_a_camera_path_are_judged_by_the_rewards_that_were_not_trained():
    changes = {"eval/sharpness": Interval(0.3, 0.2, 0.4, 16, 16), "eval/judge": Interval(0.5, 0.4, 0.6, 16, 16)}
    names, before = ["sharpness", "judge"], {"eval/sharpness": -3.0, "eval/judge": 1.0}

    def verdict(*trained: str) -> str:
        return judge(changes, names, trained, before=before, floors={}, filmed=False).in_words

    assert verdict("judge") == "better: other rewards better (sharpness -3 → -2.7)"
    assert verdict("judge", "sharpness") == "unclear: all that is measured was trained"
    changes["eval/sharpness_valid"] = Interval(0.0, 0.0, 0.0, 16, 16)
    assert verdict("judge").startswith("better: other rewards better")


def test_too_few_scenes_give_no_verdict_and_it_says_why():
    verdict = judged({}, trans_err_m=Interval(-3.0, math.nan, math.nan, 8, 1))
    assert verdict.in_words.startswith("unclear: fewer than 5 held-out scenes give no intervals, see the table")


def test_five_scenes_that_all_got_a_little_better_are_not_enough():
    def table(errors: list[float]) -> Table:
        values = {"trans_err_m": torch.tensor(errors, dtype=torch.float64)}
        return Table(tuple("abcde"), ("camera",) * 5, ("",) * 5, values)

    before, after = table([0.2] * 5), table([0.195, 0.15, 0.08, 0.198, 0.17])
    change = paired_changes(before, after)["eval/trans_err_m"]
    assert judged({}, trans_err_m=change).aspects["camera"] == "unclear"
    narrower = dataclasses.replace(change, high=change.mean + (change.high - change.mean) / widening(5))
    assert narrower.high < 0 and judged({}, trans_err_m=narrower).aspects["camera"] == "better"


def test_a_reward_is_not_taken_for_another_whose_name_begins_alike():
    changes = {"eval/room_rot": change(0.3), "eval/room_rotation_deg": change(0.3)}
    assert judge(changes, REWARDS, ["room_rot"], before={}, floors={}).overall == "worse"


def test_twins_are_found_by_their_values():
    values = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    other = values.flip(0)
    near = values + 0.05 * other
    columns = {"trained": values, "again": 3 - 2 * values, "near": near, "other": other, "same": torch.ones(8)}
    labels = ("s",) * 8, tuple("abcdefgh"), ("",) * 8
    table = Table(*labels, {name: column.double() for name, column in columns.items()})
    assert table.twins(["trained"]) == {"again"}
    table.values["again"][0] = math.nan
    assert table.twins(["trained", "not measured"]) == {"again"}
    assert table.take([1, 2, 3, 4]).twins(["trained"]) == set()  # of few rows nobody knows
    for name in ("trained", "other"):
        table.values[name][3] = 1e4  # one row far from all others
    assert "other" not in table.twins(["trained"])


def test_what_got_worse_for_a_kind_of_camera_is_named_although_the_mean_got_better():
    by_camera = {
        "zoom_in": {"eval/rot_err_deg": [0.7, 0.3, 1.1], "eval/trans_err_m": [-0.2, -0.3, -0.1]},
        "pan_left": {"eval/rot_err_deg": [0.1, -0.1, 0.3], "eval/room_pose": [-0.2, -0.3, -0.1]},
        "arc_left": {"eval/room_rot": [-0.2, -0.3, -0.1], "eval/motion": [1.0, 0.5, 1.5]},
    }
    names = ["eval/rot_err_deg", "eval/trans_err_m", "eval/room_pose", "eval/motion"]
    rot, pose = "zoom_in rot_err_deg +0.7 [+0.3, +1.1]", "pan_left room_pose -0.2 [-0.3, -0.1]"
    assert worse_by_camera(by_camera, names, REWARDS, {}, {}) == [
        pose,
        rot,
    ]  # clearer: as large as its interval is wide
    before = {"eval_by_camera/zoom_in/rot_err_deg": 1.8, "eval_by_camera/pan_left/room_pose": -20.0}
    assert worse_by_camera(by_camera, names, REWARDS, before, {}) == [pose, rot]
    assert worse_by_camera(by_camera, names, REWARDS, {"eval_by_camera/zoom_in/rot_err_deg": 50.0}, {}) == [pose]
    assert worse_by_camera(by_camera, names, REWARDS, before, {"eval/rot_err_deg": 8.0}) == [pose]
    by_camera["tilt_up"] = {"eval/trans_err_m": [0.1, 0.1, 0.1]}  # an interval without width is the clearest
    assert worse_by_camera(by_camera, names, REWARDS, before, {})[0].startswith("tilt_up")


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
