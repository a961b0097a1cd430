"""Sampling a round: fetch conditions, encode, roll out and score."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from flow_grpo.algorithm import debug_print
from flow_grpo.algorithm.rollout.batching import full_batches, group_configs_by_structure
from flow_grpo.algorithm.rollout.denoise import rollout
from flow_grpo.algorithm.rollout.scoring import ScoringQueue, merge_results, share_results
from flow_grpo.algorithm.rollout.shared_encodings import share_encodings
from flow_grpo.algorithm.rollout.shared_step import as_groups, shared_steps
from flow_grpo.data.dataset import next_batch
from flow_grpo.data.k_repeat_sampler import DistributedKRepeatSampler
from flow_grpo.models.policy import Approximates, Policy
from flow_grpo.records import Condition, Conditioning, RewardResult, Samples, ScoredBatch
from flow_grpo.rewards.base import RewardSet
from flow_grpo.runtime.clock import Clock
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.objectives import trains_groups
from flow_grpo.settings.sampling import Sampling, offloads_rollouts
from flow_grpo.settings.schema import Config


@dataclasses.dataclass
class ConditionStream:
    """The endless stream of a rank's conditions, one global step at a time."""

    loader: Iterable[Sequence[tuple[int, Condition]]]  # yields conditions with their step, in step order; may prefetch
    sampler: DistributedKRepeatSampler  # the loader's batch sampler; `take` sets its step
    _iterator: Iterator[Sequence[tuple[int, Condition]]] | None = None

    def take(self, step: int) -> tuple[Condition, ...]:
        """Return this rank's conditions of a global step.

        Raises:
            StaleBatchError: the loader delivered another step's conditions.
        """
        self.sampler.set_epoch(step)
        if self._iterator is None:
            self._iterator = iter(self.loader)
        items = next_batch(self._iterator)
        tags = {tag for tag, _ in items}
        assert len(tags) == 1, f"one batch holds conditions of steps {sorted(tags)}"
        self.sampler.check(tags.pop())
        return tuple(condition for _, condition in items)


@dataclasses.dataclass
class Collector:
    """Samples rounds on one rank."""

    policy: Policy
    stream: ConditionStream
    rewards: RewardSet
    sampling: Sampling
    config: Config
    world: World
    on_batch: Callable[[int], None] = lambda _: None  # gets the number of samples after every batch, for progress

    def __post_init__(self) -> None:
        self.small_decoder = bool(self.config.model.reward_decoder)  # decodes what is scored, until it is given up

    @property
    def approximates(self) -> bool:
        """Whether prefix, tail or decoder are cheaper than exact ones."""
        return self.sampling.approximates or self.small_decoder

    def be_exact(self) -> None:
        """Go on with all steps of the schedule, computed exactly, and the full decoder."""
        self.sampling, self.small_decoder = self.sampling.exact, False

    def collect(self, clock: Clock, phase: str = "sampling") -> tuple[ScoredBatch, ...]:
        """Return this rank's scored samples of the next round, one batch per video size (collective call).

        With sharded weights a rollout is one, so an error while loading must reach all ranks before it begins.

        Args:
            clock: counts the seconds of every part.
            phase: what an error says that it failed in.
        """
        world, share = self.world, self.config.sample.share_prefix
        gids: list[list[int]] = []
        if share:  # of every rank in the next round, asked before the stream moves on
            sampler = self.stream.sampler
            plans = [sampler.plan(sampler.next_step + step) for step in range(self.config.sample.num_batches_per_epoch)]
            gids = [[gid for plan in plans for _, gid, *_ in plan[rank]] for rank in range(sampler.num_replicas)]
        conditions: list[Condition] = []
        with world.sync_errors(phase):
            for _ in range(self.config.sample.num_batches_per_epoch):
                with clock.phase("fetch"):
                    conditions += self.stream.take(self.stream.sampler.next_step)
        with clock.phase("encode"):
            share_encodings(self.policy, conditions, world, phase)
        with world.sync_errors(phase):
            encoded = self._encode(conditions, clock)
        shared = None
        if share:
            with clock.phase("rollout"):
                shared = shared_steps(
                    self.policy,
                    [(conditions, conditioning) for _, conditions, conditioning in encoded],
                    gids,
                    self.sampling,
                    self.config.sample.train_batch_size,
                    world,
                    phase,
                )
        scoring = {"overlap": self.config.reward.overlap, "small": self.small_decoder}
        with ScoringQueue(self.policy, self.rewards, clock, world, **scoring).open() as queue:
            with world.sync_errors(phase):
                queue.prepare([conditions for _, conditions, _ in encoded])
                sampled = []
                for number, batch in enumerate(encoded):
                    sampled.append(self._roll_out(*batch[1:], shared, clock, queue))
                    self._print([debug_print.prompt_line(number, [condition.prompt for condition in batch[1]])])
            with world.sync_errors(phase):
                own = queue.rewards()
            rewards = share_results(own, world)
            with world.sync_errors(phase):
                drawn = [(positions, own) for positions, own, _ in encoded]
                batches = merge_sizes(drawn, sampled, rewards)
                batches[0] = dataclasses.replace(batches[0], videos=queue.first_videos)
                self._check(batches)
        if trains_groups(self.config):
            with clock.phase("rollout"):
                own_sizes = [batch.samples for batch in batches]
                groups = as_groups(own_sizes, gids, self.config.sample.k, world, phase)
            batches = [dataclasses.replace(b, groups=own) for b, own in zip(batches, groups, strict=True)]
        return tuple(batches)

    def attention_kept(self) -> dict[str, float]:
        """Return `tail/attention_kept` since it was asked last, mean over ranks (collective call); {} where exact."""
        if not isinstance(self.policy, Approximates) or not self.sampling.sparse:
            return {}
        own = {"tail/attention_kept": self.policy.attention_kept()}
        return {name: float(values.nanmean()) for name, values in self.world.all.all_gather_scalars(own).items()}

    def _encode(
        self, conditions: Sequence[Condition], clock: Clock
    ) -> list[tuple[list[int], tuple[Condition, ...], Conditioning]]:
        """Return a round's batches, each of one video size: positions, conditions, conditioning."""
        batches = []
        for positions in full_batches([c.size for c in conditions], self.config.sample.train_batch_size):
            own = tuple(conditions[position] for position in positions)
            with clock.phase("encode"):
                batches.append((positions, own, self.policy.encode(own)))
        return batches

    def _roll_out(
        self,
        conditions: tuple[Condition, ...],
        conditioning: Conditioning,
        shared: Mapping[int, Tensor] | None,
        clock: Clock,
        queue: ScoringQueue,
    ) -> Samples:
        """Return one batch's samples, and queue them for scoring."""
        with clock.phase("rollout"):
            device = conditioning.prompt_embeds.device
            known = None if shared is None else torch.stack([shared[c.gid].to(device) for c in conditions])
            windows = self.sampling.windows(condition.gid for condition in conditions)
            samples = rollout(self.policy, conditions, conditioning, windows, self.sampling, known)
            final_latents = samples.final_latents
            if offloads_rollouts(self.config):
                samples = samples.to("cpu")
        queue.add(conditions, final_latents)
        self.on_batch(len(conditions))
        return samples

    def _check(self, batches: Sequence[ScoredBatch]) -> None:
        sample = self.config.sample
        if self.config.debug:
            sigmas = self.sampling.sigmas
            views = [debug_print.batch_view(batch, sigmas, self.rewards.weights) for batch in batches]
            self._print(debug_print.merged_lines(views, sample.expanded_batch_size, sample.k))
        found, expected = sum(map(len, batches)), sample.expanded_batch_size
        assert found == expected, f"this rank holds {found} samples of the epoch, expected {expected}"

    def _print(self, lines: Sequence[str]) -> None:
        if self.config.debug and self.world.is_main:
            debug_print.show(lines)


def merge_sizes(
    drawn: Sequence[tuple[list[int], tuple[Condition, ...]]],
    samples: Sequence[Samples],
    rewards: Sequence[dict[str, RewardResult]],
) -> list[ScoredBatch]:
    """Return one record per video size, sizes and batches in the order in which they were sampled."""
    by_size = group_configs_by_structure([own[0].size for _, own in drawn])
    return [
        ScoredBatch(
            conditions=tuple(condition for number in numbers for condition in drawn[number][1]),
            samples=Samples.concatenate([samples[number] for number in numbers]),
            rewards=merge_results([rewards[number] for number in numbers]),
            videos=torch.empty(0),
            positions=torch.tensor([position for number in numbers for position in drawn[number][0]]),
        )
        for numbers in by_size.values()
    ]
