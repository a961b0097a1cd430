"""The base class of datasets, and the loader whose workers end quietly whenever they are dropped."""

import gc
import os
from multiprocessing import resource_sharer
from unittest import mock

import pytest
import torch
from torch.utils.data import Dataset

from flow_grpo.data import dataset
from flow_grpo.data.dataset import ConditionDataset, file_id, make_loader, next_batch
from flow_grpo.records import Condition


class Two(ConditionDataset):
    def __len__(self) -> int:
        return 2

    def make(self, index, gid, slot):
        video, still = torch.full((3, 5, 16, 24), float(index)), torch.eye(4, dtype=torch.float64).repeat(5, 1, 1)
        return Condition(index=index, gid=gid, slot=slot, prompt="a room", source_video=video, target_poses=still)

    def prompt_of(self, index):
        return "a room"

    def size_of(self, index):
        return 5, 16, 24


def test_a_key_gives_the_step_and_the_condition():
    step, found = Two()[(7, 0, 3, 1)]
    assert (step, found.index, found.slot) == (7, 1, 3)
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"index is {index}, must be within 0..1"):
            Two().condition(index)


def test_copies_of_a_condition_are_read_once_and_share_their_tensors():
    """A source video of 81x480x832 pixels is 390 MB in fp32: k copies of it would not fit beside each other."""
    data = Two()
    with mock.patch.object(data, "make", wraps=data.make) as make:
        keys = [(4, 7, 0, 1), (4, 8, 0, 0), (4, 7, 1, 1)]
        (batch,) = make_loader(data, [keys], 0)
    assert make.call_count == 2
    assert [(step, item.gid, item.slot, item.index) for step, item in batch] == keys
    assert batch[0][1].source_video is batch[2][1].source_video
    (sent,) = make_loader(data, [keys], 1)
    storages = [item.source_video.untyped_storage().data_ptr() for _, item in sent]
    assert storages[0] == storages[2] != storages[1]


def test_a_file_is_identified_by_its_content_and_read_again_when_it_changes(tmp_path):
    one, copy = tmp_path / "one.mp4", tmp_path / "copy.mp4"
    for file in (one, copy):
        file.write_bytes(b"content")
    before = file_id(copy)
    assert file_id(one) == before
    copy.write_bytes(b"CONTENT")
    os.utime(copy, ns=(1, 1))
    assert file_id(copy) != before
    with pytest.raises(ValueError, match=r"absent.mp4 cannot be read"):
        file_id(tmp_path / "absent.mp4")


class Numbers(Dataset):
    """Items of many tensors, which take long to send."""

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return [torch.full((3, 9, 64, 64), float(index)) for _ in range(8)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_delivers_lists_and_draws_nothing_from_the_global_generator(workers):
    """A resumed run makes one more iterator than an uninterrupted one, and their random states must be equal."""
    before = torch.get_rng_state()
    loader = make_loader(Numbers(), [[3, 1], [2], [0, 2]], workers)
    assert [[item[0].mean().item() for item in batch] for batch in loader] == [[3, 1], [2], [0, 2]]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_is_dropped_with_batches_in_flight_ends_silently(persistent, capfd):
    for taken in (1, 2):
        batches = iter(make_loader(Numbers(), [[index] for index in range(100)], 1, persistent=persistent))
        for _ in range(taken):
            next(batches)
        workers = batches._workers
        del batches
        gc.collect()
        assert [worker.exitcode for worker in workers] == [0]
    assert capfd.readouterr().err == ""


def test_a_killed_worker_is_named_where_its_connection_breaks_first(monkeypatch):
    batches = iter(make_loader(Numbers(), [[0]], 1))
    (worker,) = batches._workers

    def broken(_) -> int:
        raise ConnectionResetError(104, "Connection reset by peer")

    def wait(_) -> None:
        worker.kill()
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # until the system reports its death

    monkeypatch.setattr(resource_sharer.DupFd, "detach", broken)
    monkeypatch.setattr(dataset.time, "sleep", wait)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) is killed by signal"):
        next_batch(batches)
