"""Every attempt of the ranks to start has its own id, whatever earlier ones left in the store."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from flow_grpo.runtime.ranks.rendezvous import STARTED, join_attempt


def attempt(store: dist.Store, world_size: int) -> list[tuple[str, bool]]:
    with ThreadPoolExecutor(world_size) as threads:
        ranks = [threads.submit(join_attempt, store, rank, world_size, 60) for rank in reversed(range(world_size))]
        return [rank.result() for rank in ranks]


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_attempt_has_its_own_id_and_knows_whether_an_earlier_one_had_started(world_size):
    store, attempts = dist.HashStore(), []
    for _ in range(3):
        ranks = attempt(store, world_size)
        assert len(set(ranks)) == 1
        attempts.append(ranks[0])
        if len(attempts) == 2:
            store.set(STARTED, "")
    assert len({name for name, _ in attempts}) == 3
    assert [restarted for _, restarted in attempts] == [False, False, True]


def test_the_hello_of_a_dead_process_is_not_taken_for_its_rank():
    store = dist.HashStore()
    store.set("hello/1", "gone")
    with pytest.raises(RuntimeError, match=r"rank\(s\) 1 did not come"):
        join_attempt(store, 0, 2, wait_s=0.3)
    assert len(set(attempt(store, 2))) == 1


def test_a_rank_gives_up_when_rank_0_is_missing():
    with pytest.raises(dist.DistStoreError):
        join_attempt(dist.HashStore(), 1, 2, wait_s=0.3)
