"""Combinations of reward knobs that cannot work, and of those that judge groups by rewards."""

from __future__ import annotations

import difflib
import math
import warnings

from flow_grpo.maths.reward_rules import weights_at
from flow_grpo.settings.errors import refusal
from flow_grpo.settings.schema import Config, RewardConfig


def check_rewards(config: Config) -> None:
    """Refuse weights that teach nothing, rules about rewards that are not there, a gold estimator that is trained on.

    Raises:
        ConfigError: for the first such setting.
    """
    for name, weight in config.reward.weights.items():
        _check_weight(f"reward.weights.{name}", weight)
    _check_schedules(config.reward)
    _check_gates(config.reward)
    _check_signal(config)
    if config.eval.gold:
        _check_gold(config.eval.gold, config.reward)


def _check_weight(path: str, weight: float) -> None:
    if not 0 <= weight < math.inf:
        bound = "must lie in [0, inf): every reward is written so that more is better"
        raise refusal(path, weight, bound, "0 measures it without training on it")


def _check_measured(path: str, name: str, reward: RewardConfig) -> None:
    if name not in reward.weights:
        close = difflib.get_close_matches(name, reward.weights, n=1)
        hint = f"did you mean {close[0]!r}? Or" if close else "or"
        way_out = f"{hint} pass --config.reward.weights.{name}=0 to measure it"
        raise refusal(path, name, f"must be one of the measured rewards {', '.join(reward.weights)}", way_out)


def _check_schedules(reward: RewardConfig) -> None:
    """Every schedule belongs to a measured reward, its epochs rise, its weights are weights."""
    for name, points in reward.schedules.items():
        path = f"reward.schedules.{name}"
        _check_measured("reward.schedules", name, reward)
        epochs = [epoch for epoch, _ in points]
        if epochs[0] < 0 or epochs != sorted(set(epochs)):
            bound = "must name epochs from 0 on, each once, in rising order"
            raise refusal(path, points, bound, f"pass for example --config.{path}=0:0,50:1")
        for _, weight in points:
            _check_weight(path, weight)


def _check_signal(config: Config) -> None:
    """Some reward has a weight in every epoch of the run.

    A sum of straight pieces that are never negative is 0 at their ends where it is 0 between them, so only those epochs
    need a look in which a piece begins.
    """
    reward = config.reward
    turns = {epoch for points in reward.schedules.values() for epoch, _ in points if epoch < config.num_epochs}
    for epoch in sorted({0, *turns}):
        weights = weights_at(reward.weights, reward.schedules, epoch)
        if any(weights.values()):
            continue
        if not reward.schedules:
            bound = "must hold a weight above 0, or there is nothing to learn"
            raise refusal("reward.weights", weights, bound, "pass for example --config.reward.weights.target_view=1")
        bound = f"leaves every reward without weight in epoch {epoch} ({weights}), must leave one something to learn"
        raise refusal("reward.schedules", reward.schedules, bound, "let two schedules overlap")


def _check_gates(reward: RewardConfig) -> None:
    """Every gate stands between two measured rewards and has a threshold that can be reached."""
    for name, (holder, threshold) in reward.gates.items():
        path = f"reward.gates.{name}"
        _check_measured("reward.gates", name, reward)
        _check_measured(path, holder, reward)
        if holder == name:
            raise refusal(path, holder, "must be another reward than the one behind the gate", "name what must hold")
        if not math.isfinite(threshold):
            bound = f"must be a finite value of {holder}"
            raise refusal(path, threshold, bound, f"pass for example --config.{path}={holder}:VALUE")


def _check_gold(gold: str, reward: RewardConfig) -> None:
    """Nothing that is trained on depends on the gold estimator."""
    unused = "must be an estimator that no reward uses"
    if any(weight for _, weight in reward.schedules.get(gold, ())):
        bound = f"is trained on by reward.schedules.{gold}, {unused}"
        raise refusal("eval.gold", gold, bound, f"pass --config.reward.schedules.{gold}=0:0")
    if gold not in reward.schedules and reward.weights.get(gold):
        bound = f"is trained on by reward.weights.{gold}, {unused}"
        raise refusal("eval.gold", gold, bound, f"pass --config.reward.weights.{gold}=0")
    for name, (holder, _) in reward.gates.items():
        if holder == gold:
            bound = f"holds the gate of reward.gates.{name}, {unused}"
            raise refusal("eval.gold", gold, bound, "let another reward hold it")


def check_dynamic_sampling(config: Config) -> None:
    """Refuse a metric that is not measured, and warn of groups that would be valid by rounding alone.

    Raises:
        ConfigError: for such a metric.
    """
    dynamic, reward = config.dynamic_sampling, config.reward
    if dynamic.metric and dynamic.metric not in reward.weights:
        bound = f"must be one of the measured rewards {', '.join(reward.weights)}, or '' for all that have a weight"
        way_out = f"pass --config.reward.weights.{dynamic.metric}=0 to measure it"
        raise refusal("dynamic_sampling.metric", dynamic.metric, bound, way_out)
    if dynamic.enabled and reward.flat_eps < reward.adv_eps:
        warnings.warn(
            f"config.reward.flat_eps={reward.flat_eps:g} is below reward.adv_eps={reward.adv_eps:g}: dynamic sampling "
            "will take groups for valid whose advantages are mostly rounding; raise reward.flat_eps",
            stacklevel=2,
        )
