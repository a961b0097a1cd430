"""Runs whose ranks share samples are those of ranks that do not: metrics and weights, whatever a recipe switches on."""

from pathlib import Path

import pytest
import torch

import train_grpo
from tests.command import command
from tests.test_train_grpo import _train, learned, metrics_of, words
from tests.tiny_models import make_tiny_folder
from tests.workers import run_ranks

pytestmark = pytest.mark.usefixtures("without_curves")
# What makes `my_recam_8npu_tiny` small, and nothing else.
SMALL = {
    "device": "cpu",
    "num_epochs": 2,
    "data.tiny_world": "unit_test",
    "data.tune_scenes": 0,
    "sample.train_batch_size": 8,
    "sample.num_steps": 8,
    "sample.sde_steps": "0,1,2,3",
    "sample.tail_steps": 2,
    "reward.weights": "target_view=1,target_psnr=1",  # where a camera is found makes a thousandth of rounding
    "eval.every": 0,
    "eval.num_conditions": 2,
    "eval.num_steps": 2,
    "eval.videos": 0,
    "eval.signal_groups": 0,
    "trackers": "",
    "log_videos_every": 0,
}


def epochs_of(run: Path) -> list[dict[str, float]]:
    """Return, per epoch, the metrics that are of samples and weights, not of seconds or bytes."""
    groups = ("policy/", "reward/", "train/")
    rows = [row for row in metrics_of(run) if "train/grad_norm" in row]
    return [{name: value for name, value in row.items() if name.startswith(groups)} for row in rows]


def assert_equal_runs(one: Path, other: Path, *, epochs: int) -> None:
    """Assert that metrics, weights and moments of two runs differ by rounding only."""
    expected, found = epochs_of(one), epochs_of(other)
    assert len(expected) == len(found) == epochs
    for own, others in zip(expected, found, strict=True):
        assert own["train/grad_norm"] > 0
        assert others == pytest.approx(own, rel=1e-3, abs=1e-4)
        assert others["policy/ratio_first_max_abs_log"] < 1e-6
    wanted, learnt = learned(one), learned(other)
    weights = {name for name in wanted if name.startswith(("trained/", "ema/"))}
    moments = {name for name in wanted.keys() & learnt.keys() if name.endswith("exp_avg")}
    assert weights and moments
    for name in weights:  # Adam moves a weight of a tiny gradient by any amount; the gradients themselves agree
        torch.testing.assert_close(learnt[name], wanted[name], rtol=0, atol=5e-4)
    for name in moments:
        torch.testing.assert_close(learnt[name], wanted[name], rtol=0, atol=1e-2 * float(wanted[name].abs().max()))


def test_the_recipe_on_2_ranks_that_share_every_sample_is_that_of_one(world, tmp_path):
    """With its LoRA, prefixes of groups, steps after the window, weights of steps and average; and chosen copies."""
    knobs = SMALL | {"data.root": world, "output_root": tmp_path, "train.copies": 2}
    assert train_grpo.main(command(knobs, recipe="my_recam_8npu_tiny", run_name="one")) == 0
    two = command(knobs, recipe="my_recam_8npu_tiny", run_name="two", train__context_parallel=2)
    assert run_ranks(_train, 2, two) == [0, 0]
    assert_equal_runs(tmp_path / "one", tmp_path / "two", epochs=2)


def test_groups_of_ranks_that_share_samples_learn_from_different_ones_as_ranks_do(world, tmp_path):
    places = {"model.path": make_tiny_folder(tmp_path / "model"), "data.root": str(world)}
    changes = {"train__kl_coef": 0.01, "sample__guidance_scale": 2.0, "sample__num_batches_per_epoch": 1}
    assert run_ranks(_train, 2, words(places, tmp_path / "two", **changes)) == [0, 0]
    four = words(places, tmp_path / "four", **changes, train__context_parallel=2)
    assert run_ranks(_train, 4, four) == [0] * 4
    assert_equal_runs(tmp_path / "two" / "run", tmp_path / "four" / "run", epochs=2)
    (_, kl), (_, other_kl) = ([row["policy/kl"] for row in epochs_of(tmp_path / n / "run")] for n in ("two", "four"))
    assert kl > 0 and other_kl == pytest.approx(kl, rel=1e-3)
