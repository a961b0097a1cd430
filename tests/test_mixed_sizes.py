"""Videos of several sizes in one epoch: few calls, and the numbers that each would have alone."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flow_grpo.algorithm.groups import compare
from flow_grpo.algorithm.rollout.denoise import rollout
from flow_grpo.judging.evaluate import Evaluator
from flow_grpo.records import Condition, Conditioning, Guidance, ScoredBatch, TrainingBatch
from flow_grpo.rewards.base import RewardSet
from flow_grpo.runtime.clock import Clock
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.sampling import Sampling
from flow_grpo.settings.schema import Config, EvalConfig
from tests import toy
from tests.workers import run_ranks

SIZES = [(5, 2, 2), (9, 2, 4), (5, 4, 2)]
REWARD = toy.reward_config()


def sized(index: int, gid: int = 0, slot: int = 0) -> Condition:
    frames, rows, columns = SIZES[index // 2 % 3]
    whole = toy.condition(index, gid, slot)
    video = whole.source_video[:, :1].mean(dim=(2, 3), keepdim=True).expand(3, frames, rows, columns)
    poses = whole.target_poses[:1].repeat(frames, 1, 1)
    return dataclasses.replace(whole, source_video=video, target_video=video, target_poses=poses)


class ConvPolicy(toy.ToyPolicy):
    """The toy policy with a convolution, for latents of any size; records the shapes of its calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Conv3d(5, 2, 3, padding=1)
        self.module = self.net
        self.calls: list[tuple[int, ...]] = []

    def encode(self, conditions: Sequence[Condition], guidance: Guidance | None = None) -> Conditioning:
        source = torch.stack([c.source_video[:2, ::4].float() for c in conditions])
        encoded = super().encode(conditions)
        return dataclasses.replace(encoded, inputs=encoded.inputs | {"source_latents": source})

    def latent_shape(self, conditions: Sequence[Condition]) -> tuple[int, int, int, int]:
        (size,) = {c.size for c in conditions}
        return 2, (size[0] - 1) // 4 + 1, size[1], size[2]

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        self.calls.append(tuple(latents.shape))
        level = sigma.view(-1, 1, 1, 1, 1).expand(-1, 1, *latents.shape[2:])
        network = self.module if torch.is_grad_enabled() else self.net
        velocity: Tensor = network(torch.cat([latents, conditioning.inputs["source_latents"], level], dim=1))
        return velocity

    def decode(self, latents: Tensor) -> Tensor:
        light = torch.sigmoid(latents.mean(dim=1, keepdim=True)).expand(-1, 3, -1, -1, -1)
        return torch.cat([light[:, :, :1], light[:, :, 1:].repeat_interleave(4, dim=2)], dim=2)


def sample(world: World, policy: ConvPolicy, **changes) -> tuple[ScoredBatch, ...]:
    options = {"train_batch_size": 4, "num_batches_per_epoch": 6, "k": 4} | changes
    return toy.collector(world, policy, debug=False, make=sized, **options).collect(Clock(torch.device("cpu")))


def training_batch(world: World, batches: Sequence[ScoredBatch], k: int = 4) -> TrainingBatch:
    gathered = compare.gather(batches, world)
    compared = compare.advantages(gathered, REWARD, k=k, floors={})
    return compare.own_rows(compare.everything(batches, gathered, world), compared, world)


def test_a_round_of_mixed_sizes_takes_as_few_calls_as_its_sizes_allow():
    policy = ConvPolicy()
    batches = sample(World(), policy)
    counts = Counter(c.size for batch in batches for c in batch.conditions)
    assert sum(counts.values()) == sum(map(len, batches)) == 24 and len(counts) == 3
    steps = len(toy.SIGMAS) - 1
    assert len(policy.calls) == steps * sum(math.ceil(count / 4) for count in counts.values())
    assert len(policy.calls) < 24 * steps / 2


def test_every_sample_equals_the_one_rolled_out_alone_and_is_gathered_in_sampling_order():
    policy = ConvPolicy()
    batches = sample(World(), policy)
    gathered = compare.gather(batches, World())
    assert sorted(place for batch in batches for place in batch.positions.tolist()) == list(range(24))
    draws = toy.collector(World(), policy, debug=False, train_batch_size=4, num_batches_per_epoch=6).stream.sampler
    wanted = [(gid, slot) for step in range(6) for _, gid, slot, _ in draws.plan(step)[0]]
    for batch in batches:
        for row, (position, made) in enumerate(zip(batch.positions.tolist(), batch.conditions, strict=True)):
            assert (made.gid, made.slot) == wanted[position]
            steps = batch.samples.trajectory.steps[row].tolist()
            alone = rollout(policy, [made], policy.encode([made]), [steps], Sampling(toy.SIGMAS, toy.SDE, seed=1))
            assert torch.equal(alone.noise_ids[0], batch.samples.noise_ids[row])
            states = batch.samples.trajectory.states[row]
            torch.testing.assert_close(alone.trajectory.states[0], states, rtol=0, atol=1e-5)
            reward = batch.rewards["brightness"].values[row]
            assert reward.item() == pytest.approx(policy.decode(alone.final_latents).mean().item(), abs=1e-5)
            assert (int(gathered.gids[position]), int(gathered.slots[position])) == wanted[position]
            assert tuple(gathered.sizes[position].tolist()) == made.size
            assert gathered.rewards["brightness"][position] == reward


def _with_and_without_shared_prefixes(world: World) -> bool:
    ways = (sample(world, ConvPolicy(), same_initial_noise=True, share_prefix=share) for share in (True, False))
    shared, plain = ([batch.samples.final_latents for batch in batches] for batches in ways)
    assert len(shared) > 1
    return all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(shared, plain, strict=True))


def test_shared_prefixes_of_several_sizes_reach_the_ranks_that_hold_their_copies():
    assert run_ranks(_with_and_without_shared_prefixes, 2) == [True, True]


def test_whole_groups_on_a_rank_have_their_rows_in_order():
    policy = ConvPolicy()
    batches = sample(World(), policy, layout="contiguous")
    for batch in batches:
        distinct = [c for c in batch.conditions if c.slot == 0]
        assert [c.gid for c in batch.conditions] == [c.gid for c in distinct for _ in range(4)]
        once = ConvPolicy().encode(distinct)
        for name, tensor in batch.samples.conditioning.tensors().items():
            assert torch.equal(tensor, once.tensors()[name].repeat_interleave(4, dim=0))


@pytest.mark.parametrize(("micro", "updates"), [(1, 1), (3, 1), (4, 3)])
def test_the_update_never_mixes_sizes_and_does_not_depend_on_its_micro_batches(micro, updates):
    moved = []
    for size in (4, micro):
        policy = ConvPolicy()
        batch = training_batch(World(), sample(World(), policy))
        policy.calls.clear()
        updating = toy.updater(policy, batch_size=size, updates_per_epoch=updates)
        metrics = toy.update(updating, batch)
        assert metrics["train/updates"] == updates
        assert {shape[1:] for shape in policy.calls} == {(2, 2, 2, 2), (2, 3, 2, 4), (2, 2, 4, 2)}
        moved.append(toy.weights_of(policy))
    assert (moved[0] - toy.weights_of(ConvPolicy())).abs().max() > 1e-5
    torch.testing.assert_close(moved[0], moved[1], rtol=0, atol=1e-7)


def test_the_first_ratio_is_exactly_one_where_micro_batches_are_the_rollout_s():
    policy = ConvPolicy()
    batch = training_batch(World(), sample(World(), policy))
    updating = toy.updater(policy, batch_size=4)
    assert updating.plan(batch, 0).as_rolled_out
    assert toy.update(updating, batch)["policy/ratio_first_max_abs_log"] == 0.0
    mixed_up = dataclasses.replace(batch, as_rolled_out=False)
    assert not updating.plan(mixed_up, 0).as_rolled_out


def _two_ranks(world: World) -> Tensor:
    policy = ConvPolicy()
    batches = sample(world, policy, train_batch_size=4 // world.data.size)
    batch = training_batch(world, batches)
    if world.data.size > 1:
        policy.module = DistributedDataParallel(policy.net)
    toy.update(toy.updater(policy, world=world, batch_size=2), batch)
    return toy.weights_of(policy)


def test_two_ranks_make_the_update_of_one_with_mixed_sizes():
    alone = _two_ranks(World())
    for weights in run_ranks(_two_ranks, 2):
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-6)


class SizedData:
    """20 held-out conditions of three sizes, or of the first size alone."""

    def __init__(self, sizes: Sequence[tuple[int, int, int]] = SIZES) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return 20

    def condition(self, index: int, gid: int = 0, slot: int = 0) -> Condition:
        return sized(index if len(self.sizes) > 1 else 0, gid, slot)

    def scene_of(self, index: int) -> str:
        return str(index)

    def size_of(self, index: int) -> tuple[int, int, int]:
        return self.sizes[index // 2 % len(self.sizes)]


def _evaluate(world: World, number: int = 20, sizes: int = 3) -> tuple[dict[str, float], list[tuple[int, ...]]]:
    policy = ConvPolicy()
    rewards = RewardSet([toy.BrightnessReward()], {"brightness": 1.0})
    evaluation = EvalConfig(num_conditions=number, batch_size=4, num_steps=len(toy.SIGMAS) - 1, videos=0)
    config = Config(eval=evaluation)
    metrics = Evaluator(policy, SizedData(SIZES[:sizes]), rewards, None, config, world).run().metrics
    return metrics, policy.calls


def test_a_small_evaluation_is_spread_over_the_ranks_and_another_batches_more_of_the_smaller_videos():
    for _, calls in run_ranks(_evaluate, 4, 4, 1):
        assert [shape[0] for shape in calls] == [1] * (len(toy.SIGMAS) - 1)
    metrics, calls = _evaluate(World())
    rows = {shape[1:]: max(s[0] for s in calls if s[1:] == shape[1:]) for shape in calls}
    assert rows[(2, 3, 2, 4)] == 4  # 72 pixels a video
    assert rows[(2, 2, 2, 2)] == 8  # 20 pixels: all eight of them where 14 would fit
    assert sum(shape[0] for shape in calls) == 20 * (len(toy.SIGMAS) - 1)
    results = run_ranks(_evaluate, 4)
    assert results[0][0] == pytest.approx(metrics, rel=1e-5)
    assert len({len(calls) for _, calls in results}) == 1
