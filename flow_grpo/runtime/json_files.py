"""Read text and JSON files written by people or other programs; the error for a bad one names the file."""

from __future__ import annotations

import errno
import json
import stat
from pathlib import Path
from typing import Any


def regular_file(file: Path) -> Path:
    """Return a path that can be opened; FileNotFoundError also for a pipe, which would be waited for without end."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise FileNotFoundError(errno.ENOENT, "no regular file", str(file))
    return file


def read_text(file: Path, way_out: str) -> str:
    """Return the content of a UTF-8 file, with or without a byte order mark, line ends unchanged.

    Raises:
        ValueError: the file cannot be read; the message ends with `way_out`, such as "export it again".
    """
    try:
        return regular_file(file).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"file {file} cannot be read ({error}); {way_out}") from error


def read_json(file: Path, way_out: str) -> Any:
    """Return the content of a JSON file like `read_text`.

    Raises:
        ValueError: the file cannot be read, is not JSON, or gives a key of an object twice.
    """
    text = read_text(file, way_out)
    try:
        return json.loads(text, object_pairs_hook=_unique)
    # An integer of thousands of digits is a plain ValueError, deep nesting a RecursionError.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"file {file} is not JSON ({error}); {way_out}") from error


def read_json_object(file: Path, way_out: str) -> dict[str, Any]:
    """Return the content of a JSON file like `read_json`; ValueError also if it is not a JSON object."""
    content = read_json(file, way_out)
    if not isinstance(content, dict):
        raise ValueError(f"file {file} holds a {type(content).__name__}, must be a JSON object; {way_out}")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"key {name!r:.60} comes twice")
        found[name] = value
    return found
