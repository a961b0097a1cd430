"""Batches of limited cost are planned for all ranks at once."""

import inspect
import itertools
import logging
import random
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, SequentialSampler

from flow_grpo.data.dynamic_batch import DistributedWeightedSampler as Weighted
from flow_grpo.data.dynamic_batch import DynamicBatchSampler, LimitedPointsCollateFn, sample_cost, video_tokens
from flow_grpo.runtime.ranks.process_group import World
from tests.workers import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "cost_limited_batches.md"


class Items(Dataset[int]):
    """Items that are their own indices; the structure is the cost modulo 3."""

    def __init__(self, costs: list[int]) -> None:
        self.cost = costs.__getitem__
        self.length = len(costs)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index

    def size_of(self, index: int) -> int:
        return self.cost(index) % 3


def mixed(size: int = 50) -> Items:
    source = random.Random(0)
    return Items([source.choice((3, 4, 5, 7, 9)) for _ in range(size)])


def make(dataset: Any, world: int = 2, limit: int = 20, epoch: int = 0, **knobs: Any) -> list[DynamicBatchSampler]:
    samplers = [DynamicBatchSampler(dataset, limit, num_replicas=world, rank=rank, **knobs) for rank in range(world)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return samplers


def rows_of(samplers: list[DynamicBatchSampler]) -> list[tuple[list[int], ...]]:
    return list(zip(*samplers, strict=True))


def real_batches(samplers: list[DynamicBatchSampler]) -> list[list[int]]:
    return [batch for s in samplers for number, batch in enumerate(s) if s.batch_weight(number)]


def real(samplers: list[DynamicBatchSampler]) -> list[int]:
    return list(itertools.chain(*real_batches(samplers)))


def test_items_are_covered_once_in_batches_within_the_limit_and_as_many_on_every_rank() -> None:
    for case in range(150):
        source = random.Random(case)
        world, limit = source.randint(1, 8), source.randint(1, 40)
        spread = source.choice((1, 3, limit))
        dataset = Items([source.randint(max(1, limit - spread), limit) for _ in range(source.randint(60, 150))])
        knobs = {"shuffle": source.random() < 0.7, "drop_last": source.random() < 0.3, "seed": case}
        structure = source.choice((dataset.size_of, lambda _: None))
        samplers = make(dataset, world, limit, case % 3, structure=structure, **knobs)
        rows = rows_of(samplers)
        assert {len(sampler) for sampler in samplers} == {len(list(sampler)) for sampler in samplers} == {len(rows)}
        costs = [[sum(map(dataset.cost, batch)) for batch in row] for row in rows]
        assert max(itertools.chain(*costs)) <= limit
        assert all(len({structure(index) for index in batch}) == 1 for row in rows for batch in row)
        full = list(range(len(rows)))
        for number, row in enumerate(rows):
            weights = [sampler.batch_weight(number) for sampler in samplers]
            items = [index for batch, weight in zip(row, weights, strict=True) if weight for index in batch]
            filler = [batch for batch, weight in zip(row, weights, strict=True) if not weight]
            assert {sampler.real_items(number) for sampler in samplers} == {len(items)}
            assert all(batch in [[index] for index in items] for batch in filler)
            assert all(dataset.cost(batch[0]) == min(map(dataset.cost, items)) for batch in filler)
            full.remove(number) if filler else None
        assert len(rows) - len(full) <= int(not knobs["drop_last"])
        assert sum(max(costs[number]) - min(costs[number]) for number in full) <= limit  # all waiting of the epoch
        counted = sorted(real(samplers))
        assert counted == sorted(set(counted) if knobs["drop_last"] else range(len(dataset)))


def test_a_last_row_that_is_dropped_is_not_always_that_of_the_rare_and_cheap() -> None:
    dataset = Items([6] * 61 + [4])  # 21 batches and a small one
    lost = [set(range(62)) - set(real(make(dataset, 4, epoch=epoch, drop_last=True))) for epoch in range(40)]
    assert max(map(len, lost)) <= 6
    assert sum(61 in items for items in lost) < 12


def test_equal_costs_give_batches_of_a_fixed_size_and_videos_cost_latent_tokens() -> None:
    kept, dropped = (make(range(100), 2, 4, cost=lambda _: 1, drop_last=last) for last in (False, True))
    assert [len(sampler) for sampler in kept + dropped] == [13, 13, 12, 12]
    assert sorted(map(len, itertools.chain(*kept))) == [1] + [4] * 25
    assert (video_tokens(81, 480, 832), video_tokens(81, 720, 1280)) == (32_760, 75_600)
    assert video_tokens(5, 32, 64, temporal=1, spatial=8) == 5 * 4 * 8


def test_the_arguments_have_the_published_order_and_defaults() -> None:
    whole = [(p.name, p.default) for p in inspect.signature(DynamicBatchSampler).parameters.values()]
    drawn = [(p.name, p.default) for p in inspect.signature(Weighted).parameters.values()]
    world = [("num_replicas", None), ("rank", None), ("seed", 0)]
    assert whole[1:8] == [("max_points", 500_000), ("shuffle", True), ("drop_last", False), ("sampler", None), *world]
    assert drawn[3:] == [("replacement", True), *world]
    alone = DynamicBatchSampler(mixed())
    assert (alone.num_replicas, alone.rank) == (1, 0)


def test_an_epoch_is_a_function_of_seed_and_number_identical_on_every_rank() -> None:
    samplers = [make(mixed(), epoch=epoch, seed=1) for epoch in (0, 1, 2)]
    assert all(first.fingerprint() == second.fingerprint() for first, second in samplers)
    plans = [rows_of(pair) for pair in samplers]
    assert plans[0] != plans[1] != plans[2]
    samplers[0][1].set_epoch(2)
    assert list(samplers[0][1]) == [row[1] for row in plans[2]]
    assert make(mixed(), seed=2)[0].fingerprint() != samplers[0][0].fingerprint()
    in_order = SequentialSampler(range(50))
    first, second = (rows_of(make(mixed(), epoch=epoch, sampler=in_order)) for epoch in (0, 1))
    assert first != second and sorted(first) == sorted(second)  # only the rows are shuffled then


def test_without_shuffling_items_and_rows_follow_the_dataset() -> None:
    dataset = mixed(80)
    samplers = make(dataset, shuffle=False)
    in_order = sorted(real_batches(samplers))
    for structure in range(3):
        items = [index for batch in in_order for index in batch if dataset.size_of(index) == structure]
        assert items == sorted(items)
    heads = [min(min(batch) for batch in row) for row in rows_of(samplers)]
    assert heads == sorted(heads)
    assert rows_of(samplers) == rows_of(make(dataset, shuffle=False, epoch=5))
    fixed = rows_of(make(range(12), 2, 3, shuffle=False, cost=lambda _: 1))
    assert fixed == [([0, 1, 2], [3, 4, 5]), ([6, 7, 8], [9, 10, 11])]


def test_an_oversized_item_is_refused_or_alone_or_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    dataset = Items([3, 21, 6, 9, 24, 3])
    with pytest.raises(ValueError, match=r"2 of 6 items .* max_points=20, the first is item 1 with 21; .*oversize"):
        make(dataset)
    with caplog.at_level(logging.WARNING):
        single, dropped = (make(dataset, 3, oversize=oversize) for oversize in ("single", "drop"))
    assert len(caplog.records) == 2  # of the first rank
    assert sorted(batch for batch in real_batches(single) if sum(map(dataset.cost, batch)) > 20) == [[1], [4]]
    assert sorted(real(single)) == list(range(6)) and single[0].dropped_items == 0
    assert sorted(real(dropped)) == [0, 2, 3, 5] and dropped[1].dropped_items == 2


BAD_PLANS = [
    ({"oversize": "skip"}, "oversize is 'skip', must be one of raise, single, drop"),
    ({"cost": lambda index: 0}, "cost of item 0 is 0, must be a whole number >= 1"),
    ({"cost": lambda index: 1.5}, "cost of item 0 is 1.5"),
    ({"dataset": range(5)}, "dataset has no cost"),
    ({"rank": 2}, "rank is 2 with num_replicas=2"),
    ({"dataset": Items([])}, "epoch 0 has not one row of 2 batches"),
    ({"dataset": Items([3]), "drop_last": True}, "drop_last=True"),
    ({"sampler": [0, 50]}, r"drew 1 indices outside 0\.\.49, first 50"),
]
BAD_DRAWS = [
    ({"weights": [1, -1, 1]}, "weights are 3 from -1 to 1; give 3 finite ones"),
    ({"weights": [0, 0, 0]}, "not all zero"),
    ({"weights": [1, 1]}, "weights are 2 .* give 3"),
    ({"weights": [1, float("nan"), 1]}, "finite"),
    ({"num_samples": 1}, "num_samples is 1, must be at least num_replicas=2"),
    ({"weights": [1, 0, 0], "replacement": False}, "at most the 1 items of positive weight"),
]


@pytest.mark.parametrize(
    ("made", "knobs", "text"),
    [
        *((DynamicBatchSampler, {"dataset": mixed(), "max_points": 20, **knobs}, text) for knobs, text in BAD_PLANS),
        *((Weighted, {"dataset": range(3), "weights": [1] * 3, "num_samples": 2, **k}, text) for k, text in BAD_DRAWS),
    ],
)
def test_numbers_that_do_not_fit_are_refused(made: Any, knobs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        made(**{"num_replicas": 2, "rank": 0, **knobs})


def test_a_torch_sampler_draws_the_same_on_all_ranks_and_leaves_the_global_generator_alone() -> None:
    plans = []
    for rank in range(2):
        torch.manual_seed(rank)
        before = torch.get_rng_state()
        plans.append(make(mixed(), sampler=RandomSampler(range(50), num_samples=31), seed=4)[rank])
        assert torch.equal(torch.get_rng_state(), before)
    assert plans[0].fingerprint() == plans[1].fingerprint()
    assert len(set(real(plans))) == 31
    first, second = (make(mixed(), 1, 20, epoch, sampler=RandomSampler(range(50), num_samples=31)) for epoch in (0, 1))
    assert set(real(first)) != set(real(second))
    assert sorted(real(make(mixed(), sampler=SequentialSampler(range(50))))) == list(range(50))


def test_a_sampler_that_shards_or_has_its_own_generator_is_refused() -> None:
    with pytest.raises(TypeError, match=r"DistributedSampler shards over ranks.*sharded once more"):
        make(mixed(), sampler=DistributedSampler(range(50), num_replicas=2, rank=0))
    with pytest.raises(TypeError, match="RandomSampler has its own generator"):
        make(mixed(), sampler=RandomSampler(range(50), generator=torch.Generator()))


def test_weighted_draws_all_reach_the_batches_and_alone_are_equal_shares() -> None:
    weights = [float(index % 5) for index in range(50)]
    alone = [Weighted(mixed(), weights, 43, True, 4, rank, seed=3) for rank in range(4)]
    draws = alone[0].global_draws(0)
    assert [list(sampler) for sampler in alone] == [draws[rank::4][:10] for rank in range(4)]
    assert {len(sampler) for sampler in alone} == {10} and len(draws) == 43
    assert draws != alone[0].global_draws(1) and draws == alone[3].global_draws(0)
    alone[0].set_epoch(1)
    assert list(alone[0]) == alone[1].global_draws(1)[::4][:10]
    for epoch in (0, 1):
        samplers = make(mixed(), 4, epoch=epoch, sampler=alone[0])
        assert Counter(real(samplers)) == Counter(alone[0].global_draws(epoch))


def test_a_draw_knows_how_often_the_epoch_drew_its_item_before_over_all_ranks() -> None:
    samplers = make(mixed(), 3, sampler=Weighted(mixed(), [float(index % 5) for index in range(50)], 80), epoch=2)
    seen: Counter[int] = Counter()
    for number, row in enumerate(rows_of(samplers)):
        for sampler, batch in zip(samplers, row, strict=True):
            if sampler.batch_weight(number):
                assert sampler.drawn_before(number) == {index: seen[index] for index in batch}
                seen.update(batch)
    assert max(seen.values()) > 2
    once = make(mixed(), 3)
    assert not any(sum(s.drawn_before(n).values()) for s in once for n in range(len(s)) if s.batch_weight(n))


def test_draws_follow_the_weights() -> None:
    """The bounds are five standard deviations."""
    weights = torch.tensor([0.0, 1, 2, 0, 5, 2, 0])
    counts = Counter(Weighted(range(7), weights, 20_000).global_draws(0))
    for index, weight in enumerate(weights.tolist()):
        share = weight / 10
        assert abs(counts[index] - 20_000 * share) <= 5 * (20_000 * share * (1 - share)) ** 0.5
    one = Weighted(range(7), weights, 1, False)
    counts = Counter(one.global_draws(epoch)[0] for epoch in range(2_000))
    assert abs(counts[4] - 1_000) <= 5 * 500**0.5 and counts.keys() == {1, 2, 4, 5}
    tiny = Weighted(range(4), [5e-324, 1e-300, 1e-300, 1e300], 3, replacement=False)
    assert all(sorted(tiny.global_draws(epoch)) == [1, 2, 3] for epoch in range(20))
    assert len({tuple(tiny.global_draws(epoch)) for epoch in range(20)}) > 3  # heavy ones do not come first
    many = Weighted(range(2**24 + 1), torch.ones(2**24 + 1), 3)  # too many for torch.multinomial
    assert len(many.global_draws(0)) == 3


def test_collating_drops_until_the_rest_fits_and_counts() -> None:
    largest = LimitedPointsCollateFn(10, cost=int)
    assert [largest(batch) for batch in ([4, 9, 1, 5], [12, 11], [3, 7])] == [[4, 1, 5], [11], [3, 7]]
    assert largest.dropped == 2
    last = LimitedPointsCollateFn(10, "drop_last", cost=int, collate=tuple)
    assert [last(batch) for batch in ([4, 9, 1, 5], [12, 11], [3, 7])] == [(4,), (12,), (3, 7)]
    assert last.dropped == 4
    with pytest.raises(ValueError, match="strategy is 'none', must be one of drop_largest, drop_last"):
        LimitedPointsCollateFn(strategy="none", cost=int)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_counter_of_dropped_samples_adds_up_over_loader_workers(workers: int) -> None:
    collate = LimitedPointsCollateFn(10, cost=lambda index: 1 + index % 7)
    for passes in (1, 2):
        batches = list(DataLoader(mixed(41), batch_size=5, collate_fn=collate, num_workers=workers))
        assert len(batches) == 9
        assert collate.dropped == passes * (41 - sum(map(len, batches))) > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_epoch_yields_what_the_uninterrupted_one_had_left(workers: int) -> None:
    whole = make(mixed(), epoch=3)[1]
    batches = [torch.tensor(batch) for batch in whole]
    for consumed in (0, 2, len(batches)):
        resumed = make(mixed())[1]
        resumed.load_state_dict(whole.state_dict(consumed))
        resumed.set_epoch(3)
        loader = DataLoader(mixed(), batch_sampler=resumed, num_workers=workers)
        assert len(loader) == len(batches) - consumed
        assert all(torch.equal(a, b) for a, b in zip(loader, batches[consumed:], strict=True))
        assert resumed.real_items(1) == whole.real_items(1)
    resumed.set_epoch(4)
    assert list(resumed) == list(make(mixed(), epoch=4)[1])


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"world": 3}, r"num_replicas was 2, is 3.*start at the next epoch with set_epoch\(2\)"),
        ({"seed": 9}, "seed was 0, is 9"),
        ({"limit": 19}, "max_points was 20, is 19"),
        ({"dataset": mixed(51)}, r"fingerprint was '\d+ rows, epoch 1, \w+', is '\d+ rows, epoch 1"),
    ],
)
def test_another_plan_cannot_be_resumed(other: dict[str, Any], text: str) -> None:
    sampler = make(mixed(), epoch=1)[0]
    with pytest.raises(ValueError, match=text):
        make(**{"dataset": mixed(), **other})[0].load_state_dict(sampler.state_dict(2))
    with pytest.raises(ValueError, match="consumed was 99, is"):
        sampler.load_state_dict(sampler.state_dict(99))


def test_persistent_workers_follow_set_epoch_and_a_running_iterator_keeps_its_plan() -> None:
    sampler = make(mixed(30))[0]
    loader = DataLoader(mixed(30), batch_sampler=sampler, num_workers=2, persistent_workers=True, collate_fn=list)
    seen = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected, iterator = list(sampler), iter(sampler)
        running = iter(loader)
        sampler.set_epoch(epoch + 1)  # before anything was asked of the iterators
        assert list(iterator) == list(running) == expected
        seen.append(expected)
    assert seen[0] != seen[1] != seen[2]


# --- real processes


def train(world: World, size: int) -> dict[str, Any]:
    """One epoch over values 0..size-1, with the gradient of each row and the metric of the epoch."""
    dataset = mixed(size)
    sampler = DynamicBatchSampler(dataset, 20, seed=5)  # ranks are those of torch.distributed
    world.data.check_equal(sampler.fingerprint(), "batch plan")
    model = torch.nn.Linear(1, 1, bias=False)
    wrapped = DistributedDataParallel(model)
    batches, gradients, sums = [], [], torch.zeros(1, 2)
    for number, batch in enumerate(DataLoader(dataset, batch_sampler=sampler, num_workers=1)):
        weight = sampler.batch_weight(number)
        losses = wrapped(batch.float().unsqueeze(1)).sum(dim=1)
        model.zero_grad()
        (weight * losses.sum() * world.data.size / sampler.real_items(number)).backward()
        gradients.append(model.weight.grad.item())
        sums += weight * torch.tensor([[batch.float().sum(), len(batch)]])
        batches.append(batch.tolist() if weight else [])
    total, count = world.data.all_gather(sums).sum(dim=0).tolist()
    return {"batches": batches, "gradients": gradients, "metric": total / count, "of_rank": (sums[0, 0] / sums[0, 1])}


def test_two_processes_share_the_items_and_average_over_all_of_them() -> None:
    dataset = mixed(46)
    first, second = run_ranks(train, 2, 46)
    mine, other = set(itertools.chain(*first["batches"])), set(itertools.chain(*second["batches"]))
    assert not mine & other and mine | other == set(range(46))
    assert len(first["batches"]) == len(second["batches"])
    assert [] in second["batches"]  # a row with filler is among them
    assert all(sum(map(dataset.cost, batch)) <= 20 for batch in first["batches"] + second["batches"])
    assert first["metric"] == second["metric"] == pytest.approx(22.5)
    assert (first["of_rank"] + second["of_rank"]) / 2 != pytest.approx(22.5)
    rows = [a + b for a, b in zip(first["batches"], second["batches"], strict=True)]
    assert first["gradients"] == second["gradients"] == pytest.approx([sum(row) / len(row) for row in rows])


def test_a_later_epoch_with_less_than_one_row_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    sampler = DynamicBatchSampler(range(20), 9, drop_last=True, num_replicas=8, rank=0, cost=lambda i: 1 + i % 5)
    for epoch in range(60):
        sampler.set_epoch(epoch)
        assert len(sampler) == 1
    short = (12, 31, 44)
    assert caplog.messages == [f"epoch {n} has only 7 batches for 8 ranks: the rest is filler" for n in short]


# --- what is written about it


@pytest.mark.parametrize(
    ("sample", "cost"),
    [({"cost": 7, "size": (5, 32, 32)}, 7), ({"size": (5, 32, 48)}, 2 * 2 * 3), (SimpleNamespace(size=(1, 16, 16)), 1)],
)
def test_a_sample_s_own_cost_or_size_counts_where_no_cost_is_given(sample: Any, cost: int) -> None:
    assert sample_cost(sample) == cost
    assert LimitedPointsCollateFn(max_points=cost)([sample, sample]) == [sample]


def test_a_sample_without_cost_and_size_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a Tensor has neither cost nor size \(frames, height, width\); pass cost="):
        LimitedPointsCollateFn()([torch.zeros(3)])


def test_the_examples_on_the_page_run_and_the_lightning_one_compiles() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    plain, resuming, weighted, accelerate, lightning = (compile(block, str(PAGE), "exec") for block in blocks)
    names: dict[str, Any] = {}
    exec(plain, names)
    assert names["number"] == len(names["loader"]) - 1 and names["losses"].isfinite().all()
    exec(resuming, names)
    assert names["epoch"] == 2 and names["number"] == len(names["sampler"]) - 1
    exec(weighted, names)
    assert Counter(itertools.chain(*names["sampler"])) == Counter(names["weighted"].global_draws(0))
    assert "accelerator" in accelerate.co_names and "trainer" in lightning.co_names
