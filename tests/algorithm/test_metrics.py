"""What is recorded of rewards by camera and by server: names, means, and that ranks agree."""

import math

import pytest
import torch

from flow_grpo.algorithm.groups import compare
from flow_grpo.algorithm.groups.metrics import MOST_CAMERAS, camera_metrics, pooled, reward_metrics, server_metrics
from flow_grpo.rewards.base import RewardSet
from flow_grpo.runtime.clock import Clock
from flow_grpo.runtime.ranks.process_group import World
from tests.algorithm.test_compare import of_two
from tests.toy import BrightnessReward, ToyPolicy, collector
from tests.workers import run_ranks

KINDS = ("pan_right", "zoom_in", "cam05")


def test_few_kinds_of_camera_keep_their_names_unless_these_begin_a_group_of_metrics():
    assert pooled(["zoom_in", "cam05", "zoom_in"]) == ("zoom_in", "cam05", "zoom_in")
    assert pooled([]) == ()
    assert pooled(["up/left", "zoom_in:0.5+pan_left", "two words"]) == ("up-left", "zoom_in:0.5+pan_left", "two-words")


def test_of_many_kinds_the_rarest_are_one():
    frequent = [f"path{number:02d}" for number in range(MOST_CAMERAS - 1) for _ in range(3)]
    seldom = ["once_c", "twice", "once_a", "once_b", "twice"]
    found = pooled([*frequent, *seldom])
    assert found[: len(frequent)] == tuple(frequent)
    assert found[len(frequent) :] == ("other", "twice", "other", "other", "twice")
    alike = pooled([f"path{number:02d}" for number in reversed(range(20))])
    assert alike == (*["other"] * 4, *(f"path{number:02d}" for number in reversed(range(16))))


def test_the_spread_of_groups_is_that_of_their_own_valid_samples_in_any_order():
    gathered = of_two([1.0, 10.0, 3.0, 20.0, math.nan, 7.0], [1.0] * 6, [9, 4, 9, 4, 9, 5])
    found = reward_metrics(gathered, {"pose": 1.0})
    assert found["reward/pose_group_std"] == (5.0 + 1.0) / 2  # of a group of one there is none
    assert found["reward/pose_group_range_p50"] == (10.0 + 2.0) / 2


def test_means_and_shares_are_those_of_a_camera_s_own_samples():
    gathered = of_two([1.0, 3.0, 5.0, math.nan], [0.5, math.nan, math.nan, math.nan], [0, 1, 2, 2])
    assert camera_metrics(gathered, ["a", "a", "b"]) == {
        "reward_by_camera/a/pose": 2.0,
        "reward_by_camera/a/pose_valid": 1.0,
        "reward_by_camera/a/source": 0.5,
        "reward_by_camera/a/source_valid": 0.5,
        "reward_by_camera/b/pose": 5.0,
        "reward_by_camera/b/pose_valid": 0.5,
        "reward_by_camera/b/source_valid": 0.0,
    }
    assert camera_metrics(gathered, ()) == {}


def _by_camera(world: World) -> dict[str, float]:
    """Sample an epoch of 8 conditions as any number of ranks would, with two samples that fail."""
    sampling = collector(world, ToyPolicy(), debug=False, train_batch_size=16 // world.data.size)
    first = sampling.stream.sampler.plan(0)[0][0][3]
    sampling.rewards = RewardSet([BrightnessReward(broken=[(first, 0), (first, 3)])], {"brightness": 1.0})
    gathered = compare.gather(sampling.collect(Clock(torch.device("cpu"))), world)
    return camera_metrics(gathered, [KINDS[index % 3] for index in range(24)])


@pytest.mark.parametrize("world_size", [2, 8])
def test_any_number_of_ranks_finds_the_same_by_camera(world_size):
    alone = _by_camera(World())
    shares = [value for name, value in alone.items() if name.endswith("_valid")]
    assert len(shares) > 1 and sum(share < 1 for share in shares) == 1
    results = run_ranks(_by_camera, world_size)
    assert all(found == results[0] for found in results)
    assert results[0] == pytest.approx(alone, rel=1e-6)


def _asked(world: World) -> dict[str, float]:
    """Rank 1 was slower and failed twice; nobody asked the second server, and one rank alone the third."""
    judge = {
        "calls": 4.0 + world.data.rank,
        "failures": 2.0 * world.data.rank,
        "p50_s": 1.0 + world.data.rank,
        "p95_s": 3.0,
    }
    idle = {"calls": 0.0, "failures": 0.0, "p50_s": math.nan, "p95_s": math.nan}
    alone = {"calls": 1.0, "failures": 0.0, "p50_s": 0.5, "p95_s": 0.5} if world.data.rank == 0 else idle
    return server_metrics({"remote:judge": judge, "remote:idle": idle, "remote:alone": alone}, world)


def test_calls_add_up_over_ranks_and_the_slowest_rank_counts():
    results = run_ranks(_asked, 2)
    assert results[0] == results[1]
    assert results[0] == {
        "server/judge_calls": 9.0,
        "server/judge_failures": 2.0,
        "server/judge_p50_s": 2.0,
        "server/judge_p95_s": 3.0,
        "server/idle_calls": 0.0,
        "server/idle_failures": 0.0,
        "server/alone_calls": 1.0,
        "server/alone_failures": 0.0,
        "server/alone_p50_s": 0.5,
        "server/alone_p95_s": 0.5,
    }
    assert server_metrics({}, World()) == {}
