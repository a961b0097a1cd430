"""Every rank draws its part of one plan, k copies of each condition, at the step that is asked for."""

from __future__ import annotations

import itertools
import random
import warnings
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import DataLoader, Dataset

from flow_grpo.data.k_repeat_sampler import (
    LAYOUTS,
    DistributedKRepeatSampler,
    Draw,
    StaleBatchError,
    pass_length,
    pass_order,
)
from flow_grpo.runtime.ranks.process_group import Ranks
from tests.workers import run_ranks

EIGHT_DEVICES = {"batch_size": 2, "k": 4, "num_replicas": 8, "seed": 42}  # the numbers of my_recam_8npu


class Echo(Dataset[Draw]):
    """A data set whose items are the draws themselves."""

    def __init__(self, size: int = 100) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, draw: Draw) -> Draw:
        return draw

    def fingerprint(self) -> str:
        return f"echo {self.size}"


def make(dataset: Any = 100, *, rank: int = 0, layout: str = "spread", nb: int = 2, **numbers: int):
    values = {**EIGHT_DEVICES, **numbers}
    return DistributedKRepeatSampler(dataset, rank=rank, num_batches_per_epoch=nb, layout=layout, **values)


def small(dataset: Any = 10, **changes: Any) -> DistributedKRepeatSampler:
    return make(dataset, **{"batch_size": 2, "k": 2, "num_replicas": 2, **changes})


def loader(sampler: DistributedKRepeatSampler, workers: int):
    return DataLoader(Echo(), batch_sampler=sampler, collate_fn=list, num_workers=workers)


def flat(plan: list[list[Draw]]) -> list[Draw]:
    return list(itertools.chain.from_iterable(plan))


def plan_on_one_rank(ranks: Ranks, layout: str, steps: int) -> list[list[list[int]]]:
    """Return, for every step, the (step, gid, slot, index) rows that all ranks gather."""
    sampler = make(50, rank=ranks.rank, layout=layout, num_replicas=ranks.world_size)
    batches = itertools.islice(iter(sampler), steps)
    return [ranks.all_gather(torch.tensor(batch)).tolist() for batch in batches]


def test_an_epoch_of_eight_devices_holds_32_samples_of_8_conditions():
    sampler = make()
    assert sampler.conditions_per_batch == 4
    epoch = [flat(sampler.plan(step)) for step in range(2)]
    assert [len(batch) for batch in epoch] == [16, 16]
    assert len({index for batch in epoch for _, _, _, index in batch}) == 8


@pytest.mark.parametrize("layout", ["spread", "shuffled"])
def test_every_batch_holds_each_condition_exactly_k_times(layout):
    for step in range(30):
        batch = flat(make(layout=layout).plan(step))
        copies = defaultdict(list)
        for tag, gid, slot, index in batch:
            assert tag == step
            copies[gid, index].append(slot)
        assert len(copies) == 4 and len({index for _, index in copies}) == 4
        assert all(sorted(slots) == [0, 1, 2, 3] for slots in copies.values())
        assert {gid for gid, _ in copies} == set(range(4 * step, 4 * step + 4))


def test_contiguous_keeps_whole_groups_on_one_rank_over_the_round():
    sampler = make(layout="contiguous")
    for first in range(0, 10, 2):
        for rank in range(8):
            samples = [draw for step in (first, first + 1) for draw in sampler.plan(step)[rank]]
            assert [slot for _, _, slot, _ in samples] == [0, 1, 2, 3]
            assert {gid for _, gid, _, _ in samples} == {4 * first + rank}


def test_spread_is_slot_major():
    plan = make(10, batch_size=2, k=2, num_replicas=4).plan(3)
    assert [[(gid, slot) for _, gid, slot, _ in rows] for rows in plan] == [
        [(12, 0), (13, 0)],
        [(14, 0), (15, 0)],
        [(12, 1), (13, 1)],
        [(14, 1), (15, 1)],
    ]


def test_eight_samplers_yield_the_slices_of_one_plan():
    samplers = [make(Echo(), rank=rank) for rank in range(8)]
    for step, batches in enumerate(itertools.islice(zip(*map(iter, samplers), strict=True), 12)):
        assert list(batches) == samplers[5].plan(step)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eight_processes_gather_each_condition_exactly_k_times(layout):
    gathered = run_ranks(plan_on_one_rank, 8, layout, 4)
    assert all(seen == gathered[0] for seen in gathered)
    for first in (0, 2):
        groups = Counter((gid, index) for step in (first, first + 1) for _, gid, _, index in gathered[0][step])
        assert len(groups) == 8 and set(groups.values()) == {4}
    expected = make(50, layout=layout)
    assert gathered[0] == [[list(draw) for draw in flat(expected.plan(step))] for step in range(4)]


def ranks_per_group(plan: list[list[Draw]]) -> list[int]:
    homes = defaultdict(set)
    for rank, rows in enumerate(plan):
        for _, gid, _, _ in rows:
            homes[gid].add(rank)
    return [len(ranks) for ranks in homes.values()]


@pytest.mark.parametrize(("ranks", "batch", "k"), [(8, 2, 4), (4, 4, 4), (8, 3, 6), (2, 6, 4), (3, 4, 6), (1, 8, 4)])
def test_spread_puts_the_copies_on_as_many_ranks_as_possible(ranks, batch, k):
    sampler = make(200, num_replicas=ranks, batch_size=batch, k=k)
    for step in range(20):
        assert set(ranks_per_group(sampler.plan(step))) == {min(k, ranks)}


def test_shuffled_puts_the_copies_on_four_ranks_only_in_61_percent_of_groups():
    sampler = make(1000, layout="shuffled")
    counts = Counter(count for step in range(1500) for count in ranks_per_group(sampler.plan(step)))
    share = {count: counts[count] / counts.total() for count in (4, 3, 2)}
    # Exact shares of the C(16, 4) placements on 8 ranks of 2 places; 6,000 groups have a standard error of 0.6 %.
    assert share[4] == pytest.approx(1120 / 1820, abs=0.025)
    assert share[3] == pytest.approx(672 / 1820, abs=0.025)
    assert share[2] == pytest.approx(28 / 1820, abs=0.008)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")  # on purpose, on any machine
@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_every_batch_is_new_and_of_the_expected_step_with_any_number_of_workers(workers):
    sampler = make(Echo(), rank=3)
    batches = iter(loader(sampler, workers))
    seen = []
    for epoch in range(3):
        for i in range(2):
            sampler.set_epoch(2 * epoch + i)
            batch = next(batches)
            sampler.check(batch[0][0])
            assert batch == sampler.plan(2 * epoch + i)[3]
            seen.append(tuple(index for _, _, _, index in batch))
    assert len(set(seen)) == 6


def test_batches_are_in_step_when_nobody_calls_set_epoch():
    sampler = make(Echo(), rank=1)
    for step, batch in zip(range(8), loader(sampler, 1), strict=False):
        sampler.check(batch[0][0])
        assert batch == sampler.plan(step)[1]


def test_set_epoch_before_iter_is_a_seek():
    sampler = make()
    sampler.set_epoch(100)
    assert next(iter(sampler)) == sampler.plan(100)[0]


def test_set_epoch_after_iter_does_not_move_the_running_iterator():
    sampler = make()
    batches = iter(sampler)
    sampler.set_epoch(7)
    assert next(batches) == sampler.plan(0)[0]
    with pytest.raises(StaleBatchError, match="of step 0 where step 7 was expected"):
        sampler.check(0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stale_draw_raises(workers):
    sampler = make(Echo())
    batches = iter(loader(sampler, workers))
    sampler.check(next(batches)[0][0])
    sampler.seek(5)
    stale = next(batches)[0][0]
    with pytest.raises(StaleBatchError, match="of step 1 where step 5 was expected"):
        sampler.check(stale)


def test_a_batch_cannot_be_checked_twice():
    sampler = make()
    sampler.check(0)
    with pytest.raises(StaleBatchError, match="check every batch once"):
        sampler.check(0)


def test_a_loader_that_went_through_accelerate_prepare_is_noticed_on_every_rank():
    for rank, taken_before in ((0, 1), (1, 0)):
        sampler = make(num_replicas=2, rank=rank)
        # What accelerator.prepare puts around the batch sampler on 2 processes.
        batches = iter(BatchSamplerShard(sampler, num_processes=2, process_index=rank))
        for _ in range(taken_before):
            sampler.check(next(batches)[0][0])
        with pytest.raises(StaleBatchError, match=r"out of accelerator\.prepare"):
            sampler.check(next(batches)[0][0])
    assert "Never pass the loader through `accelerator.prepare`" in (DistributedKRepeatSampler.__doc__ or "")


def test_steps_hold_distinct_conditions_and_passes_visit_each_once():
    sizes = random.Random(1).sample([(n, m) for m in range(1, 14) for n in range(m, 60)], 100)
    for (n, m), seed in itertools.product(sizes, range(4)):
        length = pass_length(n, m)
        stream = [index for number in range(12) for index in pass_order(n, m, seed, number)[:length]]
        for step in range(len(stream) // m):
            assert len(set(stream[step * m : (step + 1) * m])) == m, (n, m, seed, step)
        if n >= 2 * m:
            for number in range(12):
                assert sorted(stream[number * n : (number + 1) * n]) == list(range(n)), (n, m, seed, number)


def test_passes_differ_in_order_and_so_do_seeds():
    orders = [pass_order(30, 4, seed, number) for seed in range(3) for number in range(3)]
    assert len(set(orders)) == 9


def test_the_shuffle_differs_between_steps_and_seeds():
    plans = [make(layout="shuffled", seed=seed).plan(step) for seed in range(3) for step in range(3)]
    places = {tuple((gid % 4, slot) for _, gid, slot, _ in flat(plan)) for plan in plans}
    assert len(places) == 9


def test_the_plan_walks_the_permutations_without_a_gap():
    sampler = small(7)
    indices = [index for step in range(14) for _, _, slot, index in flat(sampler.plan(step)) if slot == 0]
    assert [sorted(indices[start : start + 7]) for start in range(0, 28, 7)] == [list(range(7))] * 4


def test_the_plan_is_a_pure_function_of_the_step():
    sampler = make()
    forwards = [sampler.plan(step) for step in range(40)]
    pass_order.cache_clear()
    assert [make().plan(step) for step in reversed(range(40))] == forwards[::-1]


@pytest.mark.parametrize("layout", ["spread", "shuffled"])
def test_equal_samples_per_batch_give_equal_plans_on_any_number_of_ranks(layout):
    plans = [
        [flat(make(layout=layout, num_replicas=ranks, batch_size=16 // ranks).plan(step)) for step in range(30)]
        for ranks in (1, 2, 4, 8, 16)
    ]
    assert all(plan == plans[0] for plan in plans)


def test_all_layouts_and_world_sizes_hold_the_same_draws_per_round():
    def rounds(layout: str, ranks: int) -> list[list[tuple[int, int, int]]]:
        sampler = make(45, layout=layout, num_replicas=ranks, batch_size=16 // ranks)
        batches = [[draw[1:] for draw in flat(sampler.plan(step))] for step in range(24)]
        return [sorted(batches[step] + batches[step + 1]) for step in range(0, 24, 2)]

    expected = rounds("spread", 8)
    assert all(rounds(layout, ranks) == expected for layout in LAYOUTS for ranks in (2, 4, 8))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_resuming_at_any_step_continues_the_uninterrupted_run(workers):
    uninterrupted = small(Echo(10), rank=1)
    states, batches = [], []
    for batch in itertools.islice(loader(uninterrupted, workers), 6):
        states.append(uninterrupted.state_dict())
        uninterrupted.check(batch[0][0])
        batches.append(batch)
    for step, state in enumerate(states[:5]):
        resumed = small(Echo(10), rank=1)
        resumed.load_state_dict(state)
        continued = iter(loader(resumed, workers))
        for expected in batches[step : step + 2]:
            batch = next(continued)
            resumed.check(batch[0][0])
            assert batch == expected


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 1}, "seed was 42, is 1"),
        ({"dataset": Echo(11)}, "n was 10, is 11, fingerprint was 'echo 10', is 'echo 11'"),
        ({"k": 4}, "k was 2, is 4"),
        ({"nb": 4}, "num_batches_per_epoch was 2, is 4"),
        ({"layout": "shuffled"}, "layout was 'spread', is 'shuffled'"),
        ({"num_replicas": 4}, "num_replicas was 2, is 4"),
        ({"batch_size": 4}, "batch_size was 2, is 4"),
    ],
)
def test_resuming_another_run_names_the_difference(change, text):
    state = small(Echo(10)).state_dict()
    with pytest.raises(ValueError, match=text):
        small(**{"dataset": Echo(10), **change}).load_state_dict(state)


def test_resuming_needs_every_field():
    state = small().state_dict()
    del state["seed"]
    with pytest.raises(ValueError, match="must have"):
        small().load_state_dict(state)


def test_the_number_of_ranks_may_change_when_the_batch_over_all_ranks_does_not():
    saved = make(num_replicas=4, batch_size=4)
    saved.seek(5)
    resumed = make(num_replicas=2, batch_size=8)
    resumed.load_state_dict(saved.state_dict())
    assert flat(resumed.plan(5)) == flat(saved.plan(5)) and next(iter(resumed)) == saved.plan(5)[0] + saved.plan(5)[1]


def test_contiguous_ranks_may_change_only_between_rounds():
    saved = make(layout="contiguous", num_replicas=8)
    resumed = make(layout="contiguous", num_replicas=4, batch_size=4)
    assert {draw[1:] for draw in flat(saved.plan(4))} != {draw[1:] for draw in flat(resumed.plan(4))}
    saved.seek(5)
    with pytest.raises(ValueError, match=r"num_replicas was 8, is 4.*only between rounds"):
        resumed.load_state_dict(saved.state_dict())
    saved.seek(6)
    resumed.load_state_dict(saved.state_dict())
    assert next(iter(resumed))[0][0] == 6


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"k": 5}, r"num_replicas \* batch_size = 16, not a multiple of k=5"),
        ({"k": 32}, r"num_replicas \* batch_size = 16, not a multiple of k=32"),
        ({"dataset": 3}, "dataset has 3 conditions, a batch needs m = .* = 4 different ones"),
        ({"layout": "contiguous", "nb": 1}, r"\* m = 4 groups per round to be a multiple of num_replicas=8"),
        ({"k": 1}, "got k=1 .* k >= 2"),
        ({"layout": "sideways"}, "layout is 'sideways', must be one of spread, shuffled, contiguous"),
        ({"rank": 8}, "rank=8; counts must be"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"nb": 0}, "num_batches_per_epoch=0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_with_all_of_them(changes, text):
    with pytest.raises(ValueError, match=text) as caught:
        make(**{"dataset": 100, **changes})
    if "layout is" not in text:
        assert all(name in str(caught.value) for name in ("num_replicas=", "batch_size=", "k=", "dataset of"))
    assert "\n" not in str(caught.value)


def test_negative_steps_are_refused():
    for call in (make().plan, make().seek, make().set_epoch):
        with pytest.raises(ValueError, match="step is -1"):
            call(-1)


def test_an_epoch_larger_than_the_data_set_warns_on_the_first_rank_only():
    with pytest.warns(UserWarning, match="an epoch draws 8 conditions from a dataset of 7"):
        make(7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(7, rank=1)
        make(8)


# --- structures: conditions of several video sizes


def bucketed(counts: tuple[int, ...] = (24, 12, 7), **changes: Any) -> tuple[DistributedKRepeatSampler, list[int]]:
    structures = [number for number, count in enumerate(counts) for _ in range(count)]
    random.Random(3).shuffle(structures)
    return make(len(structures), structures=structures, **changes), structures


@pytest.mark.parametrize("layout", ["spread", "shuffled"])
def test_all_conditions_of_a_step_are_of_one_structure(layout):
    sampler, structures = bucketed(layout=layout)
    seen = [{structures[index] for _, _, _, index in flat(sampler.plan(step))} for step in range(60)]
    assert {len(found) for found in seen} == {1}
    # 24, 12 and 7 conditions at 4 a step: 6, 3 and 1 turns of a cycle of 10.
    for cycle in range(6):
        turns = Counter(next(iter(found)) for found in seen[10 * cycle : 10 * cycle + 10])
        assert turns == {0: 6, 1: 3, 2: 1}


def test_structures_of_equal_size_are_not_drawn_in_the_same_order():
    sampler, structures = bucketed((20, 20))
    places = {s: [i for i, other in enumerate(structures) if other == s] for s in (0, 1)}
    orders: dict[int, list[int]] = {0: [], 1: []}
    for step in range(10):
        for _, _, slot, index in flat(sampler.plan(step)):
            if slot == 0:
                orders[structures[index]].append(places[structures[index]].index(index))
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20))
    assert orders[0] != orders[1]


def test_every_structure_walks_through_all_its_conditions_before_one_comes_again():
    sampler, structures = bucketed((26, 13, 7))  # no whole number of steps: a pass ends within a cycle of turns
    drawn = defaultdict(list)
    for step in range(40):
        for _, _, slot, index in flat(sampler.plan(step)):
            if slot == 0:
                drawn[structures[index]].append(index)
    for structure, indices in drawn.items():
        size = structures.count(structure)
        if size >= 8:
            assert len(set(indices[:size])) == size


def test_structures_that_are_all_alike_change_nothing():
    plain, alike = make(), make(structures=["one size"] * 100)
    assert [plain.plan(step) for step in range(50)] == [alike.plan(step) for step in range(50)]
    assert plain.state_dict() == alike.state_dict()


def test_a_contiguous_round_holds_the_draws_of_the_other_layouts():
    rounds = []
    for layout in LAYOUTS:
        sampler, _ = bucketed((24, 16), layout=layout)
        epochs = [[*flat(sampler.plan(first)), *flat(sampler.plan(first + 1))] for first in range(0, 20, 2)]
        rounds.append([sorted(draw[1:] for draw in epoch) for epoch in epochs])
    assert rounds[0] == rounds[1] == rounds[2]


def test_a_structure_too_rare_for_a_step_is_refused():
    with pytest.raises(ValueError, match=r"the rarest of 2 structures has 3 conditions, a batch needs m = .* 4"):
        bucketed((24, 3))
    with pytest.raises(ValueError, match="got 2 structures for 100 conditions"):
        make(structures=[1, 2])


def test_other_structures_make_another_plan_and_are_refused_when_resuming():
    sampler, _ = bucketed()
    state = sampler.state_dict()
    other = make(43, structures=[0] * 22 + [1] * 21)
    with pytest.raises(ValueError, match="structures was"):
        other.load_state_dict(state)
