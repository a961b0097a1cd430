"""The plot of a run's curves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from flow_grpo.runtime.reporting import plots


def rows(count: int) -> dict[int, dict[str, float]]:
    made = {
        step: {"reward/mean": 0.1 * step, "reward/group_std": 0.2, "reward/source_match/mean": 1.0, "train/loss": 3.0}
        for step in range(1, count + 1)
    }
    made[0] = {"eval/trans_err_m": 0.5}
    made[count]["eval/trans_err_m"] = 0.25
    return made


def drawn_axes(path: Path, data: dict[int, dict[str, float]], **given: Any) -> list[Any]:
    figure = Figure(layout="constrained")
    with mock.patch.object(plots, "Figure", return_value=figure):
        plots.draw_curves(data, path, "run", **given)
    return figure.axes


def test_there_is_a_panel_for_each_held_out_metric_and_reward_the_weighted_sum_last(tmp_path: Path) -> None:
    axes = drawn_axes(tmp_path / "curves.png", rows(3))
    assert [a.get_title() for a in axes] == [
        "eval/trans_err_m: 0.5 → 0.25",
        "reward/source_match/mean\nhigher is better",
        "reward/mean\nhigher is better (weighted sum)",
    ]
    assert list(axes[0].lines[0].get_xdata()) == [0, 3]


@pytest.mark.parametrize(("sign", "said"), [(1, "\nhigher is better"), (-1, "\nlower is better"), (0, "")])
def test_a_held_out_metric_s_direction_stands_in_its_title(tmp_path: Path, sign: int, said: str) -> None:
    title = drawn_axes(tmp_path / "curves.png", rows(3), direction=lambda _: sign)[0].get_title()
    assert title == f"eval/trans_err_m: 0.5 → 0.25{said}"


def test_the_likeness_of_the_picture_is_drawn_once(tmp_path: Path) -> None:
    data = rows(3)
    data[0] |= {"eval/target_psnr": 24.0}
    assert drawn_axes(tmp_path / "a.png", data)[0].get_title() == "eval/target_psnr: 24 → 24"
    data[0] |= {"eval/target_view_psnr_db": 24.0}
    titles = [axes.get_title() for axes in drawn_axes(tmp_path / "b.png", data)]
    assert titles[:2] == ["eval/target_view_psnr_db: 24 → 24", "eval/trans_err_m: 0.5 → 0.25"]


def test_what_shows_a_run_s_health_is_drawn_where_it_is_logged_and_a_line_along_0_is_seen(tmp_path: Path) -> None:
    data = rows(3)
    for step in (1, 2, 3):
        data[step] |= {"policy/ratio_first_max_abs_log": 0.0, "train/grad_norm": 1.0, "train/zero_std_ratio": 0.1}
        data[step] |= {"policy/clip_fraction": math.nan, "dyn/fallback_rate": 0.1}
    levels = drawn_axes(tmp_path / "curves.png", data)[3:]
    assert [axes.get_title().replace("\n", ": ") for axes in levels] == [
        "policy/ratio_first_max_abs_log: near 0 is healthy",
        "train/grad_norm: steady is healthy",
        "train/zero_std_ratio: below 0.5 is healthy",
        "dyn/fallback_rate",
    ]
    assert all(low < 0 < high for low, high in (axes.get_ylim() for axes in levels))


def test_the_band_is_the_within_group_standard_deviation(tmp_path: Path) -> None:
    _, single, combined = drawn_axes(tmp_path / "curves.png", rows(3))
    band = combined.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(0.1 - 0.2) and band[:, 1].max() == pytest.approx(0.3 + 0.2)
    assert not single.collections


def test_the_band_of_a_held_out_metric_is_the_interval_of_its_change(tmp_path: Path) -> None:
    data = rows(3)
    change = {
        "eval_change/trans_err_m": -0.25,
        "eval_change/trans_err_m_low": -0.3,
        "eval_change/trans_err_m_high": -0.1,
    }
    data[3] |= change
    band = drawn_axes(tmp_path / "curves.png", data)[0].collections[0].get_paths()[0].vertices
    assert sorted({(float(x), round(float(y), 6)) for x, y in band}) == [(0.0, 0.5), (3.0, 0.2), (3.0, 0.4)]


def test_a_running_mean_of_the_reward_is_drawn_from_twenty_points(tmp_path: Path) -> None:
    assert len(drawn_axes(tmp_path / "curves.png", rows(19))[-1].lines) == 1
    _, constant, combined = drawn_axes(tmp_path / "curves.png", rows(30))
    assert combined.lines[1].get_ydata()[10] == pytest.approx(0.1 * 11)
    assert np.allclose(constant.lines[1].get_ydata(), 1.0)  # up to the ends


@pytest.mark.parametrize("data", [{}, {1: {"train/loss": 1.0}}, {1: {"reward/mean": math.nan, "eval/x": math.nan}}])
def test_a_run_without_values_is_still_plotted(data: dict[int, dict[str, float]], tmp_path: Path) -> None:
    plots.draw_curves(data, tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.size[0] > 100
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]
