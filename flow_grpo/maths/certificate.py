"""Does a cheaper way from the trained step to the video rank the copies of a group as the exact way does?

What follows the trained step has no log-probability: it is part of the environment and may be approximate, as long as
copies are ranked alike. GRPO compares copies inside their group and normalises each group, so agreement is taken group
by group, too: pooled over groups, those with a wide spread would hide the others.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from flow_grpo.maths.bootstrap import mean_interval

LEAST_GROUPS = 24
FEW_GROUPS = 8  # in which a way that falls far short shows it
LEAST_CORRELATION = 0.9  # of the 5 % bound
LEAST_ENDS = 0.8


@dataclasses.dataclass(frozen=True)
class Certificate:
    """How far two ways agree in one reward; NaN without a group that tells its copies apart."""

    correlation: float  # Pearson's inside a group, mean over the groups
    low: float  # its 5 % bound, by bootstrap over the groups
    high: float  # its 95 % bound
    ends: float  # share of the groups' best and worst copies that the other way finds again, or others as good
    pooled: float  # correlation of all deviations from their groups' means: those with a wide spread decide
    groups: int  # in which the exact reward ranges over more than its floor

    @property
    def holds(self) -> bool:
        """Whether the cheaper way may be trained on, as far as enough groups tell."""
        return self.groups >= LEAST_GROUPS and self.low >= LEAST_CORRELATION and self.ends >= LEAST_ENDS

    @property
    def falls_short(self) -> bool:
        """Whether it may not, beyond the luck of the groups: one or two odd ones of a few pull the mean far down."""
        return self.groups >= FEW_GROUPS and self.high < LEAST_CORRELATION


def certify(values: Tensor, exact: Tensor, floor: float = 0.0) -> Certificate:
    """Return how (groups, k) rewards of the cheaper way agree with those of the exact one.

    Copies without a value in either are left out. `floor` is the difference that is measuring noise: groups whose exact
    rewards range over no more are flat, teach nothing and are left out, and copies within it are as good as each other.
    """
    correlations, ends, deviations = [], [], []
    for own, true in zip(values, exact, strict=True):
        both = own.isfinite() & true.isfinite()
        own, true = own[both], true[both]
        if len(true) < 2 or true.max() - true.min() <= floor:
            continue
        one, other = own - own.mean(), true - true.mean()
        correlations.append(_cosine(one, other))
        deviations.append(torch.stack([one, other]))
        best, worst = true[own.argmax()] >= true.max() - floor, true[own.argmin()] <= true.min() + floor
        ends += [float(best), float(worst)]
    found = mean_interval(correlations, range(len(correlations)), level=0.9)
    share = math.fsum(ends) / max(1, len(ends))
    pooled = _cosine(*torch.cat(deviations, dim=1)) if deviations else math.nan
    return Certificate(found.mean, found.low, min(found.high, 1.0), share, pooled, len(correlations))


def _cosine(one: Tensor, other: Tensor) -> float:
    norm = float(one.norm() * other.norm())
    return float(one @ other) / norm if norm else 0.0
