"""What an evaluation measured, as one table: columns by name, one row a held-out condition."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flow_grpo.algorithm.groups.metrics import pooled

EQUAL = "equal_travel_"  # columns by a line that is fitted to all rows: `changes.at_equal_travel`


@dataclasses.dataclass(frozen=True)
class Table:
    """N rows in a fixed order."""

    scenes: tuple[str, ...]  # folders, relative to the data set's root
    cameras: tuple[str, ...]  # names of the target cameras; with the scene one names the condition
    presets: tuple[str, ...]  # names of the cameras' motions, "" where there is none
    values: dict[str, Tensor]  # metric -> (N,) fp64, NaN where it could not be measured

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]]) -> Table:
        """Return the table of which `rows` are the rows."""
        scenes, cameras, presets = (tuple(row[name] for row in rows) for name in ("scene", "camera", "preset"))
        names = rows[0]["values"] if rows else ()
        values = {name: torch.tensor([row["values"][name] for row in rows], dtype=torch.float64) for name in names}
        return cls(scenes, cameras, presets, values)

    def rows(self) -> list[dict[str, Any]]:
        """Return "scene", "camera", "preset" and "values" row by row, as checkpoints hold them."""
        labels = zip(self.scenes, self.cameras, self.presets, strict=True)
        return [
            {"scene": scene, "camera": camera, "preset": preset, "values": self.scores(row)}
            for row, (scene, camera, preset) in enumerate(labels)
        ]

    def scores(self, row: int) -> dict[str, float]:
        """Return metric -> value in one row."""
        return {name: float(column[row]) for name, column in self.values.items()}

    def take(self, rows: Sequence[int]) -> Table:
        """Return the table of some rows, in that order."""
        labels = self.scenes, self.cameras, self.presets
        scenes, cameras, presets = (tuple(column[row] for row in rows) for column in labels)
        return Table(scenes, cameras, presets, {name: column[list(rows)] for name, column in self.values.items()})

    def split(self, labels: Sequence[str]) -> dict[str, Table]:
        """Return label -> its rows, sorted by label; rows labelled "" are left out."""
        names = sorted(set(labels) - {""})
        return {name: self.take([row for row, label in enumerate(labels) if label == name]) for name in names}

    def by_camera(self) -> dict[str, Table]:
        """Return kind of camera (its preset, else its name; see `pooled`) -> its rows; no camera is no kind."""
        filmed = self.take([row for row, camera in enumerate(self.cameras) if camera])
        kinds = [preset or camera for preset, camera in zip(filmed.presets, filmed.cameras, strict=True)]
        return filmed.split(pooled(kinds))

    def twins(self, names: Sequence[str]) -> set[str]:
        """Return the columns that equal one of `names` but for scale and offset: the same measurement, named otherwise.

        Told by their values in five rows or more: a line explains all but a ten-thousandth of their variance. Their
        ranks must agree as well, since one row far from all others would draw any two columns into a line.
        """
        found = set()
        for name in (name for name in names if name in self.values):
            for other, column in self.values.items():
                both = torch.stack([self.values[name], column])
                both = both[:, both.isfinite().all(0)]
                if other == name or both.shape[1] < 5 or not both.std(-1).all():
                    continue
                ranks = both.argsort(stable=True).argsort().to(both)
                if both.corrcoef()[0, 1] ** 2 > 0.9999 and ranks.corrcoef()[0, 1] ** 2 > 0.98:
                    found.add(other)
        return found

    def means(self) -> dict[str, float]:
        """Return the mean of every column over the rows that have a value; a column without any is left out."""
        finite = {name: column[column.isfinite()].tolist() for name, column in self.values.items()}
        return {name: math.fsum(values) / len(values) for name, values in finite.items() if values}

    def shares(self) -> dict[str, float]:
        """Return `<name>_valid`, the share of rows with a value, for every column where some have none."""
        valid = {name: column.isfinite().tolist() for name, column in self.values.items()}
        return {f"{name}_valid": sum(rows) / len(rows) for name, rows in valid.items() if not all(rows)}


def common_rows(before: Table, after: Table) -> tuple[list[int], list[int]]:
    """Return the rows in `before` and in `after` of the conditions that both hold, in the order of `after`."""
    first = {condition: row for row, condition in enumerate(zip(before.scenes, before.cameras, strict=True))}
    now = list(enumerate(zip(after.scenes, after.cameras, strict=True)))
    return [first[one] for _, one in now if one in first], [row for row, one in now if one in first]


def means_by_camera(table: Table) -> dict[str, float]:
    """Return `eval_by_camera/<camera>/<name>` -> mean or share for every kind of camera, rare kinds pooled.

    Columns at equal travel are left out: the line is that of all kinds together.
    """
    kinds = {kind: part.means() | part.shares() for kind, part in table.by_camera().items()}
    return {
        f"eval_by_camera/{kind}/{name}": value
        for kind, found in kinds.items()
        for name, value in found.items()
        if not name.startswith(EQUAL)
    }
