"""The full doctor: what an epoch and two updates show, and that weights are restored afterwards."""

import contextlib
import dataclasses
from unittest import mock

import pytest
import torch

from flow_grpo.algorithm.rollout import collector
from flow_grpo.algorithm.update.objective import GrpoObjective
from flow_grpo.algorithm.update.updater import Updater
from flow_grpo.models.wan_policy import WanPolicy
from flow_grpo.preflight.doctor.epoch import with_signs
from flow_grpo.preflight.doctor.examine import full, run_checks
from flow_grpo.preflight.doctor.rewards import examine_rewards, examine_signal, examine_tail
from flow_grpo.records import TrainingBatch
from flow_grpo.rewards.target_view import TargetView
from flow_grpo.runtime.ranks.process_group import World
from tests import doctor_cases
from tests.doctor_cases import build_trainer, words
from tests.toy import ToyPolicy, group, training_batch
from tests.workers import run_ranks


@pytest.fixture
def trainer(places, tmp_path):
    return build_trainer(words(places, output_root=tmp_path, train__kl_coef=0.1))


def by_name(trainer) -> dict[str, str]:
    return {found.name: f"{found.status}: {found.measured}" for found in run_checks(trainer, full(1))}


def test_weights_moments_and_average_are_restored(trainer):
    module, optimizer = trainer.updater.policy.module, trainer.updater.optimizer
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    average = trainer.state.ema.state_dict()
    with mock.patch.object(Updater, "run", autospec=True, side_effect=Updater.run) as updates:
        found = by_name(trainer)
    # The second update is not clipped by how far the first one moved.
    assert [call.args[0].objective.train.old_log_prob for call in updates.call_args_list] == ["auto", "detach"]
    assert [said for said in found.values() if said.startswith("fail")] == []
    assert "gradient norms of two updates" in found["update"]
    assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())
    assert optimizer.state_dict()["state"] == {}
    assert all(torch.equal(average[name], value) for name, value in trainer.state.ema.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_no_call_with_gradients_has_more_rows_than_an_update_s(places, tmp_path, calls):
    trainer = build_trainer(words(places, output_root=tmp_path, train__kl_coef=0.1, train__batch_size=1))
    assert not any(said.startswith("fail") for said in by_name(trainer).values())
    assert {rows for rows, kept, _ in calls if kept} == {1}
    assert {rows for rows, kept, _ in calls if not kept} == {1, 2}


def _detached():
    replay = GrpoObjective.replay

    def detached(self, micro, column):
        step = replay(self, micro, column)
        return dataclasses.replace(step, mean=step.mean.detach().requires_grad_())

    return mock.patch.object(GrpoObjective, "replay", detached)


def _reordered():
    take = TrainingBatch.take

    def reordered(self, places, device):
        part = take(self, places, device)
        states = part.trajectory.states.flip(0)
        return dataclasses.replace(part, trajectory=dataclasses.replace(part.trajectory, states=states))

    return mock.patch.object(TrainingBatch, "take", reordered)


def _groups_of_one():
    take = collector.ConditionStream.take

    def alone(self, step):
        return tuple(dataclasses.replace(c, gid=100 + row) for row, c in enumerate(take(self, step)))

    return mock.patch.object(collector.ConditionStream, "take", alone)


def _not_finite(update: int):
    """Return a fault: the losses of one of the two updates, of two calls each, are not finite."""

    def fault():
        loss, calls = GrpoObjective.loss, []

        def broken(self, *given):
            made = loss(self, *given)
            calls.append(1)
            ratio = made.terms.ratio * (torch.nan if len(calls) > 2 * update else 1)
            return made._replace(terms=dataclasses.replace(made.terms, ratio=ratio))

        return mock.patch.object(GrpoObjective, "loss", broken)

    return fault


@pytest.mark.parametrize(
    ("fault", "names", "said"),
    [
        (_detached, {"gradient_coverage", "update", "clip"}, "0 of "),
        (_reordered, {"ratio_in_update"}, ""),
        (lambda: doctor_cases.rounded_latents(collector), {"ratio_in_update", "latents_fp32"}, "torch.bfloat16"),
        (_not_finite(0), {"update"}, "not finite"),
        (_not_finite(1), {"update"}, "not finite"),
        (_groups_of_one, {"epoch"}, "group"),
        (
            lambda: mock.patch.object(WanPolicy, "reference", return_value=contextlib.nullcontext()),
            {"kl"},
            "0 after one update",
        ),
    ],
    ids=["detached", "reordered", "rounded", "first-update", "second-update", "groups-of-one", "moving-reference"],
)
def test_a_fault_planted_into_epoch_or_update_is_found(trainer, fault, names, said):
    with fault():
        found = by_name(trainer)
    failed = {name: text for name, text in found.items() if text.startswith("fail")}
    assert names <= set(failed) and "ratio" not in failed, failed
    assert any(said in failed[name] for name in names)


def test_copies_that_all_score_the_same_warn_and_carry_no_signal(places, tmp_path):
    trainer = build_trainer(words(places, output_root=tmp_path, reward__weights="target_view=1"))
    judge = TargetView.__call__

    def generous(self, videos, conditions):
        result = judge(self, videos, conditions)
        return dataclasses.replace(result, values=torch.zeros_like(result.values))

    with mock.patch.object(TargetView, "__call__", generous):
        found = by_name(trainer)
    assert found["groups"].startswith("warn") and found["reward_order"].startswith("fail")
    assert found["signal"].startswith("fail")


def test_a_reward_that_only_a_schedule_trains_carries_a_signal(places, tmp_path):
    scheduled = {"reward__weights": "target_view=1,exposure=0", "reward__schedules": "exposure=0:0,50:0.01"}
    (found,) = examine_signal(build_trainer(words(places, output_root=tmp_path, **scheduled)))
    assert found.status != "fail" and "exposure spreads" in found.measured


def test_a_tail_that_ranks_copies_otherwise_than_all_steps_warns(places, tmp_path, monkeypatch):
    trainer = build_trainer(words(places, output_root=tmp_path, sample__tail_steps=2))
    (sound,) = examine_tail(trainer)
    assert sound.status == "ok" and "exposure 1.00 (" in sound.measured
    drawn = torch.randn((2, 2, 4), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    monkeypatch.setattr("flow_grpo.preflight.doctor.rewards.finish_by_all_steps", lambda *_: {"exposure": drawn})
    (found,) = examine_tail(trainer)
    assert found.status == "warn" and "groups: 8" in found.measured and "raise sample.tail_steps" in found.way_out


def test_a_reward_that_cannot_be_measured_is_a_failed_check_with_its_cause(trainer):
    with mock.patch.object(TargetView, "__call__", side_effect=ConnectionError("nobody there")):
        found = by_name(trainer)
    assert found["rewards"].startswith("fail") and "ConnectionError: nobody there" in found["rewards"]
    assert found["epoch"].startswith("fail") and "reward.most_faults" in found["epoch"]


def test_gradients_that_adam_s_eps_would_swallow_warn(trainer):
    for eps, wanted in ((1e-12, "ok"), (10.0, "warn: 100.0%")):
        train = dataclasses.replace(trainer.config.train, adam_eps=eps)
        trainer.config = dataclasses.replace(trainer.config, train=train)
        assert by_name(trainer)["gradient_size"].startswith(wanted)


def test_conditions_without_a_true_view_cannot_show_the_order_of_rewards(trainer):
    condition = trainer.training_data.condition
    with mock.patch.object(
        trainer.training_data, "condition", lambda *given: dataclasses.replace(condition(*given), target_video=None)
    ):
        (found,) = examine_rewards(trainer)
    assert (found.name, found.status) == ("reward_order", "warn")


def test_advantages_have_both_signs_and_differ_between_ranks():
    batch = training_batch(ToyPolicy(), [group(1, 4)])
    signs = [with_signs(batch, rank, 4).advantages.tolist() for rank in range(2)]
    assert signs == [[1, -1, 1, -1], [-1, 1, -1, 1]]
    rows = dataclasses.replace(batch, advantages=torch.zeros(2, 4))  # groups, the second on this rank as padding
    for rank in range(2):
        found = with_signs(rows, rank, 1)
        assert found.advantages.tolist() == [[1, -1, 1, -1]] * 2 and found.weights.sum(dim=1).tolist() == [4, 0]


def _sharded(world: World, given: list[str]) -> dict[str, str]:
    return by_name(build_trainer(given, world))


@pytest.mark.slow
def test_shards_are_examined_too(places, tmp_path):
    shape = {"sample__train_batch_size": 1, "train__batch_size": 1, "train__kl_coef": 0.1}
    given = words(places, output_root=tmp_path, run_name="run", train__sharding="fsdp2", **shape)
    found, other = run_ranks(_sharded, 2, given)
    assert found == other
    assert {name for name, said in found.items() if said.startswith("fail")} == set()
    assert found["weights_after_update"].startswith("ok: sharded")
    assert "gradient_sync" not in found and "gradient_coverage" in found
