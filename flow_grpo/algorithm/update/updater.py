"""Optimizer steps: an objective's loss, accumulated over micro-batches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flow_grpo.algorithm.update.history import UpdateHistory
from flow_grpo.algorithm.update.objective import Objective
from flow_grpo.algorithm.update.statistics import UpdateStats, gather_stats
from flow_grpo.maths.keys import generator
from flow_grpo.models.policy import Policy
from flow_grpo.records import Samples, TrainingBatch
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.ranks.process_group import RankError, World
from flow_grpo.runtime.ranks.sharding import averaging_gradients, gradient_bytes, take_step
from flow_grpo.settings.objectives import micro_batch, trains_groups
from flow_grpo.settings.schema import Config

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class UpdatePlan:
    """The micro-batches of an epoch, by optimizer step."""

    steps: list[list[Tensor]]  # per optimizer step, the (b,) positions of its micro-batches in the batch
    passes: int  # over all micro-batches, for progress
    as_rolled_out: bool  # every micro-batch has exactly the rows of one call of the rollout


@dataclasses.dataclass
class Updater:
    """Trains on the samples of one epoch."""

    policy: Policy  # its `module` is wrapped for gradient synchronisation when there are several ranks
    objective: Objective
    optimizer: torch.optim.Optimizer  # over `policy.trained_parameters()`
    config: Config
    world: World
    after_step: Callable[[], None] = lambda: None  # called after an optimizer step, such as to average weights
    on_pass: Callable[[], None] = lambda: None  # called after a pass over a micro-batch, for progress

    def plan(self, batch: TrainingBatch, epoch: int) -> UpdatePlan:
        """Return an epoch's micro-batches, of one video size each, dealt to its optimizer steps."""
        sizes = batch.sizes()
        steps = [
            [
                micro_batch
                for size in sizes[positions].unique()
                for micro_batch in positions[sizes[positions] == size].split(self.config.train.batch_size)
            ]
            for positions in self._deal(len(batch), epoch)
        ]
        passes = self.objective.passes(batch.parts[0]) * sum(map(len, steps))
        return UpdatePlan(steps, passes, self._same_geometry(batch, steps))

    def run(
        self, batch: TrainingBatch, plan: UpdatePlan, history: UpdateHistory, *, probe: bool = False
    ) -> dict[str, float]:
        """Take the epoch's optimizer steps and return `policy/` and `train/` metrics over all ranks.

        A step with a log-ratio or a gradient that is not finite on any rank is skipped: the weights stay.

        Args:
            batch: this rank's samples.
            plan: from `plan`.
            history: history of the run's optimizer steps; updated in place.
            probe: also replay the first micro-batch after the last update.

        Raises:
            RankError: on every rank, after more than `train.max_bad_steps` such steps in a row.
        """
        local = torch.stack([batch.weights[torch.cat(step)].cpu().double().sum() for step in plan.steps])
        mass = self.world.data.all_gather(local[None]).sum(dim=0).tolist()  # sample weights of every step, of all ranks
        stats = UpdateStats()

        def old_policy(micro: Tensor) -> Any:
            take = functools.partial(self._take, batch, micro)
            return self.objective.remember(take, as_rolled_out=plan.as_rolled_out)

        with name_memory_knobs(micro_batch(self.config)):
            memories = [[old_policy(micro) for micro in step] for step in plan.steps]
            for step, memory, total in zip(plan.steps, memories, mass, strict=True):
                if total == 0:
                    stats.skipped += 1
                    continue
                scale = self.world.data.size / total
                problem = self._optimizer_step(batch, step, memory, history, scale=scale, stats=stats)
                if problem:
                    history.bad_steps.append(problem)
                    self._skip(history.bad_steps)
            metrics = gather_stats(stats, self.world)
            if probe:
                drift = self.objective.drift(self._take(batch, plan.steps[0][0]), memories[0][0]).abs().max().cpu()
                # Still exactly 0 after an update: nothing was learned.
                metrics["policy/ratio_after_max_abs_log"] = float(self.world.data.all_gather(drift[None]).max())
        return metrics

    def learning_rates(self) -> dict[str, float]:
        """Return the `train/` metrics of the learning rates, as the latest optimizer step used them."""
        rates = {group.get("metric", "learning_rate"): group["lr"] for group in self.optimizer.param_groups}
        return {f"train/{name}": rate for name, rate in rates.items()}

    def _deal(self, rows: int, epoch: int) -> list[Tensor]:
        """Return, per optimizer step, the sorted positions of its samples; identical on every rank.

        Whole rollout calls are dealt when every step gets equally many, single rows otherwise. With fewer rows than
        optimizer steps, after a shortage, each row is a step of its own.
        """
        train, unit = self.config.train, self.config.sample.train_batch_size
        updates = min(train.updates_per_epoch, rows)
        if rows % unit or (rows // unit) % updates:
            unit = 1
        blocks = torch.arange(rows).view(-1, unit)
        order = torch.randperm(len(blocks), generator=generator(self.config.seed, "update", epoch))
        return [blocks[chunk.sort().values].flatten() for chunk in order.tensor_split(updates)]

    def _same_geometry(self, batch: TrainingBatch, steps: Sequence[Sequence[Tensor]]) -> bool:
        """Return whether every micro-batch is exactly one batch of the rollout."""
        by_groups = trains_groups(self.config)
        if not batch.as_rolled_out or self.config.sample.share_prefix != by_groups:  # else a step was taken by groups
            return False
        size = self.config.sample.train_batch_size
        held = [(batch.table[0] == part).nonzero().flatten() for part in range(len(batch.parts))]
        rolled_out = {tuple(chunk.tolist()) for positions in held for chunk in positions.split(size)}
        return all(tuple(micro.tolist()) in rolled_out for step in steps for micro in step)

    def _take(self, batch: TrainingBatch, positions: Tensor) -> Samples:
        return batch.take(positions, self.policy.trained_parameters()[0].device)

    def _optimizer_step(
        self,
        batch: TrainingBatch,
        step: Sequence[Tensor],
        memory: Sequence[Any],
        history: UpdateHistory,
        *,
        scale: float,
        stats: UpdateStats,
    ) -> str:
        """Take one optimizer step; return "", or why it was skipped, identical on every rank."""
        mark, before_any_update = len(stats.passes), not stats.norms
        replayed: list[tuple[int, Tensor]] = []
        for positions, known in zip(step, memory, strict=True):
            micro = self._take(batch, positions)
            passes = self.objective.passes(micro)
            for number in range(passes):
                last = positions is step[-1] and number == passes - 1
                with averaging_gradients(self.policy.module, now=last):
                    loss = self.objective.loss(micro, known, number)
                    weights = micro.weights if loss.weights is None else loss.weights
                    assert weights is not None
                    weight = weights.to(loss.terms.per_sample, non_blocking=True) * (scale / passes)
                    ((loss.terms.per_sample * weight).sum() * loss.scale).backward()
                stats.add(loss.terms, weight / self.world.data.size, loss.drift if before_any_update else None)
                replayed.append((number, micro.keys[:, 0].repeat_interleave(len(weight) // len(micro))))
                self.on_pass()
        trained, ranks = sum(weight.numel() for weight in self.policy.trained_parameters()), self.world.all.size
        sent = gradient_bytes(self.config.train.sharding, trained, ranks, passes=len(replayed), steps=1)
        self.world.all.sent["gradients"] += int(sent)
        problem = self._not_finite(replayed, [own["ratio"] for own in stats.passes[mark:]])
        if not problem:
            train = self.config.train
            bound = history.bound(train.max_grad_norm, train.max_grad_ratio)
            set_learning_rates(self.optimizer, history.warm_up(train.warmup_steps))
            norm = take_step(self.optimizer, bound)
            if torch.isfinite(norm):
                stats.stepped(norm, bound)
                history.stepped(norm.item())
                self.after_step()
                return ""
            problem = f"the gradient's norm is {norm.item()}"
        stats.forget(mark)
        return problem

    def _skip(self, bad_steps: Sequence[str]) -> None:
        """Drop the gradients of a step that is not finite; raise after more than `train.max_bad_steps` in a row."""
        most = self.config.train.max_bad_steps
        if len(bad_steps) > most:
            raise RankError(
                f"{len(bad_steps)} optimizer step(s) in a row are not finite, train.max_bad_steps is {most}: "
                f"{bad_steps[-1]}; the weights are those before them. Lower train.learning_rate or sample.noise_level, "
                "or compute in fp32 (model.dtype), and go on from the last checkpoint"
            )
        logger.warning("optimizer step left out: %s", bad_steps[-1])
        self.optimizer.zero_grad(set_to_none=True)

    def _not_finite(self, replayed: Sequence[tuple[int, Tensor]], ratios: Sequence[Tensor]) -> str:
        """Return which log-ratios are not finite, by rank, or ""; identical on every rank."""
        found_here = ""
        if not torch.cat(list(ratios)).log().isfinite().all():
            found = [
                (number, gids[~ratio.log().isfinite().cpu()])
                for (number, gids), ratio in zip(replayed, ratios, strict=True)
            ]
            number, bad = next((number, bad) for number, bad in found if len(bad))
            found_here = f"log-ratio is not finite in pass {number} of gids {bad.tolist()}"
        texts = self.world.data.gather_text(found_here)
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every parameter group to `factor` times the one it was made with."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group.setdefault("initial_lr", group["lr"])


@contextlib.contextmanager
def name_memory_knobs(batch_size: int) -> Iterator[None]:
    """Re-raise an out-of-memory error of the device as a RuntimeError with the knobs that reduce memory."""
    try:
        yield
    except RuntimeError as error:
        if not device_api.is_out_of_memory(error):
            raise
        smaller = f"--config.train.batch_size={batch_size // 2}, " if batch_size > 1 else ""
        raise RuntimeError(
            f"out of memory in the update of {batch_size} row(s) at once: {error}; pass {smaller}"
            "--config.model.checkpointing=blocks, --config.sample.offload=true or "
            "--config.train.sharding=fsdp2, and go on from the last checkpoint"
        ) from error
