"""The fast doctor: what it finds, that it changes no number, and that a failed check stops the run."""

import json
from unittest import mock

import pytest
import torch

import train_grpo
from flow_grpo.models.wan_policy import WanPolicy
from flow_grpo.preflight.doctor import probe
from flow_grpo.preflight.doctor.examine import FAST, full, run_checks
from flow_grpo.preflight.doctor.weights import digest
from tests import doctor_cases
from tests.doctor_cases import build_trainer, statuses, words
from tests.test_train_grpo import _train, assert_equal_state, learned, newest
from tests.workers import run_ranks


def state_of(trainer) -> dict[str, torch.Tensor]:
    module = trainer.updater.policy.module
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    gradients = {f"gradient {n}": p.grad for n, p in module.named_parameters() if p.grad is not None}
    position = torch.tensor(trainer.state.sampler.next_step)
    return weights | gradients | {"random": torch.get_rng_state(), "sampler": position}


def test_a_sound_run_passes_and_is_left_as_it_was(built):
    before = state_of(built)
    assert statuses(run_checks(built, {"rollout": full(1)["rollout"]})) == {}
    assert_equal_state(before, state_of(built))
    assert built.updater.optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("mix", [lambda v: v.flip(0), lambda v: v[:1].expand_as(v), lambda v: v[-1:].expand_as(v)])
def test_a_policy_that_mixes_the_rows_of_a_batch_fails(built, mix):
    velocity = WanPolicy.velocity
    with mock.patch.object(WanPolicy, "velocity", lambda self, latents, *given: velocity(self, mix(latents), *given)):
        assert statuses(run_checks(built, FAST))["rows"] == "fail"


def test_what_stops_a_run_is_its_last_line_with_the_knob_to_change(places, tmp_path, capsys):
    assert train_grpo.main(words(places, output_root=tmp_path, train__learning_rate=1.0)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: the doctor's check fails, rate: train.learning_rate=1 moves a weight by ")
    assert "--config.train.learning_rate=0.00" in last and "--config.doctor=off" in last


def test_a_video_that_cannot_be_read_is_a_failed_rollout(built):
    with mock.patch.object(type(built.training_data), "condition", side_effect=ValueError("video x is broken")):
        (found,) = [found for found in run_checks(built, FAST) if found.status == "fail"]
    assert found.name == "rollout" and "video x is broken" in found.measured


def test_layers_are_compared_only_when_calls_differ(built):
    compare = probe.layer_differing_from_rollout
    with mock.patch.object(probe, "layer_differing_from_rollout", side_effect=compare) as layer:
        run_checks(built, FAST)
        layer.assert_not_called()
        with doctor_cases.rounded_latents():
            found = {found.name: found for found in run_checks(built, FAST) if found.status == "fail"}
    assert set(found) == {"latents_fp32", "ratio"} and "input 0 differs first" in found["ratio"].measured


def test_replays_that_need_not_be_bit_exact_still_show_rounded_latents(built):
    """As on an accelerator, where the ratio may not show them."""
    with mock.patch.object(probe, "bit_exact", return_value=False), doctor_cases.rounded_latents():
        assert statuses(run_checks(built, FAST))["latents_fp32"] == "fail"


@pytest.mark.parametrize(("old_log_prob", "status"), [("rollout", "fail"), ("auto", "warn")])
def test_an_update_s_batch_size_larger_than_the_rollout_s_is_examined(places, tmp_path, old_log_prob, status):
    given = {"sample__num_batches_per_epoch": 2, "train__batch_size": 4, "train__old_log_prob": old_log_prob}
    trainer = build_trainer(words(places, output_root=tmp_path, **given))
    velocity = WanPolicy.velocity

    def by_rows(self, latents, sigma, conditioning):
        return velocity(self, latents, sigma, conditioning) * (1.5 if len(latents) == 4 else 1.0)

    assert statuses(run_checks(trainer, FAST)) == {}
    with mock.patch.object(WanPolicy, "velocity", by_rows):
        assert statuses(run_checks(trainer, FAST)) == {"ratio_by_batch_size": status}


def test_a_digest_tells_moved_weights_from_the_same():
    weights = [torch.ones(1000), torch.zeros(3)]
    assert digest(weights) == digest([weight.clone() for weight in weights])
    assert digest(weights) != digest([weights[0] * 1.001, weights[1]])


# --- in a run


@pytest.fixture
def train(places, tmp_path, without_curves):
    def run(name: str, **changes) -> int:
        return train_grpo.main(words(places, output_root=tmp_path, run_name=name, num_epochs=1, **changes))

    return run


def metrics_of(folder) -> list[dict[str, float]]:
    """Return the metrics of a run that do not depend on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{n: v for n, v in row.items() if "/" in n and not n.startswith(("time/", "system/"))} for row in rows]


def test_a_run_is_the_same_bit_for_bit_with_and_without(train, tmp_path, capsys):
    assert [train(mode, doctor=mode) for mode in ("fast", "off")] == [0, 0]
    printed = capsys.readouterr().out.splitlines()
    assert printed.count(f"run folder: {tmp_path / 'off'}") == 2  # at the start and at the end, whatever the doctor
    told = [line for line in printed if line.startswith("doctor:")]
    assert len(told) == 1 and told[0].endswith(" s (evaluation)") and " 1 warn, 0 fail in " in told[0]
    assert_equal_state(*(newest(tmp_path / mode) for mode in ("fast", "off")))
    assert metrics_of(tmp_path / "fast") == metrics_of(tmp_path / "off")


def test_a_failed_check_stops_the_run_before_its_first_epoch_unless_the_doctor_is_off(train, tmp_path, capsys):
    with doctor_cases.another_gaussian():
        assert train("stopped") == 2
        captured = capsys.readouterr()
        assert not (tmp_path / "stopped" / "checkpoints").exists()
        assert train("anyway", doctor="off") == 0
    (line,) = [line for line in captured.err.splitlines() if line.startswith("error:")]
    assert "residuals" in line and "--config.doctor=off" in line
    assert "-> the rollout draws from another Gaussian than it scores" in captured.out


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_three_ranks_sum_gradients_in_the_same_order_with_and_without(places, tmp_path, sharding):
    shape = {"sample__k": 3, "sample__train_batch_size": 1, "train__batch_size": 1, "train__sharding": sharding}
    for mode in ("fast", "off"):
        given = words(places, output_root=tmp_path, run_name=mode, num_epochs=2, doctor=mode, **shape)
        assert run_ranks(_train, 3, given) == [0] * 3
    on, off = (learned(tmp_path / mode) for mode in ("fast", "off"))
    assert any(name.startswith("trained/") for name in on)
    assert_equal_state(on, off)
