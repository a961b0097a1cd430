"""Exploration in the command: whose path is varied, what is recorded, and that it tells the copies of a group apart."""

import dataclasses

import pytest
import torch

from flow_grpo.algorithm.rollout.denoise import rollout, step_transition
from flow_grpo.algorithm.rollout.explore import beside, drifting
from flow_grpo.maths.poses import pose, rot_err, rotation_matrix
from flow_grpo.maths.sde import log_prob
from flow_grpo.settings.sampling import ODE, Sampling
from tests.toy import SDE, SIGMAS, ToyPolicy, group

SPREAD = (0.1, 2.0)
EXPLORING = Sampling(SIGMAS, SDE, 5, same_initial_noise=True, command_spread=SPREAD)


def test_a_drift_is_nothing_at_the_first_frame_and_whole_at_the_last():
    turns = torch.tensor([[0.0, 0.0, 0.0], [0.1, 0.2, 0.0], [0.2, 0.4, 0.1]], dtype=torch.float64)
    path = pose(rotation_matrix(turns), torch.arange(9, dtype=torch.float64).view(3, 3))
    move, turn = torch.tensor([0.5, -0.2, 0.1]).double(), torch.tensor([0.0, 0.3, 0.0]).double()
    got = drifting(path, move, turn)
    assert torch.equal(got[0], path[0])
    torch.testing.assert_close(got[1:, :3, 3] - path[1:, :3, 3], torch.stack([move / 2, move]))
    torch.testing.assert_close(got[2, :3, :3], path[2, :3, :3] @ rotation_matrix(turn))
    torch.testing.assert_close(rot_err(got, path), torch.tensor([0.0, 0.15, 0.3]).double())


def test_pairs_of_copies_deviate_by_opposite_amounts_of_the_size_that_is_asked_for():
    conditions = [condition for gid in range(200) for condition in group(gid, 4, index=3)]
    asked = torch.stack([c.need_poses()[-1] for c in beside(conditions, EXPLORING)])
    moves = asked[:, :3, 3] - conditions[0].need_poses()[-1, :3, 3]
    torch.testing.assert_close(moves[::2], -moves[1::2])
    angles = rot_err(asked, conditions[0].need_poses()[-1]).rad2deg()
    assert moves.std(dim=0).tolist() == pytest.approx([0.1] * 3, rel=0.1)
    assert float(angles.square().mean()) == pytest.approx(2 * 2.0**2, rel=0.15)  # pitch and yaw
    torch.testing.assert_close(asked[:, 0, 1], asked[:, 1, 0])  # so there is no roll


def test_a_copy_s_path_depends_on_seed_group_and_slot_alone():
    whole, alone = beside(group(7, 4), EXPLORING), beside(group(7, 4)[2:3], EXPLORING)
    assert torch.equal(whole[2].need_poses(), alone[0].need_poses())
    other = beside(group(7, 4), dataclasses.replace(EXPLORING, seed=6))
    assert not torch.equal(whole[2].need_poses(), other[2].need_poses())


def test_copies_are_sampled_for_their_own_paths_and_recorded_under_the_command():
    policy, conditions = ToyPolicy(), group(3, 4)
    commanded, own = policy.encode(conditions), policy.encode(beside(conditions, EXPLORING))
    windows = [(1, 2)] * 4
    plain = dataclasses.replace(EXPLORING, command_spread=(0.0, 0.0))
    got, like = (
        rollout(policy, conditions, given, windows, how) for given, how in ((commanded, EXPLORING), (own, plain))
    )
    assert torch.equal(got.final_latents, like.final_latents)
    assert torch.equal(got.trajectory.states, like.trajectory.states)
    assert torch.equal(got.conditioning.inputs["target_cameras"], commanded.inputs["target_cameras"])
    states = got.trajectory.states
    for column, step in enumerate((1, 2)):
        given = step_transition(policy, states[:, column], commanded, torch.full((4,), step), EXPLORING)
        torch.testing.assert_close(got.trajectory.log_probs[:, column], log_prob(states[:, column + 1], given))


def test_with_shared_noise_and_the_ode_only_the_command_tells_copies_apart():
    policy, conditions = ToyPolicy(), group(3, 4)
    for spread, different in ((SPREAD, 4), ((0.0, 0.0), 1)):
        settings = Sampling(SIGMAS, ODE, 5, same_initial_noise=True, command_spread=spread)
        got = rollout(policy, conditions, policy.encode(conditions), [()] * 4, settings)
        assert len({tuple(row.flatten().tolist()) for row in got.final_latents}) == different
        assert len({*got.noise_ids[:, 0].tolist()}) == 1 and len({*got.noise_ids[:, 1].tolist()}) == different
