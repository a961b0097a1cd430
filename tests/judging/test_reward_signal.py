"""The credit share: what recorded noise causes of a reward's spread inside groups."""

import dataclasses
import math
from unittest import mock

import pytest
import torch

from flow_grpo.algorithm.rollout.collector import Collector
from flow_grpo.judging.reward_signal import Signal, Spread, measure_signal
from flow_grpo.preflight.doctor.rewards import check_signal
from flow_grpo.rewards.base import RewardSet
from flow_grpo.runtime.ranks.context_parallel import share_samples
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.sampling import Sampling, SdeSettings
from flow_grpo.settings.schema import Config
from tests.judging.test_evaluate import ToyData
from tests.toy import SIGMAS, BrightnessReward, ToyPolicy, blocks_of, sample_config
from tests.workers import run_ranks


def spread(noise_level, world=None, groups=8, *, broken=(), own=True, both=False) -> Spread:
    sample = sample_config(train_batch_size=2)
    sampling = Sampling(SIGMAS, SdeSettings("constant", noise_level), 3, not own, blocks_of(sample))
    config = dataclasses.replace(Config(), sample=sample)
    rewards = RewardSet([BrightnessReward(broken)], {"brightness": 1.0})
    collector = Collector(ToyPolicy(), mock.Mock(), rewards, sampling, config, world or World())
    return measure_signal(collector, ToyData(), {"brightness": 1.0}, groups=groups, both=both).spreads["brightness"]


def test_more_noise_in_the_recorded_steps_is_credited_with_more_of_the_spread():
    weak, strong = spread(0.05), spread(1.0)
    assert 0 < weak.credit_share < strong.credit_share / 5
    assert weak.shared < strong.shared and weak.own == pytest.approx(strong.own, rel=0.5)


def test_only_shared_noise_is_sampled_where_that_is_all_there_is():
    found = spread(0.5, own=False)
    assert math.isnan(found.own) and math.isnan(found.credit_share)
    assert found.shared == spread(0.5).shared
    assert spread(0.5, own=False, both=True) == spread(0.5)


def test_copies_without_a_value_are_left_out():
    missing = [(gid, slot) for gid in range(8) for slot in (1, 2, 3)]
    assert math.isnan(spread(0.5, broken=missing).own)
    assert spread(0.5, broken=missing[:3]).own > 0


def _measured(world: World, share: int) -> tuple[float, float]:
    found = spread(0.5, share_samples(world, share, torch.device("cpu"))[0], groups=4 * share)
    return found.own, found.shared


@pytest.mark.parametrize("share", [1, 2])
def test_two_ranks_measure_the_groups_of_one(share):
    one = spread(0.5, groups=8)
    assert run_ranks(_measured, 2, share) == [pytest.approx((one.own, one.shared))] * 2


def test_metrics_are_those_of_the_weighted_reward_with_the_least_signal():
    spreads = {"a": Spread(2.0, 1.0, 0.5), "b": Spread(4.0, 3.0, 1.0), "unused": Spread(1.0, 0.0, 1.0)}
    weights = {"a": 1.0, "b": 0.5, "unused": 0.0}
    for shared, least in ((False, (0.25, 4.0)), (True, (1.0, 2.0))):
        found = Signal(spreads, weights, shared).metrics()
        assert (found["policy/credit_share"], found["policy/spread_over_floor"]) == least


def test_a_signal_without_a_weighted_reward_above_its_floor_is_silent_and_names_what_has_no_value():
    alike, unknown = Spread(1.0, 0.1, 0.2), Spread(math.nan, math.nan, 0.2)
    assert not Signal({"a": alike, "b": unknown}, {"a": 1.0, "b": 1.0}, shared=False).absent
    assert Signal({"a": alike, "b": unknown}, {"a": 0.0, "b": 1.0}, shared=False).absent
    found = Signal({"a": alike, "b": unknown}, {"a": 1.0, "b": 1.0}, shared=True)
    assert found.absent and found.without_value == ["b"]
    assert found.metrics() == {"policy/credit_share": 1.0, "policy/spread_over_floor": pytest.approx(0.5)}


@pytest.mark.parametrize(
    ("own", "trained", "shared", "status"),
    [(1.0, 0.6, False, "ok"), (1.0, 0.3, False, "warn"), (0.1, 0.09, False, "fail"), (1.0, 0.3, True, "ok")],
)
def test_the_doctor_warns_below_a_fifth_and_fails_at_the_floor(own, trained, shared, status):
    found = check_signal(Signal({"a": Spread(own, trained, 0.2)}, {"a": 1.0}, shared))
    assert found.status == status
    assert ("same_initial_noise=true" in found.way_out) == (status == "warn")
