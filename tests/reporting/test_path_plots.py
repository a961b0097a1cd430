"""The plot of a commanded and an estimated camera path."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from flow_grpo.maths.poses import preset_path
from flow_grpo.reporting.drawing import path_plots
from tests.maths.test_path_errors import elsewhere


def drawn(commanded: Tensor, estimated: Tensor, path: Path) -> list[Any]:
    """Return the axes in space, from above and from the side."""
    figure = Figure()
    with mock.patch.object(path_plots, "new_figure", return_value=figure):
        path_plots.draw_paths(commanded, estimated, path, "a title")
    return figure.axes


def curves(axes: Any) -> list[np.ndarray]:
    return [np.stack(line.get_data(), 1) for line in axes.lines]


def test_a_correct_path_in_another_world_frame_and_unit_coincides_with_the_command(tmp_path):
    commanded = preset_path("arc_left", 9)
    space, above, side = drawn(commanded, elsewhere(commanded), tmp_path / "new" / "a.png")
    for axes, columns, signs in ((above, (0, 2), (1, 1)), (side, (2, 1), (1, -1))):
        wanted = commanded[:, list(columns), 3].numpy() * signs
        for curve in curves(axes):
            assert np.allclose(curve, wanted, atol=1e-9)
    wanted = commanded[:, [0, 2, 1], 3].numpy() * (1, 1, -1)  # up in the world is up in the picture
    assert all(np.allclose(np.stack(line.get_data_3d(), 1), wanted, atol=1e-9) for line in space.lines[:2])
    faint, full = (line.get_alpha() for line in space.lines[:2])  # the estimate must be seen on top of the command
    assert faint < 0.5 < full
    assert [text.get_text() for text in space.get_legend().get_texts()] == ["commanded", "estimated, 9 of 9 frames"]
    assert len(space.collections) == 2  # viewing directions of both
    with Image.open(tmp_path / "new" / "a.png") as picture:
        assert len(np.unique(np.asarray(picture.convert("L")))) > 20
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["a.png"]


def test_a_path_that_only_rotates_shows_its_viewing_directions(tmp_path):
    commanded = preset_path("pan_right", 9)
    space, above, _ = drawn(commanded, elsewhere(preset_path("pan_right", 9, rotation_scale=0.5)), tmp_path / "a.png")
    full, half = curves(above)
    assert full[-1] == pytest.approx([np.sin(np.radians(19.88)), np.cos(np.radians(19.88))])
    assert half[-1] == pytest.approx([np.sin(np.radians(9.94)), np.cos(np.radians(9.94))])
    assert "viewing direction" in above.get_title(loc="left") and not space.collections


def test_frames_without_an_estimate_are_left_out_and_all_views_have_one_scale(tmp_path):
    commanded = preset_path("zoom_in", 9)
    estimated = elsewhere(commanded)
    estimated[[0, 4]] = torch.nan
    space, above, _ = drawn(commanded, estimated, tmp_path / "a.png")
    assert np.allclose(curves(above)[1], np.delete(commanded[:, [0, 2], 3].numpy(), [0, 4], axis=0))
    assert space.get_legend().get_texts()[1].get_text() == "estimated, 7 of 9 frames"
    for axes in drawn(preset_path("zoom_in", 9), preset_path("zoom_in", 9), tmp_path / "a.png"):
        spans = [np.ptp(axes.get_xlim()), np.ptp(axes.get_ylim())]
        assert spans == pytest.approx([1.15 * 1.988] * 2)


@pytest.mark.parametrize("estimated", ["nothing found", "frozen"])
def test_a_missing_or_frozen_estimate_is_still_plotted(tmp_path, estimated):
    commanded = preset_path("arc_left", 5)
    poses = torch.full((5, 4, 4), torch.nan).double() if estimated == "nothing found" else preset_path("tilt_up", 5)
    _, above, _ = drawn(commanded, poses, tmp_path / "a.png")
    assert (len(curves(above)[1]) == 0) == (estimated == "nothing found")
    assert not curves(above)[1].any() and (tmp_path / "a.png").stat().st_size > 1000


def test_a_small_plot_has_a_gap_where_a_frame_is_not_located_and_is_none_of_a_camera_that_only_turns():
    line = torch.tensor([(0.1 * step, 0.0, 0.2 * step) for step in range(4)])
    gap = line.clone()
    gap[2] = torch.nan
    above, side = path_plots.small_paths(line, gap).axes
    assert [np.isnan(curve).any(1).tolist() for curve in curves(above)] == [[False] * 4, [False, False, True, False]]
    assert np.allclose(curves(side)[0], [(0.2 * step, 0.0) for step in range(4)])
    assert path_plots.small_paths(torch.zeros(4, 3), gap) is None
