"""Advantage-weighted flow matching: its gradient, its draws, and that layouts and micro-batches change nothing."""

import contextlib
import dataclasses

import pytest
import torch

from flow_grpo.algorithm.rollout.denoise import rollout
from flow_grpo.algorithm.update.matching import MatchingObjective
from flow_grpo.algorithm.update.updater import Updater
from flow_grpo.maths.schedule import shifted
from flow_grpo.records import Samples
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.sampling import ODE, Sampling, SdeSettings
from tests.toy import SIGMAS, ToyPolicy, batch_of, group, train_config, update, update_config, weights_of
from tests.workers import run_ranks

CONDITIONS = [*group(1, 4), *group(2, 4), *group(3, 4)]
ADVANTAGES = torch.tensor([1.5, -0.5, -1.0, 0.0] * 2 + [0.0] * 4)  # the last group is flat


def sampled(policy: ToyPolicy, rows: slice = slice(None)) -> Samples:
    conditions, settings = CONDITIONS[rows], Sampling(SIGMAS, ODE, seed=5, record=False)
    samples = rollout(policy, conditions, policy.encode(conditions), [()] * len(conditions), settings)
    own = ADVANTAGES[rows]
    return dataclasses.replace(samples, advantages=own, weights=torch.ones(len(own)))


def objective(policy: ToyPolicy, **changes) -> MatchingObjective:
    settings = {"objective": "forward", "forward_levels": 2, "forward_range": 0.4, "trust_coef": 0.0} | changes
    return MatchingObjective(policy, 3.0, 5, train_config(**settings), contextlib.nullcontext)


def updated(samples: Samples, world: World | None = None, **changes) -> tuple[torch.Tensor, dict[str, float]]:
    policy = ToyPolicy()
    made = objective(policy, **changes)
    optimizer = torch.optim.SGD(policy.trained_parameters(), lr=1e-2)
    moving = Updater(policy, made, optimizer, update_config(4, made.train), world or World())
    metrics = update(moving, batch_of(samples), probe=True)
    return weights_of(policy), metrics


def test_an_epoch_without_any_weight_takes_no_step_and_drifts_nowhere():
    samples = dataclasses.replace(sampled(ToyPolicy()), weights=torch.zeros(12))
    weights, metrics = updated(samples)
    assert torch.equal(weights, weights_of(ToyPolicy()))
    assert metrics["train/skipped_updates"] == 1 and metrics["policy/ratio_after_max_abs_log"] == 0


def gradient(policy: ToyPolicy, value: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(value, policy.trained_parameters())])


def test_before_any_update_the_gradient_is_that_of_flow_matching_weighted_by_the_advantages():
    policy = ToyPolicy()
    samples, made = sampled(policy), objective(policy)
    loss = made.loss(samples, {}, 1)
    assert torch.equal(loss.terms.ratio, torch.ones(12, 1)) and not loss.drift.any()
    latents, sigma, noise = made.noised(samples, 1)
    error = (policy.velocity(latents, sigma, samples.conditioning) - noise + samples.final_latents).square()
    wanted = gradient(policy, (ADVANTAGES * error.flatten(1).mean(dim=1)).sum())
    torch.testing.assert_close(gradient(policy, loss.terms.per_sample.sum()), wanted, rtol=1e-5, atol=1e-7)


def test_copies_share_noise_and_level_which_come_from_the_chosen_part_of_the_schedule():
    policy = ToyPolicy()
    samples, made = sampled(policy), objective(policy)
    levels = []
    for number in range(2):
        latents, sigma, noise = made.noised(samples, number)
        assert torch.equal(noise[:4], noise[:1].expand(4, -1, -1, -1, -1)) and len(sigma.unique()) == 3
        assert not torch.equal(noise[0], noise[4])
        wanted = (1 - sigma[0]) * samples.final_latents[0] + sigma[0] * noise[0]
        torch.testing.assert_close(latents[0], wanted, rtol=0, atol=1e-6)
        levels.append(sigma)
    bounds = [float(shifted(torch.tensor(1 - u), 3.0)) for u in (0.0, 0.2, 0.4)]
    assert (levels[0] <= bounds[0]).all() and (levels[0] >= bounds[1]).all()
    assert (levels[1] <= bounds[1]).all() and (levels[1] >= bounds[2]).all()


def test_the_old_errors_are_those_before_the_first_of_several_updates():
    policy = ToyPolicy()
    samples, made = sampled(policy), objective(policy, updates_per_epoch=2)
    memory = made.remember(lambda: samples, as_rolled_out=True)
    with torch.no_grad():
        for weight in policy.trained_parameters():
            weight += 0.01
    loss = made.loss(samples, memory, 0)
    assert (loss.terms.ratio != 1).all()
    torch.testing.assert_close(loss.terms.ratio[:, 0].log(), loss.drift, rtol=0, atol=1e-6)
    torch.testing.assert_close(made.drift(samples, memory), loss.drift, rtol=0, atol=1e-6)


def test_the_pull_to_the_averaged_weights_is_the_squared_distance_of_the_velocities():
    policy = ToyPolicy()
    samples = sampled(policy)

    @contextlib.contextmanager
    def average():
        for weight in policy.trained_parameters():
            weight.data += 0.1
        yield
        for weight in policy.trained_parameters():
            weight.data -= 0.1

    free = objective(policy)
    held = dataclasses.replace(free, train=train_config(forward_levels=2, trust_coef=0.5), average=average)
    free = dataclasses.replace(free, train=train_config(forward_levels=2, trust_coef=0.0))
    latents, sigma, _ = free.noised(samples, 0)
    with torch.no_grad():
        own = policy.velocity(latents, sigma, samples.conditioning)
        with average():
            other = policy.velocity(latents, sigma, samples.conditioning)
    wanted = 0.5 * (own - other).square().flatten(1).mean(dim=1)
    found = held.loss(samples, {}, 0).terms.per_sample - free.loss(samples, {}, 0).terms.per_sample
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("micro", [1, 3, 12])
def test_micro_batch_size_does_not_change_the_update(micro):
    samples = sampled(ToyPolicy())
    wanted, metrics = updated(samples)
    assert metrics["policy/ratio_first_max_abs_log"] == 0.0
    assert metrics["policy/ratio_after_max_abs_log"] > 0.0
    assert (wanted - weights_of(ToyPolicy())).abs().max() > 1e-5
    torch.testing.assert_close(updated(samples, batch_size=micro)[0], wanted, rtol=0, atol=1e-7)


def _half(world: World) -> torch.Tensor:
    return updated(sampled(ToyPolicy(), slice(6 * world.data.rank, 6 * world.data.rank + 6)), world, batch_size=2)[0]


def test_the_samples_of_two_ranks_weigh_as_on_one():
    halves = run_ranks(_half, 2)
    start = weights_of(ToyPolicy())
    mean = sum(half - start for half in halves) / 2  # without DDP every rank moves by its own share
    torch.testing.assert_close(start + mean, updated(sampled(ToyPolicy()))[0], rtol=0, atol=1e-6)


def test_samples_without_recorded_steps_are_the_same_videos():
    policy = ToyPolicy()
    settings = Sampling(SIGMAS, SdeSettings("constant", 0.7), seed=5)
    kept, dropped = (
        rollout(
            policy, CONDITIONS, policy.encode(CONDITIONS), [(1, 2)] * 12, dataclasses.replace(settings, record=record)
        )
        for record in (True, False)
    )
    assert torch.equal(kept.final_latents, dropped.final_latents)
    assert dropped.trajectory.states.shape[1] == dropped.trajectory.steps.shape[1] == 0
