"""Ranks meet under a name of their own, whatever earlier attempts left in the store."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from flow_grpo.runtime.ranks.rendezvous import admit, meet


def attempt(store: dist.Store, world_size: int) -> list[tuple[str, bool]]:
    """Let all ranks meet, the last one first."""
    met: dict[int, tuple[str, bool]] = {}

    def come(rank: int) -> None:
        met[rank] = meet(store, rank, world_size, wait_s=20)

    ranks = [threading.Thread(target=come, args=(rank,)) for rank in reversed(range(world_size))]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return [met[rank] for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_attempt_has_another_name_and_all_know_whether_one_before_was_admitted(world_size):
    store, attempts = dist.HashStore(), []
    for _ in range(3):
        ranks = attempt(store, world_size)
        assert len(set(ranks)) == 1
        attempts.append(ranks[0])
        if len(attempts) == 2:
            admit(store)
    assert len({name for name, _ in attempts}) == 3
    assert [again for _, again in attempts] == [False, False, True]


def test_who_left_a_greeting_is_not_taken_for_who_comes():
    store = dist.HashStore()
    store.set("hello/1", "gone")
    with pytest.raises(RuntimeError, match=r"rank\(s\) 1 did not come within 0 s"):
        meet(store, 0, 2, wait_s=0.3)
    assert len(set(attempt(store, 2))) == 1


def test_a_rank_without_the_first_gives_up():
    with pytest.raises(dist.DistStoreError):
        meet(dist.HashStore(), 1, 2, wait_s=0.3)
