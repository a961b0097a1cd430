"""What is particular about a run's configuration: its knobs beside the recipe's and the defaults."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from flow_grpo.runtime.starts import OF_EACH_START
from flow_grpo.settings.errors import ConfigError
from flow_grpo.settings.loading import knob_values, load_config, to_dict
from flow_grpo.settings.schema import KNOBS, Config
from tools.run_report.run_folder import Run

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Knob:
    """A knob whose value is not the default or not the recipe's; values as JSON, `recipe` None where not known."""

    name: str
    meaning: str
    default: str
    recipe: str | None
    value: str

    @property
    def own(self) -> bool:
        """Whether the run departs from its recipe."""
        return self.recipe is not None and self.recipe != self.value


def knobs(run: Run, asked: str = "") -> tuple[list[Knob], str]:
    """Return the knobs that are particular, and a sentence when the recipe cannot be compared with.

    Args:
        run: the run.
        asked: "FILE:RECIPE" that the user named; a recipe is code, and of others only those of config/ are run.
    """
    values, defaults = knob_values(to_dict(run.config)), knob_values(to_dict(Config()))
    recipe, why_not = _recipe(run.start.recipe, asked)
    found = []
    for name, value in values.items():
        in_recipe = None if recipe is None else recipe.get(name)
        differs = value != defaults[name] or (recipe is not None and value != in_recipe)
        if name not in OF_EACH_START and differs:
            said = None if recipe is None else json.dumps(in_recipe)
            found.append(Knob(name, KNOBS[name].meaning, json.dumps(defaults[name]), said, json.dumps(value)))
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
        return knob_values(to_dict(load_config(f"{place}:{name}"))), ""
    except ConfigError as error:
        return None, f"The recipe {spec} cannot be loaded now ({error}): the run is compared with the defaults only."
