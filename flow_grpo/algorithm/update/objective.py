"""Learning objectives: the interface that the updater calls, and GRPO as its implementation.

The updater owns micro-batches, gradient accumulation, scaling and skipped steps; an objective owns the loss per sample
and the old policy's values. On-policy contract of GRPO: before the first update the ratio is exactly 1. A micro-batch
with the rows of a rollout call, samples or groups, repeats it bit for bit. For any other, whose batch size rounds
differently, the old log-probabilities are those of the update's own calls: with one update an epoch the new ones
without gradient, with several they are recomputed before the first.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flow_grpo.algorithm.rollout.denoise import step_transition
from flow_grpo.maths.loss import GuardTerms, LossTerms, grpo_loss
from flow_grpo.maths.schedule import step_weights
from flow_grpo.maths.sde import Transition, gaussian_kl, log_prob
from flow_grpo.models.policy import Policy
from flow_grpo.records import Samples
from flow_grpo.settings.objectives import old_log_probs, traits_of
from flow_grpo.settings.sampling import Sampling
from flow_grpo.settings.schema import Config, TrainConfig


class Loss(NamedTuple):
    """The loss of b samples in one pass."""

    terms: LossTerms
    drift: Tensor  # (b,) new minus rollout log-probability; 0 before the first update when the calls are identical
    scale: float = 1.0  # the gradient is that of `scale * terms.per_sample`; metrics report the terms without it
    weights: Tensor | None = None  # (b,) of the terms, in a mean over all passes; None for the samples' own


class Objective(Protocol):
    """The loss of a micro-batch, in one or more passes, each with its own backward."""

    def passes(self, samples: Samples) -> int:
        """Return the number of passes over a micro-batch."""

    def remember(self, take: Callable[[], Samples], *, as_rolled_out: bool) -> Any:
        """Return the old policy's values for a micro-batch; called before the epoch's first optimizer step.

        Args:
            take: returns the b samples on the device; calling it moves them there.
            as_rolled_out: every micro-batch of the epoch is exactly one batch of the rollout.
        """

    def loss(self, micro: Samples, memory: Any, number: int) -> Loss:
        """Return the loss of pass `number` of a micro-batch, with gradient."""

    def drift(self, micro: Samples, memory: Any) -> Tensor:
        """Return (b,) log-ratios of the first pass against `memory`, in nats per latent element."""


def build_objective(
    config: Config, policy: Policy, sampling: Sampling, average: Callable[[], AbstractContextManager[None]]
) -> Objective:
    """Return the recipe's objective; its class has a `build` with these arguments.

    Args:
        config: the recipe.
        policy: being trained.
        sampling: how the samples were made.
        average: context in which the policy has its averaged weights.
    """
    module, _, name = traits_of(config).implementation.partition(":")
    made: Objective = getattr(importlib.import_module(module), name).build(config, policy, sampling, average)
    return made


@dataclasses.dataclass(frozen=True)
class OldPolicy:
    """The policy before the epoch's updates, pass by pass of one micro-batch."""

    log_probs: list[Tensor] | None  # (b,) fp32 of each; None takes the new log-probabilities without their gradient
    means: list[Tensor] | None = None  # (b, C, F, H, W) fp32 of each, kept only for the GRPO-Guard ratio


@dataclasses.dataclass(frozen=True)
class GrpoObjective:
    """Flow-GRPO's clipped surrogate at the recorded stochastic steps, one pass a step."""

    policy: Policy
    sampling: Sampling  # how the samples were made
    step_weight: Tensor | None  # (S,) fp32 CPU, of every step on the policy term; None for 1
    train: TrainConfig

    @classmethod
    def build(
        cls,
        config: Config,
        policy: Policy,
        sampling: Sampling,
        average: Callable[[], AbstractContextManager[None]],  # noqa: ARG003 - as every objective
    ) -> GrpoObjective:
        """Return the objective of a recipe, see `build_objective`."""
        kind = "inverse_delta" if config.train.guard else config.train.step_weight
        weights = step_weights(kind, sampling.sigmas, config.sample.sde_steps, **vars(sampling.sde))
        return cls(policy, sampling, weights, config.train)

    def passes(self, samples: Samples) -> int:
        """Return the number of replays: one a recorded step, and of groups one a copy in the steps after the first."""
        return samples.passes

    @torch.no_grad()
    def remember(self, take: Callable[[], Samples], *, as_rolled_out: bool) -> OldPolicy:
        """Return the old policy by `old_log_probs`: the rollout's log-probabilities, recomputed, or detached."""
        whose = old_log_probs(self.train, as_rolled_out=as_rolled_out)
        if whose == "detach":
            return OldPolicy(None)
        micro = take()
        steps = [micro.replayed(number) for number in range(self.passes(micro))]
        recorded, keep = [step.log_probs for step in steps], whose == "rollout"
        if keep and not self.train.guard:
            return OldPolicy(recorded)
        current = [self.replay(micro, number) for number in range(len(steps))]
        fresh = [log_prob(step.drawn, gaussian) for step, gaussian in zip(steps, current, strict=True)]
        means = [gaussian.mean for gaussian in current] if self.train.guard else None
        return OldPolicy(recorded if keep else fresh, means)

    def loss(self, micro: Samples, memory: OldPolicy, number: int) -> Loss:
        """Return the loss of replay `number`, scaled by sqrt(D) for D latent elements a sample.

        Log-probabilities are means over elements, so their gradient is the sum of D independent terms
        z * gain * d velocity / d weights, with z ~ N(0, 1), divided by D: it falls as 1 / sqrt(D), for the latents of a
        real video (2.1 M elements) towards Adam's eps. Times sqrt(D), the update does not depend on the video's size.
        The factor acts on policy and KL term alike: ratio, clip_range and kl_coef keep their meaning per element.
        """
        train, step = self.train, micro.replayed(number)
        # The reference first: it may swap weights in place, which would break a graph that is already built.
        reference = self.reference_mean(micro, number) if train.kl_coef > 0 else None
        current = self.replay(micro, number)
        new = log_prob(step.drawn, current)
        old = new.detach() if memory.log_probs is None else memory.log_probs[number]
        steps, guard = step.steps.repeat_interleave(len(new) // len(step.steps)), None
        if train.guard:
            means = current.mean.detach() if memory.means is None else memory.means[number]
            guard = GuardTerms(means=current.mean[:, None], old_means=means[:, None], std=current.std[:, None])
        assert step.advantages is not None, "advantages are computed before the update"
        assert step.weights is not None
        terms = grpo_loss(
            new[:, None],
            old[:, None],
            step.advantages.to(new, non_blocking=True),
            clip_range=train.clip_range,
            step_weight=None if self.step_weight is None else self.step_weight[steps, None],
            guard=guard,
            kl=None if reference is None else gaussian_kl(current.mean, reference, current.std)[:, None],
            kl_coef=train.kl_coef,
        )
        elements = current.mean[0].numel()
        # A copy has as many terms as steps, however many passes there are.
        weights = step.weights * (self.passes(micro) / micro.trajectory.steps.shape[1])
        return Loss(terms, new.detach() - step.log_probs, math.sqrt(elements), weights)

    @torch.no_grad()
    def drift(self, micro: Samples, memory: OldPolicy) -> Tensor:
        """Return (b,) log-ratios of the first recorded step with the weights as they are now."""
        step = micro.replayed(0)
        old = step.log_probs if memory.log_probs is None else memory.log_probs[0]
        return log_prob(step.drawn, self.replay(micro, 0)) - old

    def replay(self, micro: Samples, number: int) -> Transition:
        """Return the Gaussians of replay `number` with the current weights; the draws of a group's copies share one."""
        step = micro.replayed(number)
        found = step_transition(self.policy, step.latents, micro.conditioning, step.steps, self.sampling)
        return found.repeated(len(step.drawn) // len(step.latents))

    @torch.no_grad()
    def reference_mean(self, micro: Samples, number: int) -> Tensor:
        """Return the (b, C, F, H, W) mean of replay `number` under the policy training started from."""
        with self.policy.reference():
            return self.replay(micro, number).mean
