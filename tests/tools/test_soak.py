"""The soak's own settings and ends; what it finds is seen by running it."""

from __future__ import annotations

import json
from unittest import mock

from tools import soak
from train_grpo import read_command_line


def options(tmp_path, *words: str):
    return soak.options().parse_args(["--out", str(tmp_path / "soak"), *words])


def test_its_command_is_one_that_training_takes_and_runs_where_equal_means_bit_for_bit(tmp_path):
    words = soak.Soak(options(tmp_path)).words("trouble_0")
    config, recipe = read_command_line(words[words.index("--config") :])
    assert (recipe, config.device, config.resume, config.run_name) == ("tiny_recam", "cpu", "auto", "trouble_0")


def test_time_used_up_before_any_fault_is_no_success(tmp_path, capsys):
    with mock.patch.object(soak.Soak, "peace"):
        assert soak.main(["--out", str(tmp_path / "soak"), "--minutes", "0"]) == 2
    assert "--minutes" in capsys.readouterr().err
    summary = json.loads((tmp_path / "soak" / "summary.json").read_text())
    assert (summary["runs"], summary["slowest_end_s"], summary["lost"]) == (0, 0.0, [])


def test_a_run_killed_after_its_last_epoch_is_only_ended(tmp_path):
    tried = soak.Soak(options(tmp_path, "--epochs", "8"))
    (tmp_path / "soak").mkdir()
    (tried.folder("trouble_0") / "checkpoint_000008").mkdir(parents=True)
    with mock.patch.object(tried, "words", return_value=["true"]):
        for fault in soak.INSIDE:
            started = tried.start("trouble_0", fault)
            assert (started.struck, started.saved, started.done) == (False, 8, True)


def test_what_was_lost_is_exit_code_1(tmp_path):
    result = {"run": "trouble_0", "starts": 2, "complete": True, "difference": "", "struck": {"kill": 1}, "left": 0}
    result["slowest_end_s"] = 3.0
    for number, (found, code) in enumerate((({}, 0), ({"difference": "adapter"}, 1), ({"left": 1}, 1))):
        over = mock.patch.object(soak.Soak, "over", side_effect=[False, True])
        trouble = mock.patch.object(soak.Soak, "trouble", return_value=result | found)
        with mock.patch.object(soak.Soak, "peace"), over, trouble:
            assert soak.main(["--out", str(tmp_path / f"soak_{number}")]) == code
