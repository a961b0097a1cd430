"""How much of a reward's spread inside groups did noise cause that has a log-probability?

Copies of a condition differ by their initial noise, which no update can credit, and by the noise of their recorded
steps. With shared initial noise only the second remains: the variance inside groups is then what the trained noise
caused, and its ratio to the variance with own initial noise is the credit share.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flow_grpo.algorithm.rollout.denoise import rollout
from flow_grpo.algorithm.rollout.sampling import SampleSettings
from flow_grpo.algorithm.rollout.scoring import decode, share_results
from flow_grpo.algorithm.rollout.shared_encodings import share_encodings
from flow_grpo.judging.evaluate import ConditionSource
from flow_grpo.maths.keys import key
from flow_grpo.models.policy import Policy
from flow_grpo.records import RewardResult
from flow_grpo.rewards.base import RewardSet
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.errors import RunStoppedError


class NoSignalError(RunStoppedError):
    """The rewards cannot tell the copies of a group apart.

    Args:
        without_value: the weighted rewards that have no value for any copy, if that is why.
    """

    save = False  # nothing was trained

    def __init__(self, without_value: Sequence[str]) -> None:
        super().__init__(
            f"{', '.join(without_value)} has no value for any copy of the held-out conditions that were sampled, and "
            "no other weighted reward tells copies apart; the warnings above say why"
            if without_value
            else "the copies of a group score the same within the rewards' own noise (policy/spread_over_floor), so "
            "nothing can be learned; raise sample.noise_level or sample.k, let earlier steps be stochastic "
            "(sample.sde_steps), choose other rewards, or pass --config.doctor=off to train in spite of it"
        )


@dataclasses.dataclass(frozen=True)
class Spread:
    """A reward's root mean variance inside groups, in its unit; NaN without two valid copies in any group.

    Attributes:
        own: with initial noise of each copy's own.
        shared: with initial noise that copies share.
        floor: the reward's noise floor.
    """

    own: float
    shared: float
    floor: float

    @property
    def credit_share(self) -> float:
        """Return the share of the variance that recorded noise caused, NaN where nothing varies."""
        return (self.shared / self.own) ** 2 if self.own > 0 else math.nan

    def inside(self, *, shared: bool) -> float:
        """Return the spread inside the groups of a recipe whose copies share their initial noise, or do not."""
        return self.shared if shared else self.own


def measure_spread(
    policy: Policy,
    dataset: ConditionSource,
    rewards: RewardSet,
    sampling: SampleSettings,
    world: World,
    *,
    groups: int,
    own: bool = True,
) -> dict[str, Spread]:
    """Sample groups with own and with shared initial noise; return reward name -> spread (collective call).

    Args:
        policy: the model being trained.
        dataset: conditions to sample, the first ones of a fixed order.
        rewards: measured on every copy.
        sampling: of the run; the draws are others than the run's.
        world: who shares the groups.
        groups: how many on every rank.
        own: sample with own initial noise, too; without, `Spread.own` is NaN.

    Raises:
        RuntimeError: on every rank, if any failed.
    """
    seed = key("signal", sampling.rollout.seed)
    found: dict[str, dict[bool, float]] = {name: {False: math.nan} for name in rewards.floors}
    for shared in (False, True) if own else (True,):
        settings = dataclasses.replace(sampling.rollout, seed=seed, same_initial_noise=shared, record=False)
        columns: dict[str, list[Tensor]] = {name: [] for name in rewards.floors}
        for number in range(groups):
            gid = world.data.rank * groups + number
            one = dataclasses.replace(sampling, rollout=settings)
            for name, values in sample_group(policy, dataset, rewards, one, world, gid).items():
                columns[name].append(_variance(values))
        for name, variances in columns.items():
            found[name][shared] = math.sqrt(float(world.data.all_gather(torch.stack(variances)).nanmean()))
    return {name: Spread(found[name][False], found[name][True], floor) for name, floor in rewards.floors.items()}


def sample_group(
    policy: Policy, dataset: ConditionSource, rewards: RewardSet, sampling: SampleSettings, world: World, gid: int
) -> dict[str, Tensor]:
    """Return reward name -> (k,) fp64 values of one condition's copies, NaN where not valid (collective call).

    Raises:
        RuntimeError: on every rank, if any failed.
    """
    sample = sampling.sample
    scored: list[dict[str, RewardResult]] = []
    for number, first in enumerate(range(0, sample.k, sample.train_batch_size)):
        slots = range(first, min(first + sample.train_batch_size, sample.k))
        with world.sync_errors("measuring the signal"):
            conditions = [dataset.condition(gid % len(dataset), gid, slot) for slot in slots]
        share_encodings(policy, conditions, world.all, lambda: world.sync_errors("measuring the signal"))
        with world.sync_errors("measuring the signal"):
            conditioning = policy.encode(conditions)
        with world.sync_errors("measuring the signal"):
            samples = rollout(policy, conditions, conditioning, sampling.windows(conditions), sampling.rollout)
        with world.sync_errors("measuring the signal"):
            rows = world.dealt_rows(number, len(slots))
            own, latents = conditions[rows], samples.final_latents[rows]
            scored.append(rewards(decode(policy, own, latents), own) if own else {})
    results = share_results(scored, world)
    return {name: torch.cat([_values(one[name]) for one in results]) for name in rewards.floors}


def _values(result: RewardResult) -> Tensor:
    """Return the (B,) fp64 values, NaN where not valid."""
    return result.values.cpu().double().masked_fill(~result.valid.cpu(), torch.nan)


def _variance(values: Tensor) -> Tensor:
    """Return the () variance of the finite values, NaN with fewer than two."""
    finite = values[values.isfinite()]
    return finite.var() if len(finite) > 1 else torch.tensor(torch.nan, dtype=torch.float64)


def spread_metrics(spreads: dict[str, Spread], weights: dict[str, float], *, shared: bool) -> dict[str, float]:
    """Return `policy/credit_share` and `policy/spread_over_floor`, the least of any reward with a weight.

    Args:
        spreads: from `measure_spread`.
        weights: reward name -> weight.
        shared: copies of the run share their initial noise; the credit share is 1 then.
    """
    used = [spread for name, spread in spreads.items() if weights.get(name)]
    shares = [1.0 if shared else spread.credit_share for spread in used]
    ratios = [spread.inside(shared=shared) / spread.floor for spread in used if spread.floor > 0]
    named = {"policy/credit_share": shares, "policy/spread_over_floor": ratios}
    return {name: min(finite) for name, all_of in named.items() if (finite := _finite(all_of))}


def is_silent(spreads: Mapping[str, Spread], weights: Mapping[str, float], *, shared: bool) -> bool:
    """Return whether no reward with a weight spreads more inside groups than its floor: nothing can be learned then."""
    used = [spread for name, spread in spreads.items() if weights.get(name)]
    return not any(spread.inside(shared=shared) > spread.floor for spread in used)


def without_value(spreads: Mapping[str, Spread], weights: Mapping[str, float], *, shared: bool) -> list[str]:
    """Return the rewards with a weight that have fewer than two valid copies in every group: measuring them fails."""
    used = {name: spread for name, spread in spreads.items() if weights.get(name)}
    return [name for name, spread in used.items() if math.isnan(spread.inside(shared=shared))]


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
