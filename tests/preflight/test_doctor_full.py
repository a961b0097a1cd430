"""The full form: what an epoch and two updates show, and that weights are afterwards as they were."""

from __future__ import annotations

import contextlib
import dataclasses
from unittest import mock

import pytest
import torch

import train_grpo
from flow_grpo.algorithm.rollout import collector
from flow_grpo.algorithm.update.updater import Updater
from flow_grpo.models.adapters import trained_parameters
from flow_grpo.models.recam_policy import RecamPolicy
from flow_grpo.preflight import doctor_full
from flow_grpo.preflight.doctor_full import examine_fully
from flow_grpo.records import TrainingBatch
from flow_grpo.rewards.target_view import TargetView
from flow_grpo.runtime.ranks.process_group import Ranks
from tests.doctor_cases import make_places, words
from tests.toy import ToyPolicy, group, training_batch
from tests.workers import run_ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return make_places(tmp_path_factory.mktemp("full"))


@pytest.fixture
def trainer(places, tmp_path):
    return build(words(places, output_root=tmp_path, train__kl_coef=0.1), Ranks())


def build(given, ranks):
    config, recipe = train_grpo.read_command_line(given)
    return train_grpo.build(config, recipe, CPU, ranks)


def by_name(findings) -> dict[str, str]:
    return {found.name: found.status for found in findings}


def test_weights_moments_and_average_are_afterwards_as_they_were(trainer):
    weights = {name: value.clone() for name, value in trainer.state.module.state_dict().items()}
    average = trainer.state.ema.state_dict()
    with mock.patch.object(Updater, "run", autospec=True, side_effect=Updater.run) as updates:
        findings = examine_fully(trainer)
    # The second one is not held back by how far the first one went.
    assert [call.args[0].settings.train.old_log_prob for call in updates.call_args_list] == ["auto", "detach"]
    assert [found for found in findings if found.status == "fail"] == []
    after = trainer.state.module.state_dict()
    assert all(torch.equal(weights[name], after[name]) for name in weights)
    assert trainer.state.optimizer.state_dict()["state"] == {}
    assert all(torch.equal(average[name], value) for name, value in trainer.state.ema.state_dict().items())
    assert all(parameter.grad is None for parameter in trainer.state.module.parameters())


def test_no_call_with_gradients_has_more_rows_than_an_update_s(places, tmp_path):
    trainer = build(words(places, output_root=tmp_path, train__kl_coef=0.1, train__batch_size=1), Ranks())
    calls, velocity = [], RecamPolicy.velocity

    def noted(self, latents, sigma, conditioning):
        calls.append((len(latents), torch.is_grad_enabled()))
        return velocity(self, latents, sigma, conditioning)

    with mock.patch.object(RecamPolicy, "velocity", noted):
        assert "fail" not in by_name(examine_fully(trainer)).values()
    assert {rows for rows, kept in calls if kept} == {1}
    assert {rows for rows, kept in calls if not kept} == {1, 2}


def test_a_part_of_the_network_without_gradient_is_named(trainer):
    replay = Updater.replay

    def detached(self, micro, column):
        step = replay(self, micro, column)
        return dataclasses.replace(step, mean=step.mean.detach().requires_grad_())

    with mock.patch.object(Updater, "replay", detached):
        found = {found.name: found for found in examine_fully(trainer)}
    assert found["received"].status == found["update"].status == found["clip"].status == "fail"
    assert found["received"].measured.startswith("0 of ")


def test_what_changes_between_rollout_and_update_is_found(trainer):
    take = TrainingBatch.take

    def mistaken(self, positions, device):
        part = take(self, positions, device)
        states = part.trajectory.states.flip(0)
        return dataclasses.replace(part, trajectory=dataclasses.replace(part.trajectory, states=states))

    with mock.patch.object(TrainingBatch, "take", mistaken):
        found = {found.name: found for found in examine_fully(trainer)}
    assert found["carried"].status == "fail" and found["ratio"].status == "ok"


def test_latents_rounded_on_their_way_are_found(trainer):
    roll_out = collector.Collector._roll_out

    def rounded(*given, **named):
        made = roll_out(*given, **named)
        trajectory = made.rolled.trajectory
        trajectory = dataclasses.replace(trajectory, states=trajectory.states.bfloat16().float())
        return dataclasses.replace(made, rolled=dataclasses.replace(made.rolled, trajectory=trajectory))

    with mock.patch.object(collector.Collector, "_roll_out", rounded):
        statuses = by_name(examine_fully(trainer))
    assert statuses["carried"] == statuses["stored"] == "fail"


@pytest.mark.parametrize("bad", [1, 2])
def test_steps_that_are_not_finite_are_a_failed_check(trainer, bad):
    loss, calls = Updater._loss, []

    def broken(self, *given):
        terms, new = loss(self, *given)
        calls.append(1)
        first = (2 - bad) * len(trainer.collector.settings.window(0))  # an update is as many calls
        return (dataclasses.replace(terms, ratio=terms.ratio * torch.nan) if len(calls) > first else terms), new

    with mock.patch.object(Updater, "_loss", broken):
        found = {found.name: found for found in examine_fully(trainer)}
    assert found["update"].status == "fail" and "not finite" in found["update"].measured


def test_log_ratios_under_the_guard_are_those_of_the_loss(places, tmp_path):
    trainer = build(words(places, output_root=tmp_path, train__guard=True), Ranks())
    specimen = doctor_full.take(trainer)
    before = doctor_full.replay(trainer.updater, specimen.part, 2)
    with torch.no_grad():
        for weight in trained_parameters(trainer.state.module).values():
            weight += 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    after = doctor_full.replay(trainer.updater, specimen.part, 2)
    bias = torch.stack(
        [
            (old - new).square().flatten(1).mean(dim=1) / 2
            for old, new in zip(before.residuals.values(), after.residuals.values(), strict=True)
        ],
        dim=1,
    )
    wanted = after.log_ratios + before.units * bias
    torch.testing.assert_close(doctor_full.guarded(before, after), wanted, rtol=1e-3, atol=1e-7)
    assert bias.max() > 1e-6


def test_a_reference_that_moves_along_is_found_by_its_kl(trainer):
    with mock.patch.object(RecamPolicy, "reference", return_value=contextlib.nullcontext()):
        assert by_name(examine_fully(trainer))["kl"] == "fail"


def test_groups_that_are_no_whole_groups_end_the_epoch(trainer):
    fetch = collector.Collector._fetch

    def alone(self, clock):
        return [dataclasses.replace(c, gid=100 + row) for row, c in enumerate(fetch(self, clock))]

    with mock.patch.object(collector.Collector, "_fetch", alone):
        found = {found.name: found for found in examine_fully(trainer)}
    assert found["epoch"].status == "fail" and "group" in found["epoch"].measured


def test_copies_that_all_score_alike_warn(trainer):
    judge = TargetView.__call__

    def generous(self, videos, conditions):
        result = judge(self, videos, conditions)
        return dataclasses.replace(result, values=torch.zeros_like(result.values))

    with mock.patch.object(TargetView, "__call__", generous):
        statuses = by_name(examine_fully(trainer))
    assert (statuses["groups"], statuses["reward_order"]) == ("warn", "fail")


def test_a_reward_that_cannot_be_asked_is_a_failed_check_with_its_cause(trainer):
    with mock.patch.object(TargetView, "__call__", side_effect=ConnectionError("nobody there")):
        found = {found.name: found for found in examine_fully(trainer)}
    assert found["rewards"].status == "fail" and "ConnectionError: nobody there" in found["rewards"].measured
    assert found["epoch"].status == "fail" and "reward.most_faults" in found["epoch"].measured


def test_conditions_without_a_true_view_cannot_show_the_order_of_rewards(trainer):
    condition = trainer.conditions.condition

    def blind(*given):
        return dataclasses.replace(condition(*given), target_video=None)

    with mock.patch.object(trainer.conditions, "condition", blind):
        (found,) = doctor_full.judged(trainer)
    assert (found.name, found.status) == ("reward_order", "warn")


def test_advantages_have_both_signs_and_differ_over_ranks():
    batch = training_batch(ToyPolicy(), [group(1, 4)])
    signs = [doctor_full._with_signs(batch, rank).parts[0].advantages.tolist() for rank in range(2)]
    assert signs == [[1, -1, 1, -1], [-1, 1, -1, 1]]


def _sharded(ranks: Ranks, given: list[str]) -> dict[str, str]:
    return {found.name: f"{found.status} {found.measured}" for found in examine_fully(build(given, ranks))}


@pytest.mark.slow
def test_shards_are_examined_too(places, tmp_path):
    shape = {"sample__train_batch_size": 1, "train__batch_size": 1, "train__kl_coef": 0.1}
    given = words(places, output_root=tmp_path, run_name="run", train__sharding="fsdp2", **shape)
    found, other = run_ranks(_sharded, 2, given)
    assert found == other
    assert {name for name, said in found.items() if said.startswith("fail")} == set()
    assert found["parameters"].startswith("ok in shards")
    assert "gradients" not in found and "received" in found
