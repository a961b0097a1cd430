"""Does the reward set prefer the true view to what a camera that does not obey would show?

In a group of two each reward's normalised advantage is +1 for the better and -1 for the other, or 0 for both where it
cannot tell them apart; so a set with weights w prefers one by the weighted mean of those signs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flow_grpo.algorithm.findings import Finding, finding
from flow_grpo.maths.keys import generator
from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.base import RewardSet

SPOILED = ("source", "noise")  # shown in place of the true view: the camera stayed where it was; nothing at all


@dataclasses.dataclass(frozen=True)
class Preference:
    """What a reward says of the true views beside spoiled ones.

    Attributes:
        means: what is shown ("true", "source", "noise") -> mean over the conditions with a value, NaN without any.
        signs: spoiled video -> mean over conditions of +1 (the true view is better), -1 (worse), 0 (no telling).
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


def preferences(rewards: RewardSet, conditions: Sequence[Condition]) -> dict[str, Preference]:
    """Return reward name -> what it prefers, measured on B conditions with a true view."""
    videos, asked = fixture(conditions)
    results, floors = rewards(videos, asked), rewards.floors
    return {name: _preference(result, len(conditions), floors[name]) for name, result in results.items()}


def check_rewards(found: Mapping[str, Preference], weights: Mapping[str, float]) -> list[Finding]:
    """Judge the set: every reward answers, and together they prefer the true view to each spoiled one.

    Args:
        found: reward name -> what it prefers.
        weights: reward name -> weight in training.
    """
    said = []
    for name, own in found.items():
        means = ", ".join(f"{shown} {value:.3g}" for shown, value in own.means.items())
        said.append(f"{name} ({weights[name]:g}): {means}" + (f" [{own.fault}]" if own.fault else ""))
    broken = [name for name, own in found.items() if own.fault and weights[name]]
    fail = f"{', '.join(broken)} could not be measured: start its server or mend the cause, or drop its weight"
    answers = finding("rewards", "; ".join(said), fail=fail if broken else "", warn=_silent(found, weights))
    return [answers, _order(found, weights)]


def _order(found: Mapping[str, Preference], weights: Mapping[str, float]) -> Finding:
    total = sum(abs(weight) for weight in weights.values())
    margins = {
        shown: sum(weights[name] * own.signs[shown] for name, own in found.items()) / total if total else 0.0
        for shown in SPOILED
    }
    said = ", ".join(f"over the {shown} by {margin:+.2f}" for shown, margin in margins.items())
    wrong = [shown for shown, margin in margins.items() if not margin > 0]
    way_out = f"copies that show {' or '.join(wrong)} would be reinforced: add a reward that sees the camera"
    return finding("reward_order", f"the true view is preferred {said} (of 1)", fail=way_out if wrong else "")


def _silent(found: Mapping[str, Preference], weights: Mapping[str, float]) -> str:
    silent = [name for name, own in found.items() if own.valid < 1 and (weights[name] or own.fault)]
    way_out = "has no value for some true views: see its causes, and tools/check_sources.py for pose rewards"
    return f"{', '.join(silent)} {way_out}" if silent else ""


def _preference(result: RewardResult, count: int, floor: float) -> Preference:
    values = dict(zip(("true", *SPOILED), result.values.split(count), strict=True))
    valid = dict(zip(("true", *SPOILED), result.valid.split(count), strict=True))
    signs = {}
    for shown in SPOILED:
        gap = values["true"] - values[shown]
        sign = gap.sign().where(gap.abs() > floor, torch.zeros(()))
        # What has no value falls behind what has one.
        sign = sign.where(valid[shown], torch.ones(())).where(valid["true"], torch.zeros(()))
        signs[shown] = float(sign.mean())
    means = {shown: float(values[shown][valid[shown]].mean()) for shown in values}
    fault = result.causes[int(result.faults.int().argmax())] if result.faults.any() else ""
    return Preference(means, signs, float(valid["true"].float().mean()), fault)
