"""Replay the remembered steps and take gradient steps.

Gradients are accumulated over micro-batches and stochastic steps and synchronised once per optimizer step. The
on-policy contract: before the first update the ratio is exactly 1 when a micro-batch is a rollout batch, because both
make the same calls; at any other micro-batch the old log-probabilities are computed again over the very micro-batches
the update uses.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo.algorithm.rollout import SdeSettings, step_transition
from flow_grpo.algorithm.update_stats import UpdateStats, gather_stats
from flow_grpo.config import TrainConfig
from flow_grpo.maths.keys import generator
from flow_grpo.maths.loss import GuardTerms, LossTerms, grpo_loss
from flow_grpo.maths.sde import Transition, gaussian_kl, log_prob
from flow_grpo.models.policy import Policy
from flow_grpo.records import TrainingBatch, TrainingPart
from flow_grpo.runtime.distributed import Ranks


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


class MicroBatch(NamedTuple):
    """Samples of one forward and backward call.

    Attributes:
        part: which part of the training batch they are in.
        rows: (b,) int64 row numbers within that part.
    """

    part: int
    rows: Tensor


@dataclasses.dataclass(frozen=True)
class OldPolicy:
    """What the update of one part is compared with; N rows.

    Attributes:
        log_probs: (N, K) fp32, or None to take the new log-probabilities without their gradient.
        means: (N, K, C, F, H, W) fp32 means of the remembered steps, kept only for the GRPO-Guard ratio.
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

    def run(self, batch: TrainingBatch, *, epoch: int, probe: bool = False) -> dict[str, float]:
        """Take the epoch's optimizer steps and return `policy/` and `train/` metrics over all ranks.

        Args:
            batch: this rank's samples; every rank must hold as many.
            epoch: draws the order of the rows.
            probe: also score the first micro-batch again after the last update.

        Raises:
            RuntimeError: on every rank, when a log-ratio or the gradient is not finite anywhere.
        """
        plan = self.plan(batch, epoch)
        old = self.old_policy(batch, plan)
        mass = self._global_mass(batch, plan)
        stats = UpdateStats()
        for number, micro_batches in enumerate(plan):
            if mass[number] == 0:
                stats.skip()
                continue
            scale = self.ranks.world_size / mass[number]
            self._optimizer_step(batch, old, micro_batches, scale=scale, stats=stats)
        metrics = gather_stats(stats, self.ranks)
        if probe:
            metrics |= self._probe(batch, old, plan[0][0])
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

    def plan(self, batch: TrainingBatch, epoch: int) -> list[list[MicroBatch]]:
        """Return the micro-batches of every optimizer step; samples of different sizes never share one."""
        return [self._micro_batches(batch, positions) for positions in self.deal(len(batch), epoch)]

    def _micro_batches(self, batch: TrainingBatch, positions: Tensor) -> list[MicroBatch]:
        found = []
        for number, part in enumerate(batch.parts):
            row_at = torch.full((len(batch),), -1)
            row_at[part.positions] = torch.arange(len(part))
            rows = row_at[positions]
            micro_batches = rows[rows >= 0].split(self.settings.train.batch_size)
            found += [MicroBatch(number, own) for own in micro_batches if len(own)]
        return found

    def replays(self, batch: TrainingBatch, epoch: int) -> int:
        """Return how many micro-batches are replayed, each remembered step counted."""
        return sum(
            len(batch.parts[micro.part].trajectory.steps)
            for micro_batches in self.plan(batch, epoch)
            for micro in micro_batches
        )

    def old_policy(self, batch: TrainingBatch, plan: list[list[MicroBatch]]) -> list[OldPolicy]:
        """Return, per part, what the ratio is taken against, by the on-policy contract and `train.old_log_prob`."""
        train = self.settings.train
        if train.old_log_prob == "detach":
            return [OldPolicy(None) for _ in batch.parts]
        keep = train.old_log_prob == "rollout" or (train.old_log_prob == "auto" and self.same_geometry(batch, plan))
        if keep and not train.guard:
            return [OldPolicy(part.trajectory.log_probs) for part in batch.parts]
        return self._recompute(batch, plan, keep=keep)

    def same_geometry(self, batch: TrainingBatch, plan: list[list[MicroBatch]]) -> bool:
        """Tell whether every micro-batch is exactly one batch of the rollout."""
        size = self.settings.rollout_batch_size
        return batch.as_rolled_out and all(
            rows.tolist() == list(range(int(rows[0]), min(int(rows[0]) + size, len(batch.parts[part]))))
            and int(rows[0]) % size == 0
            for micro_batches in plan
            for part, rows in micro_batches
        )

    @torch.no_grad()
    def _recompute(self, batch: TrainingBatch, plan: list[list[MicroBatch]], *, keep: bool) -> list[OldPolicy]:
        """Score the stored steps once more with the weights that made them; `keep` leaves the log-probs as they are."""
        guard = self.settings.train.guard
        old = [
            OldPolicy(
                part.trajectory.log_probs if keep else torch.empty_like(part.trajectory.log_probs),
                torch.empty_like(part.trajectory.latents) if guard else None,
            )
            for part in batch.parts
        ]
        for number, rows in (micro for micro_batches in plan for micro in micro_batches):
            part, (log_probs, means) = batch.parts[number], (old[number].log_probs, old[number].means)
            for column in range(len(part.trajectory.steps)):
                current = self._transition(part, rows, column)
                if log_probs is not None and not keep:
                    log_probs[rows, column] = log_prob(_next_latents(part, rows, column), current)
                if means is not None:
                    means[rows, column] = current.mean
        return old

    def _transition(self, part: TrainingPart, rows: Tensor, column: int) -> Transition:
        """Replay remembered step `column` of the given rows with the current weights."""
        trajectory = part.trajectory
        return step_transition(
            self.policy,
            trajectory.states[rows, trajectory.positions[column]],
            part.conditioning.rows(rows),
            sigmas=self.settings.sigmas,
            step=trajectory.steps[column],
            sde=self.settings.sde,
        )

    def _global_mass(self, batch: TrainingBatch, plan: list[list[MicroBatch]]) -> list[float]:
        """Return, per optimizer step, the sum of sample weights over all ranks."""
        local = torch.stack(
            [torch.cat([batch.parts[part].weights[rows] for part, rows in step]).cpu().double().sum() for step in plan]
        )
        masses: list[float] = self.ranks.all_gather(local[None]).sum(dim=0).tolist()
        return masses

    def _optimizer_step(
        self, batch: TrainingBatch, old: list[OldPolicy], plan: list[MicroBatch], *, scale: float, stats: UpdateStats
    ) -> None:
        columns = len(batch.parts[0].trajectory.steps)
        work = [(micro, column) for micro in plan for column in range(columns)]
        begun, untouched = len(stats.ratios), not stats.norms
        for number, ((place, rows), column) in enumerate(work):
            part = batch.parts[place]
            with self._synchronised(last=number == len(work) - 1):
                terms, new = self._loss(part, old[place], rows, column)
                weight = part.weights[rows].to(terms.per_sample) * (scale / columns)
                (terms.per_sample * weight).sum().backward()
            gap = new.detach() - part.trajectory.log_probs[rows, column] if untouched else None
            stats.add(terms, weight / self.ranks.world_size, gap)
            self.on_replay()
        self._refuse_non_finite(batch, work, stats.ratios[begun:])
        norm = torch.nn.utils.clip_grad_norm_(self.policy.trained_parameters(), self.settings.train.max_grad_norm)
        if not torch.isfinite(norm):
            raise RuntimeError(
                f"gradient norm is {norm.item()} on rank {self.ranks.rank}: weights were left as they are"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        stats.stepped(norm)
        self.after_step()

    def _loss(self, part: TrainingPart, old: OldPolicy, rows: Tensor, column: int) -> tuple[LossTerms, Tensor]:
        """Return the loss of one stored step of the given rows, and its new log-probabilities (b,)."""
        settings, train = self.settings, self.settings.train
        # First the reference: it may exchange weights in place, which a graph that is already built would not survive.
        reference = self._reference_mean(part, rows, column) if train.kl_coef > 0 else None
        current = self._transition(part, rows, column)
        new = log_prob(_next_latents(part, rows, column), current)
        before = new.detach() if old.log_probs is None else old.log_probs[rows, column]
        step = part.trajectory.steps[column]
        terms = grpo_loss(
            new[:, None],
            before[:, None],
            part.advantages[rows].to(new),
            clip_range=train.clip_range,
            adv_clip=train.adv_clip,
            step_weight=None if settings.step_weight is None else settings.step_weight[step : step + 1],
            guard=_guard_terms(old, rows, column, current) if train.guard else None,
            kl=None if reference is None else gaussian_kl(current.mean, reference, current.std)[:, None],
            kl_coef=train.kl_coef,
        )
        return terms, new

    @torch.no_grad()
    def _reference_mean(self, part: TrainingPart, rows: Tensor, column: int) -> Tensor:
        with self.policy.reference():
            return self._transition(part, rows, column).mean

    def _refuse_non_finite(
        self, batch: TrainingBatch, work: list[tuple[MicroBatch, int]], ratios: list[Tensor]
    ) -> None:
        """Raise on every rank when a log-ratio is not finite on any; the weights are still untouched."""
        error = None
        if not torch.cat(ratios).log().isfinite().all():
            found = [
                (batch.parts[place], column, rows[~ratio.log().isfinite().cpu()])
                for ((place, rows), column), ratio in zip(work, ratios, strict=True)
            ]
            part, column, bad = next(entry for entry in found if len(entry[2]))
            error = RuntimeError(
                f"log-ratio is not finite in step {part.trajectory.steps[column]} of gids {part.gids[bad].tolist()}"
            )
        self.ranks.raise_together(error, "update")

    @torch.no_grad()
    def _probe(self, batch: TrainingBatch, old: list[OldPolicy], micro: MicroBatch) -> dict[str, float]:
        """Score one micro-batch again: a ratio that is still exactly 1 after an update means nothing was learned."""
        part, rows = batch.parts[micro.part], micro.rows
        new = log_prob(_next_latents(part, rows, 0), self._transition(part, rows, 0))
        known = old[micro.part].log_probs
        before = part.trajectory.log_probs if known is None else known
        gap = (new - before[rows, 0]).abs().max().cpu()
        return {"policy/ratio_after_max_abs_log": float(self.ranks.all_gather(gap[None]).max())}

    @contextlib.contextmanager
    def _synchronised(self, *, last: bool) -> Iterator[None]:
        """Exchange gradients in the last backward pass of an optimizer step only."""
        local_only = getattr(self.policy.module, "no_sync", contextlib.nullcontext)
        with contextlib.nullcontext() if last else local_only():
            yield


def _nothing() -> None:
    """Stand in for a callback that is not given."""


def _next_latents(part: TrainingPart, rows: Tensor, column: int) -> Tensor:
    return part.trajectory.states[rows, part.trajectory.positions[column] + 1]


def _guard_terms(old: OldPolicy, rows: Tensor, column: int, current: Transition) -> GuardTerms:
    means = current.mean.detach() if old.means is None else old.means[rows, column]
    return GuardTerms(means=current.mean[:, None], old_means=means[:, None], std=current.std)
