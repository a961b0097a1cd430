"""The group sampler: one plan for all ranks, k copies of each condition, resumable at any step."""

import itertools
import logging
import random
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from flow_grpo.data import k_repeat_sampler

PAGE = Path(__file__).parents[2] / "docs" / "k_repeat_sampler.md"
EIGHT_DEVICES = {"batch_size": 2, "k": 4, "num_replicas": 8, "seed": 42}  # the numbers of my_recam_8npu


class Echo(Dataset[k_repeat_sampler.SampleKey]):
    def __init__(self, size: int = 100) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: k_repeat_sampler.SampleKey) -> k_repeat_sampler.SampleKey:
        return key

    def fingerprint(self) -> str:
        return f"echo {self.size}"


def make(dataset: Any = 100, *, rank: int = 0, layout: str = "spread", nb: int = 2, **numbers: Any):
    values = EIGHT_DEVICES | {"rank": rank, "num_batches_per_epoch": nb, "layout": layout} | numbers
    return k_repeat_sampler.DistributedKRepeatSampler(dataset, **values)


def small(dataset: Any = 10, **changes: Any) -> k_repeat_sampler.DistributedKRepeatSampler:
    return make(dataset, **{"batch_size": 2, "k": 2, "num_replicas": 2, **changes})


def loader(sampler: k_repeat_sampler.DistributedKRepeatSampler, workers: int):
    return DataLoader(Echo(), batch_sampler=sampler, collate_fn=list, num_workers=workers)


def flat(plan: list[list[k_repeat_sampler.SampleKey]]) -> list[k_repeat_sampler.SampleKey]:
    return list(itertools.chain.from_iterable(plan))


def ranks_per_group(plan: list[list[k_repeat_sampler.SampleKey]]) -> list[int]:
    ranks = defaultdict(set)
    for rank, rows in enumerate(plan):
        for _, gid, _, _ in rows:
            ranks[gid].add(rank)
    return [len(found) for found in ranks.values()]


# --- what a step holds


@pytest.mark.parametrize("layout", k_repeat_sampler.LAYOUTS)
def test_every_condition_appears_exactly_k_times(layout):
    steps = 2 if layout == "contiguous" else 1  # per round or per batch
    sampler = make(layout=layout)
    assert sampler.conditions_per_batch == 4
    for first in range(0, 30, steps):
        batches = [flat(sampler.plan(step)) for step in range(first, first + steps)]
        assert [{key[0] for key in batch} for batch in batches] == [{step} for step in range(first, first + steps)]
        copies = defaultdict(list)
        for _, gid, slot, index in itertools.chain(*batches):
            copies[gid, index].append(slot)
        assert {gid for gid, _ in copies} == set(range(4 * first, 4 * (first + steps))) and len(copies) == 4 * steps
        assert all(sorted(slots) == [0, 1, 2, 3] for slots in copies.values())


def test_spread_is_slot_major_and_contiguous_keeps_groups_on_one_rank():
    plan = make(10, batch_size=2, k=2, num_replicas=4).plan(3)
    assert [[(gid, slot) for _, gid, slot, _ in rows] for rows in plan] == [
        [(12, 0), (13, 0)],
        [(14, 0), (15, 0)],
        [(12, 1), (13, 1)],
        [(14, 1), (15, 1)],
    ]
    sampler = make(layout="contiguous")
    for first, rank in itertools.product(range(0, 10, 2), range(8)):
        keys = [key for step in (first, first + 1) for key in sampler.plan(step)[rank]]
        assert [(gid, slot) for _, gid, slot, _ in keys] == [(4 * first + rank, slot) for slot in range(4)]


@pytest.mark.parametrize(("ranks", "batch", "k"), [(8, 2, 4), (8, 3, 6), (2, 6, 4), (3, 4, 6), (1, 8, 4)])
def test_spread_puts_the_copies_on_as_many_ranks_as_possible(ranks, batch, k):
    sampler = make(200, num_replicas=ranks, batch_size=batch, k=k)
    assert {n for step in range(20) for n in ranks_per_group(sampler.plan(step))} == {min(k, ranks)}


def test_shuffled_is_a_uniform_permutation():
    sampler = make(1000, layout="shuffled")
    counts = Counter(count for step in range(1500) for count in ranks_per_group(sampler.plan(step)))
    # Exact shares of the C(16, 4) placements on 8 ranks of 2 places; 6,000 groups have a standard error of 0.6 %.
    for ranks, placements in ((4, 1120), (3, 672), (2, 28)):
        assert counts[ranks] / counts.total() == pytest.approx(placements / 1820, abs=0.025 if ranks > 2 else 0.008)
    plans = [make(layout="shuffled", seed=seed).plan(step) for seed in range(3) for step in range(3)]
    assert len({tuple((gid % 4, slot) for _, gid, slot, _ in flat(plan)) for plan in plans}) == 9


# --- passes over the dataset


def test_steps_hold_distinct_conditions_and_passes_visit_each_once():
    sizes = random.Random(1).sample([(n, m) for m in range(1, 14) for n in range(m, 60)], 100)
    for (n, m), seed in itertools.product(sizes, range(4)):
        length = k_repeat_sampler.pass_length(n, m)
        stream = [index for number in range(12) for index in k_repeat_sampler.pass_order(n, m, seed, number)[:length]]
        for step in range(len(stream) // m):
            assert len(set(stream[step * m : (step + 1) * m])) == m, (n, m, seed, step)
        if n >= 2 * m:
            for number in range(12):
                assert sorted(stream[number * n : (number + 1) * n]) == list(range(n)), (n, m, seed, number)
    assert len({k_repeat_sampler.pass_order(30, 4, seed, number) for seed in range(3) for number in range(3)}) == 9


def test_the_plan_walks_the_passes_without_a_gap_and_is_a_pure_function_of_the_step():
    sampler = small(7)
    indices = [index for step in range(14) for _, _, slot, index in flat(sampler.plan(step)) if slot == 0]
    assert [sorted(indices[start : start + 7]) for start in range(0, 28, 7)] == [list(range(7))] * 4
    forwards = [make().plan(step) for step in range(40)]
    k_repeat_sampler.pass_order.cache_clear()
    assert [make().plan(step) for step in reversed(range(40))] == forwards[::-1]


@pytest.mark.parametrize("structures", [None, [0] * 25 + [1] * 20])
def test_all_layouts_and_world_sizes_hold_the_same_draws_per_round(structures):
    def planned(layout: str, ranks: int) -> list[list[k_repeat_sampler.SampleKey]]:
        sampler = make(45, layout=layout, num_replicas=ranks, batch_size=16 // ranks, structures=structures)
        return [flat(sampler.plan(step)) for step in range(24)]

    def rounds(batches: list[list[k_repeat_sampler.SampleKey]]) -> list[list[k_repeat_sampler.SampleKey]]:
        return [sorted(key[1:] for key in batches[step] + batches[step + 1]) for step in range(0, 24, 2)]

    expected = rounds(planned("spread", 8))
    for layout, ranks in itertools.product(k_repeat_sampler.LAYOUTS, (1, 2, 4, 8)):
        batches = planned(layout, ranks)
        assert rounds(batches) == expected
        assert layout == "contiguous" or batches == planned(layout, 1)


# --- iterating, and staying in step with the consumer


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_in_order_with_any_number_of_workers(workers):
    sampler = make(Echo(), rank=3)
    batches = iter(loader(sampler, workers))
    for step in range(6):
        if step % 2:  # calling set_epoch or not makes no difference
            sampler.set_epoch(step)
        batch = next(batches)
        sampler.check(batch[0][0])
        assert batch == sampler.plan(step)[3]
    sampler.seek(9)
    with pytest.raises(k_repeat_sampler.StaleBatchError, match=r"step 6 .* step 9"):
        sampler.check(next(batches)[0][0])


def test_seeking_moves_new_iterators_and_not_running_ones():
    sampler = make()
    running = iter(sampler)
    sampler.set_epoch(100)  # before anything was asked of the running iterator
    assert next(iter(sampler)) == sampler.plan(100)[0] and next(running) == sampler.plan(0)[0]
    sampler.check(100)
    with pytest.raises(k_repeat_sampler.StaleBatchError, match="check every batch once"):
        sampler.check(100)
    for call in (sampler.plan, sampler.set_epoch):
        with pytest.raises(ValueError, match="step is -1"):
            call(-1)


# --- resuming


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_at_any_step_continues_the_uninterrupted_run(workers):
    uninterrupted = small(Echo(10), rank=1)
    states, batches = [], []
    for batch in itertools.islice(loader(uninterrupted, workers), 4):
        states.append(uninterrupted.state_dict())
        uninterrupted.check(batch[0][0])
        batches.append(batch)
    for step, state in enumerate(states):
        resumed = small(Echo(10), rank=1)
        resumed.load_state_dict(state)
        assert next(iter(loader(resumed, workers))) == batches[step]
        resumed.check(step)


def test_the_saved_state_keeps_its_fields_and_numbers():
    state = make(Echo(), structures=[index % 2 for index in range(100)]).state_dict()
    assert state == {
        "num_replicas": 8,
        "batch_size": 2,
        "k": 4,
        "num_batches_per_epoch": 2,
        "next_step": 0,
        "seed": 42,
        "n": 100,
        "fingerprint": "echo 100",
        "layout": "spread",
        "structures": 7699462296378782831,
    }
    assert make(Echo()).plan(3)[5] == [(3, 14, 2, 29), (3, 15, 2, 15)]


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
        ({"structures": [0] * 5 + [1] * 5}, "structures was 0"),
    ],
)
def test_resuming_another_run_names_the_difference(change, text):
    state = small(Echo(10)).state_dict()
    other = small(**{"dataset": Echo(10), **change})
    with pytest.raises(ValueError, match=text):
        other.load_state_dict(state)
    del state["seed"]
    with pytest.raises(ValueError, match="must have"):
        other.load_state_dict(state)


def test_the_number_of_ranks_may_change_when_the_batch_over_all_ranks_does_not():
    saved, resumed = make(num_replicas=4, batch_size=4), make(num_replicas=2, batch_size=8)
    saved.seek(5)
    resumed.load_state_dict(saved.state_dict())
    assert next(iter(resumed)) == saved.plan(5)[0] + saved.plan(5)[1]
    # With layout contiguous a step then holds other groups, so only between rounds.
    saved = make(layout="contiguous", num_replicas=8)
    resumed = make(layout="contiguous", num_replicas=4, batch_size=4)
    assert {key[1:] for key in flat(saved.plan(4))} != {key[1:] for key in flat(resumed.plan(4))}
    saved.seek(5)
    with pytest.raises(ValueError, match=r"num_replicas was 8, is 4.*only between rounds"):
        resumed.load_state_dict(saved.state_dict())
    saved.seek(6)
    resumed.load_state_dict(saved.state_dict())
    assert next(iter(resumed))[0][0] == 6


# --- refusals


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"k": 5}, r"num_replicas \* batch_size = 16, not a multiple of k=5"),
        ({"dataset": 3}, "dataset has 3 conditions, a batch needs m = .* = 4 different ones"),
        ({"layout": "contiguous", "nb": 1}, r"\* m = 4 groups per round to be a multiple of num_replicas=8"),
        ({"k": 1}, "got k=1 .* k >= 2"),
        ({"layout": "sideways"}, "layout is 'sideways', must be one of spread, shuffled, contiguous"),
        ({"rank": 8}, "rank=8; counts must be"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"nb": 0}, "num_batches_per_epoch=0"),
        ({"structures": [0] * 97 + [1] * 3}, "the rarest of 2 structures has 3 conditions, a batch needs m = .* 4"),
        ({"structures": [1, 2]}, "got 2 structures for 100 conditions"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes, text):
    with pytest.raises(ValueError, match=text) as caught:
        make(**{"dataset": 100, **changes})
    assert "\n" not in str(caught.value)


def repeats(n: int, epochs: int) -> bool:
    sampler = make(n)
    steps = [[index for _, _, slot, index in flat(sampler.plan(step)) if slot == 0] for step in range(2 * epochs)]
    drawn = [steps[2 * epoch] + steps[2 * epoch + 1] for epoch in range(epochs)]
    return any(len(set(indices)) < len(indices) for indices in drawn)


def test_the_first_rank_logs_where_an_epoch_may_draw_a_condition_twice(caplog):
    caplog.set_level(logging.INFO)
    make(7)
    assert caplog.records[-1].levelno == logging.WARNING
    assert "an epoch draws 8 conditions from a dataset of 7, so some come twice" in caplog.text
    caplog.clear()
    make(97)
    assert caplog.records[-1].levelno == logging.INFO and "may hold a condition twice" in caplog.text
    assert repeats(97, 500)
    caplog.clear()
    for silent in (make(7, rank=1), make(97, rank=1), make(96), make(97, nb=1)):
        assert not caplog.records, silent.state_dict()
    assert not repeats(96, 100) and not repeats(97, 12)  # 12 epochs are the first pass of 97


# --- structures: conditions of several video sizes


def structured(counts: tuple[int, ...], **changes: Any) -> tuple[k_repeat_sampler.DistributedKRepeatSampler, list[int]]:
    structures = [number for number, count in enumerate(counts) for _ in range(count)]
    random.Random(3).shuffle(structures)
    return make(len(structures), structures=structures, **changes), structures


@pytest.mark.parametrize("layout", ["spread", "shuffled"])
def test_all_conditions_of_a_step_are_of_one_structure(layout):
    sampler, structures = structured((24, 12, 7), layout=layout)
    seen = [{structures[index] for _, _, _, index in flat(sampler.plan(step))} for step in range(60)]
    assert {len(found) for found in seen} == {1}
    # 24, 12 and 7 conditions at 4 a step: 6, 3 and 1 turns of a cycle of 10.
    for cycle in range(6):
        assert Counter(found.copy().pop() for found in seen[10 * cycle : 10 * cycle + 10]) == {0: 6, 1: 3, 2: 1}


def test_the_structure_of_a_step_does_not_depend_on_which_comes_first_in_the_data():
    ordered = [0] * 24 + [1] * 12 + [2] * 7

    def taken(structures: list[int]) -> list[int]:
        sampler = make(len(structures), structures=structures)
        return [structures[flat(sampler.plan(step))[0][3]] for step in range(40)]

    assert taken(ordered) == taken(ordered[::-1]) and set(taken(ordered)) == {0, 1, 2}


def test_every_structure_has_its_own_passes_over_its_conditions():
    for counts in ((20, 20), (26, 13, 7)):  # of the latter a pass ends within a cycle of turns
        sampler, structures = structured(counts)
        drawn = defaultdict(list)
        for step in range(40):
            for _, _, slot, index in flat(sampler.plan(step)):
                if slot == 0:
                    drawn[structures[index]].append(index)
        places = {s: [i for i, other in enumerate(structures) if other == s] for s in drawn}
        for structure, indices in drawn.items():
            if counts[structure] >= 8:
                assert sorted(indices[: counts[structure]]) == places[structure]
        if counts == (20, 20):  # and not in the same order
            assert len({tuple(places[s].index(i) for i in drawn[s][:20]) for s in drawn}) == 2


def test_equal_structures_change_nothing():
    plain, equal = make(), make(structures=["one size"] * 100)
    assert [plain.plan(step) for step in range(50)] == [equal.plan(step) for step in range(50)]
    assert plain.state_dict() == equal.state_dict()


def test_the_examples_on_the_page_run():
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["resumed"].next_step == 6 and len(names["rewards"]) == 8
