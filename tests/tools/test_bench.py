"""The benchmark: an epoch against its bare transformer calls."""

import json

import pytest

from tests.command import command
from tools.dev import bench, bench_rewards


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


def test_the_rewards_wait_is_that_of_calls_dealt_to_cores_as_they_get_free(capsys):
    assert bench_rewards.dealt([3.0, 1.0, 1.0, 2.0], 2) == 4.0
    assert bench_rewards.dealt([3.0, 1.0, 1.0, 2.0], 4) == 3.0
    assert bench_rewards.main(["--size", "5", "96", "160", "--cores", "4", "--rewards", "pose_rot", "motion_mag"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["| the condition alone", "| pose_rot", "| motion_mag", "| after the last batch"]
    assert float(rows[1][2].rstrip(" |")) <= float(rows[1][1])
