"""Processes that read ahead deliver what the process itself would read, and end quietly whenever they are dropped."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils.data import Dataset

from flow_grpo.data.loader import make_loader


class Numbers(Dataset):
    """Items of many tensors: long on their way."""

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return [torch.full((3, 9, 64, 64), float(index)) for _ in range(8)]


def firsts(loader) -> list[list[float]]:
    return [[item[0].flatten()[0].item() for item in batch] for batch in loader]


def test_workers_deliver_what_the_process_itself_reads():
    batches = [[3, 1], [2], [0, 2]]
    alone, helped = (make_loader(Numbers(), batches, count) for count in (0, 2))
    assert firsts(alone) == firsts(helped) == [[3.0, 1.0], [2.0], [0.0, 2.0]]
    assert (helped.num_workers, helped.prefetch_factor, helped.persistent_workers) == (2, 2, False)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_new_iterator_draws_nothing_from_the_process_s_generator(workers):
    """A resumed run makes one more than an uninterrupted one, and their random states are to be equal."""
    before = torch.get_rng_state()
    assert firsts(make_loader(Numbers(), [[1]], workers)) == [[1.0]]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_is_dropped_with_batches_on_their_way_ends_without_a_word(persistent, capfd):
    for taken in (1, 2):
        batches = iter(make_loader(Numbers(), [[index] for index in range(100)], 1, persistent=persistent))
        for _ in range(taken):
            next(batches)
        workers = batches._workers
        del batches
        gc.collect()
        assert [worker.exitcode for worker in workers] == [0]
    assert capfd.readouterr().err == ""
