"""Cluster-bootstrap confidence intervals of a mean, and the percentiles by which metrics describe a distribution.

Videos made from one source are correlated, so whole sources are resampled; resampling videos would give intervals that
are too narrow. Percentile intervals (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13) of few
groups are too narrow, too: of 95 % they hold 84 with 5 groups. So both ends are moved away from the mean by what t is
wider than the normal distribution, times sqrt(n / (n - 1)) for the bootstrap's variance of n groups (Hesterberg, What
Teachers Should Know About the Bootstrap, 2015, section 4.5). tests/maths/test_bootstrap.py measures the coverage.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from flow_grpo.maths.keys import generator

DRAWS = 4000
LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float  # over all rows; NaN without rows
    low: float  # NaN with too few groups, like the other end
    high: float
    rows: int  # number of values
    groups: int


def mean_interval(
    values: Sequence[float], groups: Sequence[Hashable], *, level: float = LEVEL, least: int = 2
) -> Interval:
    """Return the mean of finite values with its bootstrap interval, deterministic for the same input.

    Each row is resampled with its group, such as its source video; fewer groups than `least` give no interval. For a
    paired comparison pass differences: the two differ significantly if the interval excludes 0.
    """
    assert len(values) == len(groups), "a group for every value"
    assert all(map(math.isfinite, values)), "rows without a value are left out, and counted, by the caller"
    names = {name: place for place, name in enumerate(dict.fromkeys(groups))}
    numbers = torch.tensor(list(values), dtype=torch.float64)
    mean = float(numbers.mean())
    if len(names) < least:
        return Interval(mean, math.nan, math.nan, len(values), len(names))
    rows = torch.tensor([names[group] for group in groups])
    sums = torch.zeros(len(names), dtype=torch.float64).index_add(0, rows, numbers)
    counts = torch.zeros(len(names), dtype=torch.float64).index_add(0, rows, torch.ones_like(numbers))
    drawn = _drawn(len(names))
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.quantile((drawn @ sums) / (drawn @ counts), ends).tolist()
    wider = widening(len(names), level)
    return Interval(mean, mean + wider * (low - mean), mean + wider * (high - mean), len(values), len(names))


def widening(groups: int, level: float = LEVEL) -> float:
    """Return by what the distance of a percentile interval's ends from the mean of `groups` of them is multiplied."""
    share = (1 + level) / 2
    return t_quantile(share, groups - 1) / NormalDist().inv_cdf(share) * math.sqrt(groups / (groups - 1))


def t_quantile(share: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution."""
    from scipy.special import stdtrit  # 0.2 s, which the start of a run does not wait for

    return float(stdtrit(degrees, share))


@functools.lru_cache(maxsize=8)
def _drawn(groups: int) -> Tensor:
    """Return (DRAWS, groups) float64: how often every draw has each group."""
    drawn = torch.randint(groups, (DRAWS, groups), generator=generator("bootstrap", groups))
    ones = torch.ones(drawn.shape, dtype=torch.float64)
    return torch.zeros(drawn.shape, dtype=torch.float64).scatter_add_(1, drawn, ones)


def percentiles(prefix: str, values: Tensor) -> dict[str, float]:
    """Metrics `<prefix>10`, `<prefix>50` and `<prefix>90` of (n,) finite values, interpolated linearly."""
    return {f"{prefix}{percent}": float(values.quantile(percent / 100)) for percent in (10, 50, 90)}
