"""The benchmark: an epoch against its bare transformer calls, and the other cases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.dev import bench
from tools.dev.bench_cases import exchange, growth, start

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kl_coef", [0.0, 0.01])
def test_the_benchmark_prints_one_object_with_both_ratios(one_batch, capsys, kl_coef) -> None:
    knobs = one_batch | {"train.kl_coef": kl_coef}
    words = ["--config", f"{ROOT}/config/grpo.py:tiny_recam", "--epochs", "2", "--json"]
    assert bench.main([*words, *(f"--config.{name}={value}" for name, value in knobs.items())]) == 0
    said = capsys.readouterr()
    assert f"measuring {words[1]}: one epoch to warm up and 2 measured" in said.err.splitlines()[0]
    result = json.loads(said.out.splitlines()[-1])
    assert result["rollout_s"] > 0
    assert result["update_s"] > 0
    assert 0.5 < result["rollout_update_over_bare"] <= result["epoch_over_bare"]


def test_the_packing_case_prints_both_idle_shares(capsys) -> None:
    assert bench.main(["packing", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("measuring the case packing")
    result = json.loads(said.out)
    assert result["idle_share"] < 0.01 < result["naive_idle_share"]


def test_the_exchange_moves_less_than_a_gather_of_objects_takes() -> None:
    """Two ranks and small samples; the aims hold for 4 ranks of 4 samples of 32 MiB: `bench.py dynamic-sampling`."""
    result = exchange.measure(ranks=2, local=4, mebibytes=8)
    assert set(result) == {"exchange_s", "objects_s", "time_ratio", "exchange_mib", "objects_mib", "memory_ratio"}
    assert result["time_ratio"] > 1
    assert result["memory_ratio"] > 2


def test_growth_fits_exponents_counts_what_the_plan_counts_and_draws(monkeypatch, tmp_path) -> None:
    assert growth.slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
    for name, value in {"FRAMES": (2, 4), "SIDES": ((2, 2), (4, 4)), "SAMPLES": (8, 64), "RANKS": (2,)}.items():
        monkeypatch.setattr(growth, name, value)
    monkeypatch.setattr(growth, "KNOBS", {"window": (1, 2)})
    monkeypatch.setattr(growth, "REPEATS", 1)
    monkeypatch.setattr(growth, "slope", lambda sizes, values: dict(zip(sizes, values, strict=True)))
    found = growth.measure(None)
    assert found["window_work_exponent"] == found["window_work_exponent_planned"]
    assert found["ranks_sent_exponent"] == found["ranks_sent_exponent_planned"]
    assert set(found["samples_round_exponent"]) == {8, 64} and found["frames_memory_exponent"][256] > 0
    monkeypatch.undo()
    growth.draw({"a": growth.Axis("seconds against tokens", (1, 2), (1.0, 2.0), (3.0, 6.0))}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_only_the_first_word_names_a_case(capsys) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--config.sample.k", "packing"])
    assert "--config" in capsys.readouterr().err


def test_a_start_ends_with_the_first_epoch_and_its_failure_is_raised(one_batch) -> None:
    knobs = {name: value for name, value in one_batch.items() if not name.startswith("eval")}
    assert start.first_rollout([f"--config.{name}={value}" for name, value in knobs.items()]) > 0.1
    with pytest.raises(RuntimeError, match=r"exits with 2: .*config\.sample\.k"):
        start.first_rollout(["--config.sample.k=0"])


def test_starts_are_divided_by_imports_of_their_own_turn(monkeypatch) -> None:
    turns = []

    def output(*words: str) -> str:
        turns.extend(["turn"] if start.PACKAGES in words[-1] else [])
        return "2.0" if start.PACKAGES in words[-1] else "4.0"

    monkeypatch.setattr(start, "_output", output)
    monkeypatch.setattr(start, "_wall", lambda *words: 1.5 if "import torch" in words else 0.3)
    monkeypatch.setattr(
        start, "first_rollout", lambda words: (4.0 if "--config.doctor=off" in words else 6.0) * len(turns)
    )
    found = start.measure(repeats=1)  # the second turn: the first warms up
    assert len(turns) == 2
    assert found["help_over_torch"] == pytest.approx(0.2)
    assert (found["first_rollout_over_packages"], found["first_rollout_over_classes"]) == (6.0, 3.0)
    assert (found["doctor_rollout_over_packages"], found["doctor_rollout_over_classes"]) == (4.0, 2.0)
