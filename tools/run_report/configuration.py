"""What is particular about a run's configuration: its knobs beside the recipe's and the defaults, and what changed."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

from flow_grpo.settings.errors import ConfigError
from flow_grpo.settings.loading import as_written, differences, knob_values, table_of, to_dict, unchecked
from flow_grpo.settings.schema import KNOBS, Config
from tools.run_folder import Run
from tools.run_report.words import NOTHING

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class ChangedKnob:
    """A knob, or an entry of one that is a table, whose value is not the default or not the recipe's."""

    name: str  # dotted path
    meaning: str  # sentence of the schema
    default: str  # value as JSON, like the following
    recipe: str
    value: str  # the values that the run had one after another
    own: bool  # whether the run departs from its recipe


def settings(run: Run) -> dict[str, str]:
    return _written(to_dict(run.config))


def changes(run: Run) -> dict[str, str]:
    """Return knob -> its values while the run trained, "0.0004 → 0.0001 after epoch 3", where there were several."""
    in_use = []
    for place, start in enumerate(run.starts):
        # A later start may have gone on from before: then what came in between does not count.
        end = min([later.epoch for later in run.starts[place + 1 :]], default=run.finished)
        if start.epoch < end:
            in_use.append((start.epoch, _written(start.config)))
    in_use.append((run.start.epoch, settings(run)))
    found = {}
    for name, values in differences(*(written for _, written in in_use)).items():
        # An earlier version of the program may not have known a knob: that is no change of it. A table's entry was
        # always known: the table had it, or had it not.
        known = [
            (epoch, value or NOTHING)
            for (epoch, _), value in zip(in_use, values, strict=True)
            if value or table_of(name)
        ]
        later = [after for before, after in itertools.pairwise(known) if before[1] != after[1]]
        if later:
            found[name] = known[0][1] + "".join(f" → {value} after epoch {epoch}" for epoch, value in later)
    return found


def knobs(run: Run, asked: str = "") -> tuple[list[ChangedKnob], str]:
    """Return the knobs that are particular, and a sentence when the recipe cannot be compared with.

    A recipe is code: only those of config/ are run, and `asked`, the "FILE:RECIPE" that the user named.
    """
    values, changed = settings(run), changes(run)
    recipe, why_not = _recipe(run.start.recipe, asked)
    found = []
    for name, each in differences(values, _written(to_dict(Config())), recipe or values).items():
        value, default, of_recipe = (one or NOTHING for one in each)
        knob = KNOBS.get(table_of(name) or name)
        meaning, shown = knob.meaning if knob else "", changed.get(name, value)
        found.append(ChangedKnob(name, meaning, default, of_recipe, shown, own=of_recipe != value))
    return found, why_not


def _recipe(spec: str, asked: str) -> tuple[dict[str, str] | None, str]:
    file, _, name = spec.rpartition(":")
    place = next((path for path in (Path(file), ROOT / file) if path.is_file()), None)
    if not name or place is None:
        return None, f"The recipe {spec} is not there any more: the run is compared with the defaults only."
    if spec != asked and not place.resolve().is_relative_to(ROOT / "config"):
        return None, (
            f"The recipe {spec} lies outside of config/ and is code, which a report does not run: the run is compared "
            "with the defaults only."
        )
    try:
        return _written(to_dict(unchecked(f"{place}:{name}"))), ""
    except ConfigError as error:
        return None, f"The recipe {spec} cannot be loaded now ({error}): the run is compared with the defaults only."


def _written(plain: dict[str, Any]) -> dict[str, str]:
    return as_written(knob_values(plain), by_entry=True)
