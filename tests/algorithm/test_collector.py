"""Sampling an epoch: the stream of conditions, encoding, positions over mixed video sizes, merging batches."""

import dataclasses

import pytest
import torch

from flow_grpo.algorithm.rollout import collector as collector_module
from flow_grpo.algorithm.rollout.collector import ConditionStream
from flow_grpo.data.k_repeat_sampler import DistributedKRepeatSampler, StaleBatchError
from flow_grpo.records import Condition, Samples
from flow_grpo.runtime.clock import Clock
from flow_grpo.runtime.ranks.process_group import Group, RankError, World
from tests.toy import FRAMES, ToyLoader, ToyPolicy, collector, condition, group, joined, scored


def test_the_stream_follows_the_steps_asked_for_and_the_saved_position_is_that_of_the_consumer():
    sampler = DistributedKRepeatSampler(24, 4, 4, 1, 0, seed=1)
    stream = ConditionStream(ToyLoader(sampler), sampler)
    assert [c.index for c in stream.take(5)] == [draw[3] for draw in sampler.plan(5)[0]]
    assert [c.gid for c in stream.take(6)] == [6] * 4
    assert sampler.state_dict()["next_step"] == 7
    with pytest.raises(StaleBatchError, match="step 7 where step 8 was expected"):
        stream.take(8)


def test_every_epoch_takes_new_conditions_and_keeps_the_first_batch_s_videos():
    sampling = collector(World(), ToyPolicy(), debug=False, train_batch_size=4)
    first = sampling.collect(Clock(torch.device("cpu")))
    second = sampling.collect(Clock(torch.device("cpu")))
    gids = [{c.gid for c in found[0].conditions} for found in (first, second)]
    assert gids == [{0, 1}, {2, 3}]
    assert first[0].videos.shape == (4, 3, FRAMES, 2, 2)
    own = first[0].rewards["brightness"].values[:4]
    torch.testing.assert_close(first[0].videos.flatten(1).mean(dim=1), own)


def test_samples_are_offloaded_after_each_rollout_only_with_offload(monkeypatch):
    moved = []
    monkeypatch.setattr(Samples, "to", lambda self, device: (moved.append(device), self)[1])
    for offload in (False, True):
        sampling = collector(World(), ToyPolicy(), debug=False, train_batch_size=4, offload=offload)
        sampling.collect(Clock(torch.device("cpu")))
        assert moved == (["cpu"] * 2 if offload else [])


def test_an_epoch_of_mixed_sizes_has_each_sample_at_its_place_in_the_sampler_s_order():
    """Two steps of 4 rows hold two sizes: the policy sees full batches of one size, the positions say the order."""

    def made(index: int, gid: int, slot: int) -> Condition:
        whole = condition(index, gid, slot)
        return whole if index % 2 else dataclasses.replace(whole, source_video=whole.source_video.repeat(1, 1, 2, 1))

    class TwoSizes(ToyPolicy):
        decoded = 0

        def decode(self, latents):
            indices, self.decoded = self.encoded[self.decoded], self.decoded + 1
            assert len(latents) == len(indices)
            return super().decode(latents).repeat(1, 1, 1, 1 if indices[0] % 2 else 2, 1)

    policy = TwoSizes()
    changes = {"train_batch_size": 4, "num_batches_per_epoch": 3, "k": 2}
    sampling = collector(World(), policy, debug=False, make=made, **changes)
    drawn = [draw for step in range(3) for draw in sampling.stream.sampler.plan(step)[0]]
    batches = sampling.collect(Clock(torch.device("cpu")))
    sizes = {True: [d for d in drawn if d[3] % 2], False: [d for d in drawn if d[3] % 2 == 0]}
    assert len(batches) == 2 and all(sizes.values())
    assert batches[0].conditions[0].index == drawn[0][3]
    for batch in batches:
        own = [drawn[place][1:] for place in batch.positions.tolist()]
        assert own == [tuple(key) for key in batch.samples.keys.tolist()]
        assert own == [(c.gid, c.slot, c.index) for c in batch.conditions]
        assert batch.positions.tolist() == sorted(batch.positions.tolist())
    # One call of `encode` per rollout batch, with the copies in the sampler's order.
    first = drawn[0][3] % 2 == 1
    order = [[d[3] for d in sizes[odd]] for odd in (first, not first)]
    assert policy.encoded == [own[start : start + 4] for own in order for start in range(0, len(own), 4)]


def test_the_copies_of_a_group_share_their_window_on_every_rank_and_over_batches_and_groups_take_turns():
    drawn = [collector(World.of(Group(rank, 2)), ToyPolicy(), train_batch_size=4).sampling for rank in range(2)]
    assert [drawn[0].window_of(gid) for gid in range(20)] == [drawn[1].window_of(gid) for gid in range(20)]
    assert {drawn[0].window_of(gid) for gid in range(2)} == {(1, 2), (3, 4)}
    together = dataclasses.replace(drawn[0], window_groups=3)
    assert [together.window_of(gid) for gid in range(9)] == [
        drawn[0].window_of(gid) for gid in (0, 1, 2) for _ in "abc"
    ]
    batch, *_ = collector(World(), ToyPolicy(), debug=False, train_batch_size=8).collect(Clock(torch.device("cpu")))
    steps = {gid: set() for gid in batch.samples.keys[:, 0].tolist()}
    for gid, row in zip(batch.samples.keys[:, 0].tolist(), batch.samples.trajectory.steps.tolist(), strict=True):
        steps[gid].add(tuple(row))
    assert all(len(windows) == 1 for windows in steps.values()) and len(steps) > 1
    sampling = collector(World.of(Group(0, 2)), ToyPolicy(), debug=False, layout="contiguous")
    (batch,) = sampling.collect(Clock(torch.device("cpu")))
    assert [c.slot for c in batch.conditions] == [0, 1, 2, 3]
    assert len({tuple(steps) for steps in batch.samples.trajectory.steps.tolist()}) == 1


def test_the_group_structure_is_printed_by_rank_0_with_debug_only(capsys):
    for rank, debug in ((0, False), (1, True), (0, True)):
        collector(World.of(Group(rank, 2)), ToyPolicy(), debug=debug).collect(Clock(torch.device("cpu")))
        assert capsys.readouterr().out.count("[Batch 1] Prompts (前30字符): ") == (debug and rank == 0)


def test_a_batch_s_prompts_are_printed_when_it_is_sampled(capsys):
    sampling = collector(World(), ToyPolicy(), train_batch_size=4)
    sampling.on_batch = lambda count: print(f"sampled {count}")
    sampling.collect(Clock(torch.device("cpu")))
    lines = [line.partition("]")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines[:4] == ["sampled 4", "[Batch 0", "sampled 4", "[Batch 1"]


def test_joining_batches_keeps_rows_in_order():
    policy = ToyPolicy()
    parts = [scored(policy, group(gid, 2), first=first) for gid, first in ((4, 0), (9, 2))]
    whole = joined(parts)
    samples, first_part, second_part = whole.samples, parts[0].samples, parts[1].samples
    assert [c.gid for c in whole.conditions] == [4, 4, 9, 9]
    assert whole.positions.tolist() == [0, 1, 2, 3]
    assert torch.equal(samples.trajectory.states[2:], second_part.trajectory.states)
    assert torch.equal(samples.trajectory.log_probs[:2], first_part.trajectory.log_probs)
    assert torch.equal(samples.noise_ids[:2], first_part.noise_ids)
    assert torch.equal(whole.rewards["brightness"].values[2:], parts[1].rewards["brightness"].values)
    assert torch.equal(whole.rewards["brightness"].info["percent"][2:], parts[1].rewards["brightness"].info["percent"])


def test_a_sample_that_is_lost_on_the_way_ends_the_round(monkeypatch):
    sampling = collector(World(), ToyPolicy(), train_batch_size=4)
    whole = collector_module.full_batches
    monkeypatch.setattr(collector_module, "full_batches", lambda *given: [rows[:3] for rows in whole(*given)])
    with pytest.raises(RankError, match="AssertionError: this rank holds 6 samples of the epoch, expected 8"):
        sampling.collect(Clock(torch.device("cpu")))
