"""Read JSON files written by people or other programs; the error for a bad one names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(file: Path, way_out: str) -> Any:
    """Return the content of a UTF-8 JSON file, with or without a byte order mark.

    Raises:
        ValueError: the file cannot be read or is not JSON; the message ends with `way_out`, such as "export it again".
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"file {file} cannot be read ({error}); {way_out}") from error
    try:
        return json.loads(text)
    # An integer of thousands of digits is a plain ValueError, deep nesting a RecursionError.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"file {file} is not JSON ({error}); {way_out}") from error


def read_json_object(file: Path, way_out: str) -> dict[str, Any]:
    """Return the content of a JSON file like `read_json`; ValueError also if it is not a JSON object."""
    content = read_json(file, way_out)
    if not isinstance(content, dict):
        raise ValueError(f"file {file} holds a {type(content).__name__}, must be a JSON object; {way_out}")
    return content
