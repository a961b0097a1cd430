"""One rank's way through an epoch in shapes: the real functions on tensors without memory.

Not walked are loaders, rewards and exchanges, whose shapes follow from the counts, and repetition: one step of each
kind stands for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from flow_grpo.algorithm import debug_print
from flow_grpo.algorithm.rollout.denoise import SdeSettings, step_transition
from flow_grpo.maths.loss import grpo_loss
from flow_grpo.maths.sde import log_prob, sample
from flow_grpo.models.policy import Policy
from flow_grpo.records import Condition, Conditioning, RewardResult, Samples, ScoredBatch, Trajectory
from flow_grpo.settings.schema import Config


@dataclasses.dataclass(frozen=True)
class Shape:
    """One tensor met on the way.

    Attributes:
        phase: where.
        name: which.
        shape: its dimensions.
        dtype: such as "float32".
        mib: its size.
    """

    phase: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    mib: float


def walk(
    policy: Policy, config: Config, size: tuple[int, int, int], sigmas: Sequence[float], world_size: int
) -> list[Shape]:
    """Return the tensors that one rank meets in an epoch of videos of one size; call where tensors have no memory.

    Args:
        policy: of fake tensors.
        config: the recipe.
        size: video frames, rows, columns.
        sigmas: S+1 noise levels.
        world_size: W.

    Raises:
        ValueError: the videos do not fit the model.
    """
    seen: list[Shape] = []
    first = _sampled(policy, config, size, sigmas, seen)
    nb = config.sample.num_batches_per_epoch
    merged = ScoredBatch(
        conditions=first.conditions * nb,
        samples=Samples.concatenate([first.samples] * nb),
        rewards=dict.fromkeys(
            config.reward.weights,
            RewardResult(torch.empty(len(first) * nb), torch.ones(len(first) * nb, dtype=torch.bool), ("",)),
        ),
        videos=first.videos,
    )
    views = debug_print.batch_view(merged, torch.empty(len(sigmas)), config.reward.weights)
    for name, value in views.items():
        if isinstance(value, Tensor):
            _note(seen, "epoch", name, value)
    total = world_size * config.sample.expanded_batch_size
    rewards = torch.empty(total)
    _note(seen, "gather", "rewards", rewards)
    _note(
        seen,
        "gather",
        "rewards.avg over steps",
        debug_print.repeat_over_steps(rewards, len(merged.samples.trajectory.steps)),
    )
    _update(policy, config, merged, sigmas, seen)
    return seen


def _sampled(
    policy: Policy, config: Config, size: tuple[int, int, int], sigmas: Sequence[float], seen: list[Shape]
) -> ScoredBatch:
    """Walk one batch from conditions to videos."""
    settings = config.sample
    conditions = tuple(_condition(size, row, config.data.prompt) for row in range(settings.train_batch_size))
    _note(seen, "data", "source_video", conditions[0].source_video)
    conditioning = policy.encode(conditions)
    for name, tensor in conditioning.tensors().items():
        _note(seen, "encode", name, tensor)
    with torch.no_grad():
        trajectory, final = _rolled_out(policy, config, conditions, conditioning, sigmas)
        videos = policy.decode(final)
    for name, tensor in (*trajectory.tensors().items(), ("final_latents", final)):
        _note(seen, "rollout", name, tensor)
    _note(seen, "decode", "videos", videos)
    samples = Samples(
        keys=torch.zeros((len(conditions), 3), dtype=torch.int64),
        places=torch.arange(len(conditions)),
        noise_ids=torch.zeros((len(conditions), 2), dtype=torch.int64),
        conditioning=conditioning,
        trajectory=trajectory,
        final_latents=final,
    )
    return ScoredBatch(conditions, samples, {}, videos)


def _condition(size: tuple[int, int, int], row: int, prompt: str) -> Condition:
    return Condition(
        index=row,
        gid=row,
        slot=0,
        prompt=prompt,
        source_video=torch.empty(3, *size),
        target_poses=torch.empty(size[0], 4, 4),
        scene="",
        source_camera="",
        target_camera="",
        source_id=str(row),
    )


def _rolled_out(
    policy: Policy,
    config: Config,
    conditions: Sequence[Condition],
    conditioning: Conditioning,
    sigmas: Sequence[float],
) -> tuple[Trajectory, Tensor]:
    """Take one step of the ODE and one stochastic step, which stands for all K."""
    settings = config.sample
    steps = settings.sde_steps[: settings.sde_window] or settings.sde_steps
    latents = torch.empty(len(conditions), *policy.latent_shape(conditions))
    latents = step_transition(policy, latents, conditioning, sigmas=sigmas, step=0, sde=None).mean
    drawn_from = step_transition(policy, latents, conditioning, sigmas=sigmas, step=steps[0], sde=_sde(config))
    after = sample(drawn_from, torch.empty_like(latents))
    scored = log_prob(after, drawn_from)
    trajectory = Trajectory(
        states=torch.stack([latents, *[after] * len(steps)], dim=1),
        log_probs=torch.stack([scored] * len(steps), dim=1),
        state_index=tuple(range(len(steps))),
        steps=tuple(steps),
    )
    return trajectory, after


def _update(policy: Policy, config: Config, merged: ScoredBatch, sigmas: Sequence[float], seen: list[Shape]) -> None:
    """Walk one micro-batch forward and back."""
    train = config.train
    micro = merged.samples.rows(slice(0, train.batch_size))
    advantages = torch.empty(len(micro))
    states, step = micro.trajectory.states, micro.trajectory.steps[0]
    current = step_transition(policy, states[:, 0], micro.conditioning, sigmas=sigmas, step=step, sde=_sde(config))
    new = log_prob(states[:, 1], current)
    terms = grpo_loss(
        new[:, None], new.detach()[:, None], advantages, clip_range=train.clip_range, adv_clip=train.adv_clip
    )
    for name, tensor in (("latents", states[:, 0]), ("log_prob", new), ("loss", terms.per_sample)):
        _note(seen, "micro-batch", name, tensor)
    terms.per_sample.sum().backward()
    learned = [parameter.grad is not None for parameter in policy.trained_parameters()]
    assert all(learned), f"{learned.count(False)} of {len(learned)} trained tensors have no part in the loss"


def _sde(config: Config) -> SdeSettings:
    return SdeSettings(config.sample.sde, config.sample.noise_level, config.sample.max_step_std)


def _note(seen: list[Shape], phase: str, name: str, tensor: Tensor) -> None:
    size = tensor.numel() * tensor.element_size() / 2**20
    seen.append(Shape(phase, name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), size))


def lines(shapes: Sequence[Shape]) -> list[str]:
    """Return one line per tensor."""
    widest = max(len(shape.name) for shape in shapes)
    return [
        f"{shape.phase:12s} {shape.name:{widest}s} {list(shape.shape)!s:30s} {shape.dtype:9s} {shape.mib:10,.2f} MiB"
        for shape in shapes
    ]
