"""Which groups are trained on, and on which rank: pure decisions over many patterns."""

import random
from collections import Counter

import pytest
import torch

from flow_grpo.algorithm.groups.selection import Decision, SampleGroup, ShortageError, decide, groups_of, place
from flow_grpo.settings.schema import DynamicSamplingConfig

WORLD, LOCAL, K = 4, 16, 4
TARGET = WORLD * LOCAL
RANK_OF = [row % TARGET // LOCAL for row in range(2 * TARGET)]  # of two rounds


def after(rounds, policy="fallback_original", target=TARGET, k=K, max_resample_times=3) -> Decision:
    config = DynamicSamplingConfig(policy=policy, max_resample_times=max_resample_times)
    return decide(rounds, config, target=target, k=k, seed=5)


def a_round(number: int, valid: int, *, target=TARGET, k=K, incomplete=0, draw=None) -> list[SampleGroup]:
    """Return a round with so many valid samples; which groups those are is drawn when asked for."""
    kinds = ["valid"] * (valid // k) + ["incomplete"] * incomplete
    kinds += ["flat"] * (target // k - len(kinds))
    if draw is not None:
        draw.shuffle(kinds)
    first = number * target
    # Slot-major, as the "spread" layout has it: the copies of a group lie on different ranks.
    m = target // k
    return [
        SampleGroup(number * m + j, tuple(first + j + slot * m for slot in range(k)), kind)
        for j, kind in enumerate(kinds)
    ]


def outcome(valid_per_round, policy="fallback_original", **changes) -> tuple[Decision, int]:
    rounds: list[list[SampleGroup]] = []
    for number, valid in enumerate(valid_per_round):
        rounds.append(a_round(number, valid))
        decision = after(rounds, policy, **changes)
        if decision.action != "more":
            break
    return decision, number


@pytest.mark.parametrize(
    ("valid", "most", "action", "resamples", "have"),
    [
        ([60], 0, "original", 0, 60),
        ([64], 3, "use", 0, 64),
        ([56, 16], 3, "use", 1, 72),
        ([48, 8, 4, 4], 3, "use", 3, 64),  # the third resample counts
        ([48, 8, 4, 0], 3, "original", 3, 60),
        ([0, 0, 0, 64], 3, "use", 3, 64),
        ([0, 0, 0, 0], 3, "original", 3, 0),
    ],
)
def test_rounds_are_drawn_until_the_target_or_the_last_allowed_resample(valid, most, action, resamples, have):
    decision, number = outcome(valid, max_resample_times=most)
    assert (decision.action, number, decision.valid) == (action, resamples, have)


def test_only_the_groups_that_are_needed_are_used_in_the_order_of_rounds():
    decision, _ = outcome([56, 16])
    assert len(decision.groups) == 16
    assert [group.gid for group in decision.groups[-2:]] == [16, 17]
    assert decision.valid - len(decision.groups) * K == 8  # dyn/discarded_valid


def test_pad_repeats_whole_valid_groups_up_to_the_target_the_same_every_time():
    decision, _ = outcome([40, 8, 4, 4], "pad")
    assert (decision.action, len(decision.groups), decision.padded) == ("use", 16, 8)
    counts = Counter(decision.groups)
    assert all(group.kind == "valid" for group in counts)
    assert sum(count - 1 for count in counts.values()) == 2
    assert outcome([40, 8, 4, 4], "pad")[0] == decision


def test_fill_flat_tops_up_with_flat_then_incomplete_groups_of_the_original_batch():
    rounds = [a_round(0, 40, incomplete=5), *(a_round(n, 4, incomplete=15) for n in (1, 2, 3))]
    decision = after(rounds, "fill_flat")
    assert [group.kind for group in decision.groups] == ["valid"] * 13 + ["flat"] + ["incomplete"] * 2
    assert {group.rows[0] < TARGET for group in decision.groups[13:]} == {True}
    assert decision.padded == 12


@pytest.mark.parametrize("policy", ["pad", "rebalance", "fill_flat"])
def test_an_empty_pool_falls_back_under_every_policy(policy):
    assert outcome([0, 0, 0, 0], policy)[0].action == "original"


def test_raise_says_how_many_are_missing_and_what_to_do():
    with pytest.raises(ShortageError, match=r"only 60 of 64 samples .* after 3 resample\(s\).*max_resample_times"):
        outcome([48, 8, 4, 0], "raise")


def test_62_rows_are_dealt_16_16_15_15_and_cover_the_pool_once():
    placed = place(range(62), RANK_OF, WORLD)
    assert [len(rows) for rows in placed.rows] == [16, 16, 15, 15]
    assert sorted(row for rows in placed.rows for row in rows) == list(range(62))


def test_every_rank_owns_its_slice_of_the_placed_pool():
    placed = place(range(TARGET), RANK_OF, WORLD)
    assert placed.rows == tuple(tuple(range(r * LOCAL, (r + 1) * LOCAL)) for r in range(WORLD))
    assert placed.moves == ()


def test_only_the_surplus_moves():
    """14 of 16 groups are valid in the first round and two more in the second; each lies on one rank."""
    groups = [tuple(range(4 * j, 4 * j + 4)) for j in (*range(14), 16, 17)]
    placed = place([row for rows in groups for row in rows], RANK_OF, WORLD)
    assert [len(own) for own in placed.rows] == [16] * 4
    assert placed.moves == tuple((row, 0, 3) for row in range(64, 72))


def test_nothing_moves_where_every_rank_holds_a_copy_of_every_group():
    groups = [g for g in (*a_round(0, 56), *a_round(1, 8)) if g.kind == "valid"]
    placed = place([row for group in groups for row in group.rows], RANK_OF, WORLD)
    assert placed.moves == ()


@pytest.mark.parametrize(("world", "local", "k"), [(2, 8, 4), (4, 16, 4), (8, 4, 4), (4, 16, 8), (3, 4, 6)])
@pytest.mark.parametrize("policy", ["fallback_original", "pad", "rebalance", "fill_flat"])
def test_any_pattern_of_validity_gives_equal_sizes_whole_groups_and_no_duplicates(world, local, k, policy):
    draw = random.Random(f"{world} {local} {k} {policy}")
    target = world * local
    for _ in range(60):
        chance = draw.choice([0.0, 0.1, 0.3, 0.6, 1.0])
        rounds = []
        for number in range(4):
            valid = k * sum(draw.random() < chance for _ in range(target // k))
            rounds.append(a_round(number, valid, target=target, k=k, draw=draw))
            decision = after(rounds, policy, target, k)
            if decision.action != "more":
                break
        assert decision.action in ("use", "original")
        if decision.action == "original":
            continue
        placed = place(
            [r for g in decision.groups for r in g.rows], [row % target // local for row in range(4 * target)], world
        )
        sizes = [len(rows) for rows in placed.rows]
        assert max(sizes) - min(sizes) <= (1 if policy == "rebalance" else 0)
        if policy != "rebalance":
            assert sum(sizes) == target
        counts = Counter(row for rows in placed.rows for row in rows)
        assert counts == Counter(row for group in decision.groups for row in group.rows)
        assert policy == "pad" or set(counts.values()) == {1}
        assert all(len({counts[row] for row in group.rows}) == 1 for group in decision.groups)
        stayed = sum(row % target // local == r for r, rows in enumerate(placed.rows) for row in rows)
        assert len(placed.moves) == sum(sizes) - stayed
        assert all(source == row % target // local for row, source, _ in placed.moves)


def test_groups_are_found_whatever_the_order_of_their_copies_and_an_incomplete_one_is_not_taken_for_flat():
    gids, slots = torch.tensor([7, 3, 7, 3, 9, 9]), torch.tensor([1, 0, 0, 1, 1, 0])
    flat, incomplete = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    found = groups_of(gids, slots, flat=flat, incomplete=incomplete, pool_row={row: 100 + row for row in range(6)})
    assert found == (
        SampleGroup(3, (101, 103), "incomplete"),
        SampleGroup(7, (102, 100), "flat"),
        SampleGroup(9, (105, 104), "valid"),
    )
    found = groups_of(gids, slots, flat=flat, incomplete=incomplete, pool_row={1: 20, 2: 22, 5: 21})
    assert [group.rows for group in found] == [(20,), (22,), (21,)]  # copies are trained on together


def test_every_epoch_pads_with_other_groups():
    """The draw depends on the first gid of the epoch, so resumed runs repeat it and later epochs do not."""
    choices = set()
    for shift in range(6):
        rounds = [
            [SampleGroup(g.gid + 1000 * shift, g.rows, g.kind) for g in a_round(n, v)]
            for n, v in enumerate([32, 4, 4, 4])
        ]
        decision = after(rounds, "pad")
        choices.add(tuple(group.rows for group in decision.groups))
    assert len(choices) > 3
