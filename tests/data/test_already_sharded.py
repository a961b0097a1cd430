"""accelerate does not shard a second time what is sharded already."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, Sampler

from flow_grpo.data.dynamic_batch import DynamicBatchSampler
from flow_grpo.data.k_repeat_indices import KRepeatIndices
from flow_grpo.data.k_repeat_sampler import DistributedKRepeatSampler


def groups(world_size: int) -> DistributedKRepeatSampler:
    return DistributedKRepeatSampler(24, 4, 4, world_size, 0, seed=1)


def costs(world_size: int) -> DynamicBatchSampler:
    return DynamicBatchSampler(range(24), 4, num_replicas=world_size, rank=0, cost=lambda _: 1)


MADE = [groups, costs, lambda world_size: KRepeatIndices(groups(world_size))]


@pytest.mark.parametrize("made", MADE, ids=["groups", "costs", "indices"])
@pytest.mark.parametrize("even", [True, False])
def test_accelerate_s_prepare_is_refused_on_several_processes(made: Callable[[int], Sampler], even: bool) -> None:
    loader = DataLoader(range(24), batch_sampler=made(2))
    with pytest.raises(TypeError, match=r"yields this rank's batches already, so accelerator\.prepare would lose"):
        prepare_data_loader(loader, num_processes=2, process_index=0, even_batches=even, put_on_device=False)


@pytest.mark.parametrize("made", MADE[1:], ids=["costs", "indices"])
def test_on_one_process_a_prepared_loader_loses_nothing(made: Callable[[int], Sampler]) -> None:
    loader = DataLoader(range(24), batch_sampler=made(1))
    prepared = prepare_data_loader(loader, num_processes=1, process_index=0, put_on_device=False)
    found = torch.cat(list(prepared)).tolist()
    assert found == [index for batch in made(1) for index in batch]
