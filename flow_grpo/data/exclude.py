"""Verdicts on the items of a data set, made once and kept in a file: which of them are not to be drawn.

They hold for the pictures that were looked at, so the file says how these were cut, and another cut is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from flow_grpo.data.camera_files import read_json_object
from flow_grpo.runtime.atomic_file import write_atomically
from flow_grpo.settings.schema import DataConfig

Verdicts = dict[str, dict[str, str]]  # scene -> target camera -> "" or what is wrong
_TOOL = "make it with tools/check_sources.py"


def settings_of(data: DataConfig) -> dict[str, object]:
    """Return what of the data settings verdicts depend on."""
    names = ("num_frames", "height", "width", "buckets", "reference")
    return {name: list(value) if isinstance(value := getattr(data, name), tuple) else value for name in names}


def read_verdicts(file: Path, settings: Mapping[str, object]) -> Verdicts:
    """Return the verdicts of a file.

    Args:
        file: as `write_verdicts` makes it.
        settings: from `settings_of`, which must be those of the file.

    Raises:
        ValueError: no such file, another one, or one made with other settings.
    """
    if not file.is_file():
        raise ValueError(f"there is no file {file} of verdicts; {_TOOL}")
    content = read_json_object(file)
    verdicts, made_with = content.get("verdicts"), content.get("settings")
    if not (isinstance(made_with, dict) and isinstance(verdicts, dict) and all(map(_is_row, verdicts.values()))):
        raise ValueError(f"file {file} holds no settings and table scene -> camera -> verdict; {_TOOL}")
    others = [name for name, value in settings.items() if made_with.get(name) != value]
    if others:
        told = ", ".join(f"data.{name} {made_with.get(name)} there and {settings[name]} here" for name in others)
        raise ValueError(f"file {file} was made with {told}; {_TOOL} anew, or go back to those settings")
    return verdicts


def _is_row(row: object) -> bool:
    return isinstance(row, dict) and all(isinstance(text, str) for text in row.values())


def write_verdicts(verdicts: Mapping[str, Mapping[str, str]], settings: Mapping[str, object], file: Path) -> None:
    """Replace a file of verdicts as a whole; OSError when it cannot be written."""
    content = {"settings": settings, "verdicts": verdicts}
    write_atomically(file, json.dumps(content, indent=1, sort_keys=True) + "\n")
