"""What is particular about a run's configuration: its knobs beside the recipe's and the defaults, and what changed."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flow_grpo.run.starts import OF_EACH_START
from flow_grpo.settings.errors import ConfigError
from flow_grpo.settings.loading import knob_values, to_dict, unchecked
from flow_grpo.settings.schema import KNOBS, Config
from tools.run_report.run_folder import Run
from tools.run_report.words import NOTHING

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Knob:
    """A knob, or an entry of one that is a table, whose value is not the default or not the recipe's.

    Attributes:
        name: of the knob.
        meaning: likewise.
        default: as JSON.
        recipe: likewise, None where it is not known.
        value: likewise, of the run.
        said: the values that the run had one after another, in words, where there were several; else `value`.
    """

    name: str
    meaning: str
    default: str
    recipe: str | None
    value: str
    said: str

    @property
    def own(self) -> bool:
        """Whether the run departs from its recipe."""
        return self.recipe is not None and self.recipe != self.value


@dataclasses.dataclass(frozen=True)
class KnobChange:
    """A knob that a resumed run went on with another value of: the first value, then (finished epochs, value)."""

    name: str
    first: str
    later: list[tuple[int, str]]

    @property
    def said(self) -> str:
        """All values in words: "0.0004 → 0.0001 after epoch 3"."""
        return self.first + "".join(f" → {value} after epoch {epoch}" for epoch, value in self.later)


def changes(run: Run) -> dict[str, KnobChange]:
    """Return the knobs that had several values while the run trained, by name."""
    in_use = _in_use(run)
    found = {}
    for name in dict.fromkeys(name for _, values in in_use for name in values):
        # An earlier version of the program may not have known a knob: that is no change of it.
        known = [(epoch, values.get(name, NOTHING)) for epoch, values in in_use if _has(values, name)]
        differ = [later for before, later in itertools.pairwise(known) if before[1] != later[1]]
        if differ:
            found[name] = KnobChange(name, known[0][1], differ)
    return found


def settings(run: Run) -> dict[str, str]:
    """Return name -> value as JSON of the knobs that the run trained with last, those of a single start left out."""
    return _as_json(knob_values(to_dict(run.config)))


def knobs(run: Run, asked: str = "") -> tuple[list[Knob], str]:
    """Return the knobs that are particular, and a sentence when the recipe cannot be compared with.

    Args:
        run: the run.
        asked: "FILE:RECIPE" that the user named; a recipe is code, and of others only those of config/ are run.
    """
    values, defaults, changed = settings(run), _as_json(knob_values(to_dict(Config()))), changes(run)
    in_recipe, why_not = _recipe(run.start.recipe, asked)
    recipe = None if in_recipe is None else _as_json(in_recipe)
    found = []
    for name in dict.fromkeys([*values, *defaults, *(recipe or ())]):
        value, default = values.get(name, NOTHING), defaults.get(name, NOTHING)
        of_recipe = None if recipe is None else recipe.get(name, NOTHING)
        if value != default or of_recipe not in (None, value):
            said = changed[name].said if name in changed else value
            found.append(Knob(name, _meaning(name), default, of_recipe, value, said))
    return found, why_not


def _recipe(spec: str, asked: str) -> tuple[dict[str, Any] | None, str]:
    """Return the knobs of a recipe as it is now, or None and the reason."""
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
        return knob_values(to_dict(unchecked(f"{place}:{name}"))), ""
    except ConfigError as error:
        return None, f"The recipe {spec} cannot be loaded now ({error}): the run is compared with the defaults only."


def _in_use(run: Run) -> list[tuple[int, dict[str, str]]]:
    """Return (finished epochs, knobs) of the starts whose epochs are on record, in order; the last is as it is now."""
    found = []
    for place, start in enumerate(run.starts):
        # A later start may have gone on from before: then what came in between does not count.
        end = min([later.epoch for later in run.starts[place + 1 :]], default=run.epochs)
        if start.epoch < end:
            found.append((start.epoch, _as_json(knob_values(start.config))))
    return [*found, (run.start.epoch, settings(run))]


def _has(values: Mapping[str, str], name: str) -> bool:
    """Whether a configuration says something of a knob; of a table's entry it always does: it has it, or has it not."""
    return name in values or _knob_of(name) != name


def _as_json(values: Mapping[str, Any]) -> dict[str, str]:
    """Return knobs as JSON, tables by entry, without those that hold for a single start."""
    found = {}
    for name, value in values.items():
        if name in OF_EACH_START:
            continue
        entries = {f"{name}.{key}": entry for key, entry in value.items()} if isinstance(value, dict) else {name: value}
        found |= {key: json.dumps(entry) for key, entry in entries.items()}
    return found


def _knob_of(name: str) -> str:
    """Return the knob that a name belongs to: that of the table for an entry's, else the name itself."""
    places = [place for place, letter in enumerate(name) if letter == "."]
    return next((name[:place] for place in places if name[:place] in KNOBS), name)


def _meaning(name: str) -> str:
    knob = KNOBS.get(_knob_of(name))
    return knob.meaning if knob else ""
