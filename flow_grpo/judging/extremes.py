"""The held-out conditions that a run improved most and least, and their videos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from flow_grpo.judging.changes import ConditionRow
from flow_grpo.judging.evaluate import Evaluator
from flow_grpo.judging.verdict import best_and_worst, direction
from flow_grpo.reporting.clips import Clip
from flow_grpo.settings.schema import Config

SHOWN = 2  # videos of the conditions that a run improved most, and of those that it improved least


def measure_of(config: Config, evaluator: Evaluator) -> str:
    """Return the metric by which conditions improved most and least, without `eval/`."""
    return config.checkpoint.best.removeprefix("-").removeprefix("eval/") or evaluator.names[-1]


def extreme_clips(
    evaluator: Evaluator,
    before: Sequence[ConditionRow],
    after: Sequence[ConditionRow],
    name: str,
    *,
    most: int,
    weights: AbstractContextManager[Any],
) -> dict[str, list[Clip]]:
    """Return "best" and "worst": clips of the conditions that a run improved most and least (collective call).

    Ranks other than 0 get no clips.

    Args:
        evaluator: samples them once more.
        before: rows of the evaluation before training.
        after: rows of the present one.
        name: the metric, see `measure_of`.
        most: clips of each kind; at most `SHOWN`.
        weights: context entered while sampling.
    """
    sign = direction(name, evaluator.names) or 1
    best, worst = best_and_worst(before, after, name, sign, min(SHOWN, most))
    clips = evaluator.clips([*best, *worst], after, before, weights)
    return {"best": clips[: len(best)], "worst": clips[len(best) :]}


def places(files: Mapping[str, Sequence[str]], name: str) -> list[str]:
    """Return a line per video of the conditions that improved most ("best") and least ("worst") in a metric."""
    kinds = ((f"improved most in {name}", files["best"]), (f"improved least in {name}", files["worst"]))
    return [f"  {words}: {file}" for words, own in kinds for file in own]
