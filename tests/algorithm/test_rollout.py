"""The rollout: its noise, its recorded steps, and that an empty window is the ODE sampler."""

import itertools

import pytest
import torch

from flow_grpo.algorithm.rollout.denoise import check_noise, initial_noise, prefix, rollout, window_rows
from flow_grpo.maths.keys import generator
from flow_grpo.maths.schedule import flow_sigmas, tail_levels
from flow_grpo.maths.sde import log_prob, transition
from flow_grpo.records import Samples, Trajectory
from flow_grpo.settings.sampling import Sampling, SdeSettings
from tests.toy import SDE, SHAPE, SIGMAS, ToyPolicy, condition, group


class StraightPolicy(ToyPolicy):
    """Every sample moves at one velocity, whatever its latents and noise level."""

    def velocity(self, latents, sigma, conditioning):
        return torch.full_like(latents, 0.7)


def roll(policy: ToyPolicy, conditions, window=(1, 2), seed=5, sde=SDE, **options) -> Trajectory:
    return whole(policy, conditions, window, seed, sde, **options).trajectory


def whole(policy, conditions, window=(1, 2), seed=5, sde=SDE, *, sigmas=SIGMAS, windows=None, **options) -> Samples:
    settings = Sampling(sigmas, sde, seed, **options)
    return rollout(policy, conditions, policy.encode(conditions), windows or [window] * len(conditions), settings)


def test_empty_window_is_the_euler_ode_with_the_keyed_initial_noise():
    policy = ToyPolicy()
    rolled = whole(policy, group(3, 2), window=())
    got = rolled.trajectory
    latents = torch.stack([torch.randn(SHAPE, generator=generator(5, "xT", 3, slot)) for slot in range(2)])
    conditioning = policy.encode(group(3, 2))
    with torch.no_grad():
        for before, after in itertools.pairwise(SIGMAS):
            latents = latents + policy.velocity(latents, before.repeat(2), conditioning) * (after - before)
    torch.testing.assert_close(rolled.final_latents, latents, rtol=0, atol=1e-6)
    assert got.log_probs.shape == (2, 0)
    assert got.states.shape == (2, 0, *SHAPE)


def test_steps_before_the_window_follow_the_ode():
    policy = ToyPolicy()
    stochastic = whole(policy, group(3, 2), window=(2, 3))
    plain = whole(policy, group(3, 2), window=())
    prefix = whole(policy, group(3, 2), window=(), sigmas=SIGMAS[:3])
    assert torch.equal(stochastic.trajectory.states[:, 0], prefix.final_latents)
    assert not torch.equal(stochastic.final_latents, plain.final_latents)


def test_samples_with_different_windows_in_one_batch_are_those_of_batches_with_one_window():
    policy = ToyPolicy()
    conditions = [*group(3, 2), *group(9, 2), *group(5, 1)]
    mixed = whole(policy, conditions, windows=[(3, 4), (3, 4), (0, 1), (0, 1), (2, 3)])
    assert sum(rows for rows, *_ in policy.calls) == 5 * (len(SIGMAS) - 1)
    for rows, window in (((0, 1), (3, 4)), ((2, 3), (0, 1)), ((4,), (2, 3))):
        alone = whole(policy, [conditions[row] for row in rows], window)
        torch.testing.assert_close(mixed.final_latents[list(rows)], alone.final_latents, rtol=0, atol=1e-6)
        torch.testing.assert_close(mixed.trajectory.states[list(rows)], alone.trajectory.states, rtol=0, atol=1e-6)
        torch.testing.assert_close(
            mixed.trajectory.log_probs[list(rows)], alone.trajectory.log_probs, rtol=0, atol=1e-6
        )


def test_a_given_prefix_and_velocity_replace_the_steps_until_the_window_s_first_bit_for_bit():
    policy, conditions, windows = ToyPolicy(), group(3, 4), [(2, 3)] * 4
    own = whole(policy, conditions, windows=windows, same_initial_noise=True)
    settings = Sampling(SIGMAS, SDE, 5, same_initial_noise=True)
    steps = window_rows(windows)
    noise = torch.stack([initial_noise(condition, SHAPE, settings) for condition in conditions])
    conditioning = policy.encode(conditions)
    first = prefix(policy, noise, conditioning, steps, settings)
    with torch.no_grad():
        velocity = policy.velocity(first, SIGMAS[steps[:, 0]], conditioning)
    policy.calls.clear()
    known = torch.stack([first, velocity], dim=1)[:1].expand(4, 2, *SHAPE)
    given = rollout(policy, conditions, conditioning, windows, settings, known)
    assert torch.equal(given.final_latents, own.final_latents)
    assert torch.equal(given.trajectory.states, own.trajectory.states)
    assert len(policy.calls) == len(SIGMAS) - 1 - 3


def test_a_short_tail_takes_its_number_of_calls_from_every_window():
    policy = ToyPolicy()
    tails = tail_levels(SIGMAS, 2)
    whole(policy, [*group(3, 1), *group(9, 1)], windows=[(3,), (1,)], tails=tails)
    assert len(policy.calls) == 3 + 1 + 2


def test_a_tail_on_the_schedule_s_own_levels_ends_where_the_schedule_does():
    """With a velocity that does not depend on the noise level or the latents, any step length is exact."""
    policy = StraightPolicy()
    short = whole(policy, group(3, 2), (1, 2), tails=tail_levels(SIGMAS, 2))
    full = whole(policy, group(3, 2), (1, 2))
    torch.testing.assert_close(short.final_latents, full.final_latents, rtol=0, atol=1e-6)


def test_batches_make_equally_many_calls_whatever_their_windows_where_the_network_is_sharded():
    counts = []
    for windows in ([(0,), (0,)], [(3,), (1,)]):
        policy = ToyPolicy()
        got = whole(policy, [*group(3, 1), *group(9, 1)], windows=windows, calls=(3, 5))
        plain = whole(ToyPolicy(), [*group(3, 1), *group(9, 1)], windows=windows)
        torch.testing.assert_close(got.final_latents, plain.final_latents, rtol=0, atol=1e-6)
        counts.append(len(policy.calls))
    assert counts == [9, 9]


def test_stored_steps_score_to_the_stored_log_probs_and_leave_standard_residuals():
    policy = ToyPolicy()
    conditions = [c for gid in range(64) for c in group(gid, 4)]
    got = roll(policy, conditions, window=(1, 2))
    conditioning = policy.encode(conditions)
    for column, step in enumerate(got.steps[0].tolist()):
        before, after = got.states[:, column], got.states[:, column + 1]
        with torch.no_grad():
            velocity = policy.velocity(before, SIGMAS[step].repeat(256), conditioning)
        levels = float(SIGMAS[step]), float(SIGMAS[step + 1])
        drawn_from = transition(velocity, before, *levels, kind="constant", noise_level=SDE.noise_level)
        assert torch.equal(log_prob(after, drawn_from), got.log_probs[:, column])
        residual = ((after - drawn_from.mean) / drawn_from.std).flatten()
        assert abs(residual.mean()) < 5 / len(residual) ** 0.5
        assert abs(residual.std() - 1) < 5 / (2 * len(residual)) ** 0.5


def test_a_sample_s_noise_depends_on_seed_gid_and_slot_not_on_its_batch_place_or_schedule():
    policy = ToyPolicy()
    together = whole(policy, [*group(3, 4), *group(9, 4)])
    apart = whole(policy, [condition(9, 9, 2), condition(3, 3, 1)])
    for row, place in ((0, 6), (1, 1)):
        wanted = together.trajectory.states[place]
        torch.testing.assert_close(apart.trajectory.states[row], wanted, rtol=0, atol=1e-6)
        assert torch.equal(apart.noise_ids[row], together.noise_ids[place])
    longer = whole(policy, group(3, 4), window=(1,), sigmas=flow_sigmas(9, 5.0))
    assert torch.equal(longer.noise_ids[:, 0], together.noise_ids[:4, 0])
    other_seed = whole(policy, group(3, 4), seed=6)
    assert not torch.isin(other_seed.noise_ids, together.noise_ids).any()


def test_the_copies_of_a_group_differ_and_may_share_their_first_noise_only():
    policy = ToyPolicy()
    conditions = group(3, 4)
    assert len(whole(policy, conditions).noise_ids.unique()) == 8
    rolled = whole(policy, conditions, window=(0, 1), same_initial_noise=True)
    assert len(rolled.noise_ids[:, 0].unique()) == 1
    assert len(rolled.noise_ids[:, 1].unique()) == 4
    shared = rolled.trajectory
    assert torch.equal(shared.states[0, 0], shared.states[3, 0])
    assert not torch.equal(shared.states[0, 1], shared.states[3, 1])


def test_one_velocity_call_per_step_at_the_step_s_own_sigma_gives_fp32_without_gradient():
    policy = ToyPolicy()
    got = whole(policy, group(3, 4))
    for tensor in (got.trajectory.states, got.trajectory.log_probs, got.final_latents):
        assert tensor.dtype == torch.float32 and not tensor.requires_grad
    assert [(rows, sigma) for rows, sigma, *_ in policy.calls] == [(4, float(sigma)) for sigma in SIGMAS[:-1]]


def test_the_flow_kind_is_capped_by_the_second_sigma_and_max_step_std_bounds_the_noise():
    free = roll(ToyPolicy(), group(3, 2), window=(0,), sde=SdeSettings("flow", 1.0))
    bound = roll(ToyPolicy(), group(3, 2), window=(0,), sde=SdeSettings("flow", 1.0, 0.01))
    assert free.log_probs.isfinite().all()
    step = [(t.states[:, 1] - t.states[:, 0]).std() for t in (free, bound)]
    assert step[1] < step[0] / 3


def test_the_detector_raises_on_duplicated_noise_within_a_group_only_and_accepts_wanted_duplicates():
    policy = ToyPolicy()
    twice = [condition(3, 3, 0), condition(3, 3, 0)]
    ids, gids = whole(policy, twice).noise_ids, torch.tensor([3, 3])
    with pytest.raises(RuntimeError, match="samples 0 and 1 of group 3 were drawn from the same initial noise"):
        check_noise(gids, ids, same_initial_noise=False)
    with pytest.raises(RuntimeError, match="same step noise"):
        check_noise(gids, ids, same_initial_noise=True)
    shared = whole(policy, group(3, 4), same_initial_noise=True)
    check_noise(torch.full((4,), 3), shared.noise_ids, same_initial_noise=True)
    with pytest.raises(RuntimeError, match="same initial noise"):
        check_noise(torch.full((4,), 3), shared.noise_ids, same_initial_noise=False)
    check_noise(torch.arange(4), shared.noise_ids[[0, 0, 0, 0]], same_initial_noise=False)
