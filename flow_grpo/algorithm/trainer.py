"""The verbs of the training loop: sample, gather, compare, update, log; and the evaluations around them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from flow_grpo.algorithm.clock import Clock
from flow_grpo.algorithm.evaluate import Clip, ConditionSource, Evaluation, Evaluator, make_clip, write_clips
from flow_grpo.algorithm.groups import compare
from flow_grpo.algorithm.groups.compare import Chosen, Gathered
from flow_grpo.algorithm.groups.dynamic_sampling import DynamicSampling
from flow_grpo.algorithm.reward_log import camera_metrics, server_metrics
from flow_grpo.algorithm.rollout.collector import Collected, Collector
from flow_grpo.algorithm.run_state import RunState
from flow_grpo.algorithm.update.updater import Updater
from flow_grpo.maths.advantages import CombinedAdvantages
from flow_grpo.models.adapter_files import save_adapter
from flow_grpo.records import TrainingBatch
from flow_grpo.runtime import device as device_door
from flow_grpo.runtime.checkpoints.run_lock import RunLock
from flow_grpo.runtime.ranks.process_group import InputError, RankError, Ranks
from flow_grpo.runtime.reporting.console import Progress, print_before_after
from flow_grpo.runtime.reporting.tracker import Tracker
from flow_grpo.runtime.signals import EndRequest
from flow_grpo.settings.schema import Config, RewardConfig


@dataclasses.dataclass
class Trainer:
    """One run on one rank; every method must be called on every rank.

    Attributes:
        config: the run's configuration.
        collector: samples an epoch.
        updater: moves the weights.
        evaluator: measures held-out conditions.
        state: what a checkpoint holds, and how far the run is.
        tracker: metrics, videos, summary.
        progress: the console.
        ranks: who takes part.
        device: this rank's device.
        run_folder: where the run's files are.
        lock: on that folder, held or not.
        dynamic_sampling: draws further rounds when groups are flat, or None.
        cameras: the kind of camera of every training condition, for statistics; none keeps none.
        conditions: what is trained on, by index, for the doctor; None where nobody asks it.
        from_own: whether it goes on from one of its own checkpoints; from another run's, it has saved nothing yet.
    """

    config: Config
    collector: Collector
    updater: Updater
    evaluator: Evaluator
    state: RunState
    tracker: Tracker
    progress: Progress
    ranks: Ranks
    device: torch.device
    run_folder: Path
    lock: RunLock
    dynamic_sampling: DynamicSampling | None = None
    cameras: tuple[str, ...] = ()
    conditions: ConditionSource | None = None
    from_own: bool = False

    def __post_init__(self) -> None:
        self.clock = Clock(self.device)
        self.metrics: dict[str, float] = {}
        self.end, self.ended_by = EndRequest(), ""
        self._saved = self._position() if self.from_own else None
        self._evaluated: tuple[int, dict[str, float]] | None = None
        self._begun: dict[str, Any] = self.state.sampler.state_dict()

    @property
    def reward(self) -> RewardConfig:
        """The reward settings of the epoch in progress."""
        return compare.in_epoch(self.config.reward, self.state.finished)

    def epochs(self) -> Iterator[int]:
        """Yield the epochs that are left, until the configured time is used up; count the time between."""
        for epoch in range(self.state.finished, self.config.num_epochs):
            if self._out_of_time() or self._asked_to_end():
                break
            self.tracker.begin()
            begun = time.perf_counter()
            self.clock, self.metrics = Clock(self.device), {}
            self._begun = self.state.sampler.state_dict()
            device_door.reset_peak_memory(self.device)
            yield epoch
            self.state.train_seconds += time.perf_counter() - begun
            if self.state.finished % self.config.checkpoint.every == 0:
                self.save()

    def sample(self, epoch: int) -> Collected:
        """Roll out and score this rank's samples of an epoch."""
        self.progress.start_epoch(rollouts=self.config.sample.expanded_batch_size)
        return self._collect(epoch, "sampling")

    def gather(self, collected: Collected) -> Gathered:
        """Exchange the small facts of all samples and check that they are whole groups."""
        gathered = self._gather(collected)
        with self.ranks.sync_errors("measuring"):
            self.metrics |= compare.reward_metrics(gathered, self.reward.weights)
            self.metrics |= compare.rule_metrics(gathered, self.reward) | camera_metrics(gathered, self.cameras)
            if self.dynamic_sampling is None:  # which judges by itself, maybe by another reward
                self.metrics |= compare.group_metrics(self._advantages(gathered))
        return gathered

    def choose(self, collected: Collected, gathered: Gathered, epoch: int) -> Chosen:
        """Decide what to train on: the samples as they are, or by dynamic sampling groups that carry a signal."""
        if self.dynamic_sampling is None:
            return compare.everything(collected.batches, gathered, self.ranks)

        def another_round(number: int) -> tuple[Collected, Gathered]:
            self.progress.more_rollouts(self.config.sample.expanded_batch_size)
            fresh = self._collect(epoch, f"resample #{number}")
            return fresh, self._gather(fresh)

        self.dynamic_sampling.reward = self.reward
        chosen, metrics = self.dynamic_sampling.choose(collected, gathered, another_round)
        self.metrics |= metrics
        return chosen

    def compare(self, chosen: Chosen) -> TrainingBatch:
        """Turn rewards into advantages within groups and take this rank's own rows."""
        with self.ranks.sync_errors("comparing"):
            compared = self._advantages(chosen.gathered)
            self.metrics["train/zero_std_ratio"] = float(compared.flat.float().mean())
            self.metrics["reward/advantage_abs"] = float(compared.advantages.abs().mean())
            if (
                self.dynamic_sampling
                and self.config.dynamic_sampling.skip_step_if_all_flat
                and not compared.advantages.any()
            ):
                compared = dataclasses.replace(compared, weights=torch.zeros_like(compared.weights))
            return compare.own_rows(chosen, compared, self.ranks)

    def update(self, batch: TrainingBatch, epoch: int) -> None:
        """Take the epoch's gradient steps."""
        probe = self.config.debug or self._evaluation_is_due(epoch + 1)
        self.ranks.enter("update")
        self.progress.start_update(self.updater.replays(batch, epoch))
        with self.clock.phase("update"):
            self.metrics |= self.updater.run(batch, epoch=epoch, probe=probe)
        self.state.finished = epoch + 1
        self._begun = self.state.sampler.state_dict()

    def log(self, collected: Collected) -> None:
        """Record the epoch's metrics and videos, and evaluate when it is time."""
        step, every = self.state.finished, self.config.log_videos_every
        seconds = sum(self.clock.seconds.values())
        rounds = 1 + self.metrics.get("dyn/resample_rounds", 0.0)
        samples = len(collected) * self.ranks.world_size * rounds
        metrics = self.metrics | self.clock.metrics()
        metrics["time/epoch_s"] = seconds
        metrics["system/samples_per_s"] = samples / seconds
        metrics |= server_metrics(self.collector.rewards.stats(), self.ranks)
        metrics["train/learning_rate"] = self.config.train.learning_rate
        metrics |= {f"system/memory_{name}_gib": value for name, value in device_door.memory(self.device).items()}
        with self.ranks.sync_errors("logging"):
            self.tracker.log(metrics, step)
            if every and step % every == 0:
                self._show("train", self._training_clips(collected), step)
        held_out = self.evaluate() if self._evaluation_is_due(step) else {}
        self.progress.finish_epoch(metrics | held_out)

    def evaluate(self) -> dict[str, float]:
        """Measure the held-out conditions with the weights as they are, once per state, and record the result."""
        step = self.state.finished
        if self._evaluated is None or self._evaluated[0] != step:
            begun = time.perf_counter()
            evaluation = self.evaluator.run(self._weights())
            with self.ranks.sync_errors("logging"):
                seconds = {"time/evaluation_s": time.perf_counter() - begun}
                self.tracker.log(evaluation.metrics | evaluation.by_camera | seconds, step)
                self._show_presets(evaluation, step)
                self._show("eval", evaluation.clips, step)
            self._evaluated = step, evaluation.metrics
        return self._evaluated[1]

    def evaluate_before(self) -> None:
        """Evaluate the policy training starts from; a resumed run remembers it.

        Raises:
            InputError: `checkpoint.best` is none of what is measured.
        """
        if self.state.before is None:
            self.state.before = self.evaluate()
            self.progress.say(f"before training: {_in_words(self.state.before)}")
        elif self.state.finished and self._evaluation_is_due(self.state.finished) and not self._has_evaluated():
            self.evaluate()  # a held-out file was broken, and is mended
            self._saved = None  # without a score, that was
            self.save()
        best = self.config.checkpoint.best
        if best and best.removeprefix("-") not in self.state.before:
            raise InputError(
                f"config.checkpoint.best: got {best!r}, must be a held-out metric of this run, or '-' and one where "
                f"less is better: {', '.join(self.state.before)}"
            )

    def finish(self) -> None:
        """Save, evaluate once more, and leave the summary, the adapter and the before/after table."""
        assert self.state.before is not None, "evaluate_before() comes first"
        self.save()
        after = self.evaluate()
        with self._weights():
            save_adapter(self.updater.policy, self.run_folder / "adapter", self.ranks)
        with self.ranks.sync_errors("summary"):
            self.tracker.write_summary(self.state.before, after, self.state.train_seconds)
            self.tracker.close()
        print_before_after(self.state.before, after, self.run_folder, self.ranks)

    def leave(self) -> None:
        """Save and close what is open, on the way out before the last epoch."""
        self.save()
        with self.ranks.sync_errors("summary"):
            self.tracker.close()
        self.progress.say(
            f"ended by {self.ended_by} after epoch {self.state.finished}, saved; go on with --config.resume=auto "
            f"--config.run_name={self.run_folder.name}"
        )

    def _collect(self, epoch: int, phase: str) -> Collected:
        return self.collector.collect(epoch, self.clock, lambda: self.ranks.sync_errors(phase))

    def _gather(self, collected: Collected) -> Gathered:
        sample = self.config.sample
        self._say_what_failed(collected)
        with self.clock.phase("gather"):
            gathered = compare.gather(collected.batches, self.ranks)
        if self.config.debug:
            compare.show_gathered(collected.batches, gathered, sample, self.ranks, self.reward.weights)
        try:
            compare.check(gathered, sample, self.ranks)
        except (AssertionError, RuntimeError) as error:
            raise RankError(f"gathered samples: {error}") from error  # every rank has the same
        compare.check_faults(collected.batches, gathered, self.reward, self.ranks)
        return gathered

    def _advantages(self, gathered: Gathered) -> CombinedAdvantages:
        floors = self.collector.rewards.floors
        return compare.advantages(gathered, self.reward, k=self.config.sample.k, floors=floors)

    def rewind(self) -> None:
        """Go back to where the last update left: saved now, a resumed run samples an epoch without one again."""
        self.state.sampler.load_state_dict(self._begun)

    def save(self) -> None:
        """Publish a checkpoint of the finished epochs and of what was drawn since, unless there is one."""
        if self._saved != self._position():
            folder, keep = self.run_folder / "checkpoints", self.config.checkpoint.keep
            self.state.save(folder, keep=keep, ranks=self.ranks, score=self._score())
            self._saved = self._position()

    def _position(self) -> tuple[int, int]:
        return self.state.finished, self.state.sampler.next_step

    def _score(self) -> float | None:
        """Return how good the weights are by `checkpoint.best`, if they were evaluated."""
        best = self.config.checkpoint.best
        if not best or self._evaluated is None or self._evaluated[0] != self.state.finished:
            return None
        value = self._evaluated[1].get(best.removeprefix("-"))  # no condition may have had a value
        return -value if value is not None and best.startswith("-") else value

    def _evaluation_is_due(self, step: int) -> bool:
        return self.config.eval.every > 0 and step % self.config.eval.every == 0

    def _has_evaluated(self) -> bool:
        """Tell whether held-out metrics of the newest state are on record."""
        names = self.tracker.recorded(self.state.finished)
        return self.ranks.broadcast_text(str(any(name.startswith("eval/") for name in names))) == "True"

    def _out_of_time(self) -> bool:
        """Tell whether the configured minutes are used up; rank 0's clock decides for all."""
        limit = 60 * self.config.max_minutes
        return limit > 0 and self.ranks.broadcast_text(str(self.state.train_seconds >= limit)) == "True"

    def _asked_to_end(self) -> bool:
        """Tell whether any rank got a signal to end; all of them then know which."""
        signals = [name for name in self.ranks.gather_text(self.end.signal) if name]
        self.ended_by = signals[0] if signals else ""
        return bool(signals)

    def _weights(self) -> AbstractContextManager[Any]:
        """Return what puts the evaluated weights in place: the average when there is one."""
        return contextlib.nullcontext() if self.state.ema is None else self.state.ema.applied()

    def _say_what_failed(self, collected: Collected) -> None:
        for name in self.collector.rewards.weights:
            causes = [cause for batch in collected.batches for cause in batch.rewards[name].causes if cause]
            if causes:
                self.progress.say(f"reward {name}: {len(causes)} samples of rank 0 have no value, first: {causes[0]}")

    def _training_clips(self, collected: Collected) -> list[Clip]:
        first = collected.batches[0]
        shown = min(len(collected.videos), self.config.eval.videos) if self.ranks.is_main else 0
        return [
            make_clip(
                first.conditions[row],
                collected.videos[row],
                {name: float(result.values[row]) for name, result in first.rewards.items() if result.valid[row]},
            )
            for row in range(shown)
        ]

    def _show(self, group: str, clips: list[Clip], step: int) -> None:
        paths = write_clips(self.run_folder / "videos", f"{group}_{step:06d}", clips)
        for number, (path, clip) in enumerate(zip(paths, clips, strict=True)):
            self.tracker.log_video(f"{group}/video_{number}", path, clip.caption, step)

    def _show_presets(self, evaluation: Evaluation, step: int) -> None:
        if evaluation.presets:
            columns = list(dict.fromkeys(name for row in evaluation.presets for name in row))
            rows = [[row.get(name, "") for name in columns] for row in evaluation.presets]
            self.tracker.log_table("eval/presets", columns, rows, step)


def _in_words(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items() if not name.endswith("_valid"))
