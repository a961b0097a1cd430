"""The doctor's command on a small recipe: it passes, and every planted fault fails the check that names it."""

import contextlib
import io
import json
import os
from unittest import mock

import pytest

from flow_grpo.algorithm.update.updater import Updater
from flow_grpo.preflight.doctor.findings import Finding
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.loading import load_config
from tests import doctor_cases
from tests.doctor_cases import make_places, words
from tests.workers import already_met, run_ranks
from tools import doctor


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return make_places(tmp_path_factory.mktemp("doctor"))


def examined(given: list[str], fault=contextlib.nullcontext) -> tuple[int, dict[str, dict[str, str]]]:
    with contextlib.redirect_stdout(io.StringIO()) as printed, fault():
        code = doctor.main([*given, "--json"])
    told = json.loads(printed.getvalue() or '{"findings": []}')  # other ranks than the first print nothing
    return code, {row["name"]: row for row in told["findings"]}


def statuses(findings: dict[str, dict[str, str]], status: str) -> set[str]:
    return {name for name, found in findings.items() if found["status"] == status}


def test_a_sound_recipe_passes_every_check(places):
    code, findings = examined(words(places, model__trained="lora", train__kl_coef=0.1))
    assert (code, statuses(findings, "fail")) == (0, set()), findings
    machine = {"disk", "shared_memory", "versions", "device", "backends", "run_folder"}
    schedule = {"evaluation", "guidance", "steps", "ode_limit", "window", "window_on_ranks"}
    weights = {"adapters", "weights", "rate"}
    batch = {"rows", "residuals", "latents_fp32", "ratio", "ratio_by_batch_size", "noise"}
    epoch = {"rewards", "reward_order", "signal", "groups", "clip", "kl", "ratio_in_update", "update"}
    after = {"gradient_coverage", "gradient_size", "gradient_sync", "weights_after_update"}
    assert set(findings) == machine | schedule | weights | batch | epoch | after
    assert findings["ratio"]["measured"].endswith(" 0, bound 0")


def test_the_clip_range_is_checked_for_the_recipe_s_number_of_updates(places):
    changes = {"train__clip_range": 9e-3, "train__guard": True, "sample__num_batches_per_epoch": 2}
    _, findings = examined(words(places, train__updates_per_epoch=2, **changes))
    assert findings["clip"]["status"] == "warn", findings["clip"]


def test_lora_names_that_match_nothing_are_a_failed_check(places):
    code, findings = examined(words(places, model__trained="lora", model__lora_targets=r"blocks\.\d+\.attn1\.q_proj"))
    assert (code, statuses(findings, "fail")) == (1, {"adapters"})
    assert "matches no module" in findings["adapters"]["measured"]


def test_one_adapter_without_gradient_is_found_and_named(places):
    given = words(places, model__trained="lora")
    code, findings = examined(given, doctor_cases.an_adapter_without_gradient)
    assert (code, statuses(findings, "fail")) == (1, {"gradient_coverage"})
    assert findings["gradient_coverage"]["measured"].count("blocks.0.attn1.to_q.lora_") == 2


def _examined(world: World, given: list[str], fault: str) -> tuple[int, dict[str, dict[str, str]]]:
    with already_met(doctor, world):
        return examined(given, getattr(doctor_cases, fault) if fault else contextlib.nullcontext)


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("", set()),
        ("no_synchronisation", {"gradient_sync", "weights_after_update"}),
        ("one_seed_for_every_rank", {"noise", "epoch", "signal"}),
        ("other_steps_on_every_rank", {"window_on_ranks"}),
        ("other_weights_on_every_rank", {"weights", "weights_after_update"}),
    ],
)
def test_what_goes_wrong_between_ranks_is_found(places, fault, names):
    given = words(places, sample__train_batch_size=1, train__batch_size=1, sample__num_batches_per_epoch=2)
    (code, findings), (other, _) = run_ranks(_examined, 2, given, fault)
    assert code == other == (1 if names else 0)
    assert statuses(findings, "fail") == names


def test_one_group_on_two_ranks_does_not_cancel_itself(places):
    """The rank without a group repeats the other's, without weight."""
    shared = {"sample__same_initial_noise": True, "sample__share_prefix": True}
    given = words(places, sample__train_batch_size=1, train__batch_size=1, sample__num_batches_per_epoch=1, **shared)
    for code, findings in run_ranks(_examined, 2, given, ""):
        assert (code, statuses(findings, "fail")) == (0, set())


def _out_of_memory(world: World, given: list[str]) -> str:
    """Examine where no device has memory for an update; return what is said on stderr."""
    full = mock.patch.object(Updater, "run", side_effect=RuntimeError("out of memory in the update"))
    with contextlib.redirect_stderr(io.StringIO()) as said, full, pytest.raises(RuntimeError, match="out of memory"):
        _examined(world, given, "")
    return said.getvalue()


def test_what_was_found_is_shown_before_an_error_that_ends_the_doctor(places):
    said, other = run_ranks(_out_of_memory, 2, words(places, sample__train_batch_size=1, train__batch_size=1))
    assert "ok    ratio" in said and "reward_order" in said and not other


def test_what_cannot_be_built_is_one_line_and_exit_code_2(places, capsys):
    for changes, message in (({"sample__kk": 1}, "no such knob"), ({"model__path": "nowhere"}, "does not exist")):
        assert doctor.main(words(places, **changes)) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
        assert message in line


def test_with_json_stdout_holds_one_object_whoever_talks_on_the_way(places, capfd):
    def talkative(*_: object) -> list[Finding]:
        print("a check talks")
        os.write(1, b"so does a library\n")
        return [doctor.finding("a", "1")]

    with mock.patch.object(doctor, "examine", talkative):
        assert doctor.main([*words(places), "--json"]) == 0
    printed = capfd.readouterr()
    assert [found["name"] for found in json.loads(printed.out)["findings"]] == ["a"]
    for said in ("device cpu", "a check talks", "so does a library"):
        assert said in printed.err


def test_an_epoch_is_shortened_as_far_as_its_groups_and_micro_batches_allow():
    def batches(world_size: int, *overrides: str) -> int:
        config = load_config("config/grpo.py:tiny_recam", overrides)
        return doctor.shortened(config, world_size).sample.num_batches_per_epoch

    alone = "--config.sample.share_prefix=false"  # a row of the update for every copy
    assert batches(2, alone) == 1
    assert batches(2, alone, "--config.train.batch_size=40") == 3
    small = ("--config.sample.train_batch_size=4", "--config.train.batch_size=4", "--config.sample.layout=contiguous")
    assert batches(2, alone, *small) == 2
    assert batches(2) == 4  # 8 groups in a micro-batch
    assert batches(2, "--config.train.batch_size=3") == 2
    several = ("--config.train.updates_per_epoch=4", "--config.train.guard=true", "--config.train.step_weight=none")
    updates = doctor.shortened(load_config("config/grpo.py:tiny_recam", several), 2)
    assert updates.train.updates_per_epoch == 1
