"""Training on the best and the worst copies: which they are, and that every rank gets its share of them."""

import pytest
import torch

from flow_grpo.algorithm.groups import compare
from flow_grpo.algorithm.groups.subset import best_and_worst, narrow
from flow_grpo.maths.advantages import combine_rewards
from flow_grpo.records import TrainingBatch
from flow_grpo.runtime.ranks.process_group import World
from tests.rounds import Rounds, check_marks, kinds_of
from tests.toy import reward_config
from tests.workers import run_ranks

REWARD = reward_config(weights={"scripted": 1.0})


def compared_of(values: list[float], gids: list[int], k: int):
    rewards, ids = torch.tensor(values), torch.tensor(gids)
    valid = torch.ones(len(values), dtype=torch.bool)
    return combine_rewards({"r": rewards}, {"r": valid}, {"r": 1.0}, ids, k=k, floors={})


def test_the_best_and_the_worst_of_every_group_with_a_signal_are_taken():
    gids = [7, 3, 7, 3, 7, 3, 7, 3, 5, 5, 5, 5]
    values = [0.1, 9.0, 0.4, 9.2, 0.3, 9.3, 0.2, 9.1, 2.0, 2.0, 2.0, 2.0]
    found = best_and_worst(torch.tensor(gids), compared_of(values, gids, 4), 2)
    assert found.nonzero().flatten().tolist() == [0, 1, 2, 5]  # of gids 7 and 3; gid 5 is flat
    assert best_and_worst(torch.tensor(gids), compared_of(values, gids, 4), 4)[:8].all()


def _narrowed(world: World, layout: str, valid: int) -> tuple[TrainingBatch, int, torch.Tensor]:
    local, groups = 8, 8 * world.data.size // 4
    rounds = Rounds(world, kinds_of([valid], groups), local=local, layout=layout)
    batches, gathered = rounds.draw(0)
    chosen = compare.everything(batches, gathered, world)
    compared = compare.advantages(gathered, REWARD, k=4, floors={})
    fewer, own = narrow(chosen, compared, 2, world)
    for part in fewer.parts:
        check_marks(part)
    batch = compare.own_rows(fewer, own, world)
    held = batch.take(torch.arange(len(batch)), "cpu")
    return batch, len(batch), torch.cat([held.keys[:, :2].double(), held.advantages[:, None].double()], dim=1)


@pytest.mark.parametrize("layout", ["spread", "contiguous"])
@pytest.mark.parametrize(("world", "valid"), [(1, 2), (2, 3), (4, 5)])
def test_every_rank_trains_equally_many_with_the_advantages_of_the_whole_groups(layout, world, valid):
    results = [_narrowed(World(), layout, valid)] if world == 1 else run_ranks(_narrowed, world, layout, valid)
    assert len({length for _, length, _ in results}) == 1
    rows = torch.cat([rows for *_, rows in results])
    real = rows[rows[:, 2] != 0]
    assert len(real) == 2 * valid  # the best and the worst copy of each group
    assert sorted(real[:, 1].tolist()) == [0.0] * valid + [3.0] * valid  # rewards rise with the slot
    assert real[:, 2].abs().unique().numel() <= valid and real[:, 2].sum().abs() < 1e-6


def test_a_round_without_any_signal_is_left_as_it_is():
    batch, length, _ = _narrowed(World(), "spread", 0)
    assert length == 8 and batch.as_rolled_out
