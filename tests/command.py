"""Command lines of the programs that take a recipe."""

from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def command(knobs: Mapping[str, object], *more: str, recipe: str = "tiny_recam", **changes: object) -> list[str]:
    """Return the words for a recipe with knobs by name; `changes` win over them, with `__` for the dot of a name."""
    given = {**knobs} | {name.replace("__", "."): value for name, value in changes.items()}
    return ["--config", f"{ROOT}/config/grpo.py:{recipe}", *more, *(f"--config.{n}={v}" for n, v in given.items())]
