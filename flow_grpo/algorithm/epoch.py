"""Sample an epoch: fetch, encode, roll out, score, batch by batch, and join the batches of this rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from flow_grpo.algorithm import debug_print
from flow_grpo.algorithm.clock import Clock
from flow_grpo.algorithm.rollout import SdeSettings, rollout
from flow_grpo.algorithm.scoring import score
from flow_grpo.config import SampleConfig
from flow_grpo.data.k_repeat_sampler import DistributedKRepeatSampler
from flow_grpo.maths.schedule import sde_window
from flow_grpo.models.policy import Policy
from flow_grpo.records import Condition, Conditioning, RewardResult, ScoredBatch, Trajectory
from flow_grpo.rewards.base import RewardSet


@dataclasses.dataclass(frozen=True)
class SampleSettings:
    """How an epoch is sampled.

    Attributes:
        sample: sizes, steps and window.
        sigmas: (S+1,) fp32 CPU noise levels.
        sde: noise of the stochastic steps.
        seed: seed of the run.
        debug: print the group structure.
    """

    sample: SampleConfig
    sigmas: Tensor
    sde: SdeSettings
    seed: int
    debug: bool

    def window(self, epoch: int) -> tuple[int, ...]:
        """Return the stochastic steps of an epoch, alike on every rank and for every group."""
        return sde_window(self.sample.sde_steps, self.sample.sde_window, seed=self.seed, round_index=epoch)


@dataclasses.dataclass(frozen=True)
class Collected:
    """One rank's samples of an epoch.

    Attributes:
        batch: nb * B scored samples in sampling order.
        videos: (B, 3, T, h, w) CPU fp32, the videos of the epoch's first batch.
    """

    batch: ScoredBatch
    videos: Tensor


class ConditionStream:
    """The endless stream of a rank's conditions, one global step at a time.

    Args:
        loader: yields, in step order, lists of (step, Condition); may read ahead.
        sampler: the loader's batch sampler; it is told which step is taken.
    """

    def __init__(self, loader: Iterable[Sequence[tuple[int, Condition]]], sampler: DistributedKRepeatSampler) -> None:
        self._loader = loader
        self._sampler = sampler
        self._iterator: Iterator[Sequence[tuple[int, Condition]]] | None = None

    def take(self, step: int) -> tuple[Condition, ...]:
        """Return this rank's conditions of a global step.

        Raises:
            StaleBatchError: the loader delivered another step's conditions.
        """
        self._sampler.set_epoch(step)
        if self._iterator is None:
            self._iterator = iter(self._loader)
        items = next(self._iterator)
        tags = {tag for tag, _ in items}
        assert len(tags) == 1, f"one batch holds conditions of steps {sorted(tags)}"
        self._sampler.check(tags.pop())
        return tuple(condition for _, condition in items)


class EncodeOnce:
    """Encodes each distinct condition of an epoch once and expands it to its copies.

    Args:
        policy: owns the frozen encoders.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._known: dict[int, Conditioning] = {}

    def __call__(self, conditions: Sequence[Condition]) -> Conditioning:
        """Return one row per condition."""
        new = {c.index: c for c in conditions if c.index not in self._known}
        if new:
            rows = self._policy.encode(list(new.values()))
            self._known |= {index: rows.rows(slice(row, row + 1)) for row, index in enumerate(new)}
        return Conditioning.concatenate([self._known[condition.index] for condition in conditions])


class Collector:
    """Samples epochs on one rank.

    Args:
        policy: the model being trained.
        stream: where conditions come from.
        rewards: what videos are measured by.
        settings: see `SampleSettings`.
        is_main: whether this rank prints.
        on_batch: called after every batch, for progress.
    """

    def __init__(
        self,
        policy: Policy,
        stream: ConditionStream,
        rewards: RewardSet,
        settings: SampleSettings,
        *,
        is_main: bool = True,
        on_batch: Callable[[], None] | None = None,
    ) -> None:
        self.policy = policy
        self.stream = stream
        self.rewards = rewards
        self.settings = settings
        self._prints = settings.debug and is_main
        self._on_batch = on_batch

    def collect(self, epoch: int, clock: Clock) -> Collected:
        """Return this rank's scored samples of an epoch; no exchange between ranks happens here."""
        sample = self.settings.sample
        encode = EncodeOnce(self.policy)
        batches: list[ScoredBatch] = []
        videos = None
        for number in range(sample.num_batches_per_epoch):
            with clock.phase("fetch"):
                conditions = self.stream.take(epoch * sample.num_batches_per_epoch + number)
            with clock.phase("encode"):
                conditioning = encode(conditions)
            with clock.phase("rollout"):
                trajectory = self._rollout(conditions, conditioning, epoch)
            with clock.phase("score"):
                scores = score(
                    self.policy, conditions, trajectory.final_latents, self.rewards, batch_size=len(conditions)
                )
            batches.append(ScoredBatch(conditions, conditioning, trajectory, scores.rewards))
            videos = scores.videos if videos is None else videos
            self._print([debug_print.prompt_line(number, [condition.prompt for condition in conditions])])
            if self._on_batch is not None:
                self._on_batch()
        merged = merge(batches)
        self._check(merged)
        assert videos is not None
        return Collected(merged, videos)

    def _rollout(self, conditions: Sequence[Condition], conditioning: Conditioning, epoch: int) -> Trajectory:
        settings = self.settings
        return rollout(
            self.policy,
            conditions,
            conditioning,
            sigmas=settings.sigmas,
            window=settings.window(epoch),
            sde=settings.sde,
            seed=settings.seed,
            same_initial_noise=settings.sample.same_initial_noise,
        )

    def _check(self, merged: ScoredBatch) -> None:
        sample = self.settings.sample
        expected = sample.train_batch_size * sample.num_batches_per_epoch
        if self._prints:
            view = debug_print.batch_view(merged, self.settings.sigmas, self.rewards.weights)
            self._print(debug_print.merged_lines(view, expected, sample.k))
        debug_print.check_merged(len(merged.conditions), expected)

    def _print(self, lines: Sequence[str]) -> None:
        if self._prints:
            debug_print.show(lines)


def merge(batches: Sequence[ScoredBatch]) -> ScoredBatch:
    """Join batches of one structure along the sample dimension.

    Raises:
        ValueError: the batches differ in latent shape, stochastic steps or rewards, so they share no update.
    """
    structures = {(tuple(b.trajectory.states.shape[1:]), b.trajectory.steps, tuple(b.rewards)) for b in batches}
    if len(structures) != 1:
        raise ValueError(
            "batches of one epoch must share (states, stochastic steps, rewards) to be joined, got "
            f"{sorted(map(str, structures))}: give one run data of one size"
        )
    trajectories = [batch.trajectory for batch in batches]
    return dataclasses.replace(
        batches[0],
        conditions=tuple(condition for batch in batches for condition in batch.conditions),
        conditioning=Conditioning.concatenate([batch.conditioning for batch in batches]),
        trajectory=dataclasses.replace(
            trajectories[0],
            states=torch.cat([t.states for t in trajectories]),
            log_probs=torch.cat([t.log_probs for t in trajectories]),
            final_latents=torch.cat([t.final_latents for t in trajectories]),
            noise_ids=torch.cat([t.noise_ids for t in trajectories]),
        ),
        rewards={name: merge_results([batch.rewards[name] for batch in batches]) for name in batches[0].rewards},
    )


def merge_results(results: Sequence[RewardResult]) -> RewardResult:
    """Join results of one reward along the sample dimension."""
    return RewardResult(
        values=torch.cat([result.values for result in results]),
        valid=torch.cat([result.valid for result in results]),
        causes=tuple(cause for result in results for cause in result.causes),
        info={name: torch.cat([result.info[name] for result in results]) for name in results[0].info},
    )
