"""The probe batch: it is the next batch of training, and its replays are those of the update."""

import dataclasses
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

from flow_grpo.models.adapters import trained_parameters
from flow_grpo.models.wan_policy import WanPolicy
from flow_grpo.preflight.doctor import probe
from flow_grpo.preflight.doctor.epoch import guard_log_ratios
from flow_grpo.preflight.doctor.examine import FAST, run_checks
from flow_grpo.preflight.doctor.probe import RECORDED, first_difference, recorded_layers, replay, roll_out_probe
from tests import doctor_cases
from tests.doctor_cases import build_trainer, statuses, words


def test_it_is_the_batch_that_training_takes_next_sampled_one_step_past_the_stochastic_ones(built, calls):
    samples = roll_out_probe(built)
    planned = [draw[1:] for draw in built.state.sampler.plan(built.state.sampler.next_step)[0]]
    assert [(gid, slot, index) for gid, slot, index in samples.keys.tolist()] == planned
    sigmas, last = built.collector.sampling.sigmas, built.collector.sampling.blocks[-1][-1]
    windows = [built.collector.sampling.window_of(gid) for gid in samples.keys[:, 0].tolist()]
    assert [tuple(steps) for steps in samples.trajectory.steps.tolist()] == windows
    assert {sigma for *_, sigma in calls} == set(sigmas[: last + 2].tolist()) and last + 2 < 6


def test_under_guard_log_ratios_have_the_unit_of_its_clip_range(built):
    samples, objective = roll_out_probe(built), built.updater.objective
    later = dataclasses.replace(samples.trajectory, log_probs=samples.trajectory.log_probs - 1.0)
    samples = dataclasses.replace(samples, trajectory=later)
    torch.testing.assert_close(replay(objective, samples, 2).log_ratios, torch.ones(2, 2))
    guarded = dataclasses.replace(objective, train=dataclasses.replace(objective.train, guard=True))
    stds = torch.stack([objective.replay(samples, column).std for column in range(2)], dim=1)
    torch.testing.assert_close(replay(guarded, samples, 2).log_ratios, stds.detach())


def test_log_ratios_under_the_guard_are_those_of_the_loss(places, tmp_path):
    trainer = build_trainer(words(places, output_root=tmp_path, train__guard=True))
    samples = roll_out_probe(trainer)
    before = replay(trainer.updater.objective, samples, 2)
    with torch.no_grad():
        for weight in trained_parameters(trainer.updater.policy.module).values():
            weight += 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    after = replay(trainer.updater.objective, samples, 2)
    bias = (before.residuals - after.residuals).square().flatten(2).mean(dim=2) / 2
    wanted = after.log_ratios + before.units * bias
    torch.testing.assert_close(guard_log_ratios(before, after), wanted, rtol=1e-3, atol=1e-7)
    assert bias.max() > 1e-6


def test_a_replay_in_larger_calls_than_the_rollout_s_repeats_samples(built, calls):
    found = replay(built.updater.objective, roll_out_probe(built), 5)
    assert [rows for rows, *_ in calls[-2:]] == [5, 5] and found.log_ratios.shape == (2, 2)
    assert len(found.residuals) == 2


class Saved:
    """A tensor that a graph keeps for its backward pass."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()  # itself, it would hold the graph that holds it


def test_gradients_are_kept_for_one_call_only(places, tmp_path):
    """A device has memory for the graph of one call of the update, not for more."""
    trainer = build_trainer(words(places, output_root=tmp_path, train__batch_size=1))
    alive, at_call = weakref.WeakSet(), []
    velocity = WanPolicy.velocity

    def pack(tensor):
        saved = Saved(tensor)
        alive.add(saved)
        return saved

    def noted(self, *given):
        at_call.append(len(alive))
        return velocity(self, *given)

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor)
    with hooks, mock.patch.object(WanPolicy, "velocity", noted):
        assert statuses(run_checks(trainer, FAST)) == {}
        probe.layer_differing_from_rollout(trainer, trainer.updater.objective, roll_out_probe(trainer))
    assert set(at_call) == {0}, "a graph outlived its call"


def test_what_only_calls_with_gradients_do_is_found_where_they_have_fewer_rows(places, tmp_path):
    given = words(places, output_root=tmp_path, train__batch_size=1, sample__guidance_scale=3)
    with doctor_cases.guidance_in_the_rollout_only():
        (found,) = [found for found in run_checks(build_trainer(given), FAST) if found.name == "ratio"]
    assert found.status == "fail"
    assert "the same call without gradients and with: input 0 gave (2, " in found.measured


# --- the first layer that differs


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def recorded(model: nn.Module, *given: torch.Tensor):
    with recorded_layers(model) as seen:
        for values in given:
            model(values)
    return seen


def test_equal_calls_differ_nowhere_and_every_call_is_recorded():
    first, second = recorded(network(), torch.ones(2, 3), torch.ones(2, 3))
    assert list(first) == ["input 0", "layer 0", "layer 1", "layer 2", "the network"]
    assert first_difference(first, second).startswith("no layer differs")
    del second["layer 1"]
    assert first_difference(first, second) == "layer 1 ran in the rollout only"


def test_the_first_input_or_layer_that_differs_is_named_with_its_gap():
    model, ones = network(), torch.ones(2, 3)
    first, shifted, shorter = recorded(model, ones, ones + 1e-3, ones[:1])
    assert first_difference(first, shifted) == "input 0 differs first, by 0.001 in values up to 1"
    assert first_difference(first, shorter) == "input 0 gave (2, 3) in the rollout and (1, 3) in the update"
    with torch.no_grad():
        model[2].bias += 0.5
    (moved,) = recorded(model, ones)
    assert first_difference(first, moved).startswith("layer 2 differs first, by 0.5 in values up to ")


def test_large_outputs_are_recorded_in_evenly_spaced_elements():
    (seen,) = recorded(network(), torch.arange(3.0 * 10 * RECORDED).view(-1, 3))
    shape, values = seen["input 0"]
    assert shape == (10 * RECORDED, 3)
    assert len(values) == pytest.approx(RECORDED, rel=0.01) and values[-1] > 2.9 * 10 * RECORDED
