"""metrics.jsonl and metrics.csv of a run: always written, readable during the run, consistent after a resume.

The JSON lines are the record, one per call. The CSV is derived from them: one row per step, with all its metrics.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path

from flow_grpo.runtime.atomic_file import write_atomically

Row = dict[str, float]
_log = logging.getLogger(__name__)


class MetricFiles:
    """The two files of one run; for one process only.

    They start empty, or keep their content up to and including `resumed_step`. A run killed after that step's
    checkpoint logs some of the step's metrics again; the first record is kept.
    """

    def __init__(self, folder: Path, resumed_step: int | None = None) -> None:
        self.rows: dict[int, Row] = {}  # step -> all its metrics
        self._lines = folder / "metrics.jsonl"
        self._table = folder / "metrics.csv"
        self._columns = {"step": None}  # an ordered set
        kept = [] if resumed_step is None else self._lines_up_to(resumed_step)
        for step, metrics in kept:
            self._merge(step, metrics)
        self._resumed = {} if resumed_step is None else {resumed_step: set(self.rows.get(resumed_step, ()))}
        write_atomically(self._lines, "".join(_line(step, metrics) for step, metrics in kept))
        self._write_table()

    def append(self, metrics: Mapping[str, float], step: int) -> bool:
        """Add metrics to both files, unless a resumed run has recorded them before; return whether they were added."""
        if step in self._resumed and metrics.keys() <= self._resumed[step]:
            return False
        with self._lines.open("a") as file:
            file.write(_line(step, metrics))
        self._merge(step, metrics)
        self._write_table()
        return True

    def _merge(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.setdefault(step, {}).update(metrics)
        self._columns |= dict.fromkeys(metrics)

    def _write_table(self) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows({"step": step, **row} for step, row in self.rows.items())
        write_atomically(self._table, text.getvalue())

    def _lines_up_to(self, last_step: int) -> list[tuple[int, Row]]:
        kept = []
        lines = _read(self._lines, "make it readable") if self._lines.exists() else []
        for number, text in enumerate(lines, start=1):
            record = _record(text)
            if record is None:  # a killed process may leave an incomplete line
                _log.warning("%s: line %d is no record of metrics and is dropped: %.60r", self._lines, number, text)
            elif record[0] <= last_step:
                kept.append(record)
        return kept


def read_rows(file: Path) -> dict[int, Row]:
    """Return step -> all its metrics from a run's metrics.jsonl, NaN where a value was not finite.

    Lines that are no record, such as the last one of a killed or a writing run, are left out.

    Raises:
        ValueError: the file cannot be read, or holds no record at all.
    """
    rows: dict[int, Row] = {}
    for step, metrics in filter(None, map(_record, _read(file, "give the folder of a run"))):
        rows.setdefault(step, {}).update(metrics)
    if not rows:
        raise ValueError(f"{file} holds no record of metrics; wait for the run's first, or give another run")
    return dict(sorted(rows.items()))


def _read(file: Path, way_out: str) -> list[bytes]:
    try:
        return file.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}); {way_out}") from error


def _record(text: bytes) -> tuple[int, Row] | None:
    try:
        record = json.loads(text)
    except ValueError:
        return None
    step = record.pop("step", None) if isinstance(record, dict) else None
    if type(step) is not int or not all(value is None or type(value) in (int, float) for value in record.values()):
        return None
    return step, {name: math.nan if value is None else value for name, value in record.items()}


def _line(step: int, metrics: Mapping[str, float]) -> str:
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return json.dumps({"step": step, **finite}) + "\n"
