"""The end of a finished run: verdict, table, summary, and the videos that a run improved most and least."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flow_grpo.judging.changes import changes_by_camera, with_intervals
from flow_grpo.judging.evaluate import Evaluation, means_by_camera
from flow_grpo.judging.extremes import extreme_clips, measure_of, places
from flow_grpo.judging.verdict import abridged, deciding, in_summary, judge, worse_by_camera
from flow_grpo.reporting.console import print_before_after
from flow_grpo.run.starts import next_commands
from flow_grpo.settings.checks import largest_weights

if TYPE_CHECKING:
    from flow_grpo.run.trainer import Trainer


def conclude(trainer: Trainer, after: Evaluation) -> None:
    """Judge the last evaluation by the one before training, write the summary, and print it (collective call)."""
    state, evaluator, gallery = trainer.state, trainer.evaluator, trainer.gallery
    assert state.before is not None, "evaluate_before() comes first"
    changes, rows = trainer.changes(after), state.before_rows or []
    names, gold = evaluator.names, evaluator.gold is not None
    weights, measure = largest_weights(trainer.config), measure_of(trainer.config, evaluator)
    verdict = judge(changes, names, weights, before=state.before, gold=gold)
    most = trainer.config.eval.videos
    clips = extreme_clips(evaluator, rows, after.rows, measure, most=most, weights=trainer.weights())
    with trainer.world.sync_errors("summary"):
        files = {kind: gallery.extremes(kind, own, state.finished) for kind, own in clips.items()}
        by_camera, cameras_before = changes_by_camera(rows, after.rows), means_by_camera(rows)
        decisive = deciding(changes, names, weights, gold=gold)
        worse = worse_by_camera(by_camera, decisive, names, cameras_before)
        gallery.paths(after.clips)
        gallery.cameras(cameras_before, after.by_camera, by_camera, state.finished)
        trainer.tracker.write_summary(
            {
                "verdict": in_summary(verdict, files["best"], files["worst"], worse),
                "before": state.before,
                "after": with_intervals(after.metrics, changes),
                **({"change_by_camera": by_camera} if by_camera else {}),
                **({"floor": state.floor} if state.floor else {}),
                "measured_on": state.measured_on,
                "train_seconds": state.train_seconds,
            }
        )
        trainer.close()
    trainer.saver.settle()
    print_before_after(state.before, after.metrics, changes, trainer.run_folder, trainer.world, floor=state.floor)
    commands = next_commands(trainer.run_folder, finished=state.finished, makes_videos=trainer.makes_videos)
    cameras = [f"  worse for a kind of camera: {text}" for text in abridged(worse)]
    trainer.progress.say("\n".join([f"verdict: {verdict}", *cameras, *places(files, measure), *commands]))
