"""Smoothness: changes of speed by hand; on filmed rooms test_tricks.py."""

import pytest
import torch
from torch import Tensor

from flow_grpo.maths.poses import PRESETS, preset_path
from flow_grpo.rewards.camera.pose import PoseErrors, PoseMeasurer, compare, rotation_value, translation_value
from flow_grpo.rewards.camera.smooth import MOVE_NOISE_M, TURN_NOISE_DEG, Smooth, unsteadiness
from tests.maths.test_path_errors import path

SMOOTH = Smooth(PoseMeasurer())


def compared(commanded: Tensor, seen: Tensor, lost: tuple[int, ...] = (), unseen: tuple[int, ...] = ()) -> PoseErrors:
    seen, visible = seen.clone(), torch.ones(len(seen), dtype=torch.bool)
    seen[list(lost)], visible[list(unseen)] = torch.nan, False
    return compare(commanded, seen, commanded, visible)


def test_changes_of_speed_are_second_differences_at_uneven_frames_too():
    turn, move = unsteadiness(path([0, 2, 7, 7], [0, 0.1, 0.1, 0.4]), torch.arange(4))
    assert torch.allclose(turn, torch.tensor([3.0, 5.0], dtype=torch.float64))
    assert torch.allclose(move, torch.tensor([0.1, 0.3], dtype=torch.float64))
    frames = [0, 2, 5, 7, 10]
    seen = path([3.0 * frame for frame in frames], [0.1 * frame for frame in frames])
    assert all(part.abs().max() < 1e-9 for part in unsteadiness(seen, torch.tensor(frames)))
    turn, _ = unsteadiness(seen, torch.arange(5))
    assert turn.min() > 1


def test_the_value_is_that_of_the_formula():
    commanded = path([0, 0, 0, 0], [0, 0.5, 1.0, 1.5])
    seen = path([0, 1.1, 0, 0], [0, 0.5, 1.0, 1.61])
    value, turn, move = SMOOTH.read(compared(commanded, seen))
    # Second differences of -2.2 and 1.1 degrees, 0 and 0.11 m; less the noise; caps of 45 degrees and 3 m.
    assert turn == pytest.approx((2.1 + 1.0) / 2) and move == pytest.approx((0 + 0.1) / 2)
    assert value == pytest.approx(-(2.1 + 1.0) / 2 / 45 / 2 - 0.1 / 2 / 3 / 2)


def test_only_what_the_command_does_not_ask_for_counts_and_the_noise_of_the_estimate_is_free():
    jerky = path([0, 4, 0, 4, 0], [0, 0.3, 0.2, 0.5, 0.6])
    assert SMOOTH.read(compared(jerky, jerky))[0] == 0
    assert SMOOTH.read(compared(jerky, path([0] * 5, [0] * 5)))[0] == 0
    assert SMOOTH.read(compared(path([0] * 5, [0] * 5), jerky))[0] < -0.25
    still = path([0] * 5, [0] * 5)
    shaking = [0, 0.25, 0, 0.25, 0]
    trembling = path([TURN_NOISE_DEG * part for part in shaking], [MOVE_NOISE_M * part for part in shaking])
    assert SMOOTH.read(compared(still, trembling))[0] == 0
    wilder = path([4 * TURN_NOISE_DEG * part for part in shaking], [0] * 5)
    assert SMOOTH.read(compared(still, wilder))[0] == pytest.approx(-TURN_NOISE_DEG / 45 / 2)


def test_joints_with_a_lost_frame_take_the_cap_and_a_video_that_is_mostly_lost_is_worst():
    steady = path([0] * 7, [0.1 * frame for frame in range(7)])
    # Frame 1 takes part in two of the five second differences.
    assert SMOOTH.read(compared(steady, steady, lost=(1,)))[0] == pytest.approx(-2 / 5)
    value, turn, move = SMOOTH.read(compared(steady, steady, lost=(0, 5, 6, 4)))
    assert value == pytest.approx(-1) and turn == pytest.approx(45) and move == pytest.approx(2 * 0.6)


def test_frames_without_weight_are_left_out_and_two_show_no_steadiness():
    commanded = path([0] * 7, [0.1 * frame for frame in range(7)])
    seen = path([0, 0, 30, 0, 0, 0, 0], [0.1 * frame for frame in range(7)])
    assert SMOOTH.read(compared(commanded, seen, unseen=(2,)))[0] == 0
    assert SMOOTH.read(compared(commanded, seen, lost=(2,), unseen=(2,)))[0] == 0
    with pytest.raises(ValueError, match="at least 3 frames that can be scored, got 2"):
        SMOOTH.read(compared(path([0] * 3, [0] * 3), path([0] * 3, [0] * 3), unseen=(1,)))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_static_video_is_smooth_but_loses_in_the_pose_rewards(preset):
    """The right path gains as much here, so what decides is where the camera went."""
    commanded = preset_path(preset, 21)
    static, right = (compared(commanded, seen) for seen in (commanded[:1].expand(21, 4, 4), commanded))
    assert SMOOTH.read(static)[0] == SMOOTH.read(right)[0] == 0
    assert rotation_value(static) + translation_value(static) < -0.1
    trembling = compared(commanded, commanded @ path([0.2, -0.2] * 10 + [0.2], [0.01, -0.01] * 10 + [0.01]))
    sums = [rotation_value(e) + translation_value(e) + SMOOTH.read(e)[0] for e in (right, trembling, static)]
    assert sums[0] > sums[1] > sums[2]
