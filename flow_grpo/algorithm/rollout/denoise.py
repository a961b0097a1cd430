"""The denoising loop: from noise to clean latents, recording the stochastic steps.

One loop serves training and evaluation: a step inside `window` adds noise and is recorded with the log-probability of
its draw; every other step, and so the whole loop when `window` is empty, follows the ODE.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from flow_grpo.maths.keys import generator
from flow_grpo.maths.schedule import check_sde_steps
from flow_grpo.maths.sde import Transition, log_prob, sample, transition
from flow_grpo.models.policy import Policy
from flow_grpo.records import Condition, Conditioning, Samples, Trajectory


@dataclasses.dataclass(frozen=True)
class SdeSettings:
    """The noise of a stochastic step.

    Attributes:
        kind: "flow" | "constant" | "linear" | "cps", see `maths/sde.py`.
        noise_level: coefficient of that kind.
        max_step_std: upper bound of the step's standard deviation, or None.
    """

    kind: str
    noise_level: float
    max_step_std: float | None = None


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """What a rollout depends on besides the model and its conditions.

    Attributes:
        sigmas: (S+1,) fp32 CPU noise levels, from 1 to 0.
        sde: noise of the stochastic steps.
        seed: seed of the run.
        same_initial_noise: the copies of a group share their initial noise.
    """

    sigmas: Tensor
    sde: SdeSettings
    seed: int
    same_initial_noise: bool = False


def step_transition(
    policy: Policy,
    latents: Tensor,
    conditioning: Conditioning,
    *,
    sigmas: Tensor | Sequence[float],
    step: int,
    sde: SdeSettings | None,
) -> Transition:
    """Return the Gaussian that denoising step `step` draws from; with `sde` None its mean is the ODE step.

    Rollout and update both call this function, so they cannot disagree about a step.

    Args:
        policy: predicts the velocity.
        latents: (B, C, F, H, W) fp32 before the step.
        conditioning: B rows.
        sigmas: S+1 noise levels on the CPU, from 1 to 0.
        step: which step, 0..S-1.
        sde: noise of the step, or None.
    """
    sigma, sigma_next = float(sigmas[step]), float(sigmas[step + 1])
    levels = torch.full((len(latents),), sigma, dtype=torch.float32, device=latents.device)
    velocity = policy.velocity(latents, levels, conditioning)
    return transition(
        velocity,
        latents,
        sigma,
        sigma_next,
        kind=sde.kind if sde else "ode",
        noise_level=sde.noise_level if sde else 0.0,
        sigma_cap=float(sigmas[1]),
        max_step_std=sde.max_step_std if sde else None,
    )


@torch.no_grad()
def rollout(
    policy: Policy,
    conditions: Sequence[Condition],
    conditioning: Conditioning,
    window: Sequence[int],
    settings: RolloutSettings,
) -> Samples:
    """Denoise one batch; the draws depend on (seed, gid, slot) only, never on rank, layout or batch.

    Args:
        policy: the model being trained.
        conditions: B conditions of one video size.
        conditioning: their B rows as the transformer takes them.
        window: steps that are stochastic and recorded, rising, within 0..S-2; empty samples the ODE.
        settings: noise levels, SDE and seed.

    Returns:
        B samples, whose places are 0..B-1.

    Raises:
        ValueError: a window step is the last step, lies outside the schedule or comes out of order.
    """
    steps, sigmas = tuple(window), settings.sigmas
    if steps:
        check_sde_steps(steps, len(sigmas) - 1)
    shape = policy.latent_shape(conditions)
    device = conditioning.target_cameras.device
    initial, step_noise = _draw_noise(conditions, shape, len(steps), settings)
    latents = initial.to(device)
    states: list[Tensor] = []
    state_index: list[int] = []
    log_probs: list[Tensor] = []
    for step in range(len(sigmas) - 1):
        if step not in steps:
            latents = step_transition(policy, latents, conditioning, sigmas=sigmas, step=step, sde=None).mean
            continue
        if step - 1 not in steps:
            states.append(latents)
        state_index.append(len(states) - 1)
        gaussian = step_transition(policy, latents, conditioning, sigmas=sigmas, step=step, sde=settings.sde)
        latents = sample(gaussian, step_noise[:, len(state_index) - 1].to(device))
        states.append(latents)
        log_probs.append(log_prob(latents, gaussian))
    rows = len(conditions)
    return Samples(
        keys=torch.tensor([[c.gid, c.slot, c.index] for c in conditions], dtype=torch.int64),
        places=torch.arange(rows),
        noise_ids=torch.tensor([[_hash(a), _hash(b)] for a, b in zip(initial, step_noise, strict=True)]),
        conditioning=conditioning,
        trajectory=Trajectory(
            states=torch.stack(states, dim=1) if states else latents.new_empty((rows, 0, *shape)),
            log_probs=torch.stack(log_probs, dim=1) if log_probs else latents.new_empty((rows, 0)),
            state_index=tuple(state_index),
            steps=steps,
        ),
        final_latents=latents,
    )


def check_noise(gids: Tensor, noise_ids: Tensor, *, same_initial_noise: bool) -> None:
    """Raise when two copies of one group were drawn from the same noise although they should differ.

    Args:
        gids: (N,) int64 group of every sample, over all ranks.
        noise_ids: (N, 2) int64 hashes from `Samples.noise_ids`.
        same_initial_noise: equal initial noise within a group is intended.

    Raises:
        RuntimeError: naming the group and which noise is repeated.
    """
    columns = {1: "step noise"} if same_initial_noise else {0: "initial noise", 1: "step noise"}
    for column, what in columns.items():
        seen: dict[tuple[int, int], int] = {}
        for row, pair in enumerate(zip(gids.tolist(), noise_ids[:, column].tolist(), strict=True)):
            if pair in seen:
                raise RuntimeError(
                    f"samples {seen[pair]} and {row} of group {pair[0]} were drawn from the same {what}: "
                    "the copies of a group must differ, so the (seed, gid, slot) keys collide"
                )
            seen[pair] = row


def _draw_noise(
    conditions: Sequence[Condition], shape: tuple[int, ...], steps: int, settings: RolloutSettings
) -> tuple[Tensor, Tensor]:
    """Return CPU fp32 noise: initial (B, *shape) and one per stochastic step (B, steps, *shape)."""
    initial, step_noise = [], []
    for condition in conditions:
        slot = () if settings.same_initial_noise else (condition.slot,)
        initial.append(torch.randn(shape, generator=generator(settings.seed, "xT", condition.gid, *slot)))
        own = generator(settings.seed, "sde", condition.gid, condition.slot)
        step_noise.append(torch.randn((steps, *shape), generator=own))
    return torch.stack(initial), torch.stack(step_noise)


def _hash(noise: Tensor) -> int:
    return int.from_bytes(blake2b(noise.numpy().tobytes(), digest_size=8).digest(), "big", signed=True)
