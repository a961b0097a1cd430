"""Does the reward set prefer the true view to what a camera that does not obey would show?

In a group of two each reward's normalised advantage is +1 for the better and -1 for the other, or 0 for both where it
cannot tell them apart; so a set with weights w prefers one by the weighted mean of those signs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flow_grpo.maths.keys import generator
from flow_grpo.maths.reward_rules import gate
from flow_grpo.preflight.findings import Finding, finding
from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.base import RewardSet
from flow_grpo.settings.schema import RewardConfig

SPOILED = ("source", "noise")  # shown in place of the true view: the camera stayed where it was; nothing at all


@dataclasses.dataclass(frozen=True)
class Preference:
    """What a reward says of the true views beside spoiled ones.

    Attributes:
        means: what is shown ("true", "source", "noise") -> mean over the conditions with a value, NaN without any.
        signs: spoiled video -> mean over conditions of +1 (the true view is better), -1 (worse), 0 (no telling); behind
            a gate, as that lets them pass.
        valid: share of the true views that have a value.
        fault: why measuring failed, or "".
    """

    means: dict[str, float]
    signs: dict[str, float]
    valid: float
    fault: str


def fixture(conditions: Sequence[Condition]) -> tuple[Tensor, tuple[Condition, ...]]:
    """Return the (3B, 3, T, h, w) true views, sources and noise of B conditions, and the condition of every row."""
    true = [condition.target_video for condition in conditions]
    videos = [video for video in true if video is not None]
    assert len(videos) == len(conditions), "the fixture needs conditions with a true view"
    noise = [torch.rand(video.shape, generator=generator("doctor", row)) for row, video in enumerate(videos)]
    sources = [condition.source_video for condition in conditions]
    return torch.stack([*videos, *sources, *noise]).float(), tuple(conditions) * 3


def preferences(rewards: RewardSet, conditions: Sequence[Condition], config: RewardConfig) -> dict[str, Preference]:
    """Return reward name -> what it prefers behind its gate, measured on B conditions with a true view."""
    videos, asked = fixture(conditions)
    results, floors = rewards(videos, asked), rewards.floors
    seen = {name: (result.values, result.valid) for name, result in results.items()}
    groups = torch.arange(len(conditions)).repeat(1 + len(SPOILED))
    for name, (holder, threshold) in config.gates.items():
        ours, theirs = results[name], results[holder]
        floor = max(floors[name], config.flat_eps)
        passed = gate(ours.values, ours.valid, theirs.values, theirs.valid, groups, threshold=threshold, floor=floor)
        seen[name] = passed.values, passed.valid
    return {name: _preference(result, *seen[name], floors[name]) for name, result in results.items()}


def check_rewards(found: Mapping[str, Preference], by_epoch: Mapping[int, Mapping[str, float]]) -> list[Finding]:
    """Judge the set: every reward answers, and together they prefer the true view to each spoiled one.

    Args:
        found: reward name -> what it prefers.
        by_epoch: epoch -> reward name -> weight, now and wherever a schedule bends.
    """
    first = next(iter(by_epoch.values()))
    weights = {name: max((own[name] for own in by_epoch.values()), key=abs) for name in first}
    said = []
    for name, own in found.items():
        means = ", ".join(f"{shown} {value:.3g}" for shown, value in own.means.items())
        said.append(f"{name} ({weights[name]:g}): {means}" + (f" [{own.fault}]" if own.fault else ""))
    broken = [name for name, own in found.items() if own.fault and weights[name]]
    fail = f"{', '.join(broken)} could not be measured: start its server or mend the cause, or drop its weight"
    answers = finding("rewards", "; ".join(said), fail=fail if broken else "", warn=_silent(found, weights))
    orders = [_order(found, weights, epoch) for epoch, weights in by_epoch.items()]
    return [answers, next((order for order in orders if order.status == "fail"), orders[0])]


def _order(found: Mapping[str, Preference], weights: Mapping[str, float], epoch: int) -> Finding:
    total = sum(abs(weight) for weight in weights.values())
    margins = {
        shown: sum(weights[name] * own.signs[shown] for name, own in found.items()) / total if total else 0.0
        for shown in SPOILED
    }
    said = ", ".join(f"over the {shown} by {margin:+.2f}" for shown, margin in margins.items())
    wrong = [shown for shown, margin in margins.items() if not margin > 0]
    way_out = f"copies that show {' or '.join(wrong)} would be reinforced: add a reward that sees the camera"
    said = f"the true view is preferred {said} (of 1) in epoch {epoch}"
    return finding("reward_order", said, fail=way_out if wrong else "")


def _silent(found: Mapping[str, Preference], weights: Mapping[str, float]) -> str:
    silent = [name for name, own in found.items() if own.valid < 1 and (weights[name] or own.fault)]
    way_out = "has no value for some true views: see its causes, and tools/check_sources.py for pose rewards"
    return f"{', '.join(silent)} {way_out}" if silent else ""


def _preference(result: RewardResult, counted: Tensor, known: Tensor, floor: float) -> Preference:
    """Return what a reward says.

    Args:
        result: its own values of the 3B videos of the fixture.
        counted: (3B,) those that copies are compared by.
        known: (3B,) bool, whether they are valid.
        floor: noise of the reward.
    """
    shown = ("true", *SPOILED)
    values, valid = (dict(zip(shown, part.chunk(len(shown)), strict=True)) for part in (counted, known))
    signs = {}
    for spoiled in SPOILED:
        gap = values["true"] - values[spoiled]
        sign = torch.where(gap.abs() > floor, gap.sign(), 0.0)
        # What has no value falls behind what has one.
        sign = torch.where(valid["true"], torch.where(valid[spoiled], sign, 1.0), 0.0)
        signs[spoiled] = float(sign.mean())
    own = zip(shown, result.values.chunk(len(shown)), result.valid.chunk(len(shown)), strict=True)
    means = {name: float(part[measured].mean()) for name, part, measured in own}
    fault = result.causes[int(result.faults.int().argmax())] if result.faults.any() else ""
    return Preference(means, signs, float(valid["true"].float().mean()), fault)
