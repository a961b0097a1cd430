"""Rules that end a run whose policy is broken: `train.stop_if`, such as "eval_change/target_view_psnr_db<-6"."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from flow_grpo.settings.values import parse_rule


class BrokenPolicyError(ValueError):
    """Training has broken the policy; raised on every rank."""


def broken(rules: Sequence[str], metrics: Mapping[str, float]) -> str:
    """Return the first rule that holds and the value that it holds for, in words, or "".

    Args:
        rules: each METRIC<BOUND or METRIC>BOUND.
        metrics: of one epoch; a metric that is missing or NaN breaks no rule.
    """
    for rule in rules:
        name, below, bound = parse_rule(rule)
        value = metrics.get(name, math.nan)
        if value < bound if below else value > bound:
            return f"{name} is {value:.4g}, {'below' if below else 'above'} {bound:g}"
    return ""
