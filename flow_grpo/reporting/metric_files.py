"""metrics.jsonl and metrics.csv of a run: always written, readable during the run, consistent after a resume.

The JSON lines are the record, one per call. The CSV is derived from them: one row per step, with all its metrics. It is
rewritten as a whole only where a metric is new.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path

from flow_grpo.runtime.atomic_file import naming, write_atomically

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
        self._last = self._end = 0  # where the table's last row begins and ends
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
        with naming(self._lines), self._lines.open("a") as file:
            file.write(_line(step, metrics))
        known, latest = len(self._columns), next(reversed(self.rows), -1)
        self._merge(step, metrics)
        intact = self._table.exists() and self._table.stat().st_size == self._end
        if len(self._columns) > known or step < latest or not intact:
            self._write_table()
            return True
        self._last = self._last if step == latest else self._end
        with naming(self._table), self._table.open("r+b") as file:  # the last row alone: other ranks wait
            file.seek(self._last)
            self._end = self._last + file.write(self._row({"step": step, **self.rows[step]}))
            file.truncate()
        return True

    def _merge(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.setdefault(step, {}).update(metrics)
        self._columns |= dict.fromkeys(metrics)

    def _write_table(self) -> None:
        head = self._row({name: name for name in self._columns})
        rows = [head, *(self._row({"step": step, **row}) for step, row in self.rows.items())]
        write_atomically(self._table, b"".join(rows).decode())
        self._end = sum(map(len, rows))
        self._last = self._end - len(rows[-1])

    def _row(self, values: Mapping[str, object]) -> bytes:
        text = io.StringIO()
        csv.DictWriter(text, self._columns).writerow(values)
        return text.getvalue().encode()

    def _lines_up_to(self, last_step: int) -> list[tuple[int, Row]]:
        kept = []
        try:
            lines = self._lines.read_bytes().splitlines() if self._lines.exists() else []
        except OSError as error:
            raise ValueError(f"{self._lines} cannot be read ({error.strerror}); make it readable") from error
        for number, text in enumerate(lines, start=1):
            record = _record(text)
            if record is None:  # a killed process may leave an incomplete line
                _log.warning("%s: line %d is no record of metrics and is dropped: %.60r", self._lines, number, text)
            elif record[0] <= last_step:
                kept.append(record)
        return kept


class MetricReader:
    """A run's metrics.jsonl as it grows: every look reads what is new, without the line that is being written."""

    def __init__(self, file: Path) -> None:
        self.rows: dict[int, Row] = {}  # step -> all its metrics, NaN where a value was not finite
        self.columns: dict[str, dict[int, float]] = {}  # metric -> its finite values by step
        self._file, self._inode, self._at = file, 0, 0

    def look(self) -> None:
        """Take in what is new; ValueError if the file cannot be read, or holds no record at all."""
        try:
            with self._file.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._at:  # another file: a run that was resumed
                    self.rows, self.columns, self._inode, self._at = {}, {}, found.st_ino, 0
                file.seek(self._at)
                text = file.read()
        except OSError as error:
            raise ValueError(f"{self._file} cannot be read ({error.strerror}); give the folder of a run") from error
        self._at += text.rfind(b"\n") + 1
        for step, metrics in filter(None, map(_record, text.splitlines())):
            self.rows.setdefault(step, {}).update(metrics)
            for name, value in metrics.items():
                self.columns.setdefault(name, {}).update({step: value} if math.isfinite(value) else {})
        if not self.rows:
            raise ValueError(f"{self._file} holds no record of metrics; wait for the run's first, or give another run")


def read_rows(file: Path) -> dict[int, Row]:
    """Return step -> all its metrics from a run's metrics.jsonl; ValueError as of `MetricReader.look`."""
    reader = MetricReader(file)
    reader.look()
    return dict(sorted(reader.rows.items()))


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
