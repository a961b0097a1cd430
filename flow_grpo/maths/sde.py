"""One denoising step of a flow-matching model as a Gaussian policy: mean, std, log-probability and KL.

A flow-matching model predicts the velocity v = noise - clean of latents x = (1 - sigma) * clean + sigma * noise, and
the ODE step x' = x - (sigma - sigma') * v is deterministic. RL needs a density to differentiate, so the step is made
stochastic with (nearly) the same marginals: x' ~ N(mean, std^2), where the action is x' and the policy's parameters
enter through v.

With the clean estimate x0 = x - sigma * v and the noise estimate x1 = x + (1 - sigma) * v, every published variant is
`mean = (1 - sigma') * x0 + c * x1`, `x' = mean + std * z`, z ~ N(0, 1). They differ only in `std` and `c`:

    flow, constant, linear    std = g * sqrt(sigma - sigma')              c = sigma' - std^2 / (2 * sigma)
    cps                       std = sigma' * sin(noise_level * pi / 2)    c = sqrt(sigma'^2 - std^2)
    ode                       std = 0                                     c = sigma'

The first row is one Euler-Maruyama step of the reverse SDE dx = (v + g^2 / 2 * x1 / sigma) dsigma + g dw, where
-x1 / sigma is the score; g is

    flow        noise_level * sqrt(sigma / (1 - sigma))    Flow-GRPO (arXiv 2505.05470), eq. 9 and below
    constant    noise_level                                DanceGRPO (arXiv 2505.07818)
    linear      noise_level * sigma

cps (coefficients-preserving sampling, arXiv 2509.05952) keeps c^2 + std^2 = sigma'^2, the noise level that the model
gets as its input at the next step; the others leave more noise than that in x', 5 to 50 % more in late steps of a
10-step schedule.

Collected by x and v: mean = keep * x - kappa * v, with keep = 1 - sigma' + c and
kappa = sigma * (1 - sigma') - (1 - sigma) * c. Hence d log_prob / d v = -z * gain / D per element, where gain =
kappa / std and D is the number of elements of a sample.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

KINDS = ("ode", "flow", "constant", "linear", "cps")
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """The scalars of one step, float64 on the CPU, each () or (B,)."""

    std: Tensor  # standard deviation of the added noise (after clipping), in units of the latents
    c: Tensor  # weight of the noise estimate x1 in the mean
    keep: Tensor  # d mean / d latents = 1 - sigma' + c
    kappa: Tensor  # -d mean / d velocity = sigma * (1 - sigma') - (1 - sigma) * c

    @property
    def gain(self) -> Tensor:
        """Return kappa / std, the factor of -z / D in d log_prob / d velocity; infinite for a step without noise."""
        return self.kappa / self.std


@dataclasses.dataclass(frozen=True)
class Transition:
    """The Gaussian that the next latents are drawn from.

    Attributes:
        mean: (B, ...), the latents' shape; fp32 (float64 for float64 latents).
        std: () or (B,), mean's dtype and device; the std of the whole step, sqrt(step length) included.
        has_density: std is above 0 in every sample; known without asking the device.
    """

    mean: Tensor
    std: Tensor
    has_density: bool = True

    def repeated(self, copies: int) -> Transition:
        """Return the Gaussians of `copies` draws from each row's, (B * copies, ...), those of a row together."""
        if copies == 1:
            return self
        mean, std = (row.repeat_interleave(copies, 0) for row in (self.mean, self.std))
        return Transition(mean, std, self.has_density)


def coefficients(
    sigma: float | Tensor,
    sigma_next: float | Tensor,
    *,
    kind: str,
    noise_level: float,
    sigma_cap: float | Tensor | None = None,
    max_step_std: float | None = None,
) -> Coefficients:
    """Return the scalars of a step from noise level `sigma` to `sigma_next`; formulas in the module docstring.

    Computed in float64 on the CPU, so the result is bit-identical for every device and batch shape.

    Args:
        sigma: noise level before the step, () or (B,), in (0, 1].
        sigma_next: noise level after the step, same shape, in [0, sigma).
        kind: "ode", "flow" (Flow-GRPO), "constant" (DanceGRPO), "linear" or "cps".
        noise_level: scale of the noise, >= 0, at most 1 for "cps"; 0 is the ODE step.
        sigma_cap: upper bound of sigma inside the g of "flow", usually the schedule's sigmas[1], because g is infinite
            at sigma = 1; other kinds ignore it.
        max_step_std: upper bound of std, for any kind.

    Raises:
        ValueError: unknown kind, parameter out of bounds, sigma that does not decrease, or, for a step with noise,
            sigma_next = 0 or c < 0 (the predicted noise would change sign).
    """
    _check_parameters(kind, noise_level, max_step_std)
    level, level_next = _level(sigma, "sigma"), _level(sigma_next, "sigma_next")
    if level.shape != level_next.shape:
        raise ValueError(
            f"sigma has shape {tuple(level.shape)}, sigma_next {tuple(level_next.shape)}, must be the same"
        )
    if not ((level_next < level) & (level_next >= 0) & (level <= 1)).all():
        raise ValueError(
            f"sigma is {level.tolist()}, sigma_next {level_next.tolist()}, must satisfy 0 <= sigma_next < sigma <= 1"
        )
    if kind == "ode" or noise_level == 0:
        return Coefficients(torch.zeros_like(level), level_next, torch.ones_like(level), level - level_next)
    if (level_next == 0).any():
        raise ValueError(
            f"sigma_next is 0 in a step with noise (sde kind {kind!r}), must be > 0; the last step is always 'ode'"
        )
    if kind == "cps":
        std = level_next * math.sin(noise_level * math.pi / 2)
    else:
        capped = level if sigma_cap is None else level.clamp(max=float(sigma_cap))
        growth = {"flow": (level / (1 - capped)).sqrt(), "constant": torch.ones_like(level), "linear": level}[kind]
        std = noise_level * growth * (level - level_next).sqrt()  # infinite for an uncapped "flow" step from sigma = 1
    if max_step_std is not None:
        std = std.clamp(max=max_step_std)
    if kind == "cps":
        c = (level_next.square() - std.square()).clamp(min=0).sqrt()
    else:
        c = level_next - std.square() / (2 * level)
    if not (c >= 0).all():
        worst = c.nan_to_num(nan=-math.inf).argmin()
        found, start, noise = (values.flatten()[worst].item() for values in (c, level, std))
        raise ValueError(
            f"c is {found:.4f} in a step of sde kind {kind!r} from sigma {start:.6f} with std {noise:.4f}, must be >= "
            "0: the predicted noise would change sign; lower noise_level, set max_step_std or sigma_cap, or leave this "
            "step to the ODE"
        )
    return Coefficients(std, c, 1 - level_next + c, level * (1 - level_next) - (1 - level) * c)


def transition(
    velocity: Tensor,
    latents: Tensor,
    sigma: float | Tensor,
    sigma_next: float | Tensor,
    *,
    kind: str,
    noise_level: float,
    sigma_cap: float | Tensor | None = None,
    max_step_std: float | None = None,
) -> Transition:
    """Return the Gaussian of the next latents, mean = keep * latents - kappa * velocity; differentiable in `velocity`.

    Args:
        velocity: (B, ...), the prediction of noise - clean, guidance included.
        latents: (B, ...), before the step.
        sigma: this and all that follow as in `coefficients`.
        sigma_next: noise level after the step.
        kind: SDE variant.
        noise_level: scale of the noise.
        sigma_cap: bound of sigma inside "flow".
        max_step_std: bound of the step std.

    Raises:
        ValueError: shapes that would broadcast silently, or as `coefficients`.
    """
    _check_same_shape(velocity, latents, "velocity", "latents")
    step = coefficients(
        sigma, sigma_next, kind=kind, noise_level=noise_level, sigma_cap=sigma_cap, max_step_std=max_step_std
    )
    kept = per_sample(step.keep, latents) * _full_precision(latents)
    mean = kept - per_sample(step.kappa, latents) * _full_precision(velocity)
    return Transition(mean, _like(step.std, latents), has_density=bool((step.std > 0).all()))


def sample(step: Transition, noise: Tensor) -> Tensor:
    """Return the next latents, mean + std * noise, in mean's shape and dtype.

    Raises:
        ValueError: noise and mean differ in shape.
    """
    _check_same_shape(noise, step.mean, "noise", "mean")
    return step.mean + per_sample(step.std, step.mean) * noise.to(step.mean.dtype)


def log_prob(next_latents: Tensor, step: Transition) -> Tensor:
    """Return the (B,) log-probability of `next_latents`, averaged over a sample's D elements, in nats.

        log p = mean over elements of -(x' - mean)^2 / (2 std^2) - log(std) - log(2 pi) / 2

    The mean over elements instead of the sum (as in the code of Flow-GRPO) keeps ratios near 1 for any latent size: the
    ratio of two policies is the geometric mean of the elements' density ratios. `next_latents` gets no gradient.

    Raises:
        ValueError: shape other than the mean's, or a step without noise, which has no density.
    """
    _check_same_shape(next_latents, step.mean, "next_latents", "mean")
    if not step.has_density:
        raise ValueError("std of the step is 0, must be > 0: a step without noise has no density and is never trained")
    drawn = next_latents.detach().to(step.mean.dtype)
    residual = (drawn - step.mean) / per_sample(step.std, step.mean)
    return -0.5 * element_mean(residual.square()) - step.std.log() - HALF_LOG_2PI


def gaussian_kl(mean: Tensor, reference_mean: Tensor, std: Tensor) -> Tensor:
    """Return the (B,) KL divergence of two Gaussian steps with one std, averaged over elements, in nats.

        KL = mean over elements of (mean - reference_mean)^2 / (2 std^2) = gain^2 / 2 * mean of (v - v_ref)^2

    The exact KL, no estimator. Only `mean` gets a gradient.

    Args:
        mean: (B, ...), current policy.
        reference_mean: (B, ...), reference policy.
        std: () or (B,), std of the whole step.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check_same_shape(mean, reference_mean, "mean", "reference_mean")
    difference = (mean - reference_mean.detach()) / per_sample(std, mean)
    return 0.5 * element_mean(difference.square())


def _check_parameters(kind: str, noise_level: float, max_step_std: float | None) -> None:
    if kind not in KINDS:
        raise ValueError(f"sde kind is {kind!r}, must be one of {', '.join(KINDS)}")
    if not 0 <= noise_level < math.inf:
        raise ValueError(f"noise_level is {noise_level}, must be >= 0 and finite")
    if kind == "cps" and noise_level > 1:
        raise ValueError(f"noise_level is {noise_level}, must be at most 1 for sde kind 'cps'")
    if max_step_std is not None and not max_step_std > 0:
        raise ValueError(f"max_step_std is {max_step_std}, must be > 0; None leaves the step std free")


def _level(value: float | Tensor, name: str) -> Tensor:
    """Return a noise level as a float64 CPU tensor, () or (B,)."""
    level = value.detach().cpu().double() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    if level.ndim > 1:
        raise ValueError(f"{name} has shape {tuple(level.shape)}, must be () or (B,)")
    return level


def _check_same_shape(tensor: Tensor, other: Tensor, name: str, other_name: str) -> None:
    if tensor.shape != other.shape or tensor.ndim == 0:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, {other_name} {tuple(other.shape)}, must be the same (B, ...)"
        )


def _full_precision(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def per_sample(scalar: Tensor, latents: Tensor) -> Tensor:
    """Return () or (B,) scalars in the dtype and on the device of `latents` (B, ...), as () or (B, 1, ..., 1).

    Raises:
        ValueError: another number of scalars than rows.
    """
    scalar = _like(scalar, latents)
    if scalar.ndim == 0:
        return scalar
    if scalar.shape != latents.shape[:1]:
        raise ValueError(f"std or sigma has shape {tuple(scalar.shape)}, must be () or ({latents.shape[0]},)")
    return scalar.view(-1, *[1] * (latents.ndim - 1))


def _like(scalar: Tensor, latents: Tensor) -> Tensor:
    dtype = torch.float64 if latents.dtype == torch.float64 else torch.float32
    # Not waited for: a step's scalars are copied while the device still computes the step before.
    return scalar.to(dtype).to(latents.device, non_blocking=scalar.device.type == "cpu")


def element_mean(values: Tensor) -> Tensor:
    """Return the (B,) mean over all but the first dimension."""
    return values.reshape(values.shape[0], -1).mean(dim=1)
