"""What the rewards can tell apart: the true target view from source view and noise, and the copies of a group.

In a group of two each reward's normalised advantage is +1 for the better copy and -1 for the other, or 0 for both where
their rewards differ by less than the noise floor. A set with weights w prefers a view by the weighted mean of those
signs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from flow_grpo.judging.reward_signal import Signal, measure_signal
from flow_grpo.maths.certificate import FEW_GROUPS
from flow_grpo.maths.keys import generator
from flow_grpo.maths.reward_rules import gate
from flow_grpo.preflight.doctor.findings import Finding, finding
from flow_grpo.preflight.doctor.probe import planned_keys
from flow_grpo.records import Condition
from flow_grpo.rewards.base import RewardSet
from flow_grpo.run.tail_check import TailRecord, can_ask, finish_by_all_steps, in_knobs, in_words
from flow_grpo.run.trainer import Trainer
from flow_grpo.settings.checks import largest_weights, weights_where_they_turn
from flow_grpo.settings.objectives import traits_of
from flow_grpo.settings.schema import RewardConfig

MOST_ROUNDS = 4  # of which some groups tell whether a short tail ranks copies as all steps do
CONDITIONS = 2  # whose views the rewards are shown
WRONG_VIEWS = ("source", "noise")  # what a camera that does not move shows; nothing of the scene
LEAST_SHARE = 0.2  # of the variance inside groups: below, most of what is trained on was not caused by the policy


@dataclasses.dataclass(frozen=True)
class Preference:
    """What one reward prefers."""

    means: dict[str, float]  # view ("true", "source", "noise") -> mean over conditions with a value, NaN without any
    # Wrong view -> mean over conditions of +1 (the true view is better), -1 (worse), 0 (a tie), behind the gate.
    signs: dict[str, float]
    valid: float  # share of the true views with a value
    fault: str  # why measuring failed, or ""


def examine_rewards(trainer: Trainer) -> Iterator[Finding]:
    """Check on rank 0 what the rewards prefer."""
    with trainer.world.sync_errors("the rewards"):
        found = _order_of_views(trainer) if trainer.world.is_main else []
    yield from found


def _order_of_views(trainer: Trainer) -> list[Finding]:
    data = trainer.training_data
    indices = dict.fromkeys([*(key[3] for key in planned_keys(trainer)), *range(min(len(data), 4 * CONDITIONS))])
    known = [condition for condition in map(data.condition, indices) if condition.target_video is not None]
    if not known:
        return [finding("reward_order", "no condition has a true view", warn="look at the videos instead")]
    shown = [condition for condition in known if condition.size == known[0].size][:CONDITIONS]
    by_epoch = weights_where_they_turn(trainer.config, trainer.state.finished)
    return check_rewards(preferences(trainer.collector.rewards, shown, trainer.config.reward), by_epoch)


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
    found: dict[str, Preference] = {}
    shown = ("true", *WRONG_VIEWS)
    groups = torch.arange(len(conditions)).repeat(len(shown))
    for name, result in results.items():
        gated, valid = result.values, result.valid
        if name in config.gates:
            holder, threshold = config.gates[name]
            theirs, floor = results[holder], max(floors[name], config.flat_eps)
            passed = gate(gated, valid, theirs.values, theirs.valid, groups, threshold=threshold, floor=floor)
            gated, valid = passed.values, passed.valid
        values, known = (dict(zip(shown, part.chunk(len(shown)), strict=True)) for part in (gated, valid))
        signs = {}
        for wrong in WRONG_VIEWS:
            gap = values["true"] - values[wrong]
            sign = torch.where(gap.abs() > floors[name], gap.sign(), 0.0)
            # A video without a value ranks below one that has a value.
            sign = torch.where(known["true"], torch.where(known[wrong], sign, 1.0), 0.0)
            signs[wrong] = float(sign.mean())
        own = zip(shown, result.values.chunk(len(shown)), result.valid.chunk(len(shown)), strict=True)
        means = {view: float(part[measured].mean()) for view, part, measured in own}
        fault = result.causes[int(result.faults.int().argmax())] if result.faults.any() else ""
        found[name] = Preference(means, signs, float(known["true"].float().mean()), fault)
    return found


def check_rewards(found: Mapping[str, Preference], by_epoch: Mapping[int, Mapping[str, float]]) -> list[Finding]:
    """Check that every reward can be measured, and that the set prefers the true view to every wrong one.

    `found` has what each reward prefers, `by_epoch` epoch -> reward name -> weight.
    """
    first = next(iter(by_epoch.values()))
    weights = {name: max((own[name] for own in by_epoch.values()), key=abs) for name in first}
    parts = []
    for name, own in found.items():
        means = ", ".join(f"{shown} {value:.3g}" for shown, value in own.means.items())
        parts.append(f"{name} ({weights[name]:g}): {means}" + (f" [{own.fault}]" if own.fault else ""))
    broken = [name for name, own in found.items() if own.fault and weights[name]]
    fail = f"{', '.join(broken)} could not be measured: start its server or repair the cause, or drop its weight"
    missing = [name for name, own in found.items() if own.valid < 1 and (weights[name] or own.fault)]
    warn = (
        f"{', '.join(missing)} has no value for some true views: see its causes, and tools/check_sources.py for pose "
    )
    warn += "rewards"
    answers = finding("rewards", "; ".join(parts), fail=fail if broken else "", warn=warn if missing else "")
    orders = [_order(found, weights, epoch) for epoch, weights in by_epoch.items()]
    return [answers, next((order for order in orders if order.status == "fail"), orders[0])]


def _order(found: Mapping[str, Preference], weights: Mapping[str, float], epoch: int) -> Finding:
    total = sum(abs(weight) for weight in weights.values())
    margins = {
        shown: sum(weights[name] * own.signs[shown] for name, own in found.items()) / total if total else 0.0
        for shown in WRONG_VIEWS
    }
    message = ", ".join(f"over the {shown} by {margin:+.2f}" for shown, margin in margins.items())
    wrong = [shown for shown, margin in margins.items() if not margin > 0]
    way_out = f"copies that show {' or '.join(wrong)} would be reinforced: add a reward that sees the camera"
    message = f"the true view is preferred {message} (of 1) in epoch {epoch}"
    return finding("reward_order", message, fail=way_out if wrong else "")


def examine_signal(trainer: Trainer) -> Iterator[Finding]:
    """Check how the rewards spread inside one group a rank."""
    if traits_of(trainer.config).replays_steps:
        weights = largest_weights(trainer.config)
        yield check_signal(measure_signal(trainer.collector, trainer.training_data, weights, groups=1))
    else:
        objective = trainer.config.train.objective
        yield finding("signal", f"train.objective={objective!r} learns from whole samples: all of the spread counts")


def examine_tail(trainer: Trainer) -> Iterator[Finding]:
    """Check on a few groups that a short tail ranks copies as all steps of the schedule do."""
    record = TailRecord()
    if not can_ask(trainer):
        return
    for _ in range(MOST_ROUNDS):
        record.add(finish_by_all_steps(trainer.collector, trainer.sample()[0], trainer.device))
        found = record.certificates(trainer)
        if all(own.groups >= FEW_GROUPS for own in found.values()):
            break
    warn = "copies are ranked otherwise than by all steps: a run would go on with those; raise sample.tail_steps, see "
    warn += "tools/measure_signal.py --tails"
    message = f"correlation of {in_knobs(trainer.config)} with all steps inside groups: {in_words(found)}"
    yield finding("tail", message, warn=warn if any(own.falls_short for own in found.values()) else "")


def check_signal(signal: Signal) -> Finding:
    """Check that a reward spreads more than its floor, and that the update can credit enough of every spread."""
    more_noise = "raise sample.noise_level or let earlier steps be stochastic (sample.sde_steps)"
    fail = f"the copies of a group score the same within measuring noise: {more_noise}" if signal.absent else ""
    credited = all(share >= LEAST_SHARE for share in signal.credit_shares.values())
    warn = f"below {LEAST_SHARE:.0%}: pass --config.sample.same_initial_noise=true, and {more_noise}"
    return finding("signal", signal.in_words(), fail=fail, warn="" if credited else warn)
