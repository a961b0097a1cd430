"""Verdicts on the items of a data set, made once and kept in a file: which of them are not to be drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from flow_grpo.data.camera_files import read_json_object
from flow_grpo.runtime.whole_text import write_whole

Verdicts = dict[str, dict[str, str]]  # scene -> target camera -> "" or what is wrong


def read_verdicts(file: Path) -> Verdicts:
    """Return the verdicts of a file.

    Raises:
        ValueError: no such file, or another one.
    """
    if not file.is_file():
        raise ValueError(f"there is no file {file} of verdicts; make it with tools/check_sources.py")
    found = read_json_object(file)
    if not all(isinstance(row, dict) and all(isinstance(text, str) for text in row.values()) for row in found.values()):
        raise ValueError(f"file {file} is no table scene -> camera -> verdict; make it with tools/check_sources.py")
    return found


def write_verdicts(verdicts: Mapping[str, Mapping[str, str]], file: Path) -> None:
    """Replace a file of verdicts as a whole; OSError when it cannot be written."""
    write_whole(file, json.dumps(verdicts, indent=1, sort_keys=True) + "\n")
