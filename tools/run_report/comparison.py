"""Several runs side by side: their knobs, and what was measured on the same conditions in the same way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tools.run_folder import Run
from tools.run_report.held_out import Change, held_out
from tools.run_report.words import number


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A table of several runs."""

    runs: list[str]  # names of the columns
    # (metric, unit, one (value after training, change) per run, None where a run does not measure it)
    rows: list[tuple[str, str, list[tuple[str, Change] | None]]]
    without: list[str]  # sentences about runs that cannot be compared, and why


def compare(runs: Sequence[Run]) -> Comparison:
    """Return the table of the runs that were measured as the first one with a summary was."""
    first = next((run for run in runs if run.summary), None)
    if first is None:
        return Comparison([], [], ["No run has a summary.json, so none says how it was measured: there is no table."])
    same, without = [], []
    for run in runs:
        why = _why_not(first, run)
        same += [] if why else [run]
        without += [f"{run.name} is left out: {why}"] if why else []
    measured = [{change.name: change for change in held_out(run)} for run in same]
    names = list(dict.fromkeys(name for own in measured for name in own))
    rows = []
    for name in names:
        found = [own.get(name) for own in measured]
        unit = next(change.unit for change in found if change)
        # All values of a row have the digits that the largest change needs, so that they can be compared.
        differ = max([abs(change.change) for change in found if change and math.isfinite(change.change)], default=0.0)
        cells = [(number(change.after, differ=differ), change) if change else None for change in found]
        rows.append((name, unit, cells))
    return Comparison([run.name for run in same], rows, without)


def _why_not(first: Run, run: Run) -> str:
    if run.summary is None:
        return "it has no summary.json, so it does not say how it was measured."
    ours, theirs = first.summary.measured_on if first.summary else {}, run.summary.measured_on
    differ = sorted(knob for knob in ours.keys() | theirs.keys() if ours.get(knob) != theirs.get(knob))
    said = [f"{knob} {theirs.get(knob)!r} instead of {ours.get(knob)!r}" for knob in differ]
    return f"it was measured otherwise than {first.name}, with {', '.join(said)}." if said else ""
