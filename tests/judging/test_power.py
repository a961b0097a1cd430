"""What an evaluation can see, against simulated evaluations."""

import math

import pytest
import torch

from flow_grpo.judging import power
from flow_grpo.judging.changes import LEAST_SCENES
from flow_grpo.judging.power import SAME_SCENE, least_visible, measured_spreads
from flow_grpo.judging.table import Table
from flow_grpo.maths.bootstrap import mean_interval
from flow_grpo.settings.loading import load_config
from tests.doctor_cases import ROOT


@pytest.mark.parametrize(("scenes", "by_scene"), [(6, 1), (16, 5)])
def test_a_change_of_the_visible_size_is_seen_as_often_as_promised(scenes, by_scene):
    random = torch.Generator().manual_seed(scenes)
    change = least_visible(0.5, scenes * by_scene, scenes)
    groups = [scene for scene in range(scenes) for _ in range(by_scene)]
    seen = 0
    for _ in range(400):
        of_scene = math.sqrt(SAME_SCENE) * torch.randn(scenes, 1, generator=random, dtype=torch.float64)
        own = math.sqrt(1 - SAME_SCENE) * torch.randn(scenes, by_scene, generator=random, dtype=torch.float64)
        seen += mean_interval((change + 0.5 * (of_scene + own)).flatten().tolist(), groups).low > 0
    assert seen / 400 == pytest.approx(power.POWER, abs=0.06)


@pytest.mark.parametrize("spread", [0.05, 0.4, 30.0])
def test_as_many_scenes_are_needed_as_make_a_change_visible(spread):
    needed = power.scenes_needed(0.05, spread)
    assert least_visible(spread, needed, needed) <= 1.01 * 0.05
    assert needed == LEAST_SCENES or least_visible(spread, needed - 3, needed - 3) > 0.05


def test_spreads_are_those_of_the_metrics_that_decide():
    tiny = f"{ROOT}/config/grpo.py:tiny_recam"
    assert power.usual_spreads(load_config(tiny, [])) == power.OF_GOLD | power.OF_TRUE_VIEW
    trained = ["--config.eval.gold=", "--config.reward.weights.target_view=1"]
    assert power.usual_spreads(load_config(tiny, trained)) == {}
    labels = ("s",) * 3, tuple("abc"), ("",) * 3
    columns = {"rot_err_deg": [1.0, 2.0, math.nan], "trans_err_m": [0.0, 0.0, 0.0], "sharpness": [1.0, 2.0, 3.0]}
    table = Table(*labels, {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()})
    found = measured_spreads(table, ["eval/rot_err_deg", "eval/trans_err_m", "eval/sharpness", "eval/x_m"])
    table.values["rot_err_deg"] *= 2.0
    wider = measured_spreads(table, ["eval/rot_err_deg"])
    assert list(found) == ["eval/rot_err_deg"] and found == pytest.approx(wider)  # shares of the mean


@pytest.mark.parametrize(("scenes", "text"), [(1, "of 1 scenes give no interval"), (10, "of 10 scenes see with 80%")])
def test_it_is_said_in_words(scenes, text):
    said = power.in_words({"eval/trans_err_m": 0.4}, 10, scenes)
    assert (
        " ranks " not in said
        and text in said
        and "; 10% needs " in said
        and said.endswith(" conditions, each of a scene of its own")
    )


def test_it_says_how_many_conditions_the_ranks_measure_in_the_same_time():
    assert "10 conditions of 10 scenes (on 8 ranks 16 take the same time: one rank measures 2)" in power.in_words(
        {}, 10, 10, 8
    )
    assert "ranks" not in power.in_words({}, 16, 16, 8) + power.in_words({}, 100, 100, 8) + power.in_words(
        {}, 10, 10, 1
    )
