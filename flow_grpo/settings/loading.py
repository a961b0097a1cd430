"""From a recipe and the command line to a checked configuration, before anything is loaded."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from ml_collections import ConfigDict
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from flow_grpo.settings.errors import ConfigError, refusal
from flow_grpo.settings.own_code import import_file, why_it_fails
from flow_grpo.settings.schema import KNOBS, Config
from flow_grpo.settings.values import MOST, notation, parse

__all__ = ["ConfigError", "load_config", "to_dict"]

OF_EACH_START = ("resume", "run_name", "output_root", "dry_run")  # knobs that are never taken from an earlier start
PREFIX = "--config."
SCHEMA = TypeAdapter(Config)
# What a value must be, by the type of pydantic's error, with what it adds; of any other type the value's form is wrong.
BOUNDS = {
    "greater_than_equal": "must be at least {ge:.10g}",
    "greater_than": "must be above {gt:.10g}",
    "less_than_equal": "must be at most {le:.10g}",
    "less_than": "must be below {lt:.10g}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "finite_number": "must be a finite number",
    "literal_error": "must be {expected}",
    "string_too_short": "must have at least {min_length} character",
    "value_error": "{error}",
}


def load_config(spec: str, overrides: Sequence[str] = (), kept: Mapping[str, Any] | None = None) -> Config:
    """Return the checked configuration of a recipe.

    Args:
        spec: "FILE:RECIPE"; the recipe is a function of the file that returns a ConfigDict made by `config/base.py`.
        overrides: words of the command line, "--config.sample.k=8" or "--config.sample.k", "8"; a true|false knob
            without a value is true.
        kept: dotted path -> value of the knobs that keep the value of an earlier start instead of the recipe's.

    Raises:
        ConfigError: in one line, for anything that cannot work whatever the number of ranks.
    """
    return _checked(unchecked(spec, overrides, kept))


def unchecked(spec: str, overrides: Sequence[str] = (), kept: Mapping[str, Any] | None = None) -> Config:
    """Return the configuration as `load_config`, whose knobs need not fit one another: what follows may mend that."""
    values = _run_recipe(spec).to_dict()
    paths = set(knob_values(values))
    for path in sorted(paths - set(KNOBS)):
        raise _unknown(path)
    for path in sorted(set(KNOBS) - paths):
        raise ConfigError(f"config.{path}: missing from the recipe; start it from config/base.py's get_config()")
    for path, value in (kept or {}).items():
        _set(values, path, copy.deepcopy(value))
    size = values["sample"]["k"]
    named = _override(values, overrides)
    if values["sample"]["num_image_per_prompt"] == size:  # follows k, as in the recipe, unless it was set itself
        values["sample"]["num_image_per_prompt"] = values["sample"]["k"]
    config = _validated(values)
    root, world = config.data.root, config.data.tiny_world
    if world and "data.root" in named and "data.tiny_world" not in named and not Path(root).exists():
        text = f"no such folder; misspelt? To render the recipe's world there add {PREFIX}data.tiny_world={world}"
        raise refusal("data.root", root, f"{text}, for videos of your own {PREFIX}data.tiny_world=")
    return config


def from_dict(plain: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Return the configuration that `to_dict` gave, perhaps of an earlier version; overrides as for `load_config`.

    Knobs that no longer exist are left out, and those that did not exist have their defaults.
    """
    values = to_dict(Config())
    for path, value in knob_values(plain).items():
        if path in KNOBS:
            _set(values, path, value)
    _override(values, overrides)
    return _checked(_validated(values))


def _checked(config: Config) -> Config:
    from flow_grpo.settings.checks import check  # here: it needs torch, and a misspelt knob is refused without

    check(config)
    return config


def _validated(values: dict[str, Any]) -> Config:
    try:
        return SCHEMA.validate_python(values)
    except ValidationError as error:
        raise ConfigError("; AND ".join(str(_refused(found)) for found in error.errors())) from None


def to_dict(config: Config) -> dict[str, Any]:
    """Return a configuration as nested dicts of JSON's own types, so that it equals its copy read from a file."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def knob_values(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted path -> value of every knob that `to_dict` gave, and of whatever is in the place of one."""
    found: dict[str, Any] = {}
    for name, value in plain.items():
        path = f"{prefix}{name}"
        inside = isinstance(value, Mapping) and path not in KNOBS
        found |= knob_values(value, f"{path}.") if inside else {path: value}
    return found


def as_written(values: Mapping[str, Any], *, by_entry: bool = False) -> dict[str, str]:
    """Return knob -> value as JSON, without knobs of a single start; `by_entry` splits tables, as `reward.weights.x`.

    `values` are as from `knob_values`.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name not in OF_EACH_START:
            split = by_entry and isinstance(value, dict)
            found |= {f"{name}.{key}": entry for key, entry in value.items()} if split else {name: value}
    return {name: json.dumps(value, sort_keys=True) for name, value in found.items()}


def differences(*configurations: Mapping[str, str]) -> dict[str, list[str | None]]:
    """Return knob -> its value in each configuration, None where it has none, of the knobs that differ."""
    names = dict.fromkeys(name for one in configurations for name in one)
    found = {name: [one.get(name) for one in configurations] for name in names}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def _run_recipe(spec: str) -> ConfigDict:
    text, _, name = spec.rpartition(":")
    file = Path(text)
    if not text or not name:
        raise ConfigError(f"--config: got {spec!r}, must be FILE:RECIPE; for example config/grpo.py:tiny_recam")
    if not file.is_file() or file.suffix != ".py":
        raise ConfigError(
            f"--config: no Python file {file} in {Path.cwd()}; run from the project's folder or give the full path"
        )
    running = f"recipe file {file}"
    try:
        module = import_file(file)
        own = {n: f for n, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__}
        recipes = {n: f for n, f in own.items() if not n.startswith("_") and not inspect.signature(f).parameters}
        if name in recipes:
            running = f"recipe {spec}"
            settings = recipes[name]()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--config: {why_it_fails(running, file, error)}; correct it or choose another") from error
    if name not in recipes:
        known = ", ".join(sorted(recipes))
        raise ConfigError(f"--config: {text} has no recipe {name!r}{_did_you_mean(name, recipes)}; known are {known}")
    if not isinstance(settings, ConfigDict):
        raise ConfigError(
            f"--config: {spec} returns {type(settings).__name__}, must return the ConfigDict of get_config()"
        )
    return settings


def _override(values: dict[str, Any], words: Sequence[str]) -> set[str]:
    """Set what the words of a command line say, and return the knobs that they name."""
    position, named = 0, set()
    while position < len(words):
        path, equals, value = words[position].removeprefix(PREFIX).partition("=")
        if not words[position].startswith(PREFIX):
            raise ConfigError(f"argument {words[position]!r} is not understood; settings look like {PREFIX}sample.k=8")
        position += 1
        text: str | None = value if equals else None  # None: a flag without a value
        if not equals and position < len(words) and not words[position].startswith("--"):
            text = words[position]
            position += 1
        _set(values, path, _parsed(path, text))
        named.add(path)
    return named


def _parsed(path: str, text: str | None) -> Any:
    kind = _kind(path)
    if kind is None:
        raise _unknown(path)
    text = "true" if text is None and kind is bool else text
    try:
        if text is None:
            raise ValueError
        value = parse(kind, text)
    except ValueError:
        got, form = "no value" if text is None else f"{text!r:.200}", notation(kind)
        raise ConfigError(f"config.{path}: got {got}, must be {form}; pass {PREFIX}{path}={form}") from None
    return dict(sorted(value.items())) if isinstance(value, dict) else value


def _set(values: dict[str, Any], path: str, value: Any) -> None:
    table = table_of(path)
    names = [*table.split("."), path.removeprefix(f"{table}.")] if table else path.split(".")
    try:
        for name in names[:-1]:
            values = values[name]
        values[names[-1]] = value
        if table:  # in the order of a recipe's, wherever the entry came from
            ordered = sorted(values.items())
            values.clear()
            values.update(ordered)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"config.{path}: the recipe has no section that takes it ({' '.join(str(error).split())[:200]}); start it "
            "from config/base.py's get_config()"
        ) from None


def _kind(path: str) -> Any:
    """Return the type of a knob, or of an entry of a table; None for any other path."""
    table = table_of(path)
    if table:
        return get_args(KNOBS[table].kind)[1]
    return KNOBS[path].kind if path in KNOBS else None


def table_of(path: str) -> str:
    """Return the knob of which a path names an entry, whose name may hold dots; "" for any other path."""
    tables = (name for name, knob in KNOBS.items() if isinstance(knob.default, dict))
    return next((table for table in tables if path.startswith(f"{table}.")), "")


def _refused(found: ErrorDetails) -> ConfigError:
    names = [str(part) for part in found["loc"] if not isinstance(part, int)]
    path = ".".join(names[:-2] if names[-1] == "[key]" else names)
    value, limits, form = found["input"], found.get("ctx", {}), notation(_kind(path))
    text = BOUNDS.get(found["type"], f"must be {form}").format_map(limits)
    close = difflib.get_close_matches(str(value), limits.get("expected", "").split("'")[1::2], n=1)
    if close:
        text += f"; did you mean {close[0]!r}?"
    elif unit := limits.get("multiple_of"):
        text += f"; pass {PREFIX}{path}={max(1, round(min(value, MOST) / unit)) * unit}"
    elif ";" not in text:
        text += f"; pass {PREFIX}{path}={form}"
    return refusal(path, value, text)


def _unknown(path: str) -> ConfigError:
    inside = sorted(known for known in KNOBS if known.startswith(f"{path}."))
    if inside:
        return ConfigError(f"config.{path}: is a section, not a knob; its knobs are {', '.join(inside)}")
    same_name = sorted(known for known in KNOBS if known.rpartition(".")[2] == path.rpartition(".")[2])
    hint = f" (did you mean {', '.join(same_name)}?)" if same_name else _did_you_mean(path, KNOBS)
    return ConfigError(f"config.{path}: no such knob{hint}; docs/config.md lists them all")


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
