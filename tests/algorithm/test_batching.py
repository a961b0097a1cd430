"""Which samples share a call."""

import math
import random

import pytest

from flow_grpo.algorithm.rollout.batching import full_batches, group_configs_by_structure
from flow_grpo.data.k_repeat_sampler import DistributedKRepeatSampler
from tests.toy import sample_config


def test_positions_are_grouped_in_order_of_appearance():
    assert group_configs_by_structure("abacb") == {"a": [0, 2], "b": [1, 4], "c": [3]}


@pytest.mark.parametrize("max_batch", [1, 2, 5, 64])
def test_the_calls_are_as_few_as_can_be_and_hold_every_position_once(max_batch):
    draw = random.Random(max_batch)
    for _ in range(50):
        structures = [draw.choice("abcd") for _ in range(draw.randint(1, 40))]
        calls = full_batches(structures, max_batch)
        counts = {name: structures.count(name) for name in set(structures)}
        assert len(calls) == sum(math.ceil(count / max_batch) for count in counts.values())
        assert sorted(position for call in calls for position in call) == list(range(len(structures)))
        assert all(len({structures[position] for position in call}) == 1 for call in calls)


@pytest.mark.parametrize(("conditions", "group_size"), [(4, 5), (1, 5)])
def test_a_rank_s_samples_are_its_conditions_times_the_group_size(conditions, group_size):
    sample = sample_config(k=group_size, train_batch_size=group_size, num_batches_per_epoch=conditions)
    options = {"num_batches_per_epoch": conditions, "layout": "contiguous"}
    sampler = DistributedKRepeatSampler(64, group_size, group_size, 2, 0, 1, **options)
    held = [draw for step in range(conditions) for draw in sampler.plan(step)[0]]
    assert sample.expanded_batch_size == conditions * group_size == len(held)
    assert len({index for *_, index in held}) == conditions
