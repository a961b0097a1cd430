"""The benchmark: an epoch against its bare transformer calls, and steps of the transformer."""

import json

import pytest

from tests.command import command
from tools.dev import bench


@pytest.mark.parametrize("kl_coef", [0.0, 0.01])
def test_the_benchmark_prints_one_object_with_both_ratios(one_batch, capsys, kl_coef) -> None:
    knobs = one_batch | {"train.kl_coef": kl_coef}
    words = command(knobs, "--epochs", "2", "--json")
    assert bench.main(words) == 0
    said = capsys.readouterr()
    assert f"measuring {words[1]}: one epoch to warm up and 2 measured" in said.err.splitlines()[0]
    result = json.loads(said.out.splitlines()[-1])
    assert result["rollout_s"] > 0 and result["update_s"] > 0
    assert 0.5 < result["rollout_update_over_bare"] <= result["epoch_over_bare"]


def test_the_transformer_case_prints_a_ratio_for_every_switch_and_size(capsys, monkeypatch) -> None:
    monkeypatch.setattr(bench, "VIDEOS", {120: (5, 3, 4)})
    monkeypatch.setattr(bench, "REPEATS", 1)
    assert bench.main(["transformer", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    switches = ("target_only_over_all_tokens", "keep_attention_over_blocks", "none_over_blocks")
    assert list(result) == [f"update_{switch}_120" for switch in switches]
    assert all(0.1 < ratio < 10 for ratio in result.values())


def test_only_the_first_word_names_a_case(capsys) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--config.sample.k", "transformer"])
    assert "--config" in capsys.readouterr().err
