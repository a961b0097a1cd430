"""Replay the remembered steps and take gradient steps.

Gradients are accumulated over micro-batches and stochastic steps and synchronised once per optimizer step. The
on-policy contract: before the first update the ratio is exactly 1 when a micro-batch is a rollout batch, because both
make the same calls; at any other micro-batch the old log-probabilities are computed again over the very micro-batches
the update uses.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from flow_grpo.algorithm.rollout.denoise import SdeSettings, step_transition
from flow_grpo.algorithm.update.memory_hint import memory_named
from flow_grpo.algorithm.update.statistics import UpdateStats, gather_stats
from flow_grpo.maths.keys import generator
from flow_grpo.maths.loss import GuardTerms, LossTerms, grpo_loss
from flow_grpo.maths.sde import Transition, gaussian_kl, log_prob
from flow_grpo.models.policy import Policy
from flow_grpo.records import TrainingBatch, TrainingPart
from flow_grpo.runtime.ranks.process_group import RankError, Ranks
from flow_grpo.runtime.ranks.sharding import averaging_gradients, is_partitioned, take_step
from flow_grpo.settings.schema import TrainConfig

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
    """What an update needs beside the batch.

    Attributes:
        sigmas: (S+1,) fp32 CPU noise levels of the rollout.
        sde: noise of the remembered steps.
        step_weight: (S,) fp32 CPU weight of every step on the policy term, or None for 1.
        rollout_batch_size: rows of one rollout batch, `sample.train_batch_size`.
        seed: seed of the run.
        train: learning settings.
    """

    sigmas: Tensor
    sde: SdeSettings
    step_weight: Tensor | None
    rollout_batch_size: int
    seed: int
    train: TrainConfig


@dataclasses.dataclass(frozen=True)
class OldPolicy:
    """What the update of one micro-batch is compared with.

    Attributes:
        log_probs: (b, K) fp32, or None to take the new log-probabilities without their gradient.
        means: (b, K, C, F, H, W) fp32 means of the remembered steps, kept only for the GRPO-Guard ratio.
    """

    log_probs: Tensor | None
    means: Tensor | None = None


class Updater:
    """Moves the trained parameters by one epoch's samples.

    Args:
        policy: its `module` is wrapped for gradient synchronisation when there are several ranks.
        optimizer: over `policy.trained_parameters()`.
        settings: see `UpdateSettings`.
        ranks: who takes part.
        after_step: called after every optimizer step, for example to follow the weights by an average.
        on_replay: called after every replayed step of a micro-batch, for progress.
        bad_steps: what was wrong with the last optimizer steps, all in a row not finite; changed in place.

    Raises:
        ValueError: `old_log_prob="detach"` with more than one update per epoch, for which it would be wrong.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        settings: UpdateSettings,
        ranks: Ranks,
        *,
        after_step: Callable[[], None] | None = None,
        on_replay: Callable[[], None] | None = None,
        bad_steps: list[str] | None = None,
    ) -> None:
        updates = settings.train.updates_per_epoch
        if settings.train.old_log_prob == "detach" and updates != 1:
            raise ValueError(
                f'train.old_log_prob="detach" allows train.updates_per_epoch=1 only, got {updates}: use "auto"'
            )
        self.policy = policy
        self.optimizer = optimizer
        self.settings = settings
        self.ranks = ranks
        self.after_step = after_step or _nothing
        self.on_replay = on_replay or _nothing
        self.bad_steps = [] if bad_steps is None else bad_steps

    def run(self, batch: TrainingBatch, *, epoch: int, probe: bool = False) -> dict[str, float]:
        """Take the epoch's optimizer steps and return `policy/` and `train/` metrics over all ranks.

        Args:
            batch: this rank's samples; every rank must hold as many.
            epoch: draws the order of the rows.
            probe: also score the first micro-batch again after the last update.

        A step with a log-ratio or a gradient that is not finite on any rank is left out: the weights stay.

        Raises:
            RankError: on every rank, after more than `train.max_bad_steps` such steps in a row.
        """
        plan = self.plan(batch, epoch)
        mass = self._global_mass(batch, plan)
        stats = UpdateStats()
        with memory_named(self.settings.train.batch_size):
            old = self.old_policy(batch, plan)
            for number, micro_batches in enumerate(plan):
                if mass[number] == 0:
                    stats.skip()
                    continue
                scale = self.ranks.world_size / mass[number]
                self._optimizer_step(batch, micro_batches, old[number], scale=scale, stats=stats)
            metrics = gather_stats(stats, self.ranks)
            if probe:
                metrics |= self._probe(batch, plan[0][0], old[0][0])
        return metrics

    def deal(self, rows: int, epoch: int) -> list[Tensor]:
        """Return, per optimizer step, the rising positions of its samples; alike on every rank.

        Whole rollout batches are dealt to the optimizer steps where that comes out even, single samples otherwise. When
        a shortage left fewer samples than optimizer steps, each is a step of its own.
        """
        train, unit = self.settings.train, self.settings.rollout_batch_size
        updates = min(train.updates_per_epoch, rows)
        if rows % unit or (rows // unit) % updates:
            unit = 1
        blocks = torch.arange(rows).view(-1, unit)
        order = torch.randperm(len(blocks), generator=generator(self.settings.seed, "update", epoch))
        return [blocks[chunk.sort().values].flatten() for chunk in order.tensor_split(updates)]

    def plan(self, batch: TrainingBatch, epoch: int) -> list[list[Tensor]]:
        """Return, per optimizer step, the (b,) positions of its micro-batches; samples of two sizes never share one."""
        sizes = batch.sizes()
        return [
            [
                micro_batch
                for size in sizes[positions].unique()
                for micro_batch in positions[sizes[positions] == size].split(self.settings.train.batch_size)
            ]
            for positions in self.deal(len(batch), epoch)
        ]

    def replays(self, batch: TrainingBatch, epoch: int) -> int:
        """Return how many micro-batches are replayed, each remembered step counted."""
        return len(batch.parts[0].trajectory.steps) * sum(map(len, self.plan(batch, epoch)))

    def old_policy(self, batch: TrainingBatch, plan: list[list[Tensor]]) -> list[list[OldPolicy]]:
        """Return what the ratio of every micro-batch is taken against: the on-policy contract, `train.old_log_prob`."""
        train = self.settings.train
        if train.old_log_prob == "detach":
            return [[OldPolicy(None) for _ in step] for step in plan]
        keep = train.old_log_prob == "rollout" or (train.old_log_prob == "auto" and self.same_geometry(batch, plan))
        replay = train.guard or not keep
        return [
            [self._before(batch.take(positions, self._device), keep=keep, replay=replay) for positions in step]
            for step in plan
        ]

    def same_geometry(self, batch: TrainingBatch, plan: list[list[Tensor]]) -> bool:
        """Tell whether every micro-batch is exactly one batch of the rollout."""
        if not batch.as_rolled_out:
            return False
        size = self.settings.rollout_batch_size
        rolled_out = [chunk.tolist() for part in batch.parts for chunk in part.positions.split(size)]
        return all(positions.tolist() in rolled_out for step in plan for positions in step)

    @torch.no_grad()
    def _before(self, micro: TrainingPart, *, keep: bool, replay: bool) -> OldPolicy:
        """Return the rollout's log-probs, or score the stored steps once more with the weights that made them."""
        if not replay:
            return OldPolicy(micro.trajectory.log_probs)
        columns = range(len(micro.trajectory.steps))
        current = [self.replay(micro, column) for column in columns]
        fresh = [log_prob(next_latents(micro, column), current[column]) for column in columns]
        means = torch.stack([transition.mean for transition in current], dim=1) if self.settings.train.guard else None
        return OldPolicy(micro.trajectory.log_probs if keep else torch.stack(fresh, dim=1), means)

    def replay(self, micro: TrainingPart, column: int) -> Transition:
        """Return the Gaussian of remembered step `column` with the current weights."""
        trajectory = micro.trajectory
        return step_transition(
            self.policy,
            trajectory.states[:, trajectory.positions[column]],
            micro.conditioning,
            sigmas=self.settings.sigmas,
            step=trajectory.steps[column],
            sde=self.settings.sde,
        )

    @property
    def _device(self) -> torch.device:
        return self.policy.trained_parameters()[0].device

    def _global_mass(self, batch: TrainingBatch, plan: list[list[Tensor]]) -> list[float]:
        """Return, per optimizer step, the sum of sample weights over all ranks."""
        weights = torch.zeros(len(batch) + 1)  # the last entry takes what no position names
        for part in batch.parts:
            weights[part.positions] = part.weights
        local = torch.stack([weights[torch.cat(step)].cpu().double().sum() for step in plan])
        masses: list[float] = self.ranks.all_gather(local[None]).sum(dim=0).tolist()
        return masses

    def _optimizer_step(
        self,
        batch: TrainingBatch,
        plan: list[Tensor],
        old: list[OldPolicy],
        *,
        scale: float,
        stats: UpdateStats,
    ) -> None:
        mark, untouched = stats.mark(), not stats.norms
        replayed: list[tuple[int, Tensor]] = []
        for number, (positions, before) in enumerate(zip(plan, old, strict=True)):
            micro = batch.take(positions, self._device)
            steps = micro.trajectory.steps
            for column, step in enumerate(steps):
                last = (number, column) == (len(plan) - 1, len(steps) - 1)
                with averaging_gradients(self.policy.module, now=last) as backward:
                    terms, new = self._loss(micro, before, column)
                    weight = micro.weights.to(terms.per_sample) * (scale / len(steps))
                    backward((terms.per_sample * weight).sum())
                gap = new.detach() - micro.trajectory.log_probs[:, column] if untouched else None
                stats.add(terms, weight / self.ranks.world_size, gap)
                replayed.append((step, micro.gids))
                self.on_replay()
        problem = self._not_finite(replayed, stats.ratios[mark:])
        if not problem:
            norm = take_step(self.policy.module, self.optimizer, self.settings.train.max_grad_norm)
            if torch.isfinite(norm):
                self.bad_steps.clear()
                stats.stepped(norm)
                self.after_step()
                return
            problem = f"the gradient's norm is {norm.item()}"
        stats.forget(mark)
        self._skip(problem)

    def _skip(self, problem: str) -> None:
        """Leave out an optimizer step that is not finite, or stop on every rank when it is one too many."""
        self.bad_steps.append(problem)
        # DeepSpeed's parts of a gradient cannot be taken back: its next step would hold this one.
        most = 0 if is_partitioned(self.policy.module) else self.settings.train.max_bad_steps
        if len(self.bad_steps) > most:
            raise RankError(
                f"{len(self.bad_steps)} optimizer step(s) in a row are not finite, train.max_bad_steps is {most}: "
                f"{problem}; the weights are those before them. Lower train.learning_rate or sample.noise_level, or "
                "compute in fp32 (model.dtype), and go on from the last checkpoint"
            )
        logger.warning("optimizer step left out: %s", problem)
        self.optimizer.zero_grad(set_to_none=True)

    def _loss(self, micro: TrainingPart, old: OldPolicy, column: int) -> tuple[LossTerms, Tensor]:
        """Return the loss of one stored step of a micro-batch, and its new log-probabilities (b,)."""
        settings, train = self.settings, self.settings.train
        # First the reference: it may exchange weights in place, which a graph that is already built would not survive.
        reference = self.reference_mean(micro, column) if train.kl_coef > 0 else None
        current = self.replay(micro, column)
        new = log_prob(next_latents(micro, column), current)
        before = new.detach() if old.log_probs is None else old.log_probs[:, column]
        step = micro.trajectory.steps[column]
        terms = grpo_loss(
            new[:, None],
            before[:, None],
            micro.advantages.to(new),
            clip_range=train.clip_range,
            adv_clip=train.adv_clip,
            step_weight=None if settings.step_weight is None else settings.step_weight[step : step + 1],
            guard=_guard_terms(old, column, current) if train.guard else None,
            kl=None if reference is None else gaussian_kl(current.mean, reference, current.std)[:, None],
            kl_coef=train.kl_coef,
        )
        return terms, new

    @torch.no_grad()
    def reference_mean(self, micro: TrainingPart, column: int) -> Tensor:
        """Return the (b, C, F, H, W) mean of remembered step `column` under the policy training started from."""
        with self.policy.reference():
            return self.replay(micro, column).mean

    def _not_finite(self, replayed: list[tuple[int, Tensor]], ratios: list[Tensor]) -> str:
        """Return which log-ratios are not finite on which rank, alike on every rank, or ""."""
        found_here = ""
        if not torch.cat(ratios).log().isfinite().all():
            found = [
                (step, gids[~ratio.log().isfinite().cpu()])
                for (step, gids), ratio in zip(replayed, ratios, strict=True)
            ]
            step, bad = next((step, bad) for step, bad in found if len(bad))
            found_here = f"log-ratio is not finite in step {step} of gids {bad.tolist()}"
        texts = self.ranks.gather_text(found_here)
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)

    @torch.no_grad()
    def _probe(self, batch: TrainingBatch, positions: Tensor, old: OldPolicy) -> dict[str, float]:
        """Score one micro-batch again: a ratio that is still exactly 1 after an update means nothing was learned."""
        micro = batch.take(positions, self._device)
        new = log_prob(next_latents(micro, 0), self.replay(micro, 0))
        before = micro.trajectory.log_probs if old.log_probs is None else old.log_probs
        gap = (new - before[:, 0]).abs().max().cpu()
        return {"policy/ratio_after_max_abs_log": float(self.ranks.all_gather(gap[None]).max())}


def _nothing() -> None:
    """Stand in for a callback that is not given."""


def next_latents(micro: TrainingPart, column: int) -> Tensor:
    """Return the (b, C, F, H, W) latents after remembered step `column`."""
    return micro.trajectory.states[:, micro.trajectory.positions[column] + 1]


def _guard_terms(old: OldPolicy, column: int, current: Transition) -> GuardTerms:
    means = current.mean.detach() if old.means is None else old.means[:, column]
    return GuardTerms(means=current.mean[:, None], old_means=means[:, None], std=current.std)
