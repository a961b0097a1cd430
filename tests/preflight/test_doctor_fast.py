"""The fast form: what it finds, that it changes no number, and that a failed check stops the run."""

from __future__ import annotations

import dataclasses
import json
import weakref
from unittest import mock

import pytest
import torch

import train_grpo
from flow_grpo.algorithm.rollout import denoise
from flow_grpo.maths.keys import generator
from flow_grpo.models.recam_policy import RecamPolicy
from flow_grpo.preflight import doctor_fast
from flow_grpo.runtime.ranks import process_group
from flow_grpo.runtime.ranks.process_group import Ranks
from flow_grpo.runtime.reporting import plots
from tests import doctor_cases
from tests.doctor_cases import make_places, words
from tests.test_train_grpo import learned, newest
from tests.workers import run_ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return make_places(tmp_path_factory.mktemp("fast"))


@pytest.fixture(scope="module")
def trainer(places, tmp_path_factory):
    """A trainer as built, which no test may change."""
    config, recipe = train_grpo.read_command_line(words(places, output_root=tmp_path_factory.mktemp("runs")))
    return train_grpo.build(config, recipe, CPU, Ranks())


def state_of(trainer) -> dict[str, torch.Tensor]:
    """Return everything of a trainer that a run depends on."""
    weights = {name: value.clone() for name, value in trainer.state.module.state_dict().items()}
    gradients = {f"gradient {n}": p.grad for n, p in trainer.state.module.named_parameters() if p.grad is not None}
    position = torch.tensor(trainer.state.sampler.next_step)
    return weights | gradients | {"random": torch.get_rng_state(), "sampler": position}


def test_a_sound_run_passes_and_is_left_as_it_was(trainer):
    before = state_of(trainer)
    findings = doctor_fast.examine(trainer, (1,))
    assert [found for found in findings if found.status != "ok"] == []
    after = state_of(trainer)
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    assert trainer.state.optimizer.state_dict()["state"] == {}


def test_the_specimen_is_the_batch_that_training_takes_next(trainer):
    specimen = doctor_fast.take(trainer)
    step = trainer.state.sampler.next_step
    planned = [draw[1:] for draw in trainer.state.sampler.plan(step)[0]]
    assert [(c.gid, c.slot, c.index) for c in specimen.conditions] == planned
    noise = torch.randn(specimen.part.trajectory.states.shape[2:], generator=generator(0, "xT", *planned[0][:2]))
    assert specimen.noise_ids[0, 0] == denoise._hash(noise)


def test_the_rollout_stops_one_step_after_its_last_stochastic_one(trainer):
    window = trainer.collector.settings.window(0)
    assert len(doctor_fast.as_far_as_needed(trainer).sigmas) - 1 == window[-1] + 2 < 6
    calls = []
    velocity = RecamPolicy.velocity

    def counted(self, latents, sigma, conditioning):
        calls.append(float(sigma[0]))
        return velocity(self, latents, sigma, conditioning)

    with mock.patch.object(RecamPolicy, "velocity", counted):
        specimen = doctor_fast.take(trainer)
    assert calls == trainer.collector.settings.sigmas[: window[-1] + 2].tolist()
    assert specimen.part.trajectory.steps == window


def test_a_video_that_cannot_be_read_is_a_failed_rollout(trainer):
    with mock.patch.object(type(trainer.conditions), "condition", side_effect=ValueError("video x is broken")):
        (found,) = [found for found in doctor_fast.examine(trainer) if found.status == "fail"]
    assert found.name == "rollout" and "video x is broken" in found.measured


def test_layers_are_compared_only_when_calls_differ(trainer):
    with mock.patch.object(doctor_fast, "first_divergent_layer", return_value="layer 3 differs first") as diff:
        doctor_fast.examine(trainer)
        diff.assert_not_called()
        with doctor_cases.latents_stored_in_half_precision():
            found = {found.name: found for found in doctor_fast.examine(trainer) if found.status == "fail"}
    assert set(found) == {"stored", "ratio"} and "layer 3 differs first" in found["ratio"].measured


def test_under_guard_log_ratios_have_the_unit_of_its_clip_range(trainer):
    specimen, moving = doctor_fast.take(trainer), trainer.updater
    trajectory = specimen.part.trajectory
    later = dataclasses.replace(trajectory, log_probs=trajectory.log_probs - 1.0)
    part = dataclasses.replace(specimen.part, trajectory=later)
    torch.testing.assert_close(doctor_fast.replay(moving, part, 2).log_ratios, torch.ones(2, 2))
    train = dataclasses.replace(moving.settings.train, guard=True)
    guarded = dataclasses.replace(moving.settings, train=train)
    stds = [float(moving.replay(part, column).std) for column in range(2)]
    with mock.patch.object(moving, "settings", guarded):
        torch.testing.assert_close(doctor_fast.replay(moving, part, 2).log_ratios, torch.tensor([stds, stds]))


def test_a_replay_in_larger_calls_than_the_rollout_s_repeats_rows(trainer):
    """An update whose calls have more rows than the rollout's is examined in calls of as many."""
    specimen, seen = doctor_fast.take(trainer), []
    velocity = RecamPolicy.velocity

    def counted(self, latents, sigma, conditioning):
        seen.append(len(latents))
        return velocity(self, latents, sigma, conditioning) * (1.1 if len(latents) == 5 else 1.0)

    with mock.patch.object(RecamPolicy, "velocity", counted):
        found = doctor_fast.replay(trainer.updater, specimen.part, 5)
    assert seen == [5, 5] and found.log_ratios.shape == (2, 2)
    assert all(len(values) == 2 for values in found.residuals.values())
    assert found.log_ratios.abs().min() > 0


def larger_updates(places, folder, old_log_prob: str):
    given = {"sample__num_batches_per_epoch": 2, "train__batch_size": 4, "train__old_log_prob": old_log_prob}
    config, recipe = train_grpo.read_command_line(words(places, output_root=folder, **given))
    return train_grpo.build(config, recipe, CPU, Ranks())


@pytest.mark.parametrize(("old_log_prob", "status"), [("rollout", "fail"), ("auto", "warn")])
def test_an_update_s_batch_shape_is_examined_where_it_is_larger_than_the_rollout_s(
    places, tmp_path, old_log_prob, status
):
    trainer = larger_updates(places, tmp_path, old_log_prob)
    velocity = RecamPolicy.velocity

    def by_rows(self, latents, sigma, conditioning):
        return velocity(self, latents, sigma, conditioning) * (1.5 if len(latents) == 4 else 1.0)

    assert by_status(doctor_fast.examine(trainer)) == {}
    with mock.patch.object(RecamPolicy, "velocity", by_rows):
        assert by_status(doctor_fast.examine(trainer)) == {"geometry": status}


# --- gradients: a device has room for those of an update's call, not for more


def with_small_updates(places, folder, **changes):
    given = words(places, output_root=folder, **({"train__batch_size": 1} | changes))
    config, recipe = train_grpo.read_command_line(given)
    return train_grpo.build(config, recipe, CPU, Ranks())


def by_status(findings) -> dict[str, str]:
    return {found.name: found.status for found in findings if found.status != "ok"}


class Saved:
    """A tensor that a graph keeps for its backward pass."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()  # itself, it would hold the graph that holds it


def test_gradients_are_kept_for_an_update_s_rows_and_one_call_only(places, tmp_path):
    trainer = with_small_updates(places, tmp_path)
    alive, calls = weakref.WeakSet(), []
    velocity = RecamPolicy.velocity

    def pack(tensor):
        saved = Saved(tensor)
        alive.add(saved)
        return saved

    def noted(self, latents, sigma, conditioning):
        calls.append((len(latents), torch.is_grad_enabled(), len(alive)))
        return velocity(self, latents, sigma, conditioning)

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor)
    with hooks, mock.patch.object(RecamPolicy, "velocity", noted):
        assert by_status(doctor_fast.examine(trainer)) == {}
        doctor_fast.first_divergent_layer(trainer, doctor_fast.take(trainer))
    assert {rows for rows, kept, _ in calls if kept} == {1}
    assert {rows for rows, kept, _ in calls if not kept} == {1, 2}
    assert {graphs for *_, graphs in calls} == {0}, "a graph outlived its call"


def test_what_only_calls_with_gradients_do_is_found_where_they_have_fewer_rows(places, tmp_path):
    trainer = with_small_updates(places, tmp_path, sample__guidance_scale=3)
    with doctor_cases.guidance_in_the_rollout_only():
        (found,) = [found for found in doctor_fast.examine(trainer) if found.name == "ratio"]
    assert found.status == "fail"
    assert "the same call without gradients and with: input 0 gave (2, " in found.measured


def test_bits_are_asked_for_on_the_cpu_in_fp32_without_compilation(trainer):
    model = trainer.config.model
    for changes, exact in (({}, True), ({"dtype": "bf16"}, False), ({"compile": True}, False)):
        config = dataclasses.replace(trainer.config, model=dataclasses.replace(model, **changes))
        assert doctor_fast.calls_are_exact(dataclasses.replace(trainer, config=config)) is exact


def test_a_digest_tells_moved_weights_from_the_same(trainer):
    weights = [torch.ones(1000), torch.zeros(3)]
    assert doctor_fast.digest(weights) == doctor_fast.digest([weight.clone() for weight in weights])
    assert doctor_fast.digest(weights) != doctor_fast.digest([weights[0] * 1.001, weights[1]])


# --- in a run


@pytest.fixture
def train(places, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "draw_curves", lambda rows, path, title: None)

    def run(name: str, **changes) -> int:
        return train_grpo.main(words(places, output_root=tmp_path, run_name=name, num_epochs=1, **changes))

    return run


def test_a_run_is_the_same_bit_by_bit_with_and_without(train, tmp_path, capsys):
    assert [train(mode, doctor=mode) for mode in ("fast", "off")] == [0, 0]
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("doctor:")]
    assert len(told) == 1 and " 0 warn, 0 fail in " in told[0]
    fast, off = (newest(tmp_path / mode) for mode in ("fast", "off"))
    assert set(fast) == set(off) and all(torch.equal(fast[name], off[name]) for name in fast)
    numbers = [
        [{n: v for n, v in json.loads(line).items() if not n.startswith(("time/", "system/"))} for line in lines]
        for lines in ((tmp_path / mode / "metrics.jsonl").read_text().splitlines() for mode in ("fast", "off"))
    ]
    # Seconds since the epoch stand in every row.
    assert [{n: v for n, v in row.items() if "/" in n} for row in numbers[0]] == [
        {n: v for n, v in row.items() if "/" in n} for row in numbers[1]
    ]


def test_a_failed_check_stops_the_run_before_its_first_epoch_unless_it_is_switched_off(train, tmp_path, capsys):
    with doctor_cases.another_gaussian():
        assert train("stopped") == 2
        captured = capsys.readouterr()
        assert not (tmp_path / "stopped" / "checkpoints").exists()
        assert train("anyway", doctor="off") == 0
    (line,) = [line for line in captured.err.splitlines() if line.startswith("error:")]
    assert "the doctor's checks residuals fail" in line and "--config.doctor=off" in line
    assert "-> the rollout draws from another Gaussian than it scores" in captured.out


def _train(ranks: Ranks, given: list[str]) -> int:
    with (
        mock.patch.object(train_grpo, "join", return_value=(CPU, ranks)),
        mock.patch.object(process_group, "shut_down"),
        mock.patch.object(plots, "draw_curves"),
    ):
        return train_grpo.main(given)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_three_ranks_sum_gradients_in_the_same_order_with_and_without(places, tmp_path, sharding):
    shape = {"sample__k": 3, "sample__train_batch_size": 1, "train__batch_size": 1, "train__sharding": sharding}
    for mode in ("fast", "off"):
        given = words(places, output_root=tmp_path, run_name=mode, num_epochs=2, doctor=mode, **shape)
        assert run_ranks(_train, 3, given, timeout=280) == [0] * 3
    fast, off = (learned(tmp_path / mode) for mode in ("fast", "off"))
    assert any(name.startswith("trained/") for name in fast)
    assert set(fast) == set(off) and all(torch.equal(fast[name], off[name]) for name in fast)
