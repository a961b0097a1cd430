"""The reward set: what one reward does wrong stays its own, is counted, and never becomes a score."""

import logging
import math
import pickle
from collections.abc import Callable

import pytest
import torch

from flow_grpo.records import RewardResult
from flow_grpo.rewards.base import REWARDS, RewardSet, build_reward, build_reward_set, check_name
from flow_grpo.rewards.remote.reward import RemoteReward
from flow_grpo.settings.errors import ConfigError
from tests.room_films import conditions, film

FILM = film(["pan_left", "zoom_in", "arc_right"])
CONDITIONS = conditions(FILM)


class Fake:
    floor = 0.25
    measures = ("extra",)

    def __init__(self, name: str, answer: Callable[[], RewardResult]) -> None:
        self.name = name
        self.answer = answer

    def __call__(self, videos, conditions):
        return self.answer()


def result(values=(1.0, 2.0, 3.0), valid=(True, True, True), changes=None) -> RewardResult:
    values = torch.tensor(values)
    fields = {"values": values, "valid": torch.tensor(valid), "causes": tuple("" if v else "why" for v in valid)}
    return RewardResult(**(fields | {"info": {"extra": 10 * values}} | (changes or {})))


def run(*rewards: Fake) -> dict[str, RewardResult]:
    return RewardSet(rewards, {reward.name: 1.0 for reward in rewards})(FILM.videos, CONDITIONS)


def explode() -> RewardResult:
    raise RuntimeError("the scorer is down")


def test_a_valid_result_is_returned_unchanged_and_a_masked_value_is_nan():
    said = run(Fake("fine", result))["fine"]
    assert said.values.tolist() == [1, 2, 3]
    assert said.valid.all()
    assert said.causes == ("", "", "")
    assert said.info["extra"].tolist() == [10, 20, 30]
    said = run(Fake("half", lambda: result(valid=(True, False, True))))["half"]
    assert said.values[1].isnan()
    assert said.causes == ("", "why", "")
    assert not said.faulty.any()


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("name", None, "reward Fake has name None, must be a text"),
        ("name", "", "reward Fake has name ''"),
        ("floor", None, r"reward odd has floor None, must be a number in \[0, inf\)"),
        ("floor", math.nan, "reward odd has floor nan"),
        ("floor", -0.1, "reward odd has floor -0.1"),
        ("measures", None, "reward odd has measures None, must be a tuple of the names in its info; \\(\\) for none"),
        ("measures", "extra", "reward odd has measures 'extra'"),
        ("measures", (1,), r"reward odd has measures \(1,\)"),
    ],
)
def test_a_malformed_reward_is_refused_before_it_scores(part, value, message):
    reward = Fake("odd", result)
    setattr(reward, part, value)
    with pytest.raises(ValueError, match=message):
        RewardSet([reward], {"odd": 1.0})


def test_an_exception_masks_the_batch_with_its_cause_and_leaves_other_rewards_alone(caplog):
    with caplog.at_level(logging.ERROR):
        results = run(Fake("broken", explode), Fake("fine", result))
    broken = results["broken"]
    assert not broken.valid.any()
    assert broken.values.isnan().all()
    assert broken.causes == ("RuntimeError: the scorer is down",) * 3
    assert broken.faulty.all() and not results["fine"].faulty.any()
    assert broken.info["extra"].isnan().all() and broken.info["extra"].shape == (3,)
    assert results["fine"].valid.all()
    assert "broken failed on 3 samples" in caplog.text and "the scorer is down" in caplog.text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_masked_with_its_cause(value):
    said = run(Fake("odd", lambda: result((1.0, value, 3.0))))["odd"]
    assert said.valid.tolist() == [True, False, True]
    assert said.values[1].isnan()
    assert said.causes[1] == f"value is {value}"
    assert said.faulty.tolist() == [False, True, False]


@pytest.mark.parametrize(
    "changes",
    [
        {"values": torch.zeros(2)},
        {"values": torch.zeros(3, 1)},
        {"valid": torch.ones(1, dtype=torch.bool)},
        {"causes": ("",)},
        {"faulty": torch.ones(1, dtype=torch.bool)},
        {"info": {"extra": torch.zeros(2)}},
        {"info": {}},
        {"info": {"extra": torch.zeros(3), "more": torch.zeros(3)}},
    ],
)
def test_a_result_of_another_shape_than_declared_is_masked(changes):
    said = run(Fake("odd", lambda: result(changes=changes)))["odd"]
    assert not said.valid.any()
    assert said.causes[0].startswith("ValueError: ")
    assert set(said.info) == {"extra"}


def test_names_and_weights_must_match():
    fine = Fake("fine", result)
    for rewards, weights in (([fine], {}), ([fine], {"fine": 1.0, "other": 1.0}), ([fine, fine], {"fine": 1.0})):
        with pytest.raises(ValueError, match="must name the same rewards"):
            RewardSet(rewards, weights)


def test_a_set_knows_its_floors_and_weights_and_can_be_sent_to_another_process(tmp_path):
    chosen = RewardSet([Fake("fine", result)], {"fine": 0.5})
    assert chosen.floors["fine"] == 0.25
    assert chosen.weights == {"fine": 0.5}
    chosen = build_reward_set({"target_view": 1.0, "room_pose": 0.0}, data_root=tmp_path)
    assert pickle.loads(pickle.dumps(chosen)).weights == chosen.weights


def test_the_callback_says_which_reward_is_being_measured_even_a_failed_one():
    told: list[str] = []
    both = RewardSet([Fake("fine", result), Fake("broken", explode)], {"fine": 1.0, "broken": 1.0})
    both.on_call = told.append
    both(FILM.videos, CONDITIONS)
    assert told == ["fine", "", "broken", ""]


def test_a_result_that_a_reward_changes_afterwards_stays_as_it_was():
    kept = result()
    before = run(Fake("fine", lambda: kept))["fine"]
    kept.info["extra"].zero_()
    assert before.info["extra"].tolist() == [10, 20, 30]


def test_an_unknown_reward_is_refused_with_the_known_ones():
    said = "weights: got 'beauty', must be one of 'target_view', .*'room_content' or FILE.py:NAME; pass"
    with pytest.raises(ConfigError, match=said):
        build_reward("beauty", data_root="data")
    with pytest.raises(ConfigError, match=r"got 'target_veiw', .*; did you mean 'target_view'\?"):
        check_name("target_veiw", {})


def test_a_remote_reward_is_built_where_its_server_is_named_and_its_set_knows_the_model_and_the_calls():
    servers, weights = {"hpsv3": "http://127.0.0.1:9"}, {"remote:hpsv3": 1.0, "sharpness": 1.0}
    chosen = build_reward_set(weights, data_root="data", servers=servers, timeout_s=7.0)
    assert isinstance(chosen.rewards[0], RemoteReward) and chosen.rewards[0].timeout_s == 7
    assert chosen.floors["remote:hpsv3"] == 0.0
    assert list(chosen.stats()) == ["remote:hpsv3"] and chosen.served() == {}
    chosen.rewards[0].identity = ("judge", "v1")
    assert chosen.served() == {"remote:hpsv3": "judge v1"}
    assert pickle.loads(pickle.dumps(chosen)).weights == chosen.weights
    said = "got 'remote:clip', .*'remote:hpsv3' or FILE.py:NAME; say where: --config.reward.remote.clip="
    with pytest.raises(ConfigError, match=said):
        build_reward("remote:clip", data_root="data", servers=servers)


def test_every_reward_answers_as_it_declares(tmp_path):
    chosen = build_reward_set(dict.fromkeys(REWARDS, 1.0), data_root=tmp_path)
    assert [reward.name for reward in chosen.rewards] == list(REWARDS)
    results = chosen(FILM.videos, conditions(FILM, root=tmp_path))
    for reward in chosen.rewards:
        said = results[reward.name]
        # This film's walls have no features: tests/rewards/test_tricks.py shows a room that has some.
        assert said.valid.all() != (reward.name in ("pose_rot", "pose_trans", "pose_dir", "smooth", "view_disp")), (
            said.causes
        )
        assert said.values.dtype == torch.float32
        assert set(said.info) == set(reward.measures)
        assert reward.floor > 0
