"""Sampling rounds with scripted rewards and no network, for the tests of dynamic sampling.

Every tensor of a sample encodes its (gid, slot), so that a mix-up is detected.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from unittest import mock

import torch
import torch.distributed as dist

from flow_grpo.algorithm.groups import compare
from flow_grpo.algorithm.groups.compare import Chosen, Gathered
from flow_grpo.algorithm.groups.dynamic_sampling import DynamicSampling
from flow_grpo.data.k_repeat_sampler import DistributedKRepeatSampler
from flow_grpo.records import Conditioning, RewardResult, Samples, ScoredBatch, Trajectory
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.schema import DynamicSamplingConfig
from tests.toy import condition, reward_config

CONDITIONS = 96
Kind = str
Kinds = Sequence[Sequence[Kind]]
"""Per round, the kind of each of its groups: "valid", "flat", or "incomplete" (two copies without a value)."""


def kinds_of(valid: Sequence[int], groups: int) -> list[list[Kind]]:
    """Return rounds whose first so many groups are valid and the others flat."""
    return [["valid"] * number + ["flat"] * (groups - number) for number in valid]


def scripted_batch(
    draws: Sequence[tuple[int, int, int, int]], kinds: Kinds, groups: int, frames: int = 5
) -> ScoredBatch:
    """Return the samples of one rank and round; `frames` other than 5 makes another video size."""
    conditions = []
    values = []
    for _, gid, slot, index in draws:
        made = condition(index, gid, slot)
        object.__setattr__(made, "source_video", made.source_video[:, :frames])
        conditions.append(made)
        kind = kinds[gid // groups][gid % groups]
        missing = kind == "incomplete" and slot in (1, 2)
        values.append(torch.nan if missing else 0.25 if kind == "flat" else slot + gid / 1e3)
    marks = torch.tensor([[100.0 * gid + slot] for _, gid, slot, _ in draws])
    latent = marks.view(-1, 1, 1, 1, 1, 1).expand(-1, 3, 2, frames, 2, 2).clone()
    reward = torch.tensor(values)
    samples = Samples(
        keys=torch.tensor([[gid, slot, index] for _, gid, slot, index in draws]),
        noise_ids=torch.tensor([[2**40 + 100 * gid + slot, -(100 * gid + slot)] for _, gid, slot, _ in draws]),
        conditioning=Conditioning(
            marks[:, None].repeat(1, 3, 4),
            {"source_latents": latent[:, 0] + 0.5, "target_cameras": latent[:, 0, 0, :, 0, :1] - 0.5},
        ),
        trajectory=Trajectory(latent, marks.repeat(1, 2) / 7, steps=torch.tensor([[1, 2]]).repeat(len(draws), 1)),
        final_latents=latent[:, 0] + 0.25,
    )
    rewards = {"scripted": RewardResult(reward, reward.isfinite(), ("",) * len(draws))}
    return ScoredBatch(
        tuple(conditions), samples, rewards, torch.zeros(len(draws), 3, 5, 2, 2), torch.arange(len(draws))
    )


def split_by_size(batch: ScoredBatch, frames: Callable[[int], int], kinds: Kinds, groups: int) -> list[ScoredBatch]:
    """Return the same samples as one batch per video size, which `frames` gives by condition index."""
    sizes: dict[int, list[int]] = {}
    for row, made in enumerate(batch.conditions):
        sizes.setdefault(frames(made.index), []).append(row)
    parts = []
    for size, rows in sizes.items():
        draws = [(0, c.gid, c.slot, c.index) for c in (batch.conditions[row] for row in rows)]
        part = scripted_batch(draws, kinds, groups, size)
        parts.append(dataclasses.replace(part, positions=torch.tensor(rows)))
    return parts


class Rounds:
    """Draws scripted rounds on one rank, as a trainer would.

    Args:
        world: who takes part.
        kinds: see `Kinds`.
        local: samples of a rank and round.
        k: group size.
        layout: of the sampler.
        frames: video frames by dataset index; None gives all 5.
    """

    def __init__(
        self,
        world: World,
        kinds: Kinds,
        *,
        local: int,
        k: int = 4,
        layout: str = "spread",
        frames: Callable[[int], int] | None = None,
    ) -> None:
        self.world, self.kinds, self.frames = world, kinds, frames
        self.groups = local * world.data.size // k
        self.sampler = DistributedKRepeatSampler(
            CONDITIONS, local, k, world.data.size, world.data.rank, 1, layout=layout
        )
        self.drawn: list[list[ScoredBatch]] = []

    def draw(self, number: int) -> tuple[list[ScoredBatch], Gathered]:
        assert number == len(self.drawn)
        draws = self.sampler.plan(self.sampler.next_step)[self.world.data.rank]
        self.sampler.seek(self.sampler.next_step + 1)
        batch = scripted_batch(draws, self.kinds, self.groups)
        batches = [batch] if self.frames is None else split_by_size(batch, self.frames, self.kinds, self.groups)
        self.drawn.append(batches)
        return batches, compare.gather(batches, self.world)


def dynamic(world: World, *, local: int, k: int = 4, say=None, **changes: object) -> DynamicSampling:
    """Return dynamic sampling over the scripted reward."""
    return DynamicSampling(
        config=DynamicSamplingConfig(enabled=True, **changes),
        floors={"scripted": 0.0},
        k=k,
        local=local,
        seed=5,
        world=world,
        say=say or (lambda line: None),
    )


REWARD = reward_config(weights={"scripted": 1.0}, flat_eps=1e-4)


def choose(
    sampling: DynamicSampling, rounds: Rounds, shortages: list[int] | None = None
) -> tuple[Chosen, dict[str, float]]:
    """Draw the first round and choose."""
    memory = [] if shortages is None else shortages
    return sampling.choose(*rounds.draw(0), rounds.draw, reward=REWARD, shortages=memory)


def rows_by_position(chosen: Chosen) -> dict[int, tuple[int, int]]:
    """Return position -> (gid, slot) of this rank's samples, after checking that every tensor is of that sample."""
    for samples in chosen.parts:
        check_marks(samples)
    held = [chosen.parts[part].keys[row].tolist() for part, row in chosen.table.T.tolist()]
    return {position: (gid, slot) for position, (gid, slot, _) in enumerate(held)}


def check_marks(samples: Samples) -> None:
    """Assert that every tensor of a record belongs to the sample its keys name."""
    marks = (100.0 * samples.keys[:, 0] + samples.keys[:, 1]).float()
    shifts = {"source_latents": 0.5, "target_cameras": -0.5, "final_latents": 0.25}
    for name, tensor in samples.tensors().items():
        if name in ("keys", "noise_ids", "trajectory.steps"):
            continue
        wanted = marks / 7 if name.endswith("log_probs") else marks + shifts.get(name.rpartition(".")[2], 0.0)
        assert torch.equal(tensor.flatten(1), wanted[:, None].expand(-1, tensor[0].numel())), name


def recorded(function: Callable[[], object]) -> tuple[object, list[str]]:
    """Return function's result and the collectives it made, with the shapes of what went in."""
    made: list[str] = []
    names = ("all_gather", "all_reduce", "all_to_all_single", "broadcast", "barrier", "gather", "scatter")

    def wrapped(name: str) -> Callable[..., object]:
        original = getattr(dist, name)

        def recorded(*args: object, **given: object) -> object:
            # Split sizes may differ between ranks; whether a rank takes part may not.
            made.append(name if name == "all_to_all_single" else f"{name} {[_shape(arg) for arg in args]}")
            return original(*args, **given)

        return recorded

    patches: Mapping[str, object] = {name: wrapped(name) for name in names}
    with mock.patch.multiple(dist, **patches):
        return function(), made


def _shape(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return list(value.shape)
    return [_shape(part) for part in value] if isinstance(value, list) else None
