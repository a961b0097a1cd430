"""Checks of the held-out evaluation: which change it can see."""

from __future__ import annotations

from collections.abc import Iterator

from flow_grpo.judging import power
from flow_grpo.judging.changes import LEAST_SCENES
from flow_grpo.preflight.doctor.findings import Finding, finding
from flow_grpo.run.trainer import Trainer

BLIND = 0.3  # of a metric's value: the demo changes TransErr by 44 %, most runs change it by less


def examine_evaluation(trainer: Trainer) -> Iterator[Finding]:
    """Check that the evaluation can tell the change that a good run makes from chance."""
    conditions, scenes = len(trainer.evaluator.indices), trainer.evaluator.scenes
    yield check_power(power.usual_spreads(trainer.config), conditions, scenes)


def check_power(spreads: dict[str, float], conditions: int, scenes: int) -> Finding:
    """Check what an evaluation of so many conditions of so many scenes can see; `spreads` as of `judging.power`."""
    few = scenes < LEAST_SCENES
    blind = few or any(power.least_visible(s, conditions, scenes) > BLIND for s in spreads.values())
    way_out = "the verdict may stay unclear: raise eval.num_conditions, and for more scenes data.report_scenes, with "
    way_out += "eval.split='tune' data.tune_scenes"
    return finding("evaluation", power.in_words(spreads, conditions, scenes), warn=way_out if blind else "")
