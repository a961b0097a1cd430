"""Dynamic sampling on several ranks: what moves, what is printed, and that no pattern makes ranks disagree.

Which groups are chosen is decided by pure functions, see `test_selection.py`.
"""

import dataclasses
import gc
import random
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from flow_grpo.algorithm.groups import compare
from flow_grpo.algorithm.groups.dynamic_sampling import TOO_OFTEN, WINDOW
from flow_grpo.records import Condition, RewardResult, ScoredBatch
from flow_grpo.rewards.base import RewardSet
from flow_grpo.runtime.clock import Clock
from flow_grpo.runtime.ranks.process_group import World
from tests.rounds import REWARD, Rounds, choose, dynamic, kinds_of, recorded, rows_by_position
from tests.toy import ToyPolicy, collector, reward_config, update, updater, weights_of
from tests.workers import run_ranks

LOCAL = 16  # samples per rank: a target of 64 on 4 ranks


def _scenario(world: World, kinds, options: dict) -> dict:
    lines: list[str] = []
    layout = options.pop("layout", "spread")
    local = options.pop("local", LOCAL)
    mixed = options.pop("mixed", False)
    frames = (lambda index: (5, 3, 1)[index % 3]) if mixed else None
    rounds = Rounds(world, kinds, local=local, k=4, layout=layout, frames=frames)
    sampling = dynamic(world, local=local, k=4, say=lines.append, **options)
    (chosen, metrics), collectives = recorded(lambda: choose(sampling, rounds))
    gathered = chosen.gathered
    compared = compare.advantages(gathered, REWARD, k=4, floors=sampling.floors)
    batch = compare.own_rows(chosen, compared, world)
    original = {(c.gid, c.slot) for part in rounds.drawn[0] for c in part.conditions}
    return {
        "lines": lines,
        "metrics": metrics,
        "collectives": collectives,
        "rows": [row for _, row in sorted(rows_by_position(chosen).items())],
        "placed": len(chosen.placement[world.data.rank]),
        "as_rolled_out": chosen.as_rolled_out,
        "original": original,
        "weights": batch.weights.tolist(),
        "advantages": batch.advantages.tolist(),
        "size": len(batch),
        "devices": sorted({str(t.device) for part in batch.parts for t in part.tensors().values()}),
        "next_step": rounds.sampler.next_step,
        "restored": chosen.as_rolled_out and _equals_first_round(chosen, rounds),
        "sizes": len(batch.sizes().unique()),
    }


def _equals_first_round(chosen: compare.Chosen, rounds: Rounds) -> bool:
    for samples, batch in zip(chosen.parts, rounds.drawn[0], strict=True):
        found, wanted = samples.tensors(), batch.samples.tensors()
        if set(wanted) != set(found) or not all(torch.equal(tensor, wanted[name]) for name, tensor in found.items()):
            return False
    reward = torch.cat([batch.rewards["scripted"].values for batch in rounds.drawn[0]])
    order = torch.cat([batch.positions for batch in rounds.drawn[0]]).argsort()
    mine = torch.tensor(chosen.placement[rounds.world.data.rank])
    return torch.equal(chosen.gathered.rewards["scripted"][mine].float().nan_to_num(), reward[order].nan_to_num())


def scenario(valid_groups, world=4, **options) -> list[dict]:
    kinds = valid_groups if isinstance(valid_groups[0], list) else kinds_of(valid_groups, 16)
    return run_ranks(_scenario, world, kinds, options | {"local": 64 // world})


def check_all(results: list[dict], total: int | None = None) -> None:
    assert len({result["size"] for result in results}) == 1
    assert all(result["collectives"] == results[0]["collectives"] for result in results)
    assert all(result["devices"] == ["cpu"] for result in results)
    names = [name for name in results[0]["metrics"] if name != "dyn/time"]
    assert all(result["metrics"][name] == results[0]["metrics"][name] for result in results for name in names)
    placed = Counter(row for result in results for row in result["rows"][: result["placed"]])
    for gid in {gid for gid, _ in placed}:
        assert len({placed[gid, slot] for slot in range(4)}) == 1  # whole groups
    if total is not None:
        assert sum(result["placed"] for result in results) == total


@pytest.mark.parametrize(
    ("world", "layout", "valid", "resamples", "discarded"),
    [
        (2, "spread", [16], 0, 0),
        (4, "spread", [14, 4], 1, 8),
        (4, "contiguous", [12, 2, 1, 1], 3, 0),
        (8, "shuffled", [0, 0, 0, 16], 3, 0),
    ],
)
def test_a_pool_that_fills_up_is_used_with_equal_sizes(world, layout, valid, resamples, discarded):
    results = scenario(valid, world, layout=layout)
    check_all(results, 64)
    assert [result["placed"] for result in results] == [64 // world] * world
    assert all(count == 1 for count in Counter(row for r in results for row in r["rows"]).values())
    metrics = results[0]["metrics"]
    assert metrics["dyn/resample_rounds"] == resamples
    assert metrics["dyn/fallback"] == metrics["dyn/shortage"] == 0.0
    assert metrics["dyn/discarded_valid"] == discarded  # surplus groups of the last round
    assert all(result["next_step"] == 1 + resamples for result in results)
    assert all(abs(value) > 0 for result in results for value in result["advantages"])
    assert results[0]["as_rolled_out"] == (resamples == 0)


@pytest.mark.parametrize(("world", "valid", "have"), [(2, [12, 2, 1, 0], 60), (8, [0, 0, 0, 0], 0)])
def test_a_pool_that_stays_short_restores_every_field_bitwise(world, valid, have):
    results = scenario(valid, world)
    check_all(results, 64)
    for result in results:
        assert result["restored"]
        assert result["size"] == 64 // world
        assert set(result["rows"]) == result["original"]
        assert all(weight == 1.0 for weight in result["weights"])
        assert any(result["advantages"]) == (have > 0)  # flat groups get exactly 0
    metrics = results[0]["metrics"]
    assert (metrics["dyn/fallback"], metrics["dyn/shortage"], metrics["dyn/pool_samples"]) == (1.0, 64 - have, have)
    assert metrics["dyn/moved_samples"] == metrics["dyn/moved_bytes"] == 0.0


def test_a_group_with_two_missing_values_is_left_out_whole():
    kinds = [["valid"] * 12 + ["flat"] * 4, ["valid"] * 2 + ["flat"] * 14, ["incomplete"] + ["flat"] * 15]
    results = scenario([*kinds, ["valid"] + ["flat"] * 15])
    check_all(results)
    metrics = results[0]["metrics"]
    why = scenario([kinds[2]] * 4)[0]["lines"][1]
    assert "15 of 16 groups flat, 1 incomplete: scripted ranges over 0 " in why and "2 copies have no value" in why
    assert (metrics["dyn/pool_samples"], metrics["dyn/fallback"]) == (60, 1.0)
    # The original batch is trained on: its 48 valid samples, and 16 without a signal.
    assert (metrics["dyn/discarded_valid"], metrics["dyn/padded_samples"]) == (12, 16)


def test_rank_0_prints_the_rounds_once_and_every_rank_its_own_lines():
    results = scenario([12, 2, 1, 0])
    printed = [line for line in results[0]["lines"] if line.startswith("[DynSample] ")]
    assert printed == [
        "[DynSample] Initial batch: collected 48/64 valid samples globally",
        "[DynSample] Why: 4 of 16 groups flat, 0 incomplete: scripted ranges over 0 at most, more than 0.0001 counts; "
        "groups 12, 13, 14, 15",
        "[DynSample] Resample #1/3: global_collected=48/64, need 16 more",
        "[DynSample] Resample #2/3: global_collected=56/64, need 8 more",
        "[DynSample] Resample #3/3: global_collected=60/64, need 4 more",
        "[DynSample] Insufficient valid samples: 60/64 after 3 resample(s). Falling back to original batch.",
        "[DynSample] Fallback: Using original batch with 4 invalid groups",
    ]
    for rank, result in enumerate(results):
        own = [line for line in result["lines"] if not line.startswith("[DynSample] ")]
        assert own == [
            line
            for number, pool in ((1, 56), (2, 60), (3, 60))
            for line in (
                f"[DynSample-SYNC] Rank {rank}: Fetching new batch for resample #{number}",
                f"[DynSample-SYNC] Rank {rank}: After resample #{number}, global_pool={pool}/64",
            )
        ]
        assert rank == 0 or len(result["lines"]) == len(own)


def test_every_rank_prints_its_slice_of_a_full_pool():
    results = scenario([14, 4])
    page = (Path(__file__).parents[2] / "docs" / "dynamic_sampling.md").read_text(encoding="utf-8")
    assert results[0]["lines"] == page.partition("```text\n")[2].partition("\n```")[0].splitlines()
    assert results[3]["lines"][-1] == "[DynSample-FINAL] Rank 3: Slicing global pool [48:64], got 16 samples"
    padded = scenario([1, 1, 1, 0], world=2, policy="fill_flat")
    assert padded[0]["lines"][-1] == (
        "[DynSample] Rank 0: ✅ Using 32 samples, 52 of all 64 by policy fill_flat, after 3 resample(s)"
    )


@pytest.mark.parametrize(("world", "mixed"), [(4, False), (8, True)], ids=["one size", "three sizes"])
@pytest.mark.parametrize("policy", ["pad", "rebalance", "fill_flat"])
def test_the_other_policies_train_on_every_valid_group(world, policy, mixed):
    """The pool holds 3 valid groups, fewer than the target, so that "rebalance" gives unequal shares."""
    local = 4
    kinds = kinds_of([1, 1, 1, 0], world * local // 4)
    results = run_ranks(_scenario, world, kinds, {"policy": policy, "local": local, "mixed": mixed})
    target = world * local
    total = min(12, target) if policy == "rebalance" else target
    check_all(results, total)
    sizes = [result["placed"] for result in results]
    assert max(sizes) - min(sizes) <= (policy == "rebalance")
    assert results[0]["size"] == -(-total // world)
    metrics = results[0]["metrics"]
    assert metrics["dyn/padded_samples"] == (target - 12 if policy != "rebalance" else 0)
    silent = [value for r in results for value in r["weights"]].count(0.0)
    assert silent == (results[0]["size"] * world - total if policy == "rebalance" else 0)
    if policy == "fill_flat":
        assert sum(value == 0.0 for r in results for value in r["advantages"]) == target - 12


def _fails_alone(world: World) -> str:
    rounds = Rounds(world, kinds_of([1, 1, 1, 1], 4 * world.data.size), local=LOCAL)
    if world.data.rank == 1:
        rounds.draw = failing(rounds.draw)
    with pytest.raises(RuntimeError) as caught:
        choose(dynamic(world, local=LOCAL), rounds)
    return str(caught.value)


def failing(draw):
    """Return samples of a round whose record cannot be copied."""

    def broken(number: int):
        collected, gathered = draw(number)
        if number == 1:
            collected[0].samples.trajectory.states.resize_(1)
        return collected, gathered

    return broken


def test_a_failure_of_one_rank_while_choosing_is_raised_on_all():
    results = run_ranks(_fails_alone, 2)
    assert results[0] == results[1]
    assert "rank 1 failed in choosing: IndexError" in results[0]


def test_a_round_is_freed_before_the_next_is_drawn():
    rounds = Rounds(World(), kinds_of([1, 1, 1, 0], 4), local=16)
    alive: list[weakref.ref] = []
    left: list[int] = []

    def draw(number: int):
        gc.collect()
        left.append(sum(ref() is not None for ref in alive))
        collected, gathered = rounds.draw(number)
        alive.append(weakref.ref(rounds.drawn.pop()[0]))
        rounds.drawn.append(None)
        return collected, gathered

    dynamic(World(), local=16).choose(*rounds.draw(0), draw, reward=REWARD, shortages=[])
    assert left == [0, 0, 0]


def _random_patterns(world: World, count: int, local: int) -> list[tuple]:
    draw = random.Random(7)  # the same patterns on every rank
    seen = []
    for _ in range(count):
        chance = draw.choice([0.05, 0.2, 0.4, 0.7, 0.95])
        kinds = [
            [
                "valid" if draw.random() < chance else draw.choice(["flat", "incomplete"])
                for _ in range(local * world.data.size // 4)
            ]
            for _ in range(4)
        ]
        options = {
            "policy": draw.choice(["fallback_original", "pad", "rebalance", "fill_flat"]),
            "layout": draw.choice(["spread", "shuffled", "contiguous"]),
            "mixed": draw.random() < 0.3,
            "local": local,
        }
        found = _scenario(world, kinds, dict(options))
        seen.append((options["policy"], found))
    return seen


@pytest.mark.parametrize(("world", "count"), [(2, 60), (4, 40), pytest.param(8, 36, marks=pytest.mark.slow)])
def test_no_pattern_of_validity_makes_two_ranks_disagree(world, count):
    results = run_ranks(_random_patterns, world, count, 4)
    outcomes = Counter()
    for pattern in zip(*results, strict=True):
        policy = pattern[0][0]
        found = [result for _, result in pattern]
        check_all(found)
        sizes = [result["placed"] for result in found]
        assert max(sizes) - min(sizes) <= (policy == "rebalance")
        fallback = found[0]["restored"] and found[0]["metrics"]["dyn/shortage"] > 0
        outcomes["fallback" if fallback else "used"] += 1
        counts = Counter(row for result in found for row in result["rows"][: result["placed"]])
        assert policy == "pad" or set(counts.values()) == {1}
    assert outcomes["fallback"] > 3 and outcomes["used"] > 3


def test_moved_bytes_are_those_of_the_moved_rows():
    mixed = scenario([14, 4], layout="contiguous", mixed=True)  # to ranks that sampled no video of such a size
    check_all(mixed, 64)
    assert mixed[0]["metrics"]["dyn/moved_samples"] == 8.0
    assert max(result["sizes"] for result in mixed) == 3
    results = scenario([14, 4], layout="contiguous")
    # int64: keys 3, noise 2; fp32: states 3, final latents 1 and source latents 1 of (2, 5, 2, 2), prompts
    # (3, 4), cameras (5, 1), log-probs 2; int64: steps 2
    row = 8 * 7 + 4 * (5 * 40 + 12 + 5 + 2)
    assert results[0]["metrics"]["dyn/moved_samples"] == 8.0
    assert results[0]["metrics"]["dyn/moved_bytes"] == 8 * row


def test_a_group_may_be_judged_by_one_named_reward():
    world = World()
    rounds = Rounds(world, kinds_of([2], 4), local=16)
    collected, gathered = rounds.draw(0)
    hits = (gathered.gids >= 3).double() * gathered.slots
    valid = gathered.valid | {"hit": hits >= 0}
    judged = dataclasses.replace(gathered, rewards=gathered.rewards | {"hit": hits}, valid=valid)
    sampling = dynamic(world, local=16, metric="hit", max_resample_times=0)
    whole = compare.everything(collected, judged, world)
    assert [g.kind for g in sampling.groups(whole, 0, REWARD)] == ["flat", "flat", "flat", "valid"]
    assert [g.kind for g in dynamic(world, local=16).groups(whole, 0, REWARD)] == ["valid", "valid", "flat", "flat"]
    _, metrics = sampling.choose(collected, judged, rounds.draw, reward=REWARD, shortages=[])
    assert metrics["dyn/flat_groups"] == 3.0
    assert metrics["dyn/valid_groups_ratio_initial"] == 0.25


def test_groups_are_judged_behind_the_gates_and_by_the_weights_of_the_epoch():
    """A group in which no copy keeps the source is flat; one whose only difference is the gate is not."""
    sampling = dynamic(World(), local=16)
    batches, gathered = Rounds(World(), kinds_of([2], 4), local=16).draw(0)
    holder = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)[gathered.gids] * (gathered.slots != 2)
    judged = dataclasses.replace(
        gathered,
        rewards=gathered.rewards | {"source": holder},
        valid=gathered.valid | {"source": torch.ones(16, dtype=torch.bool)},
    )
    judged = compare.everything(batches, judged, World())
    gates = {"scripted": ("source", 0.5)}
    reward = reward_config(weights={"scripted": 1.0, "source": 0.0}, gates=gates, flat_eps=1e-4)
    assert [g.kind for g in sampling.groups(judged, 0, reward)] == ["flat", "valid", "flat", "valid"]
    reward = reward_config(weights={"scripted": 0.0, "source": 1.0}, gates=gates, flat_eps=1e-4)
    assert [g.kind for g in sampling.groups(judged, 0, reward)] == ["flat", "valid", "flat", "valid"]
    reward = reward_config(weights={"scripted": 1.0, "source": 0.0}, flat_eps=1e-4)
    assert [g.kind for g in sampling.groups(judged, 0, reward)] == ["valid", "valid", "flat", "flat"]


def test_frequent_fallbacks_are_warned_about_once_through_logging(caplog):
    world, history, lines = World(), [0] * (WINDOW - 5), []
    often = int(TOO_OFTEN * WINDOW) + 1
    for _ in range(often + 3):
        rounds = Rounds(world, kinds_of([0, 0], 4), local=16)
        sampling = dynamic(world, local=16, max_resample_times=1, say=lines.append)
        _, metrics = choose(sampling, rounds, history)
    warnings = [message for message in caplog.messages if "of the last 20 epochs" in message]
    assert len(warnings) == 1 and not any("⚠️" in line for line in lines)
    assert caplog.messages.count("[DynSample] ⚠️ Shortage: 16/16 samples missing") == often + 3
    assert "fell short in 5 of the last 20 epochs" in warnings[0]
    assert "max_resample_times" in warnings[0] and "more than 0.0001 in scripted" in warnings[0]
    assert metrics["dyn/fallback_rate"] == sum(history) / WINDOW == 8 / 20
    assert len(history) == WINDOW


def test_the_mean_reward_is_logged_before_and_after_filtering():
    world = World()
    rounds = Rounds(world, [["valid", "flat", "flat", "valid"], ["flat", "valid", "valid", "flat"]], local=16)
    _, metrics = choose(dynamic(world, local=16), rounds)
    before = ([s + g / 1e3 for g in (0, 3) for s in range(4)], [0.25] * 8)
    after = [s + g / 1e3 for g in (0, 3, 5, 6) for s in range(4)]
    assert metrics["dyn/reward_mean_before"] == pytest.approx(sum(before[0] + before[1]) / 16)
    assert metrics["dyn/reward_mean_after"] == pytest.approx(sum(after) / 16)


class ScriptedReward:
    """Scores the copies of the named groups by slot, and all others 0.5."""

    name = "scripted"
    floor = 0.0
    measures = ()

    def __init__(self, valid: tuple[int, ...]) -> None:
        self.valid = valid

    def __call__(self, videos: torch.Tensor, conditions: Sequence[Condition]) -> RewardResult:
        values = torch.tensor([float(c.slot) if c.gid in self.valid else 0.5 for c in conditions])
        return RewardResult(values, torch.ones(len(conditions), dtype=torch.bool), ("",) * len(conditions))


def _train_on_a_pool(world: World, policy_name: str) -> tuple[torch.Tensor, dict[str, float]]:
    policy = ToyPolicy()
    batch_size = 8 // world.data.size
    sampling = collector(world, policy, debug=False, train_batch_size=batch_size)
    sampling.rewards = RewardSet([ScriptedReward((5, 6, 9))], {"scripted": 1.0})

    def draw(number: int) -> tuple[Sequence[ScoredBatch], compare.Gathered]:
        batches = sampling.collect(Clock(torch.device("cpu")))
        return batches, compare.gather(batches, world)

    choosing = dynamic(world, local=2 * batch_size, max_resample_times=2, policy=policy_name)
    reward = reward_config(weights={"scripted": 1.0}, flat_eps=1e-4)
    chosen, metrics = choosing.choose(*draw(0), draw, reward=reward, shortages=[])
    compared = compare.advantages(chosen.gathered, reward, k=4, floors={})
    batch = compare.own_rows(chosen, compared, world)
    if world.data.size > 1:
        policy.module = DistributedDataParallel(policy.net)
    update(updater(policy, world=world, rollout_batch_size=batch_size, batch_size=batch_size), batch)
    return weights_of(policy), metrics


@pytest.mark.parametrize(("policy_name", "world"), [("fill_flat", 2), ("pad", 4), ("rebalance", 8)])
def test_any_number_of_ranks_makes_the_update_of_one_from_a_pool(policy_name, world):
    """Under "rebalance" 12 samples on 8 ranks are shares of 2 and 1; a stand-in of weight 0 fills them up."""
    before = weights_of(ToyPolicy())
    alone, own = _train_on_a_pool(World(), policy_name)
    assert own["dyn/pool_samples"] == 12
    assert (alone - before).abs().max() > 1e-5
    for weights, metrics in run_ranks(_train_on_a_pool, world, policy_name):
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-6)
        assert metrics["dyn/pool_samples"] == 12
