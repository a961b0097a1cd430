"""One run from its first evaluation to its verdict; an epoch is sample, gather, choose, compare, update, log, save."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch

from flow_grpo.algorithm.groups import compare
from flow_grpo.algorithm.groups.compare import Chosen, Gathered
from flow_grpo.algorithm.groups.dynamic_sampling import DynamicSampling
from flow_grpo.algorithm.groups.metrics import (
    camera_metrics,
    group_metrics,
    reward_metrics,
    rule_metrics,
    server_metrics,
)
from flow_grpo.algorithm.groups.subset import narrow
from flow_grpo.algorithm.rollout.collector import Collector
from flow_grpo.algorithm.update.statistics import check_averaged
from flow_grpo.algorithm.update.updater import Updater
from flow_grpo.cost.forward_count import ForwardCount
from flow_grpo.data.splits import Split
from flow_grpo.judging import power
from flow_grpo.judging.changes import as_metrics, at_equal_travel, paired_changes
from flow_grpo.judging.evaluate import Evaluation, Evaluator
from flow_grpo.judging.reward_signal import NoSignalError, Signal, measure_signal
from flow_grpo.judging.stop_rules import BrokenPolicyError, broken, check_measured, holding
from flow_grpo.judging.table import means_by_camera
from flow_grpo.judging.verdict import deciding
from flow_grpo.maths.bootstrap import Interval, percentiles
from flow_grpo.maths.keys import key
from flow_grpo.models.files.adapter_files import save_adapter
from flow_grpo.records import ScoredBatch, TrainingBatch
from flow_grpo.reporting.console import Progress
from flow_grpo.reporting.gallery import Gallery
from flow_grpo.reporting.tracker import Tracker
from flow_grpo.run import tail_check
from flow_grpo.run.conclusion import alarm, conclude, rings
from flow_grpo.run.run_state import RunState
from flow_grpo.run.saver import Saver
from flow_grpo.run.starts import CONFIG, begin, end, going_on
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.checkpoints.run_lock import RunLock
from flow_grpo.runtime.clock import Clock, Ledger
from flow_grpo.runtime.ranks import process_group
from flow_grpo.runtime.ranks.process_group import InputError, RankError, World
from flow_grpo.runtime.ranks.start_up import refuse
from flow_grpo.runtime.signals import EndRequest
from flow_grpo.settings.checks import trained_rewards
from flow_grpo.settings.errors import RunStoppedError
from flow_grpo.settings.objectives import traits_of
from flow_grpo.settings.schema import Config, RewardConfig


@dataclasses.dataclass
class Trainer:
    """One run on one rank; every method is a collective call."""

    config: Config
    collector: Collector
    updater: Updater
    evaluator: Evaluator
    state: RunState  # what a checkpoint holds
    tracker: Tracker  # metrics, videos, summary
    progress: Progress  # the console
    world: World
    device: torch.device
    run_folder: Path
    lock: RunLock  # of that folder
    forwards: ForwardCount
    dynamic_sampling: DynamicSampling | None = None
    cameras: tuple[str, ...] = ()  # kind of camera of every training condition, for statistics; () keeps none
    from_own: bool = False  # the run resumes from its own checkpoint, so its state is already saved
    fixed: Evaluator | None = None  # on training conditions that stay the same, sampled as in training
    ledger: Ledger = dataclasses.field(default_factory=Ledger)  # seconds outside of epochs

    def __post_init__(self) -> None:
        self.clock = Clock(self.device)  # of the epoch in progress
        self.state.start_training()
        self.saver = Saver(
            self.state, self.run_folder / "checkpoints", self.config.checkpoint.keep, self.world, is_saved=self.from_own
        )
        self.gallery = Gallery(self.tracker, self.run_folder)
        self.metrics: dict[str, float] = {}
        self.end, self.ended_by = EndRequest(), "num_epochs"  # or max_minutes, a signal, an error
        self._evaluated: tuple[int, Evaluation] | None = None
        self._reward_signal: Signal | None = None
        self._sampler_at_update: dict[str, Any] = self.state.sampler.state_dict()
        tail_check.begin(self)

    @property
    def reward(self) -> RewardConfig:
        """The reward settings of the epoch in progress."""
        return compare.in_epoch(self.config.reward, self.state.finished)

    @property
    def training_data(self) -> Split:
        """The training conditions by index."""
        return cast(Split, self.state.sampler.dataset)

    def run(self) -> int:
        """Train to the end, leave the other ranks, and return the exit code: 0, or 2 where training cannot go on.

        Signals ask for an end after the epoch in progress. After any other error the checkpoint that is being written
        gets the time to be published, and the run's folder stays locked as long as the process lives: a thread may
        still write into it.
        """
        code = 0
        with self.end:
            try:
                if self.world.is_main and not (self.run_folder / CONFIG).exists():
                    begin(self.run_folder)
                sample, ranks = self.config.sample, self.world.data.size
                held, updates = ranks * sample.expanded_batch_size, self.config.train.updates_per_epoch
                of_groups = f"{held // sample.k} conditions x {sample.k} copies"
                self.progress.say(f"an epoch on {ranks} rank(s): {held} samples, {of_groups}, in {updates} update(s)")
                self.progress.say(f"run folder: {self.run_folder}")
                self.train()
                if self.ended_by in ("num_epochs", "max_minutes"):
                    self.finish()
                else:
                    self.leave()
                process_group.shut_down(self.world)
            except RunStoppedError as error:
                code = self.stop(error)
            except Exception:
                self.saver.linger()
                raise
        with contextlib.suppress(OSError):  # all else is done
            self.tracker.log({"time/close_s": self.ledger.since()}, self.state.finished)
        self.lock.release()
        return code

    def train(self) -> None:
        """Evaluate, then train for the remaining epochs."""
        with self.progress:
            self.evaluate_before()
            for epoch in self.epochs():
                self.train_epoch(epoch)

    def train_epoch(self, epoch: int) -> None:
        """Train for one epoch; its samples are freed on return, before the next epoch samples."""
        batches = self.sample()
        gathered = self.gather(batches)
        chosen = self.choose(batches, gathered)
        tail_check.ask_if_due(self, batches[0])
        training_batch = self.compare(chosen)
        self.update(training_batch, epoch)
        self.finish_epoch(epoch)
        self.log(batches)
        self.evaluate_if_due()
        self.save_if_due()

    def epochs(self) -> Iterator[int]:
        """Yield the remaining epochs until the configured time is used up or a signal asks to end."""
        self.state.start_training()
        if self.state.finished >= self.config.num_epochs > 0:
            self.progress.say(
                f"nothing left to train after epoch {self.state.finished}, a larger --config.num_epochs goes on: "
                f"{len(self.evaluator.indices)} conditions are measured again"
            )
        first = self.state.finished
        for epoch in range(first, self.config.num_epochs):
            # By rank 0's clock, and by the first rank with a signal: all must end together.
            seconds = 60 * self.config.max_minutes
            if seconds and self.world.broadcast_text(str(self.state.train_seconds >= seconds)) == "True":
                self.ended_by = "max_minutes"
                break
            if signals := [*filter(None, self.world.all.gather_text(self.end.signal))]:
                self.ended_by = signals[0]
                break
            if epoch == first and self.world.is_main:
                begin(self.run_folder)
            self.tracker.begin()
            self.ledger.book("time/log_s")
            self.clock = Clock(self.device)
            self.metrics = {}
            self.forwards.mark()
            self.world.all.sent.clear()
            device_api.reset_peak_memory(self.device)
            yield epoch
            self.state.count_training()

    def sample(self) -> tuple[ScoredBatch, ...]:
        """Roll out and score this rank's samples of the next epoch."""
        self.progress.start_epoch(rollouts=self.config.sample.expanded_batch_size)
        return self.collector.collect(self.clock)

    def gather(self, batches: Sequence[ScoredBatch]) -> Gathered:
        """Exchange ids and rewards of all samples and check that they are whole groups."""
        gathered = self._gather(batches)
        with self.world.sync_errors("measuring"):
            self.metrics |= reward_metrics(gathered, self.reward.weights)
            self.metrics |= rule_metrics(gathered, self.reward) | camera_metrics(gathered, self.cameras)
        return gathered

    def choose(self, batches: Sequence[ScoredBatch], gathered: Gathered) -> Chosen:
        """Choose the samples to train on: the whole round, or with dynamic sampling the groups that carry a signal."""
        if self.dynamic_sampling is None:
            return compare.everything(batches, gathered, self.world)

        def sample_round(number: int) -> tuple[Sequence[ScoredBatch], Gathered]:
            self.progress.more_rollouts(self.config.sample.expanded_batch_size)
            fresh = self.collector.collect(self.clock, f"resample #{number}")
            return fresh, self._gather(fresh)

        chosen, metrics = self.dynamic_sampling.choose(
            batches, gathered, sample_round, reward=self.reward, shortages=self.state.shortages
        )
        self.metrics |= metrics
        return chosen

    def compare(self, chosen: Chosen) -> TrainingBatch:
        """Turn rewards into advantages within groups and take this rank's own rows, all or those of `train.copies`."""
        with self.world.sync_errors("comparing"):
            compared = compare.advantages(
                chosen.gathered,
                self.reward,
                k=self.config.sample.k,
                floors=self.collector.rewards.floors,
                adv_clip=self.config.train.adv_clip,
            )
            self.metrics["train/zero_std_ratio"] = float(compared.flat.float().mean())
            self.metrics["reward/advantage_abs"] = float(compared.advantages.abs().mean())
            self.metrics |= percentiles("reward/advantage_p", compared.advantages)
            if self.dynamic_sampling is None:  # else logged for the first round by dynamic sampling
                found = len(compared.gids), int(compared.flat.sum()), int(compared.incomplete.sum())
                self.metrics |= group_metrics(*found)
            if self.config.dynamic_sampling.skip_step_if_all_flat and not compared.advantages.any():
                compared = dataclasses.replace(compared, weights=torch.zeros_like(compared.weights))
        if self.config.train.copies:
            chosen, compared = narrow(chosen, compared, self.config.train.copies, self.world)
        with self.world.sync_errors("comparing"):
            return compare.own_rows(chosen, compared, self.world)

    def update(self, batch: TrainingBatch, epoch: int) -> None:
        """Take the epoch's gradient steps."""
        self.world.begin_phase("update")
        plan = self.updater.plan(batch, epoch)
        self.progress.start_update(plan.passes)
        probe = self.config.debug or self._evaluation_is_due(epoch + 1)
        with self.clock.phase("update"):
            self.metrics |= self.updater.run(batch, plan, self.state.history, probe=probe)
        check_averaged(self.state.history.norms, self.world)

    def finish_epoch(self, epoch: int) -> None:
        """Mark an epoch as finished: checkpoints saved from here on contain its update."""
        self.state.finished = epoch + 1
        self._sampler_at_update = self.state.sampler.state_dict()

    def log(self, batches: Sequence[ScoredBatch]) -> None:
        """Record the finished epoch's metrics and, when due, videos of its samples."""
        step, every = self.state.finished, self.config.log_videos_every
        self.metrics |= self.clock.metrics() | self.ledger.take()
        self.ledger.since()  # the epoch's own
        seconds = self.metrics["time/epoch_s"]
        rounds = 1 + self.metrics.get("dyn/resample_rounds", 0.0)
        own = dict(zip(("forwards", "operations"), self.forwards.since_mark(), strict=True))
        forwards, operations = (float(n.sum()) for n in self.world.data.all_gather_scalars(own).values())
        forwards -= self.metrics.get("system/tail_forward_equivalents", 0.0)
        self.state.forward_equivalents += forwards
        self.metrics |= server_metrics(self.collector.rewards.stats(), self.world)
        self.metrics |= self.collector.attention_kept()
        self.metrics |= {f"system/memory_{name}_gib": gib for name, gib in device_api.memory(self.device).items()}
        self.metrics |= {
            "system/forward_equivalents": self.state.forward_equivalents,
            "system/forward_equivalents_per_sample": forwards
            / (self.config.sample.expanded_batch_size * self.world.data.size),
            "system/samples_per_s": sum(map(len, batches)) * self.world.data.size * rounds / seconds,
        }
        if operations:
            rate = operations / self.world.all.size / seconds
            self.metrics |= {"system/tflops_per_device": rate / 1e12, "system/mfu": rate / self.forwards.rate}
        self.metrics |= self.updater.learning_rates() | self.world.sent_metrics()
        with self.world.sync_errors("logging"):
            self.tracker.log(self.metrics, step)
            if every and step % every == 0 and self.world.is_main:
                count, k = self.config.eval.videos, self.config.sample.k
                weights = compare.in_epoch(self.config.reward, step - 1).weights  # `self.reward` is the next epoch's
                self.gallery.training(batches[0], step, count=count, weights=weights, k=k)

    def evaluate_if_due(self) -> None:
        """Measure the held-out conditions every `eval.every` epochs, end the epoch's line, and ask `train.stop_if`."""
        measured = dict(self.metrics)
        if self._evaluation_is_due(self.state.finished):
            evaluation = self.evaluate()
            changes = self.changes(evaluation)
            measured |= evaluation.metrics | alarm(self, evaluation)
            measured |= {name.replace("eval/", "eval_change/"): change.mean for name, change in changes.items()}
        self.progress.finish_epoch(measured)
        found = broken(self.config.train.stop_if, measured, self.state.before or {})
        # Times and memory differ between ranks, which must end together.
        self.state.broken = next(filter(None, self.world.all.gather_text(found)), "")
        self._stop_if_broken()

    def save_if_due(self) -> None:
        """Begin to save every `checkpoint.every` epochs; what the epoch before has begun is published by now."""
        self.ledger.book("time/log_s")
        self.saver.wait()
        if self.state.finished % self.config.checkpoint.every == 0:
            self._begin_saving()
        self.ledger.book("time/save_s")

    def evaluate(self) -> Evaluation:
        """Measure the held-out conditions with the current weights, once per epoch, and record the result."""
        step = self.state.finished
        if self._evaluated is None or self._evaluated[0] != step:
            self.ledger.book("time/log_s")
            evaluation = self.evaluator.run(self.weights())
            table = at_equal_travel(self.state.table_before or evaluation.table, evaluation.table)
            evaluation = dataclasses.replace(evaluation, table=table)
            beside = self._signal() | self._on_fixed_conditions() | {"time/evaluation_s": self.ledger.since()}
            with self.world.sync_errors("logging"):
                held_out = evaluation.metrics | means_by_camera(evaluation.table)
                held_out |= as_metrics(self.changes(evaluation), list(evaluation.metrics)) | alarm(self, evaluation)
                self.tracker.log(held_out | beside, step)
                self.tracker.log_table("eval/presets", evaluation.presets, step)
                self.gallery.evaluation(evaluation.clips, step, before=self.state.before is None)
            self._evaluated = step, evaluation
            self.ledger.book("time/log_s")
        return self._evaluated[1]

    def evaluate_before(self) -> None:
        """Evaluate the starting policy; a resumed run has the result in its checkpoint.

        Raises:
            InputError: `checkpoint.best` or `train.stop_if` names a metric that is not measured.
            NoSignalError: the rewards cannot tell the copies of a group apart.
            BrokenPolicyError: a run that ended by `train.stop_if` is resumed as it was.
        """
        self._stop_if_broken()
        with self.world.sync_errors("logging"):
            self.tracker.log({"time/start_s": self.ledger.since()}, self.state.finished)
        if self.state.before is None:
            first = self.evaluate()
            self.state.before, self.state.table_before = first.metrics, first.table
            self.state.floor = self.evaluator.floor()
            self.state.measured_on = self.evaluator.measured_on
            if self.state.floor:
                with self.world.sync_errors("logging"):
                    seconds = {"time/floor_s": self.ledger.since()}
                    self.tracker.log(self.state.floor | seconds, self.state.finished)
            known = [f"{name} {value:.4g}" for name, value in first.metrics.items() if not name.endswith("_valid")]
            self.progress.say(f"before training: {'  '.join(known)}")
            for words in holding(self.config.train.stop_if, first.metrics).values():
                self.progress.say(f"train.stop_if: {words}, before training already: this rule will not end the run")
            decide = deciding(first.metrics, self.evaluator.names, trained_rewards(self.config))
            spreads = power.measured_spreads(first.table, decide)
            ranks, conditions = self.world.data.size, len(self.evaluator.indices)
            self.progress.say(power.in_words(spreads, conditions, self.evaluator.scenes, ranks))
            heard = self._reward_signal
            if heard and heard.absent and self.config.doctor != "off" and self.config.num_epochs:
                raise NoSignalError(heard)
        elif self.state.finished and self._evaluation_is_due(self.state.finished):
            names = self.tracker.recorded(self.state.finished)
            if self.world.broadcast_text(str(any(name.startswith("eval/") for name in names))) != "True":
                self.evaluate()  # the previous run stopped in this evaluation, for example at a broken video
                self.saver.forget()  # the checkpoint has no score yet
                self.save()
        check_measured(self.config.train.stop_if, [*self.state.before, *["eval/hacked"] * rings(self.config)])
        best = self.config.checkpoint.best
        if best and best.removeprefix("-") not in self.state.before:
            raise InputError(
                f"config.checkpoint.best: got {best!r}, must be a held-out metric of this run, or '-' and one where "
                f"less is better: {', '.join(self.state.before)}"
            )

    def finish(self) -> None:
        """Save, evaluate once more, write the adapter, and conclude with the verdict."""
        self._begin_saving()
        after = self.evaluate()
        with self.weights():
            save_adapter(self.updater.policy, self.run_folder / "adapter", self.world)
        conclude(self, after)

    def leave(self) -> None:
        """Save and close the trackers, after a signal asked to end before the last epoch."""
        self.save()
        with self.world.sync_errors("summary"):
            self.close()
        self.progress.say(
            f"ended by {self.ended_by} after epoch {self.state.finished}, saved; go on with {going_on(self.run_folder)}"
        )

    def close(self) -> None:
        """Record why the run ended, log the seconds that are in no record yet, and close the trackers."""
        if self.world.is_main:
            end(self.run_folder, self.ended_by)
        self.ledger.book("time/finish_s")
        self.tracker.log({"time/finish_s": sum(self.ledger.take().values())}, self.state.finished)
        self.tracker.close()

    def stop(self, error: RunStoppedError) -> int:
        """Keep what the error says is to be kept, print it, leave the other ranks, and return exit code 2."""
        if error.rewind:  # to the end of the last update: a resumed run samples the epoch in progress again
            self.state.sampler.load_state_dict(self._sampler_at_update)
        if error.save:
            self.save()
            self.progress.say(f"saved after epoch {self.state.finished}; go on with {going_on(self.run_folder)}")
        self.ended_by = f"{type(error).__name__} ({error})"
        self.close()
        return refuse(error, self.world)

    def save(self) -> None:
        """Publish a checkpoint of the finished epochs and the sampler's position, unless it is saved already."""
        self._begin_saving()
        self.saver.wait()
        self.ledger.book("time/save_s")

    def _begin_saving(self) -> None:
        if self.saver.is_due:
            self.saver.wait()
            self.state.count_training()
            self.saver.begin(self._score())
            self.state.start_training()  # copying does not count as training

    def _gather(self, batches: Sequence[ScoredBatch]) -> Gathered:
        sample = self.config.sample
        for line in compare.failures(batches, self.collector.rewards.weights):
            self.progress.say(line)
        with self.clock.phase("gather"):
            gathered = compare.gather(batches, self.world)
        if self.config.debug:
            compare.show_gathered(batches, gathered, sample, self.world, self.reward.weights)
        try:
            compare.check(gathered, sample, self.world)
        except (AssertionError, RuntimeError) as error:
            raise RankError(f"gathered samples: {error}") from error  # every rank has the same
        compare.check_faults(batches, gathered, self.reward, self.world)
        return gathered

    def changes(self, evaluation: Evaluation) -> dict[str, Interval]:
        """Return the changes since the evaluation before training; none where its table is not known."""
        before = self.state.table_before
        return {} if before is None else paired_changes(before, evaluation.table)

    def _stop_if_broken(self) -> None:
        if self.state.broken and self.config.train.stop_if:
            raise BrokenPolicyError(self.state.broken, self.state.finished, self.run_folder)

    def _score(self) -> float | None:
        """Return the value of `checkpoint.best` for the current weights, larger is better, if they were evaluated."""
        best = self.config.checkpoint.best
        if not best or self._evaluated is None or self._evaluated[0] != self.state.finished:
            return None
        value = self._evaluated[1].metrics.get(best.removeprefix("-"))  # no condition may have had a value
        return -value if value is not None and best.startswith("-") else value

    def _evaluation_is_due(self, step: int) -> bool:
        return self.config.eval.every > 0 and step % self.config.eval.every == 0

    def _signal(self) -> dict[str, float]:
        """Return how much of the rewards' spread the update can credit, measured on held-out conditions."""
        groups = self.config.eval.signal_groups
        if not groups or not traits_of(self.config).replays_steps:
            return {}
        self._reward_signal = measure_signal(self.collector, self.evaluator.dataset, self.reward.weights, groups=groups)
        self.collector.rewards.stats()  # of these requests, which are not training's
        return self._reward_signal.metrics()

    def _on_fixed_conditions(self) -> dict[str, float]:
        """Return the rewards on fixed training conditions, beside those at the start, and the forwards they took.

        The weights are those of training, without averaging.
        """
        if self.fixed is None:
            return {}
        self.forwards.mark()
        means = self.fixed.run().table.means()
        self.fixed.rewards.stats()  # of these requests, which are not training's
        found = {name: value for name, value in means.items() if name in self.fixed.rewards.weights}
        on = str(key("fixed", str(self.fixed.sampling), str(self.fixed.measured_on)))
        if self.state.fixed_on != on:
            self.state.fixed, self.state.fixed_on = {}, on
        self.state.fixed = found | self.state.fixed
        (forwards,) = self.world.data.all_gather_scalars({"own": self.forwards.since_mark()[0]}).values()
        metrics = {f"fixed/{name}": value for name, value in found.items()}
        metrics |= {f"fixed/{name}_start": self.state.fixed[name] for name in found}
        return metrics | {"system/fixed_forward_equivalents": float(forwards.sum())}

    def weights(self) -> AbstractContextManager[Any]:
        """Return a context that swaps in the weights to evaluate: their moving average if there is one."""
        return contextlib.nullcontext() if self.state.ema is None else self.state.ema.applied()
