"""Rules that end a run whose policy is broken: `train.stop_if`, such as "eval_change/target_view_psnr_db<-3"."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from flow_grpo.reporting.metric_names import metric_of
from flow_grpo.runtime.ranks.process_group import InputError
from flow_grpo.settings.errors import RunStoppedError
from flow_grpo.settings.schema import TrainConfig
from flow_grpo.settings.values import parse_rule

_NOT_OF_AN_EPOCH = ("eval_floor", "eval_by_camera")  # sections that rules are not compared with


class BrokenPolicyError(RunStoppedError):
    """Training has broken the policy, by a rule in the words of `broken`; raised on every rank."""

    def __init__(self, rule: str, epoch: int, run_folder: Path) -> None:
        super().__init__(
            f"config.train.stop_if: {rule} after epoch {epoch}: training has broken the policy, all is saved; go back "
            f"with --config.resume={run_folder}/checkpoints/checkpoint_... and a lower train.learning_rate or other "
            "rewards, or pass --config.train.stop_if= to go on"
        )


def check_measured(rules: Sequence[str], held_out: Collection[str]) -> None:
    """Refuse a rule that can never hold, such as one with a misspelt metric, by an InputError.

    The default rules pass: they hold where there is something to measure. Names of single rewards are not looked at,
    but for those of held-out metrics. `held_out` names those of the run, `eval/...`.
    """
    for rule in rules:
        name = parse_rule(rule)[0]
        section, _, own = name.partition("/")
        if section in ("eval", "eval_change"):  # a share `_valid` is recorded only where something has no value
            found = not {f"eval/{own}", f"eval/{own.removesuffix('_valid')}"}.isdisjoint(held_out)
            where = f"the held-out metrics of this run are {', '.join(held_out)}"
        else:
            found = section not in _NOT_OF_AN_EPOCH and metric_of(name) is not None
            where = "docs/metrics.md lists all metrics"
        if not found and rule not in TrainConfig().stop_if:
            raise InputError(f"config.train.stop_if: got {rule!r}, but no epoch has a metric {name}; {where}")


def holding(rules: Sequence[str], metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the rules that hold and their values, in words; NaN breaks no rule."""
    found = {}
    for rule in rules:
        name, below, bound = parse_rule(rule)
        value = metrics.get(name, math.nan)
        if value < bound if below else value > bound:
            found[rule] = f"{name} is {value:.4g}, {'below' if below else 'above'} {bound:g}"
    return found


def broken(rules: Sequence[str], metrics: Mapping[str, float], before: Mapping[str, float]) -> str:
    """Return the first rule that holds in an epoch and did not `before` training, in words, or ""."""
    already = holding(rules, before)
    return next((words for rule, words in holding(rules, metrics).items() if rule not in already), "")
