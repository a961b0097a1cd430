"""steps.png: what each stochastic step adds, and how much it counts."""

from pathlib import Path
from unittest import mock

import pytest
from matplotlib.figure import Figure

from flow_grpo.reporting.drawing import step_plot

SIGMAS = (1.0, 0.8, 0.4, 0.0)


def step(number: int, weight: float) -> dict[str, float]:
    return {"step": number, "std": 0.5 - 0.1 * number, "excess": 0.04 * number, "gain": 2.0 + number, "weight": weight}


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 2.0)])
def test_noise_stands_over_the_schedule_and_gains_beside_what_they_count(tmp_path: Path, weights) -> None:
    figure = Figure(layout="constrained")
    with mock.patch.object(step_plot, "new_figure", return_value=figure):
        step_plot.draw_steps(SIGMAS, [step(0, weights[0]), step(1, weights[1])], tmp_path / "steps.png")
    noise, credit = figure.axes
    (levels,) = noise.lines
    assert levels.get_xydata().tolist() == [[0, 1.0], [1, 0.8], [2, 0.4]]
    assert [bar.get_height() for bar in noise.patches] == [0.5, 0.4]
    assert [text.get_text() for text in noise.texts] == ["", "+4%"]
    gains, *counted = ([list(point) for point in line.get_xydata()] for line in credit.lines)
    assert gains == [[0, 2.0], [1, 3.0]]
    assert counted == ([] if weights == (1.0, 1.0) else [[[0, 6.0], [1, 6.0]]])
    assert (tmp_path / "steps.png").stat().st_size > 1000
