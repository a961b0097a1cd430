"""A run's metrics as series of points, for plots."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = Mapping[int, Mapping[str, float]]
"""Step -> metrics."""


def points(rows: Rows, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the steps at which a metric is finite, (n,) int, and its values, (n,)."""
    steps = np.array([step for step in sorted(rows) if math.isfinite(rows[step].get(name, math.nan))], dtype=int)
    return steps, np.array([rows[int(step)][name] for step in steps])


def values_at(rows: Rows, steps: NDArray[Any], name: str) -> NDArray[Any]:
    """Return a metric at the steps, (n,), NaN where it has no value."""
    return np.array([rows[int(step)].get(name, math.nan) for step in steps])
