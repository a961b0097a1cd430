"""How much of a reward's spread inside groups did noise cause that has a log-probability?

Copies of a condition differ by their initial noise, which no update can credit, and by the noise of their recorded
steps. With shared initial noise only the second remains: the variance inside groups is then what the trained noise
caused, and its ratio to the variance with own initial noise is the credit share.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from flow_grpo.algorithm.rollout.collector import Collector
from flow_grpo.algorithm.rollout.scoring import decode, share_results
from flow_grpo.data.splits import Split
from flow_grpo.judging.evaluate import sample
from flow_grpo.maths.keys import generator, key
from flow_grpo.records import RewardResult
from flow_grpo.reporting.metric_names import LEAST_SPREAD
from flow_grpo.settings.errors import RunStoppedError
from flow_grpo.settings.sampling import Sampling


class NoSignalError(RunStoppedError):
    """The rewards cannot tell the copies of a group apart, perhaps as some are `without_value` for any copy."""

    save = False  # nothing was trained

    def __init__(self, signal: Signal) -> None:
        super().__init__(
            f"{', '.join(signal.without_value)} has no value for any copy of the held-out conditions that were "
            "sampled, and no other weighted reward tells copies apart; the warnings above say why"
            if signal.without_value
            else "the copies of a group score the same within the rewards' own noise: no policy/spread_over_floor is "
            f"above {LEAST_SPREAD} ({signal.in_words()}), so nothing can be learned; raise sample.noise_level or "
            "sample.k, let earlier steps be stochastic (sample.sde_steps), choose other rewards, or pass "
            "--config.doctor=off to train in spite of it"
        )


@dataclasses.dataclass(frozen=True)
class Spread:
    """A reward's root mean variance inside groups, in its unit; NaN without two valid copies in any group."""

    own: float  # with initial noise of each copy's own
    shared: float  # with initial noise that copies share
    floor: float  # noise of the reward itself

    @property
    def credit_share(self) -> float:
        """The share of the variance that recorded noise caused, NaN where nothing varies."""
        return (self.shared / self.own) ** 2 if self.own > 0 else math.nan


@dataclasses.dataclass(frozen=True)
class Signal:
    """What a recipe's rewards can tell of the copies of a group; those without a weight do not count."""

    spreads: Mapping[str, Spread]  # by reward
    weights: Mapping[str, float]  # by reward
    shared: bool  # the recipe's copies share their initial noise, so all of their spread is credited

    @property
    def inside(self) -> dict[str, float]:
        """Reward name -> spread inside the groups of the recipe."""
        used = {name: spread for name, spread in self.spreads.items() if self.weights.get(name)}
        return {name: spread.shared if self.shared else spread.own for name, spread in used.items()}

    @property
    def credit_shares(self) -> dict[str, float]:
        """Reward name -> share of its variance that the update can credit."""
        return {name: 1.0 if self.shared else self.spreads[name].credit_share for name in self.inside}

    @property
    def absent(self) -> bool:
        """Whether no reward spreads more than `LEAST_SPREAD` floors inside groups: nothing can be learned then."""
        return not any(inside > LEAST_SPREAD * self.spreads[name].floor for name, inside in self.inside.items())

    @property
    def without_value(self) -> list[str]:
        """The rewards with fewer than two valid copies in every group: measuring them fails."""
        return [name for name, inside in self.inside.items() if math.isnan(inside)]

    def metrics(self) -> dict[str, float]:
        """Return `policy/credit_share` and `policy/spread_over_floor`, the least of any reward."""
        floors = {name: self.spreads[name].floor for name in self.inside}
        ratios = [inside / floors[name] for name, inside in self.inside.items() if floors[name] > 0]
        named = {"policy/credit_share": self.credit_shares.values(), "policy/spread_over_floor": ratios}
        finite = {name: list(filter(math.isfinite, values)) for name, values in named.items()}
        return {name: min(values) for name, values in finite.items() if values}

    def in_words(self) -> str:
        """Return every reward's spread inside groups, its floor and its credit share in one line."""
        parts = []
        for name, inside in self.inside.items():
            credited = "" if self.shared else f", {self.credit_shares[name]:.0%} of its variance by recorded noise"
            parts.append(f"{name} spreads {inside:.3g} inside groups (floor {self.spreads[name].floor:.3g}){credited}")
        return "; ".join(parts)


def measure_signal(
    collector: Collector, dataset: Split, weights: Mapping[str, float], *, groups: int, both: bool = False
) -> Signal:
    """Sample groups as the run does, from noise of their own; return what the rewards tell (collective call).

    The credit share needs groups with own and with shared initial noise; a recipe whose copies share theirs has none.
    Of each kind every rank samples `groups`, of the first conditions of the data set. With `both`, own noise is sampled
    although the recipe's copies share theirs; without, `Spread.own` is NaN.
    """
    sampling, world, floors = collector.sampling, collector.world, collector.rewards.floors
    recipe_shares = sampling.same_initial_noise
    seed = key("signal", sampling.seed)
    found: dict[str, dict[bool, float]] = {name: {False: math.nan} for name in floors}
    for shared in (True,) if recipe_shares and not both else (False, True):
        one = dataclasses.replace(sampling, seed=seed, same_initial_noise=shared, record=False, window_groups=1)
        scored = [sample_group(collector, dataset, one, world.data.rank * groups + number) for number in range(groups)]
        for name in floors:
            finite = [values[name][values[name].isfinite()] for values in scored]
            nan = torch.tensor(torch.nan, dtype=torch.float64)
            variances = torch.stack([values.var() if len(values) > 1 else nan for values in finite])
            found[name][shared] = math.sqrt(float(world.data.all_gather(variances).nanmean()))
    spreads = {name: Spread(found[name][False], found[name][True], floor) for name, floor in floors.items()}
    return Signal(spreads, weights, recipe_shares)


def sample_group(
    collector: Collector, dataset: Split, sampling: Sampling, gid: int, noise: float = 0.0
) -> dict[str, Tensor]:
    """Return reward name -> (k,) fp64 values of one condition's copies, NaN where not valid (collective call).

    `noise` is added to the final latents, as a share of their standard deviation.
    """
    policy, rewards, world = collector.policy, collector.rewards, collector.world
    copies, most = range(collector.config.sample.k), collector.config.sample.train_batch_size
    scored: list[dict[str, RewardResult]] = []
    for number, first in enumerate(copies[::most]):
        slots = copies[first : first + most]
        loading = (dataset.condition(gid % len(dataset), gid, slot) for slot in slots)
        conditions, latents = sample(policy, loading, sampling, world, "measuring the signal")
        if noise:
            draw = torch.randn(latents.shape, generator=generator("control", gid, first)).to(latents)
            latents = latents + noise * latents.std() * draw
        with world.sync_errors("measuring the signal"):
            rows = world.dealt_rows(number, len(slots))
            own = conditions[rows]
            scored.append(rewards(decode(policy, own, latents[rows]), own) if own else {})
    results = share_results(scored, world)
    return {name: torch.cat([one[name].known for one in results]) for name in rewards.floors}
