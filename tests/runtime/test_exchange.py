"""Moving rows between ranks."""

from __future__ import annotations

import pytest
import torch

from flow_grpo.runtime.ranks.exchange import exchange_rows
from flow_grpo.runtime.ranks.process_group import Ranks
from tests.workers import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64)


def rows_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return (3, 2) values that tell rank and row."""
    values = torch.tensor([[10 * rank + row, row] for row in range(3)])
    return (values % 2).to(dtype) if dtype == torch.bool else values.to(dtype)


def _swap(ranks: Ranks) -> tuple[dict[str, torch.Tensor], int]:
    """Rank r sends its row 2 to the next rank and its rows 0, 0 to the one before."""
    tensors = {str(dtype): rows_of(ranks.rank, dtype) for dtype in DTYPES}
    world = ranks.world_size
    send = [[] for _ in range(world)]
    send[(ranks.rank + 1) % world] = [2]
    send[(ranks.rank - 1) % world] = [0, 0]
    receive = [0] * world
    receive[(ranks.rank - 1) % world], receive[(ranks.rank + 1) % world] = 1, 2
    return exchange_rows(tensors, send, receive, ranks)


def test_rows_arrive_by_source_rank_bit_for_bit_in_every_dtype():
    results = run_ranks(_swap, 4)
    for rank, (received, row_bytes) in enumerate(results):
        before, after = (rank - 1) % 4, (rank + 1) % 4
        for dtype in DTYPES:
            parts = {before: rows_of(before, dtype)[[2]], after: rows_of(after, dtype)[[0, 0]]}
            wanted = torch.cat([parts[source] for source in sorted(parts)])
            assert received[str(dtype)].dtype == dtype
            assert torch.equal(received[str(dtype)], wanted)
        assert row_bytes == 2 * (4 + 2 + 8 + 1 + 8)


def _one_holds_all(ranks: Ranks) -> dict[str, torch.Tensor]:
    tensors = {"states": torch.arange(6.0).view(2, 3)} if ranks.rank == 1 else {}
    send = [[1], [], [0]] if ranks.rank == 1 else [[], [], []]
    receive = [0, int(ranks.rank != 1), 0]
    return exchange_rows(tensors, send, receive, ranks)[0]


def test_a_rank_that_never_held_such_rows_learns_their_form():
    first, holder, third = run_ranks(_one_holds_all, 3)
    assert first["states"].tolist() == [[3.0, 4.0, 5.0]]
    assert third["states"].tolist() == [[0.0, 1.0, 2.0]]
    assert holder["states"].shape == (0, 3)


def _unlike(ranks: Ranks) -> str:
    tensors = {"states": torch.zeros(1, 2 + ranks.rank)}
    with pytest.raises(ValueError, match="have one form") as caught:
        exchange_rows(tensors, [[], []], [0, 0], ranks)
    return str(caught.value)


def test_unlike_forms_are_refused_on_all_ranks_with_both_shapes():
    first, second = run_ranks(_unlike, 2)
    assert first == second
    assert "[2]" in first and "[3]" in first


def _sends_what_it_has_not(ranks: Ranks) -> str:
    tensors = {"states": torch.zeros(1, 2)} if ranks.rank == 0 else {}
    send = [[], []] if ranks.rank == 0 else [[0], []]
    with pytest.raises(ValueError, match="have one form") as caught:
        exchange_rows(tensors, send, [0, int(ranks.rank == 0)], ranks)
    return str(caught.value)


def test_a_plan_that_asks_for_missing_rows_is_refused_on_all_ranks():
    first, second = run_ranks(_sends_what_it_has_not, 2)
    assert first == second


def test_a_single_process_receives_nothing():
    received, row_bytes = exchange_rows({"states": torch.zeros(3, 4)}, [[]], [0], Ranks())
    assert received["states"].shape == (0, 4)
    assert row_bytes == 16


def _from_a_device(ranks: Ranks) -> str:
    tensors = {"states": torch.zeros(1, 2, device="meta" if ranks.rank == 1 else "cpu")}
    with pytest.raises(ValueError, match="must be in CPU memory") as caught:
        exchange_rows(tensors, [[], []], [0, 0], ranks)
    return str(caught.value)


def test_tensors_on_a_device_are_refused_on_all_ranks() -> None:
    first, second = run_ranks(_from_a_device, 2)
    assert first == second
    with pytest.raises(ValueError, match="must be in CPU memory"):
        exchange_rows({"states": torch.zeros(1, 2, device="meta")}, [[]], [0], Ranks())
