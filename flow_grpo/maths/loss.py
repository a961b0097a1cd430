"""The clipped surrogate loss of GRPO for Gaussian denoising steps, one value per sample.

The caller weights the samples, averages them over ranks and micro-batches, and calls backward. Letters: B samples, K
trained (stochastic) steps.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from flow_grpo.maths.sde import gaussian_kl


@dataclasses.dataclass(frozen=True)
class GuardTerms:
    """Additional input of the GRPO-Guard ratio (arXiv 2510.22319).

    Use it with the step weight 1 / (sigma - sigma'), `step_weights("inverse_delta", ...)`.
    """

    means: Tensor  # (B, K, ...) step means of the current policy, with gradient
    old_means: Tensor  # (B, K, ...) step means of the policy that sampled
    std: Tensor  # (), (K,) or (B, K) std of the whole step, sqrt(step length) included


@dataclasses.dataclass(frozen=True)
class LossTerms:
    """The loss of B samples; only `per_sample` carries gradient.

    Attributes:
        per_sample: (B,) clipped surrogate, step weights included, mean over the K steps, + kl_coef * kl.
        kl: (B,) KL to the reference policy in nats per latent element, mean over the K steps.
        log_ratio: (B, K) `log_prob - old_log_prob`, in nats per latent element, also where a guard makes the ratio.
        ratio: (B, K) probability ratio, the geometric mean over a sample's latent elements.
        clipped: (B, K) bool, where clipping has set the policy gradient to zero.
    """

    per_sample: Tensor
    kl: Tensor
    log_ratio: Tensor
    ratio: Tensor
    clipped: Tensor


def grpo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    *,
    clip_range: float,
    step_weight: Tensor | None = None,
    guard: GuardTerms | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
) -> LossTerms:
    """Return the GRPO loss of B samples at K trained steps (PPO's clipped surrogate, arXiv 1707.06347, eq. 7, negated).

        ratio   = exp(log_prob - old_log_prob)
        policy  = mean over steps of step_weight * max(-A * ratio, -A * clip(ratio, 1 - clip_range, 1 + clip_range))
        loss    = policy + kl_coef * mean over steps of kl

    with the advantage A shared by all steps of a sample. Non-finite values pass through: the caller must stop on all
    ranks together.

    Args:
        log_prob: (B, K) from `sde.log_prob` (mean over latent elements, in nats), with gradient.
        old_log_prob: (B, K), the same under the policy that sampled.
        advantages: (B,), from `advantages.combine_rewards`.
        clip_range: the gradient stops outside 1 +- clip_range. Ratios are geometric means over all latent elements,
            therefore close to 1: useful values are 1e-4 to 1e-3, not the 0.2 of language models.
        step_weight: (K,) or (B, K) weight of each step's policy term, normalised to mean 1 over the steps that may be
            trained (`schedule.step_weights`); None is 1.
        guard: use the GRPO-Guard ratio instead of the plain one.
        kl: (B, K) from `sde.gaussian_kl` against the reference policy, with gradient.
        kl_coef: weight of the KL term, on which step weights do not act.

    Raises:
        ValueError: shapes that would broadcast silently, a bound that is not positive, or kl_coef without kl.
    """
    if not 0 < clip_range < 1:
        raise ValueError(f"clip_range is {clip_range}, must be > 0 and < 1")
    if not kl_coef >= 0 or (kl_coef > 0 and kl is None):
        raise ValueError(f"kl_coef is {kl_coef}, must be >= 0, and 0 without the KL of every step in kl")
    _check_shapes(log_prob, old_log_prob, advantages, step_weight, kl)
    log_ratio = log_prob - old_log_prob.detach()
    ratio = (log_ratio if guard is None else _guarded(log_ratio, guard)).exp()
    advantage = advantages.detach().to(ratio.dtype)[:, None]
    free, bounded = -advantage * ratio, -advantage * ratio.clamp(1 - clip_range, 1 + clip_range)
    policy = torch.maximum(free, bounded) * (1.0 if step_weight is None else step_weight.detach().to(ratio))
    penalty = torch.zeros_like(policy) if kl is None else kl
    per_sample = policy.mean(dim=1) + kl_coef * penalty.mean(dim=1)
    return LossTerms(
        per_sample=per_sample,
        kl=penalty.detach().mean(dim=1),
        log_ratio=log_ratio.detach(),
        ratio=ratio.detach(),
        clipped=(bounded > free).detach(),
    )


def _guarded(log_ratio: Tensor, guard: GuardTerms) -> Tensor:
    """Return the GRPO-Guard log-ratio std * (log_ratio + bias), (B, K) (arXiv 2510.22319).

    bias = mean over elements of (mean - old_mean)^2 / (2 std^2), per sample and step, is minus the expected log-ratio;
    the factor std gives all steps one scale. The result equals the mean over elements of z_old * (mean - old_mean).
    """
    if guard.means.shape[:2] != log_ratio.shape:
        raise ValueError(
            f"guard.means has shape {tuple(guard.means.shape)}, must begin with (B, K) = {tuple(log_ratio.shape)}"
        )
    if guard.std.shape not in ((), log_ratio.shape[1:], log_ratio.shape):
        raise ValueError(f"guard.std has shape {tuple(guard.std.shape)}, must be (), (K,) or {tuple(log_ratio.shape)}")
    std = guard.std.to(log_ratio.dtype).expand_as(log_ratio)
    bias = gaussian_kl(guard.means.flatten(0, 1), guard.old_means.flatten(0, 1), std.flatten())
    return std * (log_ratio + bias.view_as(log_ratio))


def _check_shapes(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, step_weight: Tensor | None, kl: Tensor | None
) -> None:
    if log_prob.ndim != 2:
        raise ValueError(f"log_prob has shape {tuple(log_prob.shape)}, must be (B, K)")
    rows, columns = log_prob.shape
    wanted = {"old_log_prob": (old_log_prob, (rows, columns)), "advantages": (advantages, (rows,))}
    if kl is not None:
        wanted["kl"] = (kl, (rows, columns))
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must be {shape} to fit log_prob")
    if step_weight is not None and tuple(step_weight.shape) not in ((columns,), (rows, columns)):
        shapes = f"({columns},) or ({rows}, {columns})"
        raise ValueError(f"step_weight has shape {tuple(step_weight.shape)}, must be {shapes}, one per trained step")
