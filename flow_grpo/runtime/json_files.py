"""JSON files that people, or programs elsewhere, have written: an object, or one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(file: Path, way_out: str) -> Any:
    """Return the content of a JSON file.

    Args:
        file: in UTF-8, with or without a mark of byte order.
        way_out: what to do about a bad one, such as "export it again".

    Raises:
        ValueError: it cannot be read, or is no JSON; names the file.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"file {file} cannot be read ({error}); {way_out}") from error
    try:
        return json.loads(text)
    # A number of thousands of digits is a plain ValueError, brackets without end are a RecursionError.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"file {file} is not JSON ({error}); {way_out}") from error


def read_json_object(file: Path, way_out: str) -> dict[str, Any]:
    """Return the content of a JSON file that holds an object; otherwise as `read_json`."""
    content = read_json(file, way_out)
    if not isinstance(content, dict):
        raise ValueError(f"file {file} holds a {type(content).__name__}, must be a JSON object; {way_out}")
    return content
