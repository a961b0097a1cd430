"""Combinations of reward knobs that cannot work, and of those that judge groups by rewards."""

from __future__ import annotations

import math
import warnings

from flow_grpo.config_errors import refusal
from flow_grpo.config_types import Config


def check_rewards(config: Config) -> None:
    """Refuse weights that teach nothing, and a gold estimator that is trained on.

    Raises:
        ConfigError: for the first such setting.
    """
    weights = config.reward.weights
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            bound = "must lie in [0, inf): every reward is written so that more is better"
            raise refusal(f"reward.weights.{name}", weight, bound, "0 measures it without training on it")
    if not any(weights.values()):
        bound = "must hold a weight above 0, or there is nothing to learn"
        raise refusal("reward.weights", weights, bound, "pass for example --config.reward.weights.target_view=1")
    if config.eval.gold and weights.get(config.eval.gold):
        bound = f"is trained on by reward.weights.{config.eval.gold}, must be an estimator that no reward uses"
        raise refusal("eval.gold", config.eval.gold, bound, f"pass --config.reward.weights.{config.eval.gold}=0")


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
