"""What a reward set prefers: the true view, or a wrong one."""

import pytest
import torch

from flow_grpo.maths.reward_rules import weights_at
from flow_grpo.preflight.doctor.rewards import check_rewards, preferences, views
from flow_grpo.records import RewardResult
from flow_grpo.rewards.base import RewardSet
from tests.toy import condition, reward_config

CONDITIONS = [condition(1), condition(2)]


class Judge:
    """Scores true views, sources and noise as told, whatever it is shown; None has no value."""

    floor = 0.1
    measures = ()

    def __init__(self, name, *scores, faulty=False):
        self.name, self.scores, self.faulty = name, scores, faulty

    def __call__(self, videos, conditions):
        if self.faulty:
            raise ConnectionError("nobody there")
        rows = [score for score in self.scores for _ in range(len(conditions) // 3)]
        valid = torch.tensor([row is not None for row in rows])
        values = torch.tensor([torch.nan if row is None else row for row in rows])
        return RewardResult(values, valid, tuple("" if row is not None else "no pose" for row in rows))


def judged(*judges, weights=None, **changes):
    weights = weights or {judge.name: 1.0 for judge in judges}
    config = reward_config(weights=weights, **changes)
    epochs = {0, *(epoch for points in config.schedules.values() for epoch, _ in points)}
    by_epoch = {epoch: weights_at(weights, config.schedules, epoch) for epoch in sorted(epochs)}
    found = check_rewards(preferences(RewardSet(judges, weights), CONDITIONS, config), by_epoch)
    return {each.name: each for each in found}


def test_views_are_every_true_view_then_every_source_then_noise():
    videos, owners = views(CONDITIONS)
    assert torch.equal(videos[1], CONDITIONS[1].target_video) and torch.equal(videos[2], CONDITIONS[0].source_video)
    assert [each.index for each in owners] == [1, 2] * 3
    assert videos[4:].min() >= 0 and videos[4:].max() <= 1 and not torch.equal(videos[4], videos[5])


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        ((1.0, 0.0, -1.0), "ok"),
        ((1.0, None, None), "ok"),  # what cannot be measured falls behind
        ((0.0, 1.0, -1.0), "fail"),  # the camera had better not move
        ((0.0, -1.0, 1.0), "fail"),  # noise wins
        ((0.05, 0.0, 0.0), "fail"),  # within the reward's noise floor: it cannot tell them apart
        ((None, 0.0, 0.0), "fail"),
    ],
)
def test_a_set_that_does_not_prefer_the_true_view_fails(scores, wanted):
    assert judged(Judge("a", *scores))["reward_order"].status == wanted


def test_rewards_count_by_their_weights():
    judges = Judge("sharp", 0.0, 1.0, 1.0), Judge("camera", 1.0, 0.0, 0.0)
    assert judged(*judges, weights={"sharp": 0.3, "camera": 1.0})["reward_order"].status == "ok"
    assert judged(*judges, weights={"sharp": 1.0, "camera": 0.3})["reward_order"].status == "fail"
    found = judged(*judges, weights={"sharp": 0.0, "camera": 1.0})["reward_order"]
    assert found.measured.startswith("the true view is preferred over the source by +1.00, over the noise by +1.00")


@pytest.mark.parametrize(
    ("threshold", "wanted"),
    [
        (0.5, "ok"),  # noise is sharper, and does not pass
        (-2.0, "fail"),  # everything passes
        (1.5, "fail"),  # nothing does, not even the true view: all copies are alike
    ],
)
def test_gates_apply_as_in_training(threshold, wanted):
    judges = Judge("sharp", 0.0, -1.0, 1.0), Judge("match", 1.0, 1.0, -1.0)
    weights, gates = {"sharp": 1.0, "match": 0.0}, {"sharp": ("match", threshold)}
    found = judged(*judges, weights=weights, gates=gates)
    assert found["reward_order"].status == wanted
    assert "sharp (1): true 0, source -1, noise 1" in found["rewards"].measured


def test_a_scheduled_reward_counts_with_its_later_weight():
    judges = Judge("camera", 1.0, 0.0, 0.0), Judge("sharp", 0.0, 1.0, 1.0)
    found = judged(*judges, schedules={"sharp": ((0, 0.0), (5, 2.0))})
    assert found["reward_order"].status == "fail" and "in epoch 5" in found["reward_order"].measured
    assert judged(*judges, schedules={"sharp": ((0, 0.0), (5, 0.5))})["reward_order"].status == "ok"


def test_a_reward_without_a_value_for_the_true_view_fails_with_its_cause_or_warns(caplog):
    fine, broken, blind = Judge("fine", 1.0, 0.0, 0.0), Judge("broken", faulty=True), Judge("blind", None, 0.0, 0.0)
    found = judged(fine, broken)["rewards"]
    assert found.status == "fail" and "ConnectionError: nobody there" in found.measured and "broken" in found.way_out
    assert judged(fine, broken, weights={"fine": 1.0, "broken": 0.0})["rewards"].status == "warn"
    assert judged(fine, blind)["rewards"].status == "warn"
    assert judged(fine)["rewards"].status == "ok"
