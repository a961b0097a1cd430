"""Gathering and comparing: positions, masks, own rows, statistics."""

import contextlib
import dataclasses

import pytest
import torch

from flow_grpo.algorithm.groups import compare
from flow_grpo.algorithm.groups.metrics import reward_metrics, rule_metrics
from flow_grpo.maths.advantages import CombinedAdvantages
from flow_grpo.records import RewardResult, ScoredBatch
from flow_grpo.runtime.ranks.process_group import World
from tests.toy import BrightnessReward, ToyPolicy, condition, group, reward_config, sample_config, scored
from tests.workers import run_ranks

REWARD = reward_config()
# An example worked out by hand: 4 conditions a batch, 8 ranks with 2 rows per batch, 2 batches, slot-major.
FIRST = [100, 200, 300, 400]
SECOND = [500, 600, 700, 800]
POSITIONS = {
    100: [0, 8, 16, 24],
    200: [1, 9, 17, 25],
    300: [4, 12, 20, 28],
    400: [5, 13, 21, 29],
    500: [2, 10, 18, 26],
    600: [3, 11, 19, 27],
    700: [6, 14, 22, 30],
    800: [7, 15, 23, 31],
}


def _rows_of_the_example(rank: int) -> list[tuple[int, int]]:
    rows = []
    for gids in (FIRST, SECOND):
        batch = [(gid, slot) for slot in range(4) for gid in gids]
        rows += batch[2 * rank : 2 * rank + 2]
    return rows


def scored_rows(rows: list[tuple[int, int]]) -> ScoredBatch:
    return scored(ToyPolicy(), [dataclasses.replace(group(gid, 4)[slot], index=gid) for gid, slot in rows])


def _gather_the_example(world: World) -> tuple[list[int], list[float], list[int]]:
    batch = scored_rows(_rows_of_the_example(world.data.rank))
    gathered = compare.gather([batch], world)
    compare.check(gathered, sample_config(), world)
    compared = compare.advantages(gathered, REWARD, k=4, floors={})
    batch = compare.own_rows(compare.everything([batch], gathered, world), compared, world)
    mine = batch.take(torch.arange(len(batch)), "cpu")
    return gathered.gids.tolist(), compared.advantages.tolist(), mine.keys[:, 0].tolist()


def test_copies_have_the_places_of_the_example_and_every_rank_gets_its_own_rows_back():
    results = run_ranks(_gather_the_example, 8)
    gids, advantages, _ = results[0]
    found = {gid: [row for row, other in enumerate(gids) if other == gid] for gid in sorted(set(gids))}
    assert found == POSITIONS
    assert all(everyone[:2] == (gids, advantages) for everyone in results)
    for rows in POSITIONS.values():
        own = torch.tensor([advantages[row] for row in rows])
        assert own.sum().abs() < 1e-6
        assert own.std(correction=0) > 0.9
    for rank, (*_, mine) in enumerate(results):
        assert mine == [gid for gid, _ in _rows_of_the_example(rank)]


def gathered_of(values, gids, **changes):
    rewards = torch.tensor(values, dtype=torch.float64)
    gids = torch.tensor(gids)
    fields = {
        "gids": gids,
        "slots": torch.arange(len(gids)) % 2,
        "indices": gids,
        "sizes": torch.tensor([[5, 2, 2]] * len(gids)),
        "noise_ids": torch.arange(2 * len(gids)).view(-1, 2),
        "rewards": {"brightness": rewards},
        "valid": {"brightness": rewards.isfinite()},
        "info": {"brightness_percent": 100 * rewards},
        "faulty": {"brightness": torch.zeros(len(gids), dtype=torch.bool)},
    }
    return compare.Gathered(**(fields | changes))


def test_advantages_compare_within_groups_and_mask_what_failed():
    gathered = gathered_of([1.0, 3.0, 5.0, 5.0, 2.0, float("nan")], [7, 7, 8, 8, 9, 9])
    compared = compare.advantages(gathered, REWARD, k=2, floors={})
    assert compared.advantages.tolist() == pytest.approx([-1 / 1.0001, 1 / 1.0001, 0, 0, 0, 0])
    assert compared.weights.tolist() == [1, 1, 1, 1, 0, 0]
    assert compared.flat.tolist() == [False, True, False] and compared.incomplete.tolist() == [False, False, True]
    metrics = reward_metrics(gathered, {"brightness": 1.0})
    assert [metrics[f"reward/brightness_group_range_p{p}"] for p in (10, 50, 90)] == pytest.approx([0.2, 1.0, 1.8])
    assert metrics["reward/brightness_valid"] == pytest.approx(5 / 6)
    assert metrics["reward/brightness_mean"] == metrics["reward/mean"] == pytest.approx(16 / 5)
    assert metrics["reward/brightness_group_std"] == pytest.approx(0.5)
    assert metrics["reward/brightness_percent"] == pytest.approx(320)


def of_two(values, holder, gids, **changes):
    rewards = {"pose": torch.tensor(values, dtype=torch.float64), "source": torch.tensor(holder, dtype=torch.float64)}
    valid = {name: column.isfinite() for name, column in rewards.items()}
    return gathered_of(values, gids, rewards=rewards, valid=valid, info={}, **changes)


POSE = reward_config(weights={"pose": 1.0, "source": 0.0}, gates={"pose": ("source", 0.5)})


def test_a_gated_reward_counts_only_where_its_gate_holds():
    """A group of two whose better pose lost the source, one in which both lost it, one without a gate to fail."""
    gathered = of_two([1.0, 3.0, 1.0, 3.0, 1.0, 3.0], [0.9, 0.1, 0.1, 0.1, 0.5, 0.9], [7, 7, 8, 8, 9, 9])
    compared = compare.advantages(gathered, POSE, k=2, floors={"pose": 0.1})
    near = 0.1 / 0.1001  # 1.0 against 0.8: half their distance over std + adv_eps
    assert compared.advantages.tolist() == pytest.approx([near, -near, 0, 0, -1 / 1.0001, 1 / 1.0001])
    assert compared.flat.tolist() == [False, True, False]
    metrics = reward_metrics(gathered, POSE.weights) | rule_metrics(gathered, POSE)
    assert metrics["reward/pose_mean"] == 2.0  # as measured
    assert metrics["reward/pose_gated"] == pytest.approx(3 / 6)
    assert "reward/source_gated" not in metrics


def test_a_gate_that_was_not_measured_leaves_its_reward_without_a_value():
    gathered = of_two([1.0, 3.0, 1.0, 3.0], [float("nan"), 0.9, 0.1, 0.9], [7, 7, 8, 8])
    compared = compare.advantages(gathered, POSE, k=2, floors={"pose": 0.1})
    assert compared.incomplete.tolist() == [True, False]  # one valid copy is none to compare with
    assert compared.advantages[:2].tolist() == [0.0, 0.0]
    assert rule_metrics(gathered, POSE)["reward/pose_gated"] == pytest.approx(1 / 3)
    none = of_two([1.0, 3.0], [float("nan")] * 2, [7, 7])
    assert "reward/pose_gated" not in rule_metrics(none, POSE)


def test_gates_compare_with_the_measured_value_even_of_a_gated_reward():
    both = reward_config(
        weights={"pose": 1.0, "source": 1.0}, gates={"pose": ("source", 0.5), "source": ("pose", 2.0)}, flat_eps=0.0
    )
    gathered = of_two([1.0, 3.0], [0.9, 0.4], [7, 7])
    found = compare.gated(gathered, both, {"pose": 0.1, "source": 0.01})
    assert found["pose"].values.tolist() == pytest.approx([1.0, 0.8])
    assert found["source"].values.tolist() == pytest.approx([0.38, 0.4])


def test_the_weights_of_an_epoch_decide_what_is_flat_and_what_is_missing():
    fading = reward_config(
        weights={"pose": 1.0, "source": 1.0}, schedules={"pose": ((0, 1.0), (4, 0.0)), "source": ((0, 0.0), (4, 2.0))}
    )
    gathered = of_two([1.0, 3.0, 5.0, float("nan")], [0.5, 0.5, 0.0, 1.0], [7, 7, 8, 8])
    begun, middle, ended = (compare.in_epoch(fading, epoch) for epoch in (0, 2, 9))
    assert [config.weights for config in (begun, middle, ended)] == [
        {"pose": 1.0, "source": 0.0},
        {"pose": 0.5, "source": 1.0},
        {"pose": 0.0, "source": 2.0},
    ]
    judged = [compare.advantages(gathered, config, k=2, floors={}) for config in (begun, middle, ended)]
    assert [j.flat.tolist() for j in judged] == [[False, False], [False, False], [True, False]]
    assert [j.incomplete.tolist() for j in judged] == [[False, True], [False, True], [False, False]]
    assert judged[1].advantages.tolist() == pytest.approx([-0.5, 0.5, -1, 1])
    assert judged[2].advantages.tolist() == pytest.approx([0, 0, -2 / 1.0002, 2 / 1.0002])
    assert rule_metrics(gathered, middle) == {"reward/pose_weight": 0.5, "reward/source_weight": 1.0}
    assert compare.in_epoch(middle, 9) == ended


def _gated_advantages(world: World) -> list[float]:
    rows = [row for rank in range(8) for row in _rows_of_the_example(rank)]
    mine = rows[world.data.rank * 32 // world.data.size : (world.data.rank + 1) * 32 // world.data.size]
    batch = scored_rows(mine)
    draws = [torch.Generator().manual_seed(gid + slot) for gid, slot in mine]
    columns = torch.stack([torch.rand(2, generator=draw) for draw in draws]).unbind(dim=1)
    holder_valid = columns[1] < 0.9
    rewards = {
        "pose": RewardResult(columns[0], torch.ones(len(mine), dtype=torch.bool), ("",) * len(mine)),
        "source": RewardResult(columns[1], holder_valid, tuple("" if fine else "late" for fine in holder_valid)),
    }
    gathered = compare.gather([dataclasses.replace(batch, rewards=rewards)], world)
    compared = compare.advantages(gathered, POSE, k=4, floors={"pose": 0.01})
    assert 0.2 < rule_metrics(gathered, POSE)["reward/pose_gated"] < 0.8
    order = sorted(range(32), key=lambda row: (int(gathered.gids[row]), int(gathered.slots[row])))
    return compared.advantages[order].tolist()


def test_gates_give_the_same_advantages_on_any_number_of_ranks():
    alone = _gated_advantages(World())
    assert any(alone)
    for everyone in (run_ranks(_gated_advantages, 2), run_ranks(_gated_advantages, 8)):
        assert all(found == pytest.approx(alone, rel=1e-12, abs=1e-12) for found in everyone)


def test_a_floor_makes_a_group_flat():
    gathered = gathered_of([1.0, 1.3, 1.0, 2.0], [7, 7, 8, 8])
    compared = compare.advantages(gathered, REWARD, k=2, floors={"brightness": 0.5})
    assert compared.flat.tolist() == [True, False]
    assert compared.advantages[:2].tolist() == [0.0, 0.0]


def test_statistics_leave_out_rewards_without_any_valid_sample_and_the_nan_of_a_broken_one():
    gathered = gathered_of([float("nan")] * 4, [7, 7, 8, 8])
    metrics = reward_metrics(gathered, {"brightness": 1.0})
    assert metrics["reward/brightness_valid"] == 0.0
    assert "reward/brightness_mean" not in metrics
    assert "reward/mean" not in metrics
    batch = scored(ToyPolicy(), group(1, 4), reward=BrightnessReward(broken=[(1, 1)]))
    gathered = compare.gather([batch], World())
    assert gathered.info["brightness_percent"].isnan().tolist() == [False, True, False, False]
    metrics = reward_metrics(gathered, {"brightness": 1.0})
    assert all(torch.tensor(value).isfinite() for value in metrics.values())


@pytest.mark.parametrize(
    ("gids", "slots", "message"),
    [
        ([1, 1, 2, 2], [0, 1, 0, 1], None),
        ([1, 2, 1, 2], [0, 0, 1, 1], None),
        ([1, 1, 2], [0, 1, 0], "3 samples were gathered, expected 4"),
        ([1, 1, 1, 1], [0, 1, 0, 1], "1 groups were gathered, expected 2"),
        ([1, 1, 2, 2], [0, 1, 0, 0], r"groups \[2\] do not hold each of the 2 copies once"),
        ([1, 1, 1, 2], [0, 1, 1, 0], r"groups \[1, 2\] do not hold"),
    ],
)
def test_the_gathered_counts_are_asserted_always(gids, slots, message):
    context = pytest.raises(AssertionError, match=message) if message else contextlib.nullcontext()
    gathered = gathered_of([0.0] * len(gids), gids, slots=torch.tensor(slots))
    with context:
        compare.check(gathered, sample_config(k=2, num_batches_per_epoch=2), World())


def test_duplicated_noise_over_ranks_is_found_in_the_gathered_facts():
    gathered = gathered_of([1.0, 2.0], [7, 7], noise_ids=torch.tensor([[5, 6], [5, 8]]))
    sample = sample_config(k=2, num_batches_per_epoch=1)
    with pytest.raises(RuntimeError, match="samples 0 and 1 of group 7 were drawn from the same initial noise"):
        compare.check(gathered, sample, World())
    compare.check(gathered, dataclasses.replace(sample, same_initial_noise=True), World())


def test_rows_that_do_not_match_what_was_gathered_are_refused():
    batch = scored(ToyPolicy(), group(1, 4))
    gathered = compare.gather([scored(ToyPolicy(), group(1, 4)[::-1])], World())
    nothing = torch.zeros(4)
    compared = CombinedAdvantages(nothing, nothing, nothing, nothing, nothing)
    with pytest.raises(AssertionError, match="rank 0 holds"):
        compare.own_rows(compare.everything([batch], gathered, World()), compared, World())


def test_several_rewards_are_gathered_under_their_own_names_and_ids_above_2_to_the_53_survive():
    large = 2**60 + 1
    batch = scored(ToyPolicy(), [dataclasses.replace(c, gid=large) for c in group(1, 4)])
    second = RewardResult(torch.arange(4.0), torch.tensor([True, True, False, True]), ("",) * 4)
    gathered = compare.gather([dataclasses.replace(batch, rewards=batch.rewards | {"second": second})], World())
    assert gathered.gids.tolist() == [large] * 4
    assert gathered.rewards["second"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert gathered.valid["second"].tolist() == [True, True, False, True]
    assert set(gathered.info) == {"brightness_percent"}


def failing(count: int, of: int = 8) -> list[ScoredBatch]:
    """Return a batch of which the first `count` samples could not be measured."""
    batch = scored(ToyPolicy(), [condition(gid, slot) for gid in (1, 2) for slot in range(of // 2)])
    faulty = torch.arange(of) < count
    causes = tuple("the server is dead" if bad else "" for bad in faulty.tolist())
    given = batch.rewards["brightness"]
    result = RewardResult(given.values.masked_fill(faulty, torch.nan), ~faulty, causes, given.info, faulty)
    return [dataclasses.replace(batch, rewards={"brightness": result})]


def fault_error(batches: list[ScoredBatch], *, most: float = 0.25, world: World = World(), **knobs) -> str:  # noqa: B008
    try:
        config = reward_config(most_faults=most, **knobs)
        compare.check_faults(batches, compare.gather(batches, world), config, world)
    except compare.RewardFaultError as error:
        return str(error)
    return ""


def test_more_faults_than_allowed_stop_the_run_with_their_cause():
    idle = {"weights": {"brightness": 0.0, "other": 1.0}}
    assert fault_error(failing(2)) == fault_error(failing(3), **idle) == fault_error(failing(8), most=1.0) == ""
    assert "3 of 8" in fault_error(failing(3), **idle, gates={"other": ("brightness", 0.5)})
    said = fault_error(failing(3))
    assert "reward brightness failed to measure 3 of 8 samples" in said and "the server is dead" in said


def _faults(world: World, counts: list[int]) -> str:
    return fault_error(failing(counts[world.data.rank]), world=world)


def test_faults_of_one_rank_stop_all_with_the_same_error():
    assert run_ranks(_faults, 2, [0, 4]) == [""] * 2
    one, other = run_ranks(_faults, 2, [0, 5])
    assert one == other
    assert "5 of 16 samples" in one and "the server is dead" in one
