"""Reward knobs that cannot work together are refused in one line, those at the edge are taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from flow_grpo.settings.loading import ConfigError, load_config

ROOT = Path(__file__).resolve().parents[2]
TOY = f"{ROOT}/tests/toy_recipe.py:toy"

BAD = [
    ("reward.weights=target_view=0", ["config.reward.weights: got {'target_view': 0.0}", "nothing to learn"]),
    ("reward.weights.target_view=-1", ["config.reward.weights.target_view: got -1.0", "more is better"]),
    ("reward.weights.target_view=nan", ["config.reward.weights.target_view: got nan"]),
    ("reward.weights.room_pose=1", ["config.eval.gold: got 'room_pose'", "no reward uses"]),
    ("reward.schedules.target_veiw=0:1", ["config.reward.schedules: got 'target_veiw'", "did you mean 'target_view'?"]),
    ("reward.schedules.motion_mag=0:1", ["measured rewards source_match, target_view", "weights.motion_mag=0 to mea"]),
    ("reward.schedules.target_view=5:1,5:0", ["schedules.target_view: got ((5, 1.0), (5, 0.0))", "each once"]),
    ("reward.schedules.target_view=5:1,3:0", ["schedules.target_view: got", "rising order", "=0:0,50:1"]),
    ("reward.schedules.target_view=-1:1", ["config.reward.schedules.target_view: got ((-1, 1.0),)", "from 0 on"]),
    ("reward.schedules.target_view=0:1,5:-1", ["config.reward.schedules.target_view: got -1.0", "[0, inf)"]),
    ("reward.schedules.target_view=0:nan", ["config.reward.schedules.target_view: got nan", "[0, inf)"]),
    ("reward.schedules.target_view=0:inf", ["config.reward.schedules.target_view: got inf"]),
    (
        "reward.schedules=target_view=0:1,5:0,source_match=5:0,9:1",
        ["config.reward.schedules: got", "epoch 5 ({'source_match': 0.0, 'target_view': 0.0})", "overlap"],
    ),
    (
        "reward.weights.source_match=0 reward.schedules.target_view=7:0,9:1",
        ["config.reward.schedules: got", "in epoch 0"],
    ),
    (
        "reward.weights.room_pose=0 reward.schedules.room_pose=3:0,9:1",
        ["config.eval.gold: got 'room_pose'", "by reward.schedules.room_pose", "schedules.room_pose=0:0"],
    ),
    (
        "reward.weights.room_pose=0 reward.gates.target_view=room_pose:-1",
        ["config.eval.gold: got 'room_pose'", "holds the gate of reward.gates.target_view", "no reward uses"],
    ),
    ("reward.gates.target_view=pose_rot:0", ["gates.target_view: got 'pose_rot'", "measured rewards", "pose_rot=0 to"]),
    ("reward.gates.pose_rot=source_match:0.5", ["config.reward.gates: got 'pose_rot'", "weights.pose_rot=0 to meas"]),
    (
        "reward.gates.target_view=target_view:0",
        ["config.reward.gates.target_view: got 'target_view'", "another reward"],
    ),
    ("reward.gates.target_view=source_match:nan", ["config.reward.gates.target_view: got nan", "finite"]),
    ("reward.gates.target_view=source_match:-inf", ["config.reward.gates.target_view: got -inf", "source_match:VALUE"]),
    (
        "dynamic_sampling.metric=motion_mag",
        ["config.dynamic_sampling.metric: got 'motion_mag'", "motion_mag=0 to meas"],
    ),
]


@pytest.mark.parametrize(("settings", "parts"), BAD, ids=[settings for settings, _ in BAD])
def test_a_setting_that_cannot_work_is_refused_in_one_line(settings: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^config\.[^\n]+;[^\n]+$") as caught:
        load_config(TOY, [f"--config.{setting}" for setting in settings.split(" ")])
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        "reward.weights.motion_mag=0",
        "reward.weights.room_pose=0",
        "reward.weights.room_pose=1 eval.gold=",
        "reward.weights=target_view=0 reward.schedules.target_view=0:1",
        "reward.schedules=target_view=0:1,5:0,source_match=4:0,9:1",
        "reward.weights.source_match=0 reward.schedules.target_view=0:1,300:0 num_epochs=300",
        "reward.weights.room_pose=1 reward.schedules.room_pose=0:0,9:0",
        "reward.gates=target_view=source_match:0,source_match=target_view:-1",
        "reward.weights.remote:judge=0 reward.remote.judge=http://h reward.gates.target_view=remote:judge:2",
        "reward.weights.motion_mag=0 dynamic_sampling.metric=motion_mag",
    ],
)
def test_a_setting_at_the_edge_of_what_works_is_taken(settings: str) -> None:
    assert load_config(TOY, [f"--config.{setting}" for setting in settings.split(" ")])


def test_groups_that_would_be_valid_by_rounding_alone_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"reward.flat_eps=1e-06 is below reward.adv_eps=0.0001"):
        load_config(TOY, ["--config.dynamic_sampling.enabled", "--config.reward.flat_eps=1e-6"])
