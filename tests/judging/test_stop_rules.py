"""A rule holds where its metric is beyond the bound, and nowhere else."""

import math

import pytest

from flow_grpo.judging.stop_rules import broken, check_measured
from flow_grpo.runtime.ranks.process_group import InputError
from flow_grpo.settings.loading import ConfigError, load_config
from flow_grpo.settings.schema import TrainConfig

TOY = "tests/toy_recipe.py:toy"


@pytest.mark.parametrize(
    ("rule", "value", "said"),
    [
        ("eval/a<-6", -6.5, "eval/a is -6.5, below -6"),
        ("eval/a<-6", -6.0, ""),
        ("eval/a>1e-2", 0.5, "eval/a is 0.5, above 0.01"),
        ("eval/a>1e-2", 0.01, ""),
        ("eval/a>0", math.nan, ""),
        ("eval/b>0", 1.0, ""),
    ],
)
def test_a_rule_is_broken_beyond_its_bound_only(rule, value, said):
    assert broken([rule], {"eval/a": value}, {}) == said


def test_the_first_broken_rule_is_named_and_the_default_ones_can_be_switched_off():
    assert broken(["eval/a>9", "eval/a>1", "eval/a>0"], {"eval/a": 2.0}, {}) == "eval/a is 2, above 1"
    assert broken(TrainConfig().stop_if, {"eval_change/target_view_psnr_db": -3.5}, {})
    assert broken(TrainConfig().stop_if, {"eval_change/target_view_psnr_db": -2.5}, {}) == ""
    assert load_config(TOY, ["--config.train.stop_if="]).train.stop_if == ()


def test_what_is_so_before_training_was_not_broken_by_it():
    """Clips without poses, or such as the estimator finds no camera in: the share of values is 0 from the start."""
    before = {"eval/trans_err_m_valid": 0.0, "eval/a": 1.0}
    assert broken(TrainConfig().stop_if, {"eval/trans_err_m_valid": 0.0}, {"eval/trans_err_m_valid": 1.0})
    assert broken(TrainConfig().stop_if, before, before) == ""
    rules = [*TrainConfig().stop_if, "eval/a>1"]
    assert broken(rules, {**before, "eval/a": 2.0}, before) == "eval/a is 2, above 1"


@pytest.mark.parametrize("rule", ["eval/a", "a<1", "eval/a=1", "eval/a<x", "eval/a<1<2", "eval/a<--1"])
def test_a_rule_of_another_form_is_refused(rule):
    with pytest.raises(ConfigError, match=r"train.stop_if: .* must be METRIC<BOUND or METRIC>BOUND; pass"):
        load_config(TOY, [f"--config.train.stop_if={rule}"])


HELD_OUT = ("eval/target_view", "eval/rot_err_deg")


@pytest.mark.parametrize(
    "name",
    [
        "policy/clipfraction",
        "polcy/clip_fraction",
        "eval/rot_err",
        "eval_change/target_vew",
        "eval_change/target_view_psnr",
        "eval_floor/rot_err_deg",
        "eval_by_camera/pan_left/rot_err_deg",
    ],
)
def test_a_rule_whose_metric_no_epoch_has_is_refused(name):
    with pytest.raises(InputError, match=f"got '{name}>1', but no epoch has a metric {name}; .*(eval/rot|metrics.md)"):
        check_measured(["policy/clip_fraction>0.9", f"{name}>1"], HELD_OUT)


def test_a_rule_of_a_measured_metric_of_a_share_and_of_the_defaults_passes():
    rules = ["eval_change/rot_err_deg>1", "eval/rot_err_deg_valid<0.5", "reward/my.py:one_lost>1", "time/epoch_s>9"]
    check_measured([*rules, *TrainConfig().stop_if], HELD_OUT)
