"""A policy of a few hundred weights, conditions and rewards to match: the algorithm's tests need no video model."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flow_grpo.algorithm.groups.compare import everything, gather, own_rows
from flow_grpo.algorithm.rollout.collector import Collector, ConditionStream, merge_sizes
from flow_grpo.algorithm.rollout.denoise import rollout
from flow_grpo.algorithm.update.history import UpdateHistory
from flow_grpo.algorithm.update.objective import GrpoObjective
from flow_grpo.algorithm.update.updater import Updater
from flow_grpo.data.k_repeat_sampler import DistributedKRepeatSampler
from flow_grpo.maths.advantages import combine_rewards
from flow_grpo.maths.keys import generator
from flow_grpo.maths.schedule import flow_sigmas, windows
from flow_grpo.models.policy import Policy
from flow_grpo.records import Condition, Conditioning, Guidance, RewardResult, Samples, ScoredBatch, TrainingBatch
from flow_grpo.rewards.base import RewardSet
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.sampling import Sampling, SdeSettings
from flow_grpo.settings.schema import Config, RewardConfig, SampleConfig, TrainConfig

SHAPE = (2, 2, 2, 2)  # C, F, H, W
FRAMES = 5  # T = 4 (F - 1) + 1


def condition(index: int = 0, gid: int = 0, slot: int = 0, *, preset: str | None = None) -> Condition:
    """Return a condition whose videos are a function of its index; h = w = 2."""
    draw = generator("toy condition", index)
    poses = torch.eye(4, dtype=torch.float64).repeat(FRAMES, 1, 1)
    poses[:, 0, 3] = torch.linspace(0, 0.1 * index, FRAMES, dtype=torch.float64)
    return Condition(
        index=index,
        gid=gid,
        slot=slot,
        prompt=f"a toy room number {index} seen by a moving camera",
        source_video=torch.rand((3, FRAMES, *SHAPE[2:]), generator=draw),
        target_poses=poses,
        scene=f"val/f17_aperture10/scene{index}",
        source_camera="cam01",
        target_camera="cam02",
        target_video=torch.rand((3, FRAMES, *SHAPE[2:]), generator=draw),
        preset=preset,
    )


def group(gid: int, k: int, index: int | None = None) -> list[Condition]:
    """Return the k copies of one draw."""
    return [condition(gid if index is None else index, gid, slot) for slot in range(k)]


class ToyNet(nn.Module):
    """velocity = MLP(latents, sigma, cameras), all flattened."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        elements = SHAPE[0] * SHAPE[1] * SHAPE[2] * SHAPE[3]
        self.inner = nn.Linear(elements + 1 + SHAPE[1] * 12, hidden)
        self.outer = nn.Linear(hidden, elements)

    def forward(self, latents: Tensor, sigma: Tensor, cameras: Tensor) -> Tensor:
        given = torch.cat([latents.flatten(1), sigma[:, None], cameras.flatten(1)], dim=1)
        return self.outer(torch.tanh(self.inner(given))).view_as(latents)


class ToyPolicy:
    """The `Policy` seam over a ToyNet; counts its calls.

    Attributes:
        module: the network, possibly wrapped.
        calls: per call of `velocity`, (rows, sigma of the first row, gradients enabled, inside `reference`).
        encoded: indices handed to `encode`, call by call.
    """

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.net = ToyNet()
        self.module: nn.Module = self.net
        self.start = {name: value.clone() for name, value in self.net.state_dict().items()}
        self.calls: list[tuple[int, float, bool, bool]] = []
        self.encoded: list[list[int]] = []
        self._inside_reference = False

    def encode(self, conditions: Sequence[Condition], guidance: Guidance | None = None) -> Conditioning:
        self.encoded.append([c.index for c in conditions])
        return Conditioning(
            prompt_embeds=torch.stack([torch.full((3, 4), float(len(c.prompt))) for c in conditions]),
            inputs={
                "source_latents": torch.stack([c.source_video[:2, :2].float() for c in conditions]),
                "target_cameras": torch.stack([c.target_poses[::4, :3].flatten(1).float() for c in conditions]),
            },
        )

    def encode_targets(self, conditions: Sequence[Condition]) -> Tensor:
        light = torch.stack([c.target_video[:, ::4].mean(dim=0) for c in conditions])
        return torch.logit(light).unsqueeze(1).expand(-1, SHAPE[0], -1, -1, -1)

    def latent_shape(self, conditions: Sequence[Condition]) -> tuple[int, int, int, int]:
        assert conditions
        return SHAPE

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        grad = torch.is_grad_enabled()
        self.calls.append((len(latents), float(sigma[0]), grad, self._inside_reference))
        network = self.module if grad else self.net
        velocity: Tensor = network(latents, sigma, conditioning.inputs["target_cameras"])
        return velocity

    def decode(self, latents: Tensor) -> Tensor:
        light = torch.sigmoid(latents.mean(dim=1, keepdim=True)).expand(-1, 3, -1, -1, -1)
        return torch.cat([light[:, :, :1], light[:, :, 1:].expand(-1, -1, FRAMES - 1, -1, -1)], dim=2)

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        current = {name: value.clone() for name, value in self.net.state_dict().items()}
        self._inside_reference = True
        self.net.load_state_dict(self.start)
        try:
            yield
        finally:
            self.net.load_state_dict(current)
            self._inside_reference = False

    def trained_parameters(self) -> list[nn.Parameter]:
        return list(self.net.parameters())


class BrightnessReward:
    """Mean of the video; samples whose (index, slot) is in `broken` have no value."""

    name = "brightness"
    floor = 0.0
    measures = ("percent",)

    def __init__(self, broken: Sequence[tuple[int, int]] = ()) -> None:
        self.broken = set(broken)

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        valid = torch.tensor([(c.index, c.slot) not in self.broken for c in conditions])
        values = videos.flatten(1).mean(dim=1)
        causes = tuple("" if fine else "broken on purpose" for fine in valid.tolist())
        # NaN where not valid: code that uses the value anyway fails.
        return RewardResult(values.masked_fill(~valid, torch.nan), valid, causes, {"percent": 100 * values})


SIGMAS = flow_sigmas(6, 3.0)
SDE = SdeSettings("constant", 0.7)


def scored(
    policy: ToyPolicy,
    conditions: Sequence[Condition],
    *,
    window: Sequence[int] = (1, 2),
    reward: BrightnessReward | None = None,
    seed: int = 5,
    first: int = 0,
) -> ScoredBatch:
    """Roll out and score one batch, whose positions start at `first`."""
    samples = rollout(
        policy, conditions, policy.encode(conditions), [window] * len(conditions), Sampling(SIGMAS, SDE, seed)
    )
    reward = reward or BrightnessReward()
    videos = policy.decode(samples.final_latents)
    positions = torch.arange(first, first + len(samples))
    return ScoredBatch(tuple(conditions), samples, {reward.name: reward(videos, conditions)}, videos, positions)


def joined(parts: Sequence[ScoredBatch]) -> ScoredBatch:
    """Join batches of one video size."""
    drawn = [(part.positions.tolist(), part.conditions) for part in parts]
    (whole,) = merge_sizes(drawn, [part.samples for part in parts], [part.rewards for part in parts])
    return whole


def batch_of(samples: Samples) -> TrainingBatch:
    """Return samples that have advantages and weights as a rank's whole batch."""
    assert samples.advantages is not None and samples.weights is not None
    rows = torch.arange(len(samples))
    return TrainingBatch((samples,), torch.stack([0 * rows, rows]), samples.advantages, samples.weights)


def training_batch(policy: ToyPolicy, batches: Sequence[Sequence[Condition]], **options: Any) -> TrainingBatch:
    """Roll out batch by batch, join, and compare within groups, as one rank would."""
    starts = [sum(map(len, batches[:number])) for number in range(len(batches))]
    parts = [scored(policy, part, first=first, **options) for part, first in zip(batches, starts, strict=True)]
    whole = joined(parts)
    gathered = gather([whole], World())
    k = int((gathered.gids == gathered.gids[0]).sum())
    compared = combine_rewards(
        gathered.rewards, gathered.valid, {"brightness": 1.0}, gathered.gids, k=k, floors={}, flat_eps=0.0
    )
    return own_rows(everything([whole], gathered, World()), compared, World())


def train_config(**changes: Any) -> TrainConfig:
    """Return learning settings for the toy."""
    values: dict[str, Any] = {
        "batch_size": 4,
        "learning_rate": 1e-2,
        "adam_beta2": 0.99,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "max_grad_ratio": 0.0,
        "max_bad_steps": 0,
        "clip_range": 0.1,
    }
    return TrainConfig(**(values | changes))


def reward_config(**changes: Any) -> RewardConfig:
    """Return settings over the toy's reward with a near-zero flat range."""
    return RewardConfig(**({"weights": {"brightness": 1.0}, "flat_eps": 1e-6} | changes))


def update_config(rollout_batch_size: int, train: TrainConfig) -> Config:
    """Return a configuration of seed 5 whose rollout batches have so many rows."""
    return dataclasses.replace(Config(), seed=5, train=train, sample=sample_config(train_batch_size=rollout_batch_size))


def updater(policy: ToyPolicy, *, rollout_batch_size: int = 4, world: World | None = None, **changes: Any) -> Updater:
    """Return an Updater over plain SGD, so that an update is proportional to its gradient."""
    train = train_config(**changes)
    optimizer = torch.optim.SGD(policy.trained_parameters(), lr=train.learning_rate)
    objective = GrpoObjective(policy, Sampling(SIGMAS, SDE, 5), step_weight=None, train=train)
    return Updater(policy, objective, optimizer, update_config(rollout_batch_size, train), world or World())


def update(
    moving: Updater,
    batch: TrainingBatch,
    epoch: int = 0,
    *,
    history: UpdateHistory | None = None,
    probe: bool = False,
) -> dict[str, float]:
    """Plan and take the optimizer steps of an epoch."""
    return moving.run(batch, moving.plan(batch, epoch), history or UpdateHistory(), probe=probe)


def weights_of(policy: ToyPolicy) -> Tensor:
    """Return all weights as one vector."""
    return torch.cat([parameter.detach().flatten().clone() for parameter in policy.net.parameters()])


def sample_config(**changes: Any) -> SampleConfig:
    """Return the 8-NPU recipe's sampler numbers over the toy's schedule."""
    values: dict[str, Any] = {"num_steps": 6, "shift": 3.0, "noise_level": 0.7, "sde_steps": (1, 2, 3, 4)}
    return SampleConfig(**(values | changes))


def blocks_of(sample: SampleConfig) -> tuple[tuple[int, ...], ...]:
    """Return the windows that groups may have."""
    return tuple(windows(sample.sde_steps, sample.sde_window))


class ToyLoader:
    """Delivers what the sampler draws, as a loader without workers would."""

    def __init__(
        self, sampler: DistributedKRepeatSampler, make: Callable[[int, int, int], Condition] = condition
    ) -> None:
        self.sampler, self.make = sampler, make

    def __iter__(self) -> Iterator[list[tuple[int, Condition]]]:
        return ([(step, self.make(i, gid, slot)) for step, gid, slot, i in draws] for draws in self.sampler)


def collector(
    world: World,
    policy: Policy,
    *,
    debug: bool = True,
    make: Callable[[int, int, int], Condition] = condition,
    **changes: Any,
) -> Collector:
    """Return a collector over 24 conditions."""
    sample = sample_config(**changes)
    sampler = DistributedKRepeatSampler(
        24,
        sample.train_batch_size,
        sample.k,
        world.data.size,
        world.data.rank,
        seed=1,
        num_batches_per_epoch=sample.num_batches_per_epoch,
        layout=sample.layout,
    )
    sampling = Sampling(SIGMAS, SDE, 1, sample.same_initial_noise, blocks_of(sample))
    config = dataclasses.replace(Config(), sample=sample, debug=debug)
    rewards = RewardSet([BrightnessReward()], {"brightness": 1.0})
    return Collector(policy, ConditionStream(ToyLoader(sampler, make), sampler), rewards, sampling, config, world)
