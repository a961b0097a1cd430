"""Files of verdicts that exclude unusable (scene, target camera) items from training.

Verdicts depend on how videos are cut and resized, so the file records those settings and other settings are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from flow_grpo.runtime.atomic_file import write_atomically
from flow_grpo.runtime.json_files import read_json_object
from flow_grpo.settings.schema import DataConfig

Verdicts = dict[str, dict[str, str]]
"""scene -> target camera -> "" if usable, else the reason to exclude it."""

_TOOL = "make it with tools/check_sources.py"


def settings_of(data: DataConfig) -> dict[str, object]:
    """Return the data settings that verdicts depend on, JSON-able."""
    names = ("num_frames", "height", "width", "buckets", "reference")
    return {name: list(value) if isinstance(value := getattr(data, name), tuple) else value for name in names}


def read_verdicts(file: Path, settings: Mapping[str, object]) -> Verdicts:
    """Return the verdicts of a file written by `write_verdicts` with the same `settings_of` settings.

    Raises:
        ValueError: missing file, not a file of verdicts, or other settings.
    """
    content = read_json_object(file, _TOOL)
    verdicts, made_with = content.get("verdicts"), content.get("settings")
    if not (isinstance(made_with, dict) and isinstance(verdicts, dict) and all(map(_is_row, verdicts.values()))):
        raise ValueError(f"file {file} holds no settings and table scene -> camera -> verdict; {_TOOL}")
    others = [name for name, value in settings.items() if made_with.get(name) != value]
    if others:
        differing = ", ".join(f"data.{name} {made_with.get(name)} there and {settings[name]} here" for name in others)
        raise ValueError(f"file {file} was made with {differing}; {_TOOL} anew, or go back to those settings")
    return verdicts


def _is_row(row: object) -> bool:
    return isinstance(row, dict) and all(isinstance(text, str) for text in row.values())


def write_verdicts(verdicts: Mapping[str, Mapping[str, str]], settings: Mapping[str, object], file: Path) -> None:
    """Write or replace a file of verdicts atomically; OSError if it cannot be written."""
    content = {"settings": settings, "verdicts": verdicts}
    write_atomically(file, json.dumps(content, indent=1, sort_keys=True) + "\n")
