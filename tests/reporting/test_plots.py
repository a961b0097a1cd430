"""The plots of a run's curves and of its cameras."""

import math
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from matplotlib.figure import Figure
from PIL import Image

from flow_grpo.reporting.drawing import camera_plots, plots, style


def rows(count: int) -> dict[int, dict[str, float]]:
    made = {
        step: {"reward/a_mean": 0.1 * step, "reward/a_group_std": 0.2, "reward/a_weight": 1.0, "train/loss": 3.0}
        for step in range(1, count + 1)
    }
    made[0] = {"eval/trans_err_m": 0.5}
    made[count]["eval/trans_err_m"] = 0.25
    return made


def drawn(data: dict[int, dict[str, float]], **given: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"direction": lambda _: 0, "deciding": list} | given
    return {panel.title: axes_of(panel) for line in plots.panels_of_run(data, **settings) for panel in line}


def axes_of(panel: plots.EpochPlot) -> Any:
    axes = Figure().add_subplot()
    plots.draw_panel(axes, panel)
    return axes


def test_held_out_metrics_stand_before_the_rewards_and_those_before_the_run_s_health() -> None:
    data = rows(3)
    for step in (1, 2, 3):
        data[step] |= {"train/grad_norm": 1.0, "time/epoch_s": 2.0, "time/rollout_s": 2.0, "policy/credit_share": 1.0}
        data[step] |= {"policy/clip_fraction": 0.0, "policy/ratio_mean": 1.0, "policy/ratio_after_max_abs_log": 1e-3}
    axes = drawn(data)
    assert list(axes) == [
        *("eval/trans_err_m", "reward/a_mean"),
        *("signal", "ratio and clip fraction", "gradient norm", "time of an epoch"),
    ]
    assert list(axes["eval/trans_err_m"].lines[0].get_xdata()) == [0, 3]


def curves(path: Path, data: dict[int, dict[str, float]], **given: Any) -> Any:
    figure = Figure(layout="constrained")
    with mock.patch.object(plots, "new_figure", return_value=figure):
        plots.draw_curves(data, path, "run", **given)
    return figure


def test_a_reward_without_weight_is_measured_and_not_drawn() -> None:
    data = rows(3)
    for step in (1, 2, 3):
        data[step] |= {"reward/b_mean": 2.0, "reward/b_weight": 0.0, "reward/mean": 0.1}
    assert list(drawn(data)) == ["eval/trans_err_m", "reward/a_mean"]
    unknown = {step: {name: row[name] for name in row if "weight" not in name} for step, row in data.items()}
    assert len(drawn(unknown)) == 3  # of an earlier version: every reward, without their sum


def test_a_running_mean_of_the_reward_is_drawn_from_twenty_points() -> None:
    assert len(drawn(rows(19))["reward/a_mean"].lines) == 1
    smooth = drawn(rows(30))["reward/a_mean"].lines[1].get_ydata()
    assert smooth[10] == pytest.approx(0.1 * 11) and smooth[0] == pytest.approx(0.15)  # up to the ends


def test_only_what_decides_the_verdict_is_drawn_and_equal_numbers_once() -> None:
    data = rows(3)
    for step, value in ((0, 24.0), (3, 25.0)):
        data[step] |= dict.fromkeys(("eval/target_psnr", "eval/target_view_psnr_db", "eval/twin"), value)
        data[step] |= {
            "eval/target_view": -value,
            "eval/located": 1.0,
            "eval/located_valid": value,
            "eval/b": value + 1,
        }
    axes = drawn(data, deciding=lambda names: [name for name in names if name != "eval/b"])
    assert [title.partition(":")[0] for title in axes][:-1] == ["eval/target_view_psnr_db", "eval/trans_err_m"]
    del data[0]["eval/target_view_psnr_db"], data[3]["eval/target_view_psnr_db"], data[0]["eval/b"], data[3]["eval/b"]
    names = [title.partition(":")[0] for title in drawn(data)]
    assert names[:-1] == ["eval/target_psnr", "eval/target_view", "eval/trans_err_m"]


def test_epochs_are_also_counted_in_minutes_and_forwards_and_a_title_says_which_way_is_better(tmp_path: Path) -> None:
    data = rows(4)
    for step in (1, 2, 3, 4):
        data[step] |= {"time/epoch_s": 60.0 * step, "system/forward_equivalents": 1000.0 * step}
    figure = curves(tmp_path / "curves.png", data, direction=lambda _: -1)
    assert figure.get_supxlabel() == (
        "epoch   (4 epochs: 10 minutes of training, 4,000 forward equivalents of the network)"
    )
    assert figure.axes[0].get_title(loc="left") == "eval/trans_err_m\n0.5 → 0.25, lower is better"
    (above,) = figure.axes[0].child_axes
    ticks = dict(zip([text.get_text() for text in above.get_xticklabels()], above.get_xticks(), strict=True))
    assert ticks["10"] == pytest.approx(4) and ticks["6"] == pytest.approx(3) and ticks["0"] == pytest.approx(0)


def test_a_line_along_0_is_seen_and_a_wide_gradient_norm_is_drawn_by_its_logarithm() -> None:
    data = rows(3)
    for step in (1, 2, 3):
        data[step] |= {"train/zero_std_ratio": 0.0, "policy/clip_fraction": 0.0, "train/grad_norm": 100.0**step}
    axes = drawn(data)
    assert axes["signal"].get_ylim()[0] < 0 and axes["gradient norm"].get_yscale() == "log"


def test_advantages_and_ratios_show_the_middle_of_their_distribution() -> None:
    data = rows(2)
    for step in (1, 2):
        data[step] |= {f"reward/advantage_p{percent}": (percent - 40) * step for percent in (10, 50, 90)}
        data[step] |= {"policy/ratio_mean": 1.0, "policy/ratio_min": 0.5, "policy/ratio_max": 1.5}
        data[step] |= {"policy/ratio_p10": 0.75, "policy/ratio_p90": 1.25}
    axes = drawn(data)
    bands = [bounds(band) for band in axes["advantages"].collections]
    assert bands == [(-60, 100)] and list(axes["advantages"].lines[0].get_ydata()) == [10, 20]
    assert [bounds(band) for band in axes["ratio and clip fraction"].collections] == [(-0.5, 0.5), (-0.25, 0.25)]
    old = {step: {name: value for name, value in row.items() if "_p" not in name} for step, row in data.items()}
    assert "ratio and clip fraction" in drawn(old) and "advantages" not in drawn(old)  # from before these were logged


def bounds(band: Any) -> tuple[float, float]:
    heights = band.get_paths()[0].vertices[:, 1]
    return float(heights.min()), float(heights.max())


def test_a_band_is_the_std_within_groups_or_the_interval_of_the_change_and_the_floor_a_dashed_line() -> None:
    assert bounds(drawn(rows(3))["reward/a_mean"].collections[0]) == pytest.approx((0.1 - 0.2, 0.3 + 0.2))
    data = rows(3)
    data[0]["eval_floor/trans_err_m"] = 0.04
    for end, value in (("", -0.25), ("_low", -0.3), ("_high", -0.1)):
        data[3][f"eval_change/trans_err_m{end}"] = value
    axes = next(iter(drawn(data).values()))
    band = axes.collections[0].get_paths()[0].vertices
    assert sorted({(float(x), round(float(y), 6)) for x, y in band}) == [(0.0, 0.5), (3.0, 0.2), (3.0, 0.4)]
    assert [list(line.get_ydata()) for line in axes.lines if line.get_linestyle() == "--"] == [[0.04, 0.04]]


def test_bars_of_every_camera_stand_side_by_side_with_the_interval_of_the_change(tmp_path: Path) -> None:
    before = {"eval_by_camera/arc/err_m": 0.5, "eval_by_camera/pan/err_m": 0.25}
    after = {"eval_by_camera/arc/err_m": 0.25, "eval_by_camera/pan/err_m": 0.25, "eval_by_camera/pan/located": 1.0}
    assert camera_plots.shown_metrics(after, list) == ["eval/err_m"]
    figure = Figure(layout="constrained")
    with mock.patch.object(camera_plots, "new_figure", return_value=figure):
        changes = {"arc": {"eval/err_m": [-0.25, -0.3, -0.1]}}
        camera_plots.draw_cameras((before, after), changes, ["eval/err_m"], tmp_path / "cameras.png", lambda _: -1)
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "err_m\nlower is better"
    assert [bar.get_width() for bar in axes.patches] == [0.5, 0.25, 0.25, 0.25]
    (whisker,) = [lines for lines in axes.collections if len(lines.get_segments())]
    assert sorted(whisker.get_segments()[0][:, 0]) == pytest.approx([0.2, 0.4])
    assert (tmp_path / "cameras.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "data",
    [{}, {1: {"train/loss": 1.0}}, {1: {"time/rollout_s": 1.0}}, {1: {"reward/mean": math.nan, "eval/x": math.nan}}],
)
def test_a_run_without_values_is_still_plotted(data: dict[int, dict[str, float]], tmp_path: Path) -> None:
    plots.draw_curves(data, tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.size[0] > 100
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


@pytest.mark.parametrize(("count", "bands", "note"), [(2, 2, "; band: ± group std"), (3, 0, "")])
def test_runs_on_top_of_one_another_have_a_colour_each_and_bands_where_they_are_few(count, bands, note) -> None:
    panel = plots.panel_of_metric([rows(3)] * count, "reward/a_mean", lambda _: -1)
    axes = axes_of(panel)
    assert (panel.title, panel.note) == ("reward/a_mean", f"higher is better{note}")
    assert [line.get_color() for line in axes.lines] == list(style.CYCLE[:count]) and len(axes.collections) == bands


@pytest.mark.parametrize("last", [1, 2, 7, 40, 1234])
def test_epochs_on_an_axis_are_whole_numbers(last: int) -> None:
    marks = axes_of(plots.EpochPlot("", "", [], lambda axes: axes.plot([0, last], [0, 1]))).get_xticks()
    assert len(marks) >= 2 and all(place == round(place) for place in marks)


def test_an_svg_for_a_page_is_the_same_each_time_and_holds_text_as_text() -> None:
    def svg(name: str) -> str:
        figure = Figure(figsize=(2, 1))
        axes = figure.add_subplot()
        axes.plot([0, 1], [0.123456, 1], marker="o", label="a curve")
        axes.legend()
        return style.as_svg(figure, name)

    assert svg("a") == svg("a") and "a curve</text>" in svg("a") and svg("a").startswith("<svg ")
    assert not set(ids(svg("a"))) & set(ids(svg("b")))
    assert "<metadata" not in svg("a") and "<style" not in svg("a")


def ids(svg: str) -> list[str]:
    found = re.findall(r' id="([^"]*)"', svg)
    assert len(found) > 2 and set(re.findall(r"(?:url\(|href=\")#(\w+)", svg)) <= set(found)
    return found
