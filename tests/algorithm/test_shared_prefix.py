"""Prefixes that the copies of a group share: who computes them, and that the samples stay the same."""

from collections import Counter

import pytest
import torch

from flow_grpo.records import Samples
from flow_grpo.runtime.clock import Clock
from flow_grpo.runtime.ranks.exchange import owners
from flow_grpo.runtime.ranks.process_group import World
from tests.toy import SIGMAS, ToyPolicy, collector
from tests.workers import run_ranks

STEPS = len(SIGMAS) - 1


def test_every_group_has_one_owner_that_holds_a_copy_and_the_load_is_even():
    gids = [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 4, 5], [4, 5, 4, 6]]
    found = owners(gids)
    assert list(found) == list(range(7))
    assert all(gid in gids[rank] for gid, rank in found.items())
    assert Counter(found.values()) == {0: 2, 1: 2, 2: 1, 3: 2}
    assert owners([[0, 1, 2], [0, 1, 2]], {0: 5.0, 1: 1.0, 2: 3.0}.__getitem__) == {0: 0, 1: 1, 2: 1}


def collected(world: World, layout: str, size: int, share: bool) -> tuple[Samples, int]:
    policy = ToyPolicy()
    changes = {"layout": layout, "train_batch_size": size, "num_batches_per_epoch": 8 // size, "share_prefix": share}
    sampling = collector(world, policy, debug=False, same_initial_noise=True, **changes)
    (batch,) = sampling.collect(Clock(torch.device("cpu")))
    return batch.samples, sum(rows for rows, *_ in policy.calls)


def _both(world: World, layout: str, size: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int, int]:
    shared, fewer = collected(world, layout, size, True)
    plain, all_rows = collected(world, layout, size, False)
    return shared.tensors(), plain.tensors(), fewer, all_rows


@pytest.mark.parametrize("layout", ["spread", "shuffled", "contiguous"])
def test_shared_prefixes_change_no_sample_and_save_their_calls_in_every_layout(layout):
    results = run_ranks(_both, 2, layout, 8)
    for shared, plain, *_ in results:
        for name, tensor in plain.items():
            torch.testing.assert_close(shared[name], tensor, rtol=0, atol=1e-6, msg=name)
    prefixes = [steps[0] for _, plain, *_ in results for steps in plain["trajectory.steps"].tolist()]
    saved = sum(all_rows - fewer for *_, fewer, all_rows in results)
    assert sum(all_rows for *_, all_rows in results) == 16 * STEPS
    assert saved == sum(prefixes) - sum(prefixes) // 4 > 0


def test_with_calls_of_one_row_a_shared_prefix_changes_no_bit():
    for shared, plain, *_ in run_ranks(_both, 4, "spread", 1):
        assert all(torch.equal(shared[name], tensor) for name, tensor in plain.items())
