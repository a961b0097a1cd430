"""Text, JSON and tables written by people or other programs; the error for a bad file names it."""

from __future__ import annotations

import csv
import errno
import io
import json
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def regular_file(file: Path) -> Path:
    """Check that a path can be opened; FileNotFoundError also for a pipe, whose content never ends."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise FileNotFoundError(errno.ENOENT, "no regular file", str(file))
    return file


def read_text(file: Path, way_out: str) -> str:
    """Read a UTF-8 file, with or without a byte order mark, line ends unchanged.

    Raises:
        ValueError: the file cannot be read; the message ends with `way_out`, such as "export it again".
    """
    try:
        return regular_file(file).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"file {file} cannot be read ({error}); {way_out}") from error


def read_json(file: Path, way_out: str) -> Any:
    """Read a JSON file like `read_text`.

    Raises:
        ValueError: the file cannot be read, is not JSON, or gives a key of an object twice.
    """
    return _parsed(read_text(file, way_out), f"file {file}", way_out)


def read_json_lines(file: Path, way_out: str) -> list[tuple[int, Any]]:
    """Read a file with a JSON value a line, like `read_json`; return the numbers of lines that are not empty beside."""
    lines = enumerate(read_text(file, way_out).split("\n"), 1)
    return [(number, _parsed(line, f"{file}: line {number}", way_out)) for number, line in lines if line.strip()]


def read_json_object(file: Path, way_out: str) -> dict[str, Any]:
    """Read a JSON file like `read_json`; ValueError also if it is not a JSON object."""
    content = read_json(file, way_out)
    if not isinstance(content, dict):
        raise ValueError(f"file {file} holds a {type(content).__name__}, must be a JSON object; {way_out}")
    return content


def read_table(file: Path, columns: Sequence[str], way_out: str) -> list[dict[str, str]]:
    """Read the rows of a .csv table with a head, column -> text; "" where a line ends early.

    Raises:
        ValueError: the file cannot be read (the message ends with `way_out`), lacks one of `columns`, has a line with
            more fields than columns, as an unquoted comma makes them, or a quote that is not closed.
    """
    rows = []
    try:
        reader = csv.DictReader(io.StringIO(read_text(file, way_out), newline=""), restval="", strict=True)
        found = list(reader.fieldnames or ())
        if not set(columns) <= set(found):
            raise ValueError(f"{file} has the columns {found!r:.200}, must have {' and '.join(columns)}; add or rename")
        for row in reader:
            if None in row:  # where DictReader puts what has no column
                raise ValueError(f"{file}: line {reader.line_num} has more fields than columns; put texts in quotes")
            rows.append(row)
    except csv.Error as error:
        raise ValueError(f"{file} is no table ({error}); correct its quotes") from error
    return rows


def _parsed(text: str, what: str, way_out: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    # An integer of thousands of digits is a plain ValueError, deep nesting a RecursionError.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON ({error}); {way_out}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"key {name!r:.60} comes twice")
        found[name] = value
    return found
