"""How samples are denoised: one record, made from a recipe by one function, that rollout, update and doctor ask."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch import Tensor

from flow_grpo.maths.schedule import flow_sigmas, tail_levels, window_of, windows
from flow_grpo.settings.objectives import trains_groups, traits_of
from flow_grpo.settings.schema import Config


@dataclasses.dataclass(frozen=True)
class SdeSettings:
    """The noise of a stochastic step."""

    kind: str  # "flow" | "constant" | "linear" | "cps", see `maths/sde.py`; "ode" has none
    noise_level: float  # coefficient of that kind
    max_step_std: float | None = None  # upper bound of the step's standard deviation


ODE = SdeSettings("ode", 0.0)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What a rollout depends on besides the model and its conditions."""

    sigmas: Tensor  # (S+1,) fp32 CPU noise levels, from 1 to 0
    sde: SdeSettings  # noise of the stochastic steps
    seed: int  # of all draws
    same_initial_noise: bool = False  # the copies of a group share it
    # Windows of consecutive stochastic steps, of which a group has one; none where the ODE is sampled.
    blocks: tuple[tuple[int, ...], ...] = ()
    # (S+1, m+1) fp32 CPU noise levels of a short tail of m second-order steps, by the level it starts from; None
    # follows `sigmas` by first-order steps.
    tails: Tensor | None = None
    sparse: bool = False  # calls of prefix and tail are approximate
    record: bool = True  # keep the stochastic steps for the update; without, `Trajectory` is empty
    # Calls of the network that every batch makes in its prefix and in its tail, whatever its windows, for a sharded
    # network that all ranks must call equally often; None makes as many as are needed.
    calls: tuple[int, int] | None = None
    window_groups: int = 1  # neighbouring groups with the same window

    @property
    def approximates(self) -> bool:
        """Whether something besides the stochastic steps is cheaper than the schedule's steps, computed exactly."""
        return self.tails is not None or self.sparse

    @property
    def exact(self) -> Sampling:
        """The same without that."""
        return dataclasses.replace(self, tails=None, sparse=False)

    def window_of(self, gid: int) -> tuple[int, ...]:
        """Return the stochastic steps of a group, the same on every rank; none where the ODE is sampled."""
        return window_of(gid // self.window_groups, self.blocks, seed=self.seed) if self.blocks else ()

    def windows(self, gids: Iterable[int]) -> list[tuple[int, ...]]:
        """Return the stochastic steps of each of these groups."""
        return [self.window_of(gid) for gid in gids]


def sampling_of(config: Config) -> Sampling:
    """Return how the training samples of a recipe are denoised."""
    sample, calls = config.sample, None
    blocks = () if sample.sde == "ode" else tuple(windows(sample.sde_steps, sample.sde_window))
    if config.train.sharding == "fsdp2" and blocks:
        calls = max(block[0] for block in blocks), sample.num_steps - 1 - min(block[-1] for block in blocks)
    sigmas = flow_sigmas(sample.num_steps, sample.shift)
    return Sampling(
        sigmas=sigmas,
        sde=SdeSettings(sample.sde, sample.noise_level, sample.max_step_std),
        seed=config.seed,
        same_initial_noise=sample.same_initial_noise,
        blocks=blocks,
        window_groups=sample.window_groups,
        tails=tail_levels(sigmas, sample.tail_steps) if sample.tail_steps else None,
        sparse=sample.ode_calls == "sparse",
        record=traits_of(config).replays_steps,
        calls=calls,
    )


def offloads_rollouts(config: Config) -> bool:
    """Return whether samples wait for the update in CPU memory."""
    # A pool grows over several rounds, and copies are chosen from a whole round.
    chosen = config.train.copies > 0 and not trains_groups(config)
    return config.sample.offload or config.dynamic_sampling.enabled or chosen
