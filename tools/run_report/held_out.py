"""The verdict in a sentence, and the table of held-out metrics before and after training."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from flow_grpo.judging import verdict
from flow_grpo.judging.verdict import AGREEMENT, CAMERA, OTHER, PICTURE, TRUE_VIEW, abridged, plainly, word_of
from flow_grpo.reporting.drawing.plots import worth_a_panel
from flow_grpo.reporting.metric_names import metric_of
from flow_grpo.settings.checks import trained_rewards
from tools.run_folder import Run
from tools.run_report.words import changed, number, pair, tidy

NO_VERDICT = "no verdict"


@dataclasses.dataclass(frozen=True)
class Change:
    """One held-out metric before and after training; NaN for numbers that are not known."""

    name: str  # `eval/` name, or a kind of camera
    meaning: str
    unit: str
    before: float  # before the training of the run, and of that which it began from, if any
    after: float  # at the last evaluation, NaN where there was only that before training
    change: float  # mean over the conditions with a value both times
    low: float  # end of the 95 % interval of the change
    high: float
    floor: float  # what the reference estimator finds on perfect videos
    word: str  # "better", "worse", "unclear", or "" where the better direction is not known
    group: str  # heading under which it belongs

    @property
    def ends(self) -> tuple[str, str]:
        return pair(self.before, self.after)

    @property
    def moved(self) -> str:
        return changed(self.change, self.low, self.high)

    @property
    def percent(self) -> float:
        return 100 * self.change / abs(self.before) if self.before else math.nan


TRAINED = "trained rewards, what equals them, and pictures not compared at equal travel"
GROUPS = (CAMERA, PICTURE, AGREEMENT, TRAINED, "other measurements")


def direction(run: Run, name: str) -> int:
    """Return 1 where more of a held-out metric `eval/...` is better, -1 where less is, 0 where not known."""
    return verdict.direction(name, _measured(run))


def deciding(run: Run, names: Iterable[str]) -> list[str]:
    """Return those of the held-out metrics `eval/...` that decide the verdict."""
    names = verdict.deciding(names, _measured(run), trained_rewards(run.config))
    judgement = run.summary.verdict if run.summary else None  # knows what equals a trained reward
    return [name for name in names if name in judgement.deciding] if judgement and judgement.deciding else names


def _measured(run: Run) -> list[str]:
    return [*run.config.reward.weights, run.config.eval.gold, TRUE_VIEW]


def _steps(run: Run) -> list[int]:
    return [step for step, row in run.rows.items() if any(name.startswith("eval/") for name in row)]


def _began_elsewhere(run: Run) -> bool:
    """Whether "before training" was measured by the run whose checkpoint this one began from."""
    return min(_steps(run), default=0) > run.starts[0].epoch  # a run that measures it does so at its first start


def held_out(run: Run) -> list[Change]:
    """Return every held-out metric, by group, those with a known direction first."""
    steps = _steps(run)
    if not steps:
        return []
    names = [name for name in run.rows[steps[0]] if name.startswith("eval/")]
    changes = [_change(run, name, steps[0], steps[-1]) for name in names]
    changes = [change for change in changes if math.isfinite(change.before) or math.isfinite(change.after)]
    return sorted(changes, key=lambda change: (GROUPS.index(change.group), not change.word))


def camera_changes(run: Run, name: str) -> list[Change]:
    """Return the changes of a held-out metric, one for each kind of camera whose values before and after are known."""
    short, found = name.removeprefix("eval/"), []
    changes = run.summary.change_by_camera if run.summary else {}
    for camera in sorted({key.split("/")[1] for key in run.columns if key.startswith("eval_by_camera/")}):
        values = run.values(f"eval_by_camera/{camera}/{short}")
        change, low, high = (changes.get(camera, {}).get(name, []) + [math.nan] * 3)[:3]
        if _began_elsewhere(run):  # the mean change tells what was before that one's training
            values = [value - change for value in values[-1:] if math.isfinite(change)] + values[-1:]
        if len(values) > 1:
            before, after = values[0], values[-1]
            ends = before, after, change if math.isfinite(change) else after - before, low, high
            found.append(_made(run, name, camera, ends, floor=math.nan, group=name))
    return found


def side_by_side(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the table of the runs that were measured as the first one with a summary was, for the template.

    Its rows are (metric, unit, one (value after training, change) per run, None where a run does not measure it).
    """
    first = next((run for run in runs if run.summary), None)
    if first is None or first.summary is None:
        why = "No run has a summary.json, so none says how it was measured: there is no table."
        return {"alike": [], "runs": [], "rows": [], "without": [why]}
    ours, same, without = first.summary.measured_on, [], []
    for run in runs:
        theirs = run.summary.measured_on if run.summary else {}
        differ = sorted(knob for knob in ours.keys() | theirs.keys() if ours.get(knob) != theirs.get(knob))
        message = ", ".join(f"{knob} {theirs.get(knob)!r} instead of {ours.get(knob)!r}" for knob in differ)
        if run.summary is None:
            without.append(f"{run.name} is left out: it has no summary.json, so it does not say how it was measured.")
        elif differ:
            without.append(
                f"{run.name} is left out: it was measured otherwise than {first.name}, with {message}. "
                "Only runs that were measured on the same conditions in the same way can be compared."
            )
        else:
            same.append(run)
    measured = [{change.name: change for change in held_out(run)} for run in same]
    rows = []
    for name in dict.fromkeys(name for own in measured for name in own):
        found = [own.get(name) for own in measured]
        unit = next(change.unit for change in found if change)
        # All values of a row have the digits that the largest change needs, so that they can be compared.
        most = max([abs(change.change) for change in found if change and math.isfinite(change.change)], default=0.0)
        rows.append((name, unit, [(number(one.after, differ=most), one) if one else None for one in found]))
    return {"alike": same, "runs": [run.name for run in same], "rows": rows, "without": without}


def judged(run: Run) -> list[str]:
    """Return the few held-out metrics that tell most: those that decide the verdict and move, as in curves.png."""
    moving = [change.name for change in held_out(run) if change.before != change.after]
    return worth_a_panel(moving, functools.partial(deciding, run))


def verdict_word(run: Run) -> str:
    return run.summary.verdict.overall if run.summary and run.summary.verdict else NO_VERDICT


def sentences(run: Run) -> tuple[str, str]:
    """Return what the run has achieved, or how far it has come, as a person would say it, and the figures of that."""
    if run.summary is None or run.summary.verdict is None:
        of = f"{run.finished} of {run.config.num_epochs} epochs are on record"
        why = f"it was {run.ended}" if run.ended else f"it is still training, or ended early. {of}"
        return f"The run has no verdict in a summary.json: {why}.", ""
    verdict, conditions = run.summary.verdict, run.summary.measured_on.get("eval.num_conditions", "the")
    words = tidy(verdict.in_words.removeprefix(f"{verdict.overall}: "))  # the word stands before the sentence
    found = [words[:1].upper() + words[1:], f"Measured on {conditions} held-out conditions"]
    if verdict.worse_by_camera:
        found.append(f"Worse for a kind of camera: {tidy('; '.join(abridged(verdict.worse_by_camera)))}")
    found += [f"The run {run.ended}"] if run.ended else []
    return plainly(verdict.aspects), ". ".join([*found, ""])


def _change(run: Run, name: str, first: int, last: int) -> Change:
    before, after = run.rows[first].get(name, math.nan), run.rows[last].get(name, math.nan)
    ends = [
        run.rows[last].get(name.replace("eval/", "eval_change/", 1) + end, math.nan) for end in ("", "_low", "_high")
    ]
    if run.summary:
        before, after = _value(run.summary.before.get(name)), _value(run.summary.after.get(name))
        interval = run.summary.after.get(f"{name}_ci95") or [math.nan, math.nan]
        ends = [ends[0] if math.isfinite(ends[0]) else after - before, *interval]
    elif _began_elsewhere(run):
        before = after - ends[0]
    elif first == last:
        after, ends = math.nan, [math.nan] * 3
    floor = run.values(name.replace("eval/", "eval_floor/", 1))
    values = before, after, *ends
    return _made(run, name, name, values, floor[-1] if floor else math.nan, _group(run, name))


def _made(run: Run, metric: str, label: str, values: Sequence[float], floor: float, group: str) -> Change:
    known, before = metric_of(metric), values[0]
    word = word_of(metric, values[2:], _measured(run), before, floor) if direction(run, metric) else ""
    if label == metric and run.summary and run.summary.verdict:  # it knows all floors
        word = run.summary.verdict.metrics.get(metric, word)
    return Change(label, known.meaning if known else "", known.unit if known else "", *values, floor, word, group)


def _value(found: object) -> float:
    return float(found) if isinstance(found, int | float) else math.nan


def _group(run: Run, name: str) -> str:
    part = verdict.aspect(name)
    if any(f"{name.removeprefix('eval/')}_".startswith(f"{reward}_") for reward in trained_rewards(run.config)):
        return TRAINED
    if part == OTHER or not direction(run, name):
        return GROUPS[-1]
    known = run.summary.verdict.metrics if run.summary and run.summary.verdict else {}
    return TRAINED if name in known and name not in deciding(run, [name]) else part
