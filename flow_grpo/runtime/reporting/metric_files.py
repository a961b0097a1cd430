"""metrics.jsonl and metrics.csv of a run: always written, readable while the run goes on, consistent after a resume.

The JSON lines are the record, one per call; the CSV is the same as a table with one row per step, where calls of the
same step share a row and new columns may appear at any time.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from flow_grpo.runtime.atomic_file import write_whole

Row = dict[str, float]
_log = logging.getLogger(__name__)


class MetricFiles:
    """The two files of one run; for one process only.

    Attributes:
        rows: step -> its metrics, everything on record.
    """

    def __init__(self, folder: Path, resumed_step: int | None = None) -> None:
        """Start the files afresh, or keep what they hold up to and including `resumed_step` and drop the rest.

        A run that was killed after it recorded something of that step records it again; the first record stays.
        """
        self.rows: dict[int, Row] = {}
        self._lines = folder / "metrics.jsonl"
        self._table = folder / "metrics.csv"
        self._columns: list[str] = ["step"]
        kept = [] if resumed_step is None else self._lines_up_to(resumed_step)
        for step, metrics in kept:
            self._remember(step, metrics)
        self._again = None if resumed_step is None else (resumed_step, set(self.rows.get(resumed_step, ())))
        write_whole(self._lines, "".join(_line(step, metrics) for step, metrics in kept))
        self._write_table()

    def append(self, metrics: Mapping[str, float], step: int) -> bool:
        """Add a call's metrics to both files, unless a resumed run has them on record; return whether they are new."""
        if self._again is not None and step == self._again[0] and metrics.keys() <= self._again[1]:
            return False
        with self._lines.open("a") as file:
            file.write(_line(step, metrics))
        is_new_row = step not in self.rows
        if self._remember(step, metrics) or not is_new_row:
            self._write_table()
        else:
            with self._table.open("a", newline="") as file:
                csv.writer(file).writerow(self._cells(step))
        return True

    def _remember(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Merge into the step's row; return whether columns were added."""
        self.rows.setdefault(step, {}).update(metrics)
        new = [name for name in metrics if name not in self._columns]
        self._columns += new
        return bool(new)

    def _cells(self, step: int) -> Iterable[float | str]:
        return [step, *(self.rows[step].get(name, "") for name in self._columns[1:])]

    def _write_table(self) -> None:
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(self._columns)
        writer.writerows(self._cells(step) for step in self.rows)
        write_whole(self._table, text.getvalue())

    def _lines_up_to(self, last_step: int) -> list[tuple[int, Row]]:
        kept = []
        for text in self._lines.read_text().splitlines() if self._lines.exists() else ():
            try:
                record = json.loads(text)
                step = record.pop("step")
            except (ValueError, KeyError):  # a killed process may leave half a line
                _log.warning("%s: unreadable line dropped: %.60s", self._lines, text)
                continue
            if step <= last_step:
                kept.append((step, {name: math.nan if value is None else value for name, value in record.items()}))
        return kept


def _line(step: int, metrics: Mapping[str, float]) -> str:
    """One JSON line; JSON knows no NaN or infinity, they become null."""
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return json.dumps({"step": step, **finite}) + "\n"
