"""Sample a round: fetch its conditions, encode, roll out and score them in full batches, and join those of one size."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from flow_grpo.algorithm import debug_print
from flow_grpo.algorithm.clock import Clock
from flow_grpo.algorithm.rollout.batching import Structure, full_batches
from flow_grpo.algorithm.rollout.denoise import Rollout, SdeSettings, rollout
from flow_grpo.algorithm.rollout.scoring import Scores, ScoringQueue
from flow_grpo.data.k_repeat_sampler import DistributedKRepeatSampler
from flow_grpo.maths.schedule import sde_window
from flow_grpo.models.policy import Policy
from flow_grpo.records import Condition, Conditioning, RewardResult, ScoredBatch, Trajectory
from flow_grpo.rewards.base import RewardSet
from flow_grpo.settings.schema import SampleConfig


@dataclasses.dataclass(frozen=True)
class SampleSettings:
    """How an epoch is sampled.

    Attributes:
        sample: sizes, steps and window.
        sigmas: (S+1,) fp32 CPU noise levels.
        sde: noise of the stochastic steps.
        seed: seed of the run.
        debug: print the group structure.
        offload: keep scored samples in CPU memory, for a pool that grows over several rounds.
        overlap: measure a batch while the next one is sampled.
    """

    sample: SampleConfig
    sigmas: Tensor
    sde: SdeSettings
    seed: int
    debug: bool
    offload: bool = False
    overlap: bool = True

    def window(self, epoch: int) -> tuple[int, ...]:
        """Return the stochastic steps of an epoch, alike on every rank and for every group."""
        return sde_window(self.sample.sde_steps, self.sample.sde_window, seed=self.seed, round_index=epoch)


@dataclasses.dataclass(frozen=True)
class Collected:
    """One rank's samples of a round: nb * B over all batches.

    Attributes:
        batches: scored samples, one batch per video size.
        videos: (b, 3, T, h, w) CPU fp32, the videos of the first b samples of the first batch.
    """

    batches: tuple[ScoredBatch, ...]
    videos: Tensor

    def __len__(self) -> int:
        return sum(len(batch.conditions) for batch in self.batches)


@dataclasses.dataclass(frozen=True)
class _Sampled:
    """One batch between rollout and scoring."""

    positions: tuple[int, ...]
    conditions: tuple[Condition, ...]
    conditioning: Conditioning
    rolled: Rollout


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

    @property
    def next_step(self) -> int:
        """The step that was not taken yet: every round goes on where the last one ended, resampled ones, too."""
        return self._sampler.next_step

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
    """Encodes each distinct condition of a round once and expands it to its copies.

    Args:
        policy: owns the frozen encoders.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._known: dict[int, Conditioning] = {}

    def __call__(self, conditions: Sequence[Condition]) -> Conditioning:
        """Return one row per condition; whole groups in order are `repeat_interleave` of their distinct conditions."""
        new = {c.index: c for c in conditions if c.index not in self._known}
        if new:
            rows = self._policy.encode(list(new.values()))
            self._known |= {index: rows.rows(slice(row, row + 1)) for row, index in enumerate(new)}
        return Conditioning.concatenate([self._known[condition.index] for condition in conditions])


def roll_out(
    policy: Policy,
    conditions: Sequence[Condition],
    conditioning: Conditioning,
    window: tuple[int, ...],
    settings: SampleSettings,
) -> Rollout:
    """Return B conditions rolled out as the settings say, see `rollout`."""
    return rollout(
        policy,
        conditions,
        conditioning,
        sigmas=settings.sigmas,
        window=window,
        sde=settings.sde,
        seed=settings.seed,
        same_initial_noise=settings.sample.same_initial_noise,
    )


class Collector:
    """Samples rounds on one rank.

    Args:
        policy: the model being trained.
        stream: where conditions come from.
        rewards: what videos are measured by.
        settings: see `SampleSettings`.
        is_main: whether this rank prints.
        on_batch: called with the number of samples after every batch, for progress.
    """

    def __init__(
        self,
        policy: Policy,
        stream: ConditionStream,
        rewards: RewardSet,
        settings: SampleSettings,
        *,
        is_main: bool = True,
        on_batch: Callable[[int], None] | None = None,
    ) -> None:
        self.policy = policy
        self.stream = stream
        self.rewards = rewards
        self.settings = settings
        self._prints = settings.debug and is_main
        self._on_batch = on_batch

    def collect(
        self, epoch: int, clock: Clock, together: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    ) -> Collected:
        """Return this rank's scored samples of the next round.

        Args:
            epoch: draws the stochastic steps, the same for every round of an epoch.
            clock: takes the seconds of every phase.
            together: entered for loading, rollout and scoring in turn. Where weights lie in shards the rollout is an
                exchange, so a rank whose files are broken must be known to all before it begins.
        """
        window = self.settings.window(epoch)
        with together():
            encoded = self._load(window, clock)
        with ScoringQueue(self.policy, self.rewards, clock, beside=self.settings.overlap).open() as scoring:
            with together():
                sampled = [self._roll_out(*batch, window, clock, scoring) for batch in encoded]
            with together():
                scores = scoring.scores()
                scored = [_join(*pair) for pair in zip(sampled, scores, strict=True)]
                merged = tuple(merge(own) for own in _by_size(scored))
                self._check(merged)
        return Collected(merged, scores[0].videos)

    def _fetch(self, clock: Clock) -> list[Condition]:
        """Take the conditions of the next nb steps."""
        conditions: list[Condition] = []
        for number in range(self.settings.sample.num_batches_per_epoch):
            with clock.phase("fetch"):
                taken = self.stream.take(self.stream.next_step)
            conditions += taken
            self._print([debug_print.prompt_line(number, [condition.prompt for condition in taken])])
        return conditions

    def _load(
        self, window: tuple[int, ...], clock: Clock
    ) -> list[tuple[tuple[int, ...], tuple[Condition, ...], Conditioning]]:
        """Return the batches of the next round, of one structure each: positions, conditions, encodings."""
        sample = self.settings.sample
        conditions = self._fetch(clock)
        structures = [
            Structure(*condition.size, sample.num_steps, sample.guidance_scale, window) for condition in conditions
        ]
        encode, batches = EncodeOnce(self.policy), []
        for positions in full_batches(structures, sample.train_batch_size):
            own = tuple(conditions[position] for position in positions)
            with clock.phase("encode"):
                batches.append((tuple(positions), own, encode(own)))
        return batches

    def _roll_out(
        self,
        positions: tuple[int, ...],
        own: tuple[Condition, ...],
        conditioning: Conditioning,
        window: tuple[int, ...],
        clock: Clock,
        scoring: ScoringQueue,
    ) -> _Sampled:
        """Return the samples of one batch."""
        with clock.phase("rollout"):
            rolled = roll_out(self.policy, own, conditioning, window, self.settings)
            if self.settings.offload:
                conditioning = conditioning.to("cpu")
                rolled = dataclasses.replace(rolled, trajectory=rolled.trajectory.to("cpu"))
        scoring.add(own, rolled.final_latents)
        if self._on_batch is not None:
            self._on_batch(len(positions))
        return _Sampled(positions, own, conditioning, rolled)

    def _check(self, merged: Sequence[ScoredBatch]) -> None:
        sample = self.settings.sample
        if self._prints:
            views = [debug_print.batch_view(batch, self.settings.sigmas, self.rewards.weights) for batch in merged]
            self._print(debug_print.merged_lines(views, sample.expanded_batch_size, sample.k))
        debug_print.check_merged(sum(len(batch.conditions) for batch in merged), sample.expanded_batch_size)

    def _print(self, lines: Sequence[str]) -> None:
        if self._prints:
            debug_print.show(lines)


def _join(sampled: _Sampled, scores: Scores) -> ScoredBatch:
    rolled = sampled.rolled
    return ScoredBatch(
        sampled.conditions,
        sampled.positions,
        sampled.conditioning,
        rolled.trajectory,
        rolled.noise_ids,
        scores.rewards,
    )


def _by_size(batches: Sequence[ScoredBatch]) -> list[list[ScoredBatch]]:
    sizes: dict[tuple[int, int, int], list[ScoredBatch]] = {}
    for batch in batches:
        sizes.setdefault(batch.size, []).append(batch)
    return list(sizes.values())


def merge(batches: Sequence[ScoredBatch]) -> ScoredBatch:
    """Join batches of one structure along the sample dimension.

    Raises:
        ValueError: the batches differ in latent shape, stochastic steps or rewards, so they share no update.
    """
    structures = {(tuple(b.trajectory.states.shape[1:]), b.trajectory.steps, tuple(b.rewards)) for b in batches}
    if len(structures) != 1:
        raise ValueError(
            "batches of one video size must share (states, stochastic steps, rewards) to be joined, got "
            f"{sorted(map(str, structures))}"
        )
    return ScoredBatch(
        conditions=tuple(condition for batch in batches for condition in batch.conditions),
        positions=tuple(position for batch in batches for position in batch.positions),
        conditioning=Conditioning.concatenate([batch.conditioning for batch in batches]),
        trajectory=Trajectory.concatenate([batch.trajectory for batch in batches]),
        noise_ids=torch.cat([batch.noise_ids for batch in batches]),
        rewards={name: merge_results([batch.rewards[name] for batch in batches]) for name in batches[0].rewards},
    )


def merge_results(results: Sequence[RewardResult]) -> RewardResult:
    """Join results of one reward along the sample dimension."""
    return RewardResult(
        values=torch.cat([result.values for result in results]),
        valid=torch.cat([result.valid for result in results]),
        causes=tuple(cause for result in results for cause in result.causes),
        info={name: torch.cat([result.info[name] for result in results]) for name in results[0].info},
        faulty=torch.cat([result.faults for result in results]),
    )
