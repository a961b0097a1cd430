"""One denoising step as a Gaussian: mean, std, log-probability and KL, every SDE variant behind one function.

With clean estimate x0 = x - sigma * v and noise estimate x1 = x + (1 - sigma) * v, every published step is
`mean = (1 - sigma') * x0 + c * x1`, `x' = mean + std * z`; variants differ in `std` and `c` only:

    Euler-Maruyama  std = g * sqrt(sigma - sigma')              c = sigma' - std^2 / (2 sigma)
    cps             std = sigma' * sin(noise_level * pi / 2)    c = sqrt(sigma'^2 - std^2)
    ode             std = 0                                     c = sigma'
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
    """The scalars of one step, float64 on the CPU, each () or (B,).

    Attributes:
        std: noise really added (after clipping), in units of the latents.
        c: weight of the noise estimate in the mean.
        keep: d mean / d latents = 1 - sigma' + c.
        kappa: |d mean / d velocity| = sigma * (1 - sigma') - (1 - sigma) * c.
    """

    std: Tensor
    c: Tensor
    keep: Tensor
    kappa: Tensor

    @property
    def gain(self) -> Tensor:
        """Return kappa / std: how hard the log-probability pulls on the velocity; infinite for a step without noise."""
        return self.kappa / self.std


@dataclasses.dataclass(frozen=True)
class Transition:
    """Where one step leads: a Gaussian around `mean`.

    Attributes:
        mean: (B, ...) of the latents' shape, fp32 (float64 for float64 latents).
        std: () or (B,), mean's dtype and device; the full step std, square root of the step length included.
        c: () or (B,), weight of the noise estimate.
        gain: () or (B,), |d mean / d velocity| / std.
    """

    mean: Tensor
    std: Tensor
    c: Tensor
    gain: Tensor


def coefficients(
    sigma: float | Tensor,
    sigma_next: float | Tensor,
    *,
    kind: str,
    noise_level: float,
    sigma_cap: float | Tensor | None = None,
    max_step_std: float | None = None,
) -> Coefficients:
    """Return the scalars of a step from noise level `sigma` to `sigma_next`.

    Computed in float64 on the CPU wherever the levels live, so that every device and batch shape gets the same bits.

    Args:
        sigma: noise level before the step, () or (B,).
        sigma_next: noise level after the step, () or (B,).
        kind: "ode"; "flow" (Flow-GRPO), g = noise_level * sqrt(sigma / (1 - sigma)); "constant" (DanceGRPO),
            g = noise_level; "linear", g = noise_level * sigma; "cps" (coefficients-preserving sampling).
        noise_level: strength of the noise, >= 0; at most 1 for "cps". 0 gives the ODE step.
        sigma_cap: upper bound of sigma inside the g of "flow", the schedule's sigmas[1]; other kinds ignore it.
        max_step_std: upper bound of the step std, for any kind.

    Raises:
        ValueError: an unknown kind, a bound broken by a parameter, levels that do not fall, or, for a step with noise,
            sigma_next = 0 or c < 0 (the predicted noise would change sign).
    """
    _check_parameters(kind, noise_level, max_step_std)
    level, level_next = _level(sigma, "sigma"), _level(sigma_next, "sigma_next")
    _check_levels(level, level_next)
    if kind == "ode" or noise_level == 0:
        return Coefficients(torch.zeros_like(level), level_next, torch.ones_like(level), level - level_next)
    if (level_next == 0).any():
        raise ValueError(
            f"sigma_next is 0 in a step with noise (sde kind {kind!r}), must be > 0; the last step is always 'ode'"
        )
    std = _free_std(level, level_next, kind, noise_level, sigma_cap)
    if max_step_std is not None:
        std = std.clamp(max=max_step_std)
    if kind == "cps":
        c = (level_next.square() - std.square()).clamp(min=0).sqrt()
    else:
        c = level_next - std.square() / (2 * level)
    if not (c >= 0).all():
        _refuse_negative_c(level, std, c, kind)
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
    """Return the Gaussian that one denoising step draws the next latents from; gradient flows through `velocity`.

    Args:
        velocity: (B, ...), noise minus clean, guidance included.
        latents: (B, ...), before the step.
        sigma: see `coefficients`, as all others.
        sigma_next: noise level after the step.
        kind: SDE variant.
        noise_level: strength of the noise.
        sigma_cap: bound of sigma inside "flow".
        max_step_std: bound of the step std.

    Raises:
        ValueError: shapes that would broadcast silently, or as `coefficients`.
    """
    _check_same_shape(velocity, latents, "velocity", "latents")
    step = coefficients(
        sigma, sigma_next, kind=kind, noise_level=noise_level, sigma_cap=sigma_cap, max_step_std=max_step_std
    )
    # (1 - sigma') * x0 + c * x1, collected by latents and velocity.
    kept = _per_sample(_like(step.keep, latents), latents) * _full_precision(latents)
    mean = kept - _per_sample(_like(step.kappa, latents), latents) * _full_precision(velocity)
    return Transition(mean, _like(step.std, latents), _like(step.c, latents), _like(step.gain, latents))


def sample(step: Transition, noise: Tensor) -> Tensor:
    """Return the next latents mean + std * noise, of mean's shape and dtype.

    Raises:
        ValueError: noise has another shape than the mean.
    """
    _check_same_shape(noise, step.mean, "noise", "mean")
    return step.mean + _per_sample(step.std, step.mean) * noise.to(step.mean.dtype)


def log_prob(next_latents: Tensor, step: Transition) -> Tensor:
    """Return the (B,) mean log-density per latent element of drawing `next_latents`, in nats.

    The full Gaussian, normalisation included (Flow-GRPO, eq. 9, with a mean in place of the sum), so a ratio of two is
    the geometric mean over elements. No gradient flows into `next_latents`.

    Raises:
        ValueError: another shape than the mean, or a step without noise, which has no density.
    """
    _check_same_shape(next_latents, step.mean, "next_latents", "mean")
    if not (step.std > 0).all():
        raise ValueError("std of the step is 0, must be > 0: a step without noise has no density and is never trained")
    drawn = next_latents.detach().to(step.mean.dtype)
    residual = (drawn - step.mean) / _per_sample(step.std, step.mean)
    return -0.5 * _element_mean(residual.square()) - step.std.log() - HALF_LOG_2PI


def gaussian_kl(mean: Tensor, reference_mean: Tensor, std: Tensor) -> Tensor:
    """Return the (B,) KL divergence per latent element, in nats, of two steps that share one std.

    Equals half the squared gain times the mean squared difference of velocities. Gradient flows through `mean` only.

    Args:
        mean: (B, ...) of the current policy.
        reference_mean: (B, ...) of the reference policy.
        std: () or (B,) full step std.

    Raises:
        ValueError: the means differ in shape, or std does not fit them.
    """
    _check_same_shape(mean, reference_mean, "mean", "reference_mean")
    difference = (mean - reference_mean.detach()) / _per_sample(std, mean)
    return 0.5 * _element_mean(difference.square())


def _check_parameters(kind: str, noise_level: float, max_step_std: float | None) -> None:
    if kind not in KINDS:
        raise ValueError(f"sde kind is {kind!r}, must be one of {', '.join(KINDS)}")
    if not 0 <= noise_level < math.inf:
        raise ValueError(f"noise_level is {noise_level}, must be >= 0 and finite")
    if kind == "cps" and noise_level > 1:
        raise ValueError(f"noise_level is {noise_level}, must be at most 1 for sde kind 'cps'")
    if max_step_std is not None and not max_step_std > 0:
        raise ValueError(f"max_step_std is {max_step_std}, must be > 0; None leaves the step std free")


def _check_levels(level: Tensor, level_next: Tensor) -> None:
    if level.shape != level_next.shape:
        raise ValueError(
            f"sigma has shape {tuple(level.shape)}, sigma_next {tuple(level_next.shape)}, must be the same"
        )
    if not ((level_next < level) & (level_next >= 0) & (level <= 1)).all():
        raise ValueError(
            f"sigma is {level.tolist()}, sigma_next {level_next.tolist()}, must satisfy 0 <= sigma_next < sigma <= 1"
        )


def _free_std(
    level: Tensor, level_next: Tensor, kind: str, noise_level: float, sigma_cap: float | Tensor | None
) -> Tensor:
    """Return the step std before clipping; infinite for an uncapped "flow" step from sigma = 1."""
    if kind == "cps":
        return level_next * math.sin(noise_level * math.pi / 2)
    root = (level - level_next).sqrt()
    if kind == "flow":
        capped = level if sigma_cap is None else level.clamp(max=float(sigma_cap))
        return noise_level * (level / (1 - capped)).sqrt() * root
    if kind == "linear":
        return noise_level * level * root
    return noise_level * root


def _refuse_negative_c(level: Tensor, std: Tensor, c: Tensor, kind: str) -> None:
    worst = c.nan_to_num(nan=-math.inf).argmin()
    level, std, c = level.flatten()[worst], std.flatten()[worst], c.flatten()[worst]
    raise ValueError(
        f"c is {c.item():.4f} in a step of sde kind {kind!r} from sigma {level.item():.6f} with std {std.item():.4f}, "
        "must be >= 0: the predicted noise would change sign; lower noise_level, set max_step_std or sigma_cap, or "
        "leave this step to the ODE"
    )


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


def _like(scalar: Tensor, latents: Tensor) -> Tensor:
    dtype = torch.float64 if latents.dtype == torch.float64 else torch.float32
    return scalar.to(dtype).to(latents.device)


def _per_sample(scalar: Tensor, latents: Tensor) -> Tensor:
    """Return () unchanged and (B,) as (B, 1, ..., 1)."""
    if scalar.ndim == 0:
        return scalar
    if scalar.shape != latents.shape[:1]:
        raise ValueError(f"std or sigma has shape {tuple(scalar.shape)}, must be () or ({latents.shape[0]},)")
    return scalar.view(-1, *[1] * (latents.ndim - 1))


def _element_mean(values: Tensor) -> Tensor:
    """Return the (B,) mean over all but the first dimension."""
    return values.reshape(values.shape[0], -1).mean(dim=1)
