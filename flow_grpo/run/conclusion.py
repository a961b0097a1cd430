"""The end of a finished run: verdict, table, summary, and the videos that a run improved most and least."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from flow_grpo.judging.changes import changes_by_camera, with_intervals
from flow_grpo.judging.evaluate import Evaluation
from flow_grpo.judging.table import Table, means_by_camera
from flow_grpo.judging.verdict import Verdict, abridged, best_and_worst, direction, judge, plainly, worse_by_camera
from flow_grpo.models.registry import is_video_model
from flow_grpo.reporting.console import print_before_after
from flow_grpo.run.starts import next_commands
from flow_grpo.runtime.atomic_file import write_atomically
from flow_grpo.settings.checks import trained_rewards
from flow_grpo.settings.schema import Config

if TYPE_CHECKING:
    from flow_grpo.run.trainer import Trainer

SHOWN = 2  # videos at most of the conditions that a run improved most, and as many of those that it improved least


def verdict_on(trainer: Trainer, evaluation: Evaluation) -> Verdict:
    """Return the verdict on what an evaluation has found since the one before training."""
    trained = trained_rewards(trainer.config)
    return judge(
        trainer.changes(evaluation),
        trainer.evaluator.names,
        trained,
        before=trainer.state.before or {},
        floors=trainer.evaluator.floors(trainer.state.floor),
        twins={f"eval/{name}" for name in evaluation.table.twins(trained)},
        filmed=not trainer.config.data.prompts,
    )


def rings(config: Config) -> bool:
    """Return whether a run has an alarm: it needs a gold estimator, and ends a run on conditions for tuning only."""
    return bool(config.eval.gold) and config.eval.split == "tune"


def alarm(trainer: Trainer, evaluation: Evaluation) -> dict[str, float]:
    """Return `eval/hacked`, where the run has that alarm and this is not its first evaluation.

    It is 1 where a trained reward got better and the value of the gold estimator worse.
    """
    config = trainer.config
    if not rings(config) or trainer.state.table_before is None:
        return {}
    words = verdict_on(trainer, evaluation).metrics
    rises = any(words.get(f"eval/{name}") == "better" for name in trained_rewards(config))
    return {"eval/hacked": float(rises and words.get(f"eval/{config.eval.gold}") == "worse")}


def conclude(trainer: Trainer, after: Evaluation) -> None:
    """Judge the last evaluation by the one before training, write the summary, and print it (collective call)."""
    config, state, evaluator, gallery = trainer.config, trainer.state, trainer.evaluator, trainer.gallery
    assert state.before is not None, "evaluate_before() comes first"
    changes, before = trainer.changes(after), state.table_before or Table.of_rows([])
    names, floors, verdict = evaluator.names, evaluator.floors(state.floor), verdict_on(trainer, after)
    measure = config.checkpoint.best.removeprefix("-").removeprefix("eval/") or names[-1]
    sign = direction(measure, names) or 1
    best, worst = best_and_worst(before, after.table, measure, sign, min(SHOWN, config.eval.videos))
    clips = evaluator.clips([*best, *worst], before, after.table, trainer.weights())
    with trainer.world.sync_errors("summary"):
        best_files = gallery.extremes("best", clips[: len(best)], state.finished)
        worst_files = gallery.extremes("worst", clips[len(best) :], state.finished)
        by_camera, cameras_before = changes_by_camera(before, after.table), means_by_camera(before)
        worse = worse_by_camera(by_camera, verdict.deciding, names, cameras_before, floors)
        gallery.paths(after.clips)
        gallery.cameras(cameras_before, means_by_camera(after.table), by_camera, state.finished)
        trainer.tracker.write_summary(
            {
                "verdict": dataclasses.asdict(verdict)
                | {"worse_by_camera": worse, "best": best_files, "worst": worst_files},
                "before": state.before,
                "after": with_intervals(after.metrics, changes),
                **({"change_by_camera": by_camera} if by_camera else {}),
                **({"floor": state.floor} if state.floor else {}),
                "measured_on": state.measured_on,
                "train_seconds": state.train_seconds,
                "ended_by": trainer.ended_by,
            }
        )
        if trainer.world.is_main:
            rows = {"before": before.rows(), "after": after.table.rows()}
            write_atomically(trainer.run_folder / "held_out.json", json.dumps(rows) + "\n")
        trainer.close()
    trainer.saver.wait()
    print_before_after(state.before, after.metrics, changes, trainer.run_folder, trainer.world, floor=state.floor)
    makes_videos = is_video_model(config.model.kind)
    commands = next_commands(trainer.run_folder, finished=state.finished, makes_videos=makes_videos)
    lines = [f"ended by {trainer.ended_by} after epoch {state.finished} of {config.num_epochs}"]
    lines += [plainly(verdict.aspects), f"verdict: {verdict.in_words}"]
    lines += [f"  worse for a kind of camera: {text}" for text in abridged(worse)]
    lines += [f"  improved most in {measure}: {file}" for file in best_files]
    lines += [f"  improved least in {measure}: {file}" for file in worst_files]
    trainer.progress.say("\n".join(filter(None, [*lines, *commands])))
