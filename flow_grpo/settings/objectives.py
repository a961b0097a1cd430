"""What every learning objective costs, needs and forbids; its class, in algorithm/update/, is named beside it.

Settings, planner, doctor and trainer ask these traits; nothing else tells objectives apart. An objective is one class
with the methods of `Objective` (algorithm/update/objective.py) and one entry here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from flow_grpo.settings.errors import refusal

if TYPE_CHECKING:
    from flow_grpo.settings.schema import Config, TrainConfig

OldLogProbs = Literal["rollout", "recompute", "detach"]


@dataclasses.dataclass(frozen=True)
class Traits:
    """One objective."""

    implementation: str  # "MODULE:CLASS"
    replays_steps: bool  # it learns from the stochastic steps of the rollout, which trajectories then keep
    passes: Callable[[Config], int]  # backward passes over a row of the update
    # Calls without gradient beside each of them: reference, old policy, averaged weights.
    forwards: Callable[[Config], int]
    forbids: Callable[[Config], None]  # raises ConfigError for settings that cannot work with it
    # A pass is one of the stochastic steps, of samples or of groups (`Samples.replayed`), and its class has the
    # `replay`, `reference_mean` and `step_weight` of `GrpoObjective`: the doctor examines step by step, else only that
    # the loss repeats itself.
    single_steps: bool = False


def traits_of(config: Config) -> Traits:
    """Return the traits of the recipe's objective; ConfigError where there is none of that name."""
    name = config.train.objective
    if name not in OBJECTIVES:
        raise refusal("train.objective", name, f"must be one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]


def window_length(config: Config) -> int:
    """Return the stochastic steps of a sample."""
    sample = config.sample
    return 0 if sample.sde == "ode" else sample.sde_window or len(sample.sde_steps)


def trains_groups(config: Config) -> bool:
    """Return whether a row of the update is a group: its copies share the first stochastic step, and so its replay."""
    return config.sample.share_prefix and traits_of(config).single_steps


def trained_rows(config: Config) -> int:
    """Return an epoch's rows of the update on a rank: groups, or samples, of which `train.copies` may take a part."""
    held = config.sample.expanded_batch_size
    return math.ceil(held / config.sample.k) if trains_groups(config) else held


def micro_batch(config: Config) -> int:
    """Return the most rows of a micro-batch: those of an optimizer step where `train.batch_size` is more."""
    return min(config.train.batch_size, math.ceil(trained_rows(config) / config.train.updates_per_epoch))


def old_log_probs(train: TrainConfig, *, as_rolled_out: bool) -> OldLogProbs:
    """Return whose log-probabilities are the old policy's.

    The rollout's own are those of the update's calls only where every micro-batch is a batch of the rollout: any other
    batch size rounds differently. With one update an epoch the new ones without gradient are the old ones.
    """
    if train.old_log_prob != "auto":
        return train.old_log_prob
    if as_rolled_out:
        return "rollout"
    return "detach" if train.updates_per_epoch == 1 else "recompute"


def _grpo_forwards(config: Config) -> int:
    sample, train = config.sample, config.train
    # Where all videos have one size and dynamic sampling moves none.
    rows, most = trained_rows(config), sample.train_batch_size
    whole_batches = train.updates_per_epoch == 1 or (rows % most == 0 and rows // most % train.updates_per_epoch == 0)
    whole_batches &= not train.copies or trains_groups(config)
    as_rolled_out = micro_batch(config) == min(most, rows) and whole_batches
    old = old_log_probs(train, as_rolled_out=as_rolled_out)
    calls_for_old = old == "recompute" or (train.guard and old == "rollout")  # the guard needs the old means as well
    return (train.kl_coef > 0) + calls_for_old


def _grpo_passes(config: Config) -> int:
    steps = window_length(config)
    return 1 + (steps - 1) * config.sample.k if trains_groups(config) else steps


def _grpo_forbids(config: Config) -> None:
    if config.sample.sde == "ode":
        text = "leaves train.objective='grpo' no stochastic step to learn from; pass --config.sample.sde=flow"
        raise refusal("sample.sde", "ode", f"{text} or --config.train.objective=forward")


def _forward_forwards(config: Config) -> int:
    train = config.train
    calls_for_old = train.old_log_prob == "recompute" or train.updates_per_epoch > 1
    return (train.kl_coef > 0) + calls_for_old + (train.trust_coef > 0)


def _forward_forbids(config: Config) -> None:
    train, sample = config.train, config.sample
    if sample.sde == "ode" and sample.same_initial_noise:
        text = "makes the copies of a group equal with sample.sde='ode'; pass --config.sample.same_initial_noise=false"
        raise refusal("sample.same_initial_noise", True, text)
    if train.trust_coef > 0 and train.ema_decay == 0:
        text = "needs averaged weights; pass --config.train.ema_decay=0.9, or --config.train.trust_coef=0"
        raise refusal("train.trust_coef", train.trust_coef, text)
    for name, usual in (("guard", False), ("step_weight", "none")):
        if getattr(train, name) != usual:
            text = f"belongs to train.objective='grpo'; pass --config.train.{name}={str(usual).lower()}"
            raise refusal(f"train.{name}", getattr(train, name), text)
    boundary = config.model.boundary_ratio
    most = 1 - boundary / (sample.shift - (sample.shift - 1) * boundary)  # of the schedule before its shift
    if train.forward_range > most:
        text = f"must be at most {math.floor(1e4 * most) / 1e4:g}: it reaches noise levels below model.boundary_ratio="
        text += f"{boundary:g}, where the starting weights answer and nothing is learned; lower one of the two"
        raise refusal("train.forward_range", train.forward_range, text)
    if train.old_log_prob == "rollout":
        text = "is not known from the rollout with train.objective='forward'; pass --config.train.old_log_prob=auto"
        raise refusal("train.old_log_prob", "rollout", text)


OBJECTIVES = {
    "grpo": Traits(
        implementation="flow_grpo.algorithm.update.objective:GrpoObjective",
        replays_steps=True,
        passes=_grpo_passes,
        forwards=_grpo_forwards,
        forbids=_grpo_forbids,
        single_steps=True,
    ),
    "forward": Traits(
        implementation="flow_grpo.algorithm.update.matching:MatchingObjective",
        replays_steps=False,
        passes=lambda config: config.train.forward_levels,
        forwards=_forward_forwards,
        forbids=_forward_forbids,
    ),
}
