"""Advantage-weighted flow matching: learning on the forward process, from final latents alone.

The policy's own videos are noised again and the network learns to denoise the better copies and to unlearn the worse
ones. Nothing of the sampler is needed, so it may be deterministic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from flow_grpo.algorithm.update.objective import Loss
from flow_grpo.maths.keys import generator
from flow_grpo.maths.loss import grpo_loss
from flow_grpo.maths.schedule import shifted
from flow_grpo.maths.sde import element_mean, per_sample
from flow_grpo.models.policy import Policy
from flow_grpo.records import Samples
from flow_grpo.settings.sampling import Sampling
from flow_grpo.settings.schema import Config, TrainConfig


@dataclasses.dataclass(frozen=True)
class MatchingObjective:
    """AWM's loss (advantage weighted matching, arXiv 2509.25050), with a pull to the averaged weights.

        x_sigma = (1 - sigma) * x0 + sigma * e,    error = mean over elements of (v(x_sigma, sigma) - (e - x0))^2
        ratio   = exp(old error - error)
        loss    = max(-A * ratio, -A * clip(ratio)) + kl_coef * |v - v_start|^2 + trust_coef * |v - v_average|^2

    x0 are a sample's final latents, A its advantage; |.|^2 is a mean over elements. Where v is the old policy's, the
    ratio is 1 and the gradient of the first term is A times that of flow matching. The copies of a group share noise e
    and level sigma, so their errors differ by what the samples are and not by the draws.
    """

    policy: Policy
    shift: float  # of the noise schedule
    seed: int
    train: TrainConfig
    # Inside, the policy has its averaged weights; not entered at trust_coef 0.
    average: Callable[[], AbstractContextManager[None]]

    @classmethod
    def build(
        cls,
        config: Config,
        policy: Policy,
        sampling: Sampling,  # noqa: ARG003 - as every objective
        average: Callable[[], AbstractContextManager[None]],
    ) -> MatchingObjective:
        """Return the objective of a recipe, see `build_objective`."""
        return cls(policy, config.sample.shift, config.seed, config.train, average)

    def passes(self, samples: Samples) -> int:  # noqa: ARG002 - as every objective
        """Return the number of noise levels."""
        return self.train.forward_levels

    @torch.no_grad()
    def remember(
        self,
        take: Callable[[], Samples],
        *,
        as_rolled_out: bool,  # noqa: ARG002 - as every objective
    ) -> dict[int, Tensor]:
        """Return the old policy's errors by pass; with one update `loss` fills them in.

        `as_rolled_out` does not matter: the errors are always those of the update's own calls.
        """
        if self.train.updates_per_epoch == 1 and self.train.old_log_prob != "recompute":
            return {}
        micro = take()
        return {number: self._error(micro, number)[0] for number in range(self.passes(micro))}

    def loss(self, micro: Samples, memory: dict[int, Tensor], number: int) -> Loss:
        """Return the loss at noise level `number`."""
        train = self.train
        # Other weights first: swapping them in place would break a graph that is already built.
        start = self._velocity(micro, number, self.policy.reference) if train.kl_coef > 0 else None
        average = self._velocity(micro, number, self.average) if train.trust_coef > 0 else None
        error, velocity = self._error(micro, number)
        old = memory.setdefault(number, error.detach())
        assert micro.advantages is not None, "advantages are computed before the update"
        terms = grpo_loss(
            -error[:, None],
            -old[:, None],
            micro.advantages.to(error),
            clip_range=train.clip_range,
            kl=None if start is None else element_mean((velocity - start).square())[:, None],
            kl_coef=train.kl_coef,
        )
        if average is not None:
            distance = element_mean((velocity - average).square())
            terms = dataclasses.replace(terms, per_sample=terms.per_sample + train.trust_coef * distance)
        return Loss(terms, old - error.detach())

    @torch.no_grad()
    def drift(self, micro: Samples, memory: dict[int, Tensor]) -> Tensor:
        """Return (b,) log-ratios at the first noise level with the weights as they are now."""
        error, _ = self._error(micro, 0)
        return memory.get(0, error) - error  # without a step nothing is remembered: the weights are the same

    def _error(self, micro: Samples, number: int) -> tuple[Tensor, Tensor]:
        """Return the (b,) matching errors at noise level `number`, and the velocities."""
        latents, sigma, noise = self.noised(micro, number)
        velocity = self.policy.velocity(latents, sigma, micro.conditioning)
        return element_mean((velocity - (noise - micro.final_latents)).square()), velocity

    @torch.no_grad()
    def _velocity(self, micro: Samples, number: int, weights: Callable[[], AbstractContextManager[None]]) -> Tensor:
        latents, sigma, _ = self.noised(micro, number)
        with weights():
            return self.policy.velocity(latents, sigma, micro.conditioning)

    def noised(self, micro: Samples, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return noised latents (b, C, F, H, W), their levels (b,) and the noise, functions of (seed, gid, number).

        Levels are drawn uniformly before the shift from the first `train.forward_range` of the schedule, one from each
        of as many equal parts as there are passes.
        """
        clean = micro.final_latents
        levels, draws = [], []
        for gid in micro.keys[:, 0].tolist():
            draw = generator(self.seed, "matching", gid, number)
            place = (number + float(torch.rand((), generator=draw))) / self.train.forward_levels
            levels.append(1 - self.train.forward_range * place)
            draws.append(torch.randn(clean.shape[1:], generator=draw))
        sigma = shifted(torch.tensor(levels, dtype=torch.float64), self.shift).to(clean)
        noise = torch.stack(draws).to(clean)
        return torch.lerp(clean, noise, per_sample(sigma, clean)), sigma, noise
