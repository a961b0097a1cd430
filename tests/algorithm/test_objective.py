"""GRPO's objective: the size of its gradient."""

import dataclasses

import pytest
import torch

from tests.toy import ToyPolicy, group, training_batch, update, updater


class PointwisePolicy(ToyPolicy):
    """A velocity that mixes channels element by element, for latents of any size."""

    def __init__(self, shape: tuple[int, int, int, int]) -> None:
        super().__init__()
        self.shape, self.net = shape, torch.nn.Conv3d(2, 2, 1)
        self.module = self.net

    def latent_shape(self, conditions):
        return self.shape

    def velocity(self, latents, sigma, conditioning):
        return self.module(latents)


def first_steps(shape: tuple[int, int, int, int]) -> dict[str, float]:
    """Return the metrics of 48 optimizer steps on 4 samples each, with random advantages and weights that stay."""
    policy = PointwisePolicy(shape)
    batch = training_batch(policy, [group(gid, 4) for gid in range(48)])
    signs = torch.randn(192, generator=torch.Generator().manual_seed(0)).sign()
    batch = dataclasses.replace(batch, advantages=signs)
    changes = {"updates_per_epoch": 48, "learning_rate": 1e-30, "max_grad_norm": 1e9, "old_log_prob": "rollout"}
    return update(updater(policy, **changes), batch)


def test_the_gradient_does_not_depend_on_the_size_of_the_video():
    small, large = first_steps((2, 2, 2, 2)), first_steps((2, 2, 16, 32))
    assert small["train/updates"] == large["train/updates"] == 48
    assert large["train/grad_norm"] == pytest.approx(small["train/grad_norm"], rel=0.15)  # 1 / 11 of it per mean
    for metrics in (small, large):
        assert metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == 1.0
        assert abs(metrics["train/loss"]) <= 1.0  # per latent element: minus the mean advantage
