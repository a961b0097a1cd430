"""Moving rows between ranks."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flow_grpo.runtime.ranks.exchange import exchange_rows, hand_out
from flow_grpo.runtime.ranks.process_group import Group, World
from flow_grpo.runtime.ranks.watchdog import Monitor
from tests.workers import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64)


def rows_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return (3, 2) values that identify rank and row."""
    values = torch.tensor([[10 * rank + row, row] for row in range(3)])
    return (values % 2).to(dtype) if dtype == torch.bool else values.to(dtype)


def _swap(world: World) -> tuple[dict[str, torch.Tensor], int]:
    """Rank r sends its row 2 to the next rank and its rows 0, 0 to the previous one."""
    tensors = {str(dtype): rows_of(world.data.rank, dtype) for dtype in DTYPES}
    size = world.data.size
    send = [[] for _ in range(size)]
    send[(world.data.rank + 1) % size] = [2]
    send[(world.data.rank - 1) % size] = [0, 0]
    receive = [0] * size
    receive[(world.data.rank - 1) % size], receive[(world.data.rank + 1) % size] = 1, 2
    return exchange_rows(tensors, send, receive, world.data)


def _hand_out(world: World) -> dict[str, list[float]]:
    """Six tensors that all want, made by the ranks in turn."""
    keys, rank, size = "abcdef", world.data.rank, world.data.size
    made = {key: torch.tensor([10.0 * number, number]) for number, key in enumerate(keys) if number % size == rank}
    owner = {key: number % size for number, key in enumerate(keys)}
    return {key: found.tolist() for key, found in hand_out(made, owner, [keys] * size, world.data).items()}


def test_tensors_of_several_owners_come_under_their_own_keys():
    for rank, found in enumerate(run_ranks(_hand_out, 3)):
        assert found == {key: [10.0 * n, n] for n, key in enumerate("abcdef") if n % 3 != rank}


def test_rows_arrive_by_source_rank_bit_for_bit_in_every_dtype():
    for rank, (received, row_bytes) in enumerate(run_ranks(_swap, 4)):
        before, after = (rank - 1) % 4, (rank + 1) % 4
        for dtype in DTYPES:
            parts = {before: rows_of(before, dtype)[[2]], after: rows_of(after, dtype)[[0, 0]]}
            wanted = torch.cat([parts[source] for source in sorted(parts)])
            assert received[str(dtype)].dtype == dtype and torch.equal(received[str(dtype)], wanted)
        assert row_bytes == 2 * (4 + 2 + 8 + 1 + 8)


def _one_holds_all(world: World) -> dict[str, torch.Tensor]:
    tensors = {"states": torch.arange(6.0).view(2, 3)} if world.data.rank == 1 else {}
    send = [[1], [], [0]] if world.data.rank == 1 else [[], [], []]
    receive = [0, int(world.data.rank != 1), 0]
    return exchange_rows(tensors, send, receive, world.data)[0]


def test_a_rank_without_rows_learns_their_shape_from_the_others():
    first, holder, third = run_ranks(_one_holds_all, 3)
    assert first["states"].tolist() == [[3.0, 4.0, 5.0]]
    assert third["states"].tolist() == [[0.0, 1.0, 2.0]]
    assert holder["states"].shape == (0, 3)


def test_a_single_process_receives_nothing():
    received, row_bytes = exchange_rows({"states": torch.zeros(3, 4)}, [[]], [0], Group())
    assert received["states"].shape == (0, 4) and row_bytes == 16


def _refused(world: World, case: str) -> str:
    first = world.data.rank == 0
    tensors = {
        "shapes": {"states": torch.zeros(1, 2 + world.data.rank)},
        "missing rows": {"states": torch.zeros(1, 2)} if first else {},
        "device": {"states": torch.zeros(1, 2, device="cpu" if first else "meta")},
    }[case]
    send = [[0], []] if case == "missing rows" and not first else [[], []]
    with pytest.raises(ValueError, match="rows to exchange") as caught:
        exchange_rows(tensors, send, [0, int(case == "missing rows" and first)], world.data)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "words"), [("shapes", ["[2]", "[3]"]), ("missing rows", ["[2]"]), ("device", ["CPU memory", "meta"])]
)
def test_rows_that_cannot_be_exchanged_are_refused_on_every_rank(case, words):
    first, second = run_ranks(_refused, 2, case)
    assert first == second and all(word in first for word in words)


def _statuses_in_the_exchange(world: World) -> list[str]:
    store, statuses, exchange = dist.HashStore(), [], dist.all_to_all_single
    monitor = Monitor(store, world.data.rank, world.data.size, dead_s=60, silent_s=60, now=0.0)

    def publish() -> None:
        monitor.check(1.0)
        statuses.append(store.get(f"beat/{world.data.rank}").decode().split("|")[2])

    def watched(*args: object, **options: object) -> None:
        publish()
        exchange(*args, **options)

    with mock.patch.object(dist, "all_to_all_single", watched):
        exchange_rows({"a": torch.zeros(1)}, [[], []], [0, 0], dataclasses.replace(world.data, heartbeat=monitor))
    publish()
    return statuses


def test_a_group_exchange_under_the_watchdog_counts_as_waiting_for_peers():
    assert run_ranks(_statuses_in_the_exchange, 2) == [["waiting", "working"]] * 2
