"""Tables of texts in .csv files: captions of a scene's videos, prompts."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from flow_grpo.runtime.json_files import read_text


def read_table(file: Path, columns: Sequence[str], way_out: str) -> list[dict[str, str]]:
    """Return the rows of a table with a head, column -> text; "" where a line ends early.

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
