"""Does the reward set prefer the true target view to the source view and to noise?

In a group of two each reward's normalised advantage is +1 for the better copy and -1 for the other, or 0 for both where
their rewards differ by less than the noise floor. A set with weights w prefers a view by the weighted mean of those
signs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flow_grpo.algorithm.groups import compare
from flow_grpo.maths.keys import generator
from flow_grpo.maths.reward_rules import gate
from flow_grpo.preflight.doctor.context import DoctorContext
from flow_grpo.preflight.doctor.findings import Finding, finding
from flow_grpo.preflight.doctor.probe import planned_keys
from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.base import RewardSet
from flow_grpo.settings.schema import RewardConfig

CONDITIONS = 2  # whose views the rewards are shown
WRONG_VIEWS = ("source", "noise")  # what a camera that does not move shows; nothing of the scene


@dataclasses.dataclass(frozen=True)
class Preference:
    """What one reward prefers.

    Attributes:
        means: view ("true", "source", "noise") -> mean reward over the conditions with a value, NaN without any.
        signs: wrong view -> mean over conditions of +1 (the true view is better), -1 (worse), 0 (a tie), behind the
            reward's gate.
        valid: share of the true views with a value.
        fault: why measuring failed, or "".
    """

    means: dict[str, float]
    signs: dict[str, float]
    valid: float
    fault: str


def examine_rewards(context: DoctorContext) -> list[Finding]:
    """Return the findings of this module, measured on rank 0; collective call: every rank must call it.

    Raises:
        RuntimeError: on every rank, if rank 0 failed.
    """
    with context.world.sync_errors("the rewards"):
        if not context.world.is_main:
            return []
        shown = _conditions_with_true_view(context)
        if not shown:
            return [finding("reward_order", "no condition has a true view", warn="look at the videos instead")]
        config = context.config.reward
        return check_rewards(preferences(context.rewards, shown, config), _weights_by_epoch(context))


def _conditions_with_true_view(context: DoctorContext) -> list[Condition]:
    """Return a few conditions of one video size, those of the next batch first."""
    data = context.data
    indices = dict.fromkeys([*(key[3] for key in planned_keys(context)), *range(min(len(data), 4 * CONDITIONS))])
    found = [condition for condition in map(data.condition, indices) if condition.target_video is not None]
    return [condition for condition in found if condition.size == found[0].size][:CONDITIONS]


def _weights_by_epoch(context: DoctorContext) -> dict[int, dict[str, float]]:
    """Return the reward weights at the first epoch and at every later knot of their piecewise linear schedules."""
    config, first = context.config.reward, context.epoch
    last = max(first, context.config.num_epochs - 1)
    knots = {min(epoch, last) for points in config.schedules.values() for epoch, _ in points}
    epochs = [first, *sorted(epoch for epoch in knots if epoch > first)]
    return {epoch: compare.in_epoch(config, epoch).weights for epoch in epochs}


def views(conditions: Sequence[Condition]) -> tuple[Tensor, tuple[Condition, ...]]:
    """Return the (3B, 3, T, h, w) true views, sources and noise of B conditions, and the condition of every row."""
    true = [condition.target_video for condition in conditions]
    videos = [video for video in true if video is not None]
    assert len(videos) == len(conditions), "every condition must have a true view"
    noise = [torch.rand(video.shape, generator=generator("doctor", row)) for row, video in enumerate(videos)]
    sources = [condition.need_source() for condition in conditions]
    return torch.stack([*videos, *sources, *noise]).float(), tuple(conditions) * 3


def preferences(rewards: RewardSet, conditions: Sequence[Condition], config: RewardConfig) -> dict[str, Preference]:
    """Return reward name -> what it prefers, behind its gate, on B conditions with a true view."""
    videos, owners = views(conditions)
    results, floors = rewards(videos, owners), rewards.floors
    gated = {name: (result.values, result.valid) for name, result in results.items()}
    groups = torch.arange(len(conditions)).repeat(1 + len(WRONG_VIEWS))
    for name, (holder, threshold) in config.gates.items():
        ours, theirs = results[name], results[holder]
        floor = max(floors[name], config.flat_eps)
        passed = gate(ours.values, ours.valid, theirs.values, theirs.valid, groups, threshold=threshold, floor=floor)
        gated[name] = passed.values, passed.valid
    return {name: _preference(result, *gated[name], floors[name]) for name, result in results.items()}


def _preference(result: RewardResult, gated: Tensor, valid: Tensor, floor: float) -> Preference:
    """Return what one reward prefers.

    Args:
        result: its values of the 3B videos of `views`.
        gated: (3B,) values behind the gate.
        valid: (3B,) bool, of `gated`.
        floor: noise floor of the reward.
    """
    shown = ("true", *WRONG_VIEWS)
    values, known = (dict(zip(shown, part.chunk(len(shown)), strict=True)) for part in (gated, valid))
    signs = {}
    for wrong in WRONG_VIEWS:
        gap = values["true"] - values[wrong]
        sign = torch.where(gap.abs() > floor, gap.sign(), 0.0)
        # A video without a value ranks below one that has a value.
        sign = torch.where(known["true"], torch.where(known[wrong], sign, 1.0), 0.0)
        signs[wrong] = float(sign.mean())
    own = zip(shown, result.values.chunk(len(shown)), result.valid.chunk(len(shown)), strict=True)
    means = {name: float(part[measured].mean()) for name, part, measured in own}
    fault = result.causes[int(result.faults.int().argmax())] if result.faults.any() else ""
    return Preference(means, signs, float(known["true"].float().mean()), fault)


def check_rewards(found: Mapping[str, Preference], by_epoch: Mapping[int, Mapping[str, float]]) -> list[Finding]:
    """Check that every reward can be measured, and that the set prefers the true view to every wrong one.

    Args:
        found: reward name -> what it prefers.
        by_epoch: epoch -> reward name -> weight.
    """
    first = next(iter(by_epoch.values()))
    weights = {name: max((own[name] for own in by_epoch.values()), key=abs) for name in first}
    said = []
    for name, own in found.items():
        means = ", ".join(f"{shown} {value:.3g}" for shown, value in own.means.items())
        said.append(f"{name} ({weights[name]:g}): {means}" + (f" [{own.fault}]" if own.fault else ""))
    broken = [name for name, own in found.items() if own.fault and weights[name]]
    fail = f"{', '.join(broken)} could not be measured: start its server or repair the cause, or drop its weight"
    answers = finding("rewards", "; ".join(said), fail=fail if broken else "", warn=_without_value(found, weights))
    orders = [_order(found, weights, epoch) for epoch, weights in by_epoch.items()]
    return [answers, next((order for order in orders if order.status == "fail"), orders[0])]


def _order(found: Mapping[str, Preference], weights: Mapping[str, float], epoch: int) -> Finding:
    total = sum(abs(weight) for weight in weights.values())
    margins = {
        shown: sum(weights[name] * own.signs[shown] for name, own in found.items()) / total if total else 0.0
        for shown in WRONG_VIEWS
    }
    said = ", ".join(f"over the {shown} by {margin:+.2f}" for shown, margin in margins.items())
    wrong = [shown for shown, margin in margins.items() if not margin > 0]
    way_out = f"copies that show {' or '.join(wrong)} would be reinforced: add a reward that sees the camera"
    said = f"the true view is preferred {said} (of 1) in epoch {epoch}"
    return finding("reward_order", said, fail=way_out if wrong else "")


def _without_value(found: Mapping[str, Preference], weights: Mapping[str, float]) -> str:
    names = [name for name, own in found.items() if own.valid < 1 and (weights[name] or own.fault)]
    way_out = "has no value for some true views: see its causes, and tools/check_sources.py for pose rewards"
    return f"{', '.join(names)} {way_out}" if names else ""
