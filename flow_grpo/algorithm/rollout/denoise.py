"""The denoising loop: from noise to clean latents, recording the stochastic steps.

A sample has three phases: the prefix follows the ODE to the window, each step of the window adds noise and is recorded
with the log-probability of its draw, and the tail follows the ODE to clean latents. Groups have windows at different
places, so a batch may hold samples at different noise levels; all samples of a batch take their stochastic steps in
the same calls, which are those that the update repeats, but for a step that copies share (`shared_step.py`). Evaluation
has no window: the prefix is all there is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from flow_grpo.maths.keys import generator
from flow_grpo.maths.multistep import second_order_step
from flow_grpo.maths.sde import Transition, log_prob, sample, transition
from flow_grpo.models.policy import Approximates, Policy
from flow_grpo.records import Condition, Conditioning, Samples, Trajectory
from flow_grpo.settings.sampling import Sampling


def step_transition(
    policy: Policy,
    latents: Tensor,
    conditioning: Conditioning,
    steps: Tensor,
    sampling: Sampling,
    *,
    velocity: Tensor | None = None,
) -> Transition:
    """Return the Gaussian that each sample's denoising step draws from.

    Rollout and update both call this function, so they cannot disagree about a step.

    Args:
        policy: predicts the velocity.
        latents: (B, C, F, H, W) fp32 before the step.
        conditioning: B rows.
        steps: (B,) int64 CPU, each sample's step, 0..S-1.
        sampling: noise levels and SDE.
        velocity: (B, C, F, H, W), where it is known already.
    """
    sigmas = sampling.sigmas
    sigma = sigmas[steps]
    if velocity is None:
        velocity = policy.velocity(latents, sigma.to(latents, non_blocking=True), conditioning)
    return transition(velocity, latents, sigma, sigmas[steps + 1], sigma_cap=float(sigmas[1]), **vars(sampling.sde))


@torch.no_grad()
def rollout(
    policy: Policy,
    conditions: Sequence[Condition],
    conditioning: Conditioning,
    windows: Sequence[Sequence[int]],
    sampling: Sampling,
    shared: Tensor | None = None,
) -> Samples:
    """Denoise one batch of B; the draws depend on (seed, gid, slot) only, never on rank, layout or batch.

    Args:
        policy: the model being trained.
        conditions: B conditions of one video size.
        conditioning: their B rows as the transformer takes them.
        windows: per sample its K stochastic steps, consecutive, within 0..S-2; without any the ODE is sampled.
        sampling: noise levels, SDE and seed.
        shared: (B, 2, C, F, H, W) latents before each sample's window and the velocity there, where they are known.
    """
    steps = window_rows(windows)
    count, columns = steps.shape
    shape = policy.latent_shape(conditions)
    device = conditioning.prompt_embeds.device
    initial = torch.stack([initial_noise(condition, shape, sampling) for condition in conditions])
    noise = step_noise(conditions, shape, columns, sampling)
    velocity = None
    if shared is None:
        latents = prefix(policy, initial.to(device, non_blocking=True), conditioning, steps, sampling)
    else:
        latents, velocity = shared.to(device, non_blocking=True).unbind(dim=1)
    states, log_probs = [latents], []
    for column in range(columns):
        gaussian = step_transition(policy, latents, conditioning, steps[:, column], sampling, velocity=velocity)
        velocity = None
        drawn = sample(gaussian, noise[:, column].to(device, non_blocking=True))
        if sampling.record:
            states.append(drawn)
            log_probs.append(log_prob(drawn, gaussian))
        latents = drawn
    if columns:
        latents = tail(policy, latents, conditioning, steps[:, -1] + 1, sampling)
    own = noise if columns else initial
    return Samples(
        keys=torch.tensor([[c.gid, c.slot, c.index] for c in conditions], dtype=torch.int64),
        noise_ids=torch.tensor([[_hash(a), _hash(b)] for a, b in zip(initial, own, strict=True)]),
        conditioning=conditioning,
        trajectory=Trajectory(
            states=torch.stack(states, dim=1) if log_probs else latents.new_empty((count, 0, *shape)),
            log_probs=torch.stack(log_probs, dim=1) if log_probs else latents.new_empty((count, 0)),
            steps=steps if log_probs else steps[:, :0],
        ),
        final_latents=latents,
    )


def window_rows(windows: Sequence[Sequence[int]]) -> Tensor:
    """Return the windows of B samples as (B, K) int64 CPU."""
    return torch.tensor([list(window) for window in windows], dtype=torch.int64).view(len(windows), -1)


@torch.no_grad()
def prefix(policy: Policy, latents: Tensor, conditioning: Conditioning, steps: Tensor, sampling: Sampling) -> Tensor:
    """Return the (B, C, F, H, W) latents before each sample's window, or clean latents where K = 0.

    Args:
        policy: predicts the velocity.
        latents: (B, C, F, H, W) initial noise.
        conditioning: B rows.
        steps: (B, K) from `window_rows`.
        sampling: noise levels.
    """
    last = len(sampling.sigmas) - 1
    counts = steps[:, 0] if steps.shape[1] else torch.full((len(latents),), last)
    levels, calls = sampling.sigmas.expand(len(latents), -1), sampling.calls and sampling.calls[0]
    with _walk(policy, sampling, int(counts.max())):
        return _euler(policy, latents, conditioning, levels, counts, calls)


def tail(policy: Policy, latents: Tensor, conditioning: Conditioning, starts: Tensor, sampling: Sampling) -> Tensor:
    """Return clean latents of samples at noise levels `sigmas[starts]`, starts (B,)."""
    if sampling.tails is not None:
        with _walk(policy, sampling, sampling.tails.shape[1] - 1):
            return _second_order(policy, latents, conditioning, sampling.tails[starts])
    last = len(sampling.sigmas) - 1
    levels = sampling.sigmas[(starts[:, None] + torch.arange(last + 1)).clamp(max=last)]
    with _walk(policy, sampling, last - int(starts.min())):
        return _euler(policy, latents, conditioning, levels, last - starts, sampling.calls and sampling.calls[1])


def _walk(policy: Policy, sampling: Sampling, calls: int) -> contextlib.AbstractContextManager[None]:
    if not sampling.sparse:
        return contextlib.nullcontext()
    assert isinstance(policy, Approximates)  # or it was refused when it was made
    return policy.approximate(calls)


def _euler(
    policy: Policy, latents: Tensor, conditioning: Conditioning, levels: Tensor, counts: Tensor, calls: int | None
) -> Tensor:
    """Follow the ODE along (B, n+1) CPU noise levels by first-order steps, so many a sample as `counts` (B,) says.

    `calls` is how often the network is called, None for no more than it takes.
    """
    most = int(counts.max())
    for step in range(most):
        rows = (counts > step).nonzero().flatten()
        if len(rows) == len(latents):
            latents = _ode_step(policy, latents, conditioning, levels[:, step], levels[:, step + 1])
        else:
            index = rows.to(latents.device, non_blocking=True)
            own, ends = conditioning.rows(rows), levels[rows]
            moved = _ode_step(policy, latents[index], own, ends[:, step], ends[:, step + 1])
            latents = latents.index_copy(0, index, moved)
    for _ in range(most if calls is None else calls, most, -1):
        # A sharded network gathers its weights in every call, so all ranks must make equally many.
        policy.velocity(latents[:1], levels[:1, 0].to(latents, non_blocking=True), conditioning.rows(slice(0, 1)))
    return latents


def _second_order(policy: Policy, latents: Tensor, conditioning: Conditioning, levels: Tensor) -> Tensor:
    """Follow the ODE along (B, n+1) CPU noise levels by steps that use the previous velocity as well."""
    sigma, after = levels[:, 0], levels[:, 1]
    velocity = policy.velocity(latents, sigma.to(latents, non_blocking=True), conditioning)
    latents = transition(velocity, latents, sigma, after, kind="ode", noise_level=0.0).mean
    for step in range(1, levels.shape[1] - 1):
        before, sigma, after = levels[:, step - 1], levels[:, step], levels[:, step + 1]
        previous, velocity = velocity, policy.velocity(latents, sigma.to(latents, non_blocking=True), conditioning)
        latents = second_order_step(latents, velocity, previous, before, sigma, after)
    return latents


def _ode_step(policy: Policy, latents: Tensor, conditioning: Conditioning, sigma: Tensor, after: Tensor) -> Tensor:
    velocity = policy.velocity(latents, sigma.to(latents, non_blocking=True), conditioning)
    return transition(velocity, latents, sigma, after, kind="ode", noise_level=0.0).mean


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


def step_noise(conditions: Sequence[Condition], shape: Sequence[int], steps: int, sampling: Sampling) -> Tensor:
    """Return the CPU fp32 noise of every stochastic step, (B, steps, *shape)."""
    own = [generator(sampling.seed, "sde", condition.gid, condition.slot) for condition in conditions]
    return torch.stack([torch.randn((steps, *shape), generator=draw) for draw in own])


def initial_noise(condition: Condition, shape: tuple[int, ...], sampling: Sampling) -> Tensor:
    """Return the CPU fp32 noise of `shape` that a sample starts from."""
    slot = () if sampling.same_initial_noise else (condition.slot,)
    return torch.randn(shape, generator=generator(sampling.seed, "xT", condition.gid, *slot))


def _hash(noise: Tensor) -> int:
    return int.from_bytes(blake2b(noise.numpy().tobytes(), digest_size=8).digest(), "big", signed=True)
