"""Code of the user's own outside of this package, named by its place: `FILE.py:NAME`, a reward or a policy.

A relative path is relative to the working directory. The file is a module of its own: it is run once per process, and
imports from its folder need that folder on `PYTHONPATH`.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from flow_grpo.settings.errors import refusal


def is_own(name: str) -> bool:
    """Return whether a name is of the form `FILE.py:NAME`."""
    return name.partition(":")[0].endswith(".py")


def load_own(knob: str, name: str, *kinds: type) -> Any:
    """Return the function, class or object of one of `kinds` that `FILE.py:NAME` names; `knob` is for refusals."""
    path, _, attribute = name.partition(":")
    file = Path(path)
    if not file.is_file():
        text = f"must be FILE.py:NAME, and there is no file {path} in {Path.cwd()}; correct the path"
        raise refusal(knob, name, text)
    try:
        module = _imported_once(file.resolve())
    except (Exception, SystemExit) as error:
        text = f"must be a file that can be run, {why_it_fails(path, file, error)}; correct it"
        raise refusal(knob, name, text) from error
    found = getattr(module, attribute, None)
    if not callable(found) and not isinstance(found, kinds):
        objects = [n for n, value in vars(module).items() if isinstance(value, kinds)]
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        known = objects or own
        close = difflib.get_close_matches(attribute, known, n=1) or sorted(known)
        hint = f"; it has {', '.join(close)}" if close else ""
        wanted = " or ".join(["function", "class", *(kind.__name__ for kind in kinds)])
        raise refusal(knob, name, f"must name a {wanted} of {path} after the colon{hint}")
    return found


def check_call(knob: str, name: str, function: Callable[..., Any], *arguments: str) -> None:
    """Raise ConfigError unless a function takes these arguments, by position; refusals show their names."""
    takes = inspect.signature(function)
    try:
        takes.bind(*arguments)
    except TypeError as error:
        text = f"must take ({', '.join(arguments)}) but takes {takes}: {error}; correct its arguments"
        raise refusal(knob, name, text) from None


def import_file(file: Path) -> ModuleType:
    """Run a Python file as a module of its own, and return it; what it raises passes through."""
    name = f"own_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"{file} does not end in .py"  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


_imported_once = functools.cache(import_file)


def why_it_fails(what: str, file: Path, error: BaseException) -> str:
    """Return "WHAT fails in line 3: ..." for an error of a file's own; the line is its last one on the way."""
    files = {str(file), str(file.resolve())}
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    place = f" in line {lines[-1]}" if lines else ""
    # A ConfigDict lists all it holds, as objects with addresses.
    text = re.sub(r" Other fields present: .*?(?=Did you mean|$)", " ", " ".join(str(error).split()))
    return f"{what} fails{place}: {type(error).__name__}: {text}"
