"""Reward knobs that cannot work together are refused in one line, those at the edge are taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from flow_grpo.config import ConfigError, load_config

ROOT = Path(__file__).resolve().parents[1]
TOY = f"{ROOT}/tests/toy_recipe.py:toy"

BAD = [
    ("reward.weights=target_view=0", ["config.reward.weights: got {'target_view': 0.0}", "nothing to learn"]),
    ("reward.weights.target_view=-1", ["config.reward.weights.target_view: got -1.0", "more is better"]),
    ("reward.weights.target_view=nan", ["config.reward.weights.target_view: got nan"]),
    ("reward.weights.room_pose=1", ["config.eval.gold: got 'room_pose'", "no reward uses"]),
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
        "reward.weights.motion_mag=0 dynamic_sampling.metric=motion_mag",
    ],
)
def test_a_setting_at_the_edge_of_what_works_is_taken(settings: str) -> None:
    assert load_config(TOY, [f"--config.{setting}" for setting in settings.split(" ")])


def test_groups_that_would_be_valid_by_rounding_alone_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"reward.flat_eps=1e-06 is below reward.adv_eps=0.0001"):
        load_config(TOY, ["--config.dynamic_sampling.enabled", "--config.reward.flat_eps=1e-6"])
