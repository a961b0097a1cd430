"""From a recipe and the command line to a checked configuration, before anything is loaded.

`config/base.py` holds the defaults, `config_types.py` names and types, `config_checks.py` the bounds.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.util
import inspect
import json
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from ml_collections import ConfigDict

from flow_grpo.settings.checks import check, check_world
from flow_grpo.settings.errors import ConfigError
from flow_grpo.settings.schema import Config
from flow_grpo.settings.values import KINDS

__all__ = ["ConfigError", "check_world", "load_config", "to_dict"]

PREFIX = "--config."


def load_config(spec: str, overrides: Sequence[str] = ()) -> Config:
    """Return the checked configuration of a recipe.

    Args:
        spec: "FILE:RECIPE"; the recipe is a function of the file that returns a ConfigDict made by `config/base.py`.
        overrides: the command line's words "--config.sample.k=8" or "--config.sample.k", "8"; a flag that takes true or
            false may stand alone.

    Raises:
        ConfigError: in one line, for anything that cannot work whatever the number of ranks.
    """
    settings = _run_recipe(spec)
    for path, text in _assignments(overrides):
        _override(settings, path, text)
    config: Config = _typed(Config, settings.to_dict())
    check(config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Return a configuration as nested dicts of JSON's own types, so that it equals its copy read from a file."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def _run_recipe(spec: str) -> ConfigDict:
    file, _, name = spec.rpartition(":")
    if not file or not name:
        raise ConfigError(f"--config: got {spec!r}, must be FILE:RECIPE; for example config/grpo.py:tiny_recam")
    recipes = _recipes(Path(file))
    if name not in recipes:
        raise ConfigError(
            f"--config: {file} has no recipe {name!r}{_did_you_mean(name, recipes)}; known are {_listed(recipes)}"
        )
    try:
        settings = recipes[name]()
    except Exception as error:
        raise _recipe_fails(f"recipe {spec}", Path(file), error) from error
    if not isinstance(settings, ConfigDict):
        raise ConfigError(
            f"--config: {spec} returns {type(settings).__name__}, must return the ConfigDict of get_config()"
        )
    return settings


def _recipes(path: Path) -> dict[str, Callable[[], object]]:
    """Return the public functions that a recipe file defines itself and that can be called without arguments."""
    spec = importlib.util.spec_from_file_location(f"recipes_of_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(
            f"--config: no Python file {path} in {Path.cwd()}; run from the project's folder or give the full path"
        )
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _recipe_fails(f"recipe file {path}", path, error) from error
    own = {n: f for n, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__}
    return {n: f for n, f in own.items() if not n.startswith("_") and not inspect.signature(f).parameters}


def _recipe_fails(what: str, file: Path, error: Exception) -> ConfigError:
    """Return the error to raise for a recipe's own, with the last line of its file that was on the way."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    place = f" in line {lines[-1]}" if lines else ""
    # A ConfigDict lists all it holds, as objects with addresses.
    text = re.sub(r" Other fields present: .*?(?=Did you mean|$)", " ", " ".join(str(error).split()))
    return ConfigError(f"--config: {what} fails{place}: {type(error).__name__}: {text}; correct it or choose another")


def _assignments(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield (path, text) of every override; the text is None for a flag that stands alone."""
    position = 0
    while position < len(words):
        path, equals, text = words[position].removeprefix(PREFIX).partition("=")
        if not words[position].startswith(PREFIX):
            raise ConfigError(f"argument {words[position]!r} is not understood; settings look like {PREFIX}sample.k=8")
        position += 1
        if equals:
            yield path, text
        elif position < len(words) and not words[position].startswith("--"):
            yield path, words[position]
            position += 1
        else:
            yield path, None


def _override(settings: ConfigDict, path: str, text: str | None) -> None:
    kinds = _kinds(Config)
    section, _, leaf = path.rpartition(".")
    kind = kinds.get(path)
    if kind is None and get_origin(kinds.get(section)) is dict:
        kind = get_args(kinds[section])[1]  # one entry of a table
    if kind is None:
        raise _unknown(path, kinds)
    if text is None and kind is bool:
        text = "true"
    try:
        if text is None:
            raise ValueError
        value = KINDS[kind].parse(text)
    except ValueError:
        got, bound, example = "no value" if text is None else f"{text!r:.200}", KINDS[kind].meaning, KINDS[kind].example
        raise ConfigError(f"config.{path}: got {got}, must be {bound}; for example {PREFIX}{path}={example}") from None
    for name in filter(None, section.split(".")):
        settings = settings[name]
    try:
        settings[leaf] = value
    except ValueError as error:  # a ConfigDict takes no names with dots
        raise ConfigError(f"config.{path}: got {text!r:.200}, must be names without dots; {error}") from None


@functools.cache
def _kinds(cls: Any, prefix: str = "") -> dict[str, Any]:
    """Return the type of every knob by its dotted path."""
    found: dict[str, Any] = {}
    for name, kind in get_type_hints(cls).items():
        section: Any = kind
        found |= _kinds(section, f"{prefix}{name}.") if dataclasses.is_dataclass(kind) else {f"{prefix}{name}": kind}
    return found


def _unknown(path: str, kinds: Mapping[str, Any]) -> ConfigError:
    inside = [known for known in kinds if known.startswith(f"{path}.")]
    if inside:
        return ConfigError(f"config.{path}: is a section, not a knob; its knobs are {_listed(inside)}")
    leaf = path.rpartition(".")[2]
    same_name = [known for known in kinds if known.rpartition(".")[2] == leaf]
    hint = f" (did you mean {_listed(same_name)}?)" if same_name else _did_you_mean(path, kinds)
    return ConfigError(f"config.{path}: no such knob{hint}; config/base.py lists them all")


def _did_you_mean(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _listed(names: Mapping[str, object] | Sequence[str]) -> str:
    return ", ".join(sorted(names))


def _typed(cls: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Build a dataclass from a mapping; every value must be of its field's type, none may lack or be in excess."""
    hints = get_type_hints(cls)
    for name in values:
        if name not in hints:
            raise _unknown(f"{prefix}{name}", _kinds(Config))
    built: dict[str, Any] = {}
    for name, kind in hints.items():
        path = f"{prefix}{name}"
        if name not in values:
            raise ConfigError(f"config.{path}: missing from the recipe; start it from config/base.py's get_config()")
        if dataclasses.is_dataclass(kind):
            built[name] = _typed(kind, values[name], f"{path}.")
            continue
        try:
            built[name] = KINDS[kind].convert(values[name])
        except ValueError:
            bound, example = KINDS[kind].meaning, KINDS[kind].example
            raise ConfigError(
                f"config.{path}: got {values[name]!r:.200}, must be {bound}; for example {PREFIX}{path}={example}"
            ) from None
    return cls(**built)
