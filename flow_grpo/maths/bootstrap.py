"""How sure a mean is: bootstrap over groups of rows that hang together.

Videos made from one source share its difficulties, so sources are drawn, not videos: intervals over videos would be too
narrow. Percentile intervals (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence

import torch

from flow_grpo.maths.keys import generator

DRAWS = 4000
LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean and where it may lie.

    Attributes:
        mean: over all rows; NaN without any.
        low: lower end, NaN where a single group leaves nothing to draw from.
        high: upper end, likewise.
        rows: how many values there were.
        groups: of how many groups.
    """

    mean: float
    low: float
    high: float
    rows: int
    groups: int


def mean_interval(values: Sequence[float], groups: Sequence[Hashable], *, level: float = LEVEL) -> Interval:
    """Return the mean of values with its bootstrap interval; the same for the same input.

    For a paired comparison pass differences: an interval without 0 then says that the two differ.

    Args:
        values: one number a row, finite.
        groups: what each row is drawn with, such as its source video.
        level: share of bootstrap means inside the interval.

    Raises:
        ValueError: as many groups as values are needed, and finite values.
    """
    if len(values) != len(groups):
        raise ValueError(f"bootstrap has {len(values)} values and {len(groups)} groups, must be as many")
    if not all(map(math.isfinite, values)):
        raise ValueError("bootstrap has values that are not finite; leave those rows out and say how many")
    if not values:
        return Interval(math.nan, math.nan, math.nan, 0, 0)
    names = list(dict.fromkeys(groups))
    places = {name: place for place, name in enumerate(names)}
    rows = torch.tensor([places[group] for group in groups])
    numbers = torch.tensor(list(values), dtype=torch.float64)
    sums = torch.zeros(len(names), dtype=torch.float64).index_add(0, rows, numbers)
    counts = torch.zeros(len(names), dtype=torch.float64).index_add(0, rows, torch.ones_like(numbers))
    mean = float(numbers.mean())
    if len(names) < 2:
        return Interval(mean, math.nan, math.nan, len(values), len(names))
    drawn = torch.randint(len(names), (DRAWS, len(names)), generator=generator("bootstrap", len(names)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.quantile(means, ends).tolist()
    return Interval(mean, low, high, len(values), len(names))
