"""Errors of a whole path: both conventions against numbers computed by hand, and undefined cases."""

import math

import pytest
import torch
from torch import Tensor

from flow_grpo.maths.path_errors import CONVENTIONS, baseline_m, path_errors
from flow_grpo.maths.poses import PRESETS, pose, preset_path, rotation_matrix

STILL = [name for name, preset in PRESETS.items() if not any(preset.translation)]


def path(degrees: list[float], metres: list[float]) -> Tensor:
    """Return poses turned about y and moved along x."""
    turns = torch.tensor([[0.0, angle, 0.0] for angle in degrees], dtype=torch.float64).deg2rad()
    return pose(rotation_matrix(turns), torch.tensor([[x, 0.0, 0.0] for x in metres], dtype=torch.float64))


def elsewhere(poses: Tensor, scale: float = 3.0) -> Tensor:
    """Return poses in another, mirrored world (as MultiCamVideo's absolute poses) and another unit."""
    mirror = torch.diag(torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=torch.float64))
    turn = rotation_matrix(torch.tensor([0.4, -1.0, 2.0]).double())
    moved = mirror @ pose(turn, torch.tensor([5.0, -7.0, 1.0]).double()) @ poses
    moved[:, :3, 3] *= scale
    return moved


def test_values_are_those_worked_out_by_hand():
    commanded, estimated = path([0, 10, 20], [0, 1, 2]), path([0, 13, 20], [0, 0.5, 2])
    errors = path_errors(commanded, estimated, metric=True)
    assert errors["rot_deg_mean"] == pytest.approx((3 + 0 + 3) / 3)  # three pairs, each counted twice
    assert errors["rot_deg_frame_mean"] == pytest.approx(1)
    assert errors["rot_rad_sum"] == pytest.approx(math.radians(3))
    assert errors["trans_m_mean"] == pytest.approx(0.5 / 3)
    assert errors["trans_rel_sum"] == pytest.approx(0.25)  # both paths reach 2
    chord = 2 * math.sqrt(2) * math.sin(math.radians(1.5))
    assert errors["cam_mc_rel_sum"] == pytest.approx(math.hypot(chord, 0.25))
    # Least squares of 0 1 2 on 0 0.5 2: slope 12/13, mean 1; residuals 3/13, 4/13, 1/13.
    assert errors["trans_sim3_rel"] == pytest.approx((3 + 4 + 1) / 13 / 3 / 2)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_right_path_has_no_error_in_any_world_and_unit(preset):
    commanded = preset_path(preset, 21)
    for name, value in path_errors(commanded, elsewhere(commanded)).items():
        moving = name.startswith(("trans_", "cam_mc")) and preset in STILL
        if name == "trans_m_mean" or moving:
            assert value is None, name
        else:
            assert value == pytest.approx(0, abs=1e-9), name


def test_errors_without_scale_do_not_see_half_the_speed_but_a_frozen_estimate():
    commanded, slow = path([0, 0, 0, 0], [0, 1, 2, 3]), path([0, 0, 0, 0], [0, 0.5, 1, 1.5])
    errors = path_errors(commanded, slow, metric=True)
    assert errors["trans_m_mean"] == pytest.approx(0.75)
    frozen = path_errors(path([0, 0, 0], [0, 1, 2]), path([0, 0, 0], [0, 0, 0]))
    assert (frozen["trans_rel_sum"], frozen["trans_sim3_rel"]) == pytest.approx((0 + 0.5 + 1, 2 / 3 / 2))
    for name in ("trans_rel_sum", "cam_mc_rel_sum", "trans_sim3_rel"):
        assert errors[name] == pytest.approx(0, abs=1e-12)


def test_a_command_that_goes_nowhere_has_no_translation_error():
    wobble = path([0, 5, 10], [0, 0.009, 0])
    errors = path_errors(wobble, path([0, 5, 10], [0, 1, 2]))
    assert baseline_m(wobble) == pytest.approx(0.009)
    undefined = [name for name, value in errors.items() if value is None]
    assert undefined == ["trans_sim3_rel", "trans_rel_sum", "cam_mc_rel_sum", "trans_m_mean"]
    assert path_errors(path([0, 5, 10], [0, 0.011, 0]), wobble)["trans_sim3_rel"] is not None


def lost(poses: Tensor, rows: list[int]) -> Tensor:
    found = poses.clone()
    found[rows] = torch.nan
    return found


def test_missing_frames_leave_means_and_no_sums():
    commanded = preset_path("arc_left", 9)
    errors = path_errors(commanded, elsewhere(lost(commanded, [0, 4])))
    for name, convention in CONVENTIONS.items():
        missing = convention == "A" or name == "trans_m_mean"
        assert errors[name] == (None if missing else pytest.approx(0, abs=1e-9)), name


def test_fewer_than_three_frames_give_nothing():
    commanded = preset_path("arc_left", 4)
    assert set(path_errors(commanded, lost(commanded, [0, 3])).values()) == {None}
    assert path_errors(commanded, lost(commanded, [3]))["rot_deg_mean"] is not None
