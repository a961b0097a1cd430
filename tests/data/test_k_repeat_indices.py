"""The group sampler's draws as indices, for a plain data set and DataLoader, also beside accelerate.

What is sharded already is not sharded by accelerate a second time.
"""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, TensorDataset

from flow_grpo.data.dynamic_batch import DynamicBatchSampler
from flow_grpo.data.k_repeat_indices import KRepeatIndices
from flow_grpo.data.k_repeat_sampler import DistributedKRepeatSampler, StaleBatchError
from flow_grpo.runtime.ranks.process_group import World
from tests.workers import run_ranks

VALUES = torch.arange(100, 110)


def batches(rank: int = 0, world_size: int = 2, **changes: int) -> KRepeatIndices:
    given = {"batch_size": 4, "k": 4, "seed": 7, "num_batches_per_epoch": 2} | changes
    return KRepeatIndices(DistributedKRepeatSampler(VALUES, num_replicas=world_size, rank=rank, **given))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_plain_data_set_gets_the_planned_indices_epoch_by_epoch(workers):
    own = batches()
    loader = DataLoader(TensorDataset(VALUES), batch_sampler=own, num_workers=workers)
    for epoch in (0, 1, 5):
        own.set_epoch(epoch)
        planned = [[100 + index for *_, index in own.sampler.plan(2 * epoch + n)[0]] for n in range(2)]
        assert [batch[0].tolist() for batch in loader] == planned
        assert [[100 + index for *_, index in keys] for keys in own.sample_keys()] == planned
    assert len(loader) == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_is_delivered_once_unless_it_is_named_again(workers):
    own = batches()
    loader = DataLoader(VALUES, batch_sampler=own, num_workers=workers, persistent_workers=workers > 0)
    first = [batch.tolist() for batch in loader]
    with pytest.raises(StaleBatchError, match=r"epoch 0 was begun already; before iter\(loader\) call set_epoch\(1\)"):
        next(iter(loader))
    own.set_epoch(0)
    assert [batch.tolist() for batch in loader] == first
    own.set_epoch(1)
    assert [batch.tolist() for batch in loader] != first


def test_an_iterator_keeps_its_epoch_when_the_next_is_named():
    own = batches()
    first = list(own)
    own.set_epoch(0)
    running = iter(own)
    own.set_epoch(1)
    assert list(running) == first and list(own) != first
    with pytest.raises(ValueError, match="epoch is -1, must be at least 0"):
        own.set_epoch(-1)


def under_accelerate(world: World) -> list[list[int]]:
    os.environ |= {"RANK": str(world.data.rank), "LOCAL_RANK": str(world.data.rank), "WORLD_SIZE": str(world.data.size)}
    accelerator = Accelerator(cpu=True)
    own = batches(accelerator.process_index, accelerator.num_processes)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    loader = DataLoader(TensorDataset(VALUES), batch_sampler=own)
    gathered = []
    for (values,), keys in zip(loader, own.sample_keys(), strict=True):
        model(values.float()[:, None]).sum().backward()
        gids = accelerator.gather(torch.tensor([gid for _, gid, _, _ in keys]))
        gathered.append(gids.tolist())
        assert set(Counter(accelerator.gather(values).tolist()).values()) == {4}
    return gathered


def test_under_accelerate_every_group_is_whole_over_the_processes():
    for gathered in run_ranks(under_accelerate, 2, fresh=True):
        assert [Counter(gids) for gids in gathered] == [{0: 4, 1: 4}, {2: 4, 3: 4}]


def costs(world_size: int) -> DynamicBatchSampler:
    return DynamicBatchSampler(VALUES, 4, num_replicas=world_size, rank=0, cost=lambda _: 1)


MADE = [lambda world_size: batches(0, world_size).sampler, costs, lambda world_size: batches(0, world_size)]


@pytest.mark.parametrize("made", MADE, ids=["groups", "costs", "indices"])
@pytest.mark.parametrize("even", [True, False])
def test_accelerate_s_prepare_is_refused_on_several_processes(made: Callable[[int], Any], even: bool) -> None:
    loader = DataLoader(range(10), batch_sampler=made(2))
    with pytest.raises(TypeError, match=r"yields this rank's batches already, so accelerator\.prepare would lose"):
        prepare_data_loader(loader, num_processes=2, process_index=0, even_batches=even, put_on_device=False)


@pytest.mark.parametrize("made", MADE[1:], ids=["costs", "indices"])
def test_on_one_process_a_prepared_loader_loses_nothing(made: Callable[[int], Any]) -> None:
    loader = DataLoader(range(10), batch_sampler=made(1))
    prepared = prepare_data_loader(loader, num_processes=1, process_index=0, put_on_device=False)
    found = torch.cat(list(prepared)).tolist()
    assert found == [index for batch in made(1) for index in batch]
