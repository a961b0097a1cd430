"""Paths and errors of published benchmarks against closed forms and against their formulas written out."""

import math

import pytest
import torch
from torch import Tensor

from flow_grpo.maths import benchmarks
from flow_grpo.maths.path_errors import path_errors
from flow_grpo.maths.poses import PRESETS, pose, preset_path, rot_err, rotation_matrix, umeyama

DRAW = torch.Generator().manual_seed(3)


def turning(rate_deg: float, frames: int) -> Tensor:
    """Return poses that turn about y at a constant rate, at the origin."""
    turns = torch.arange(frames, dtype=torch.float64)[:, None] * torch.tensor([0.0, math.radians(rate_deg), 0.0])
    return pose(rotation_matrix(turns.double()), torch.zeros(frames, 3, dtype=torch.float64))


def shaken(poses: Tensor, metres: float = 0.3, degrees: float = 2.0) -> Tensor:
    noise = torch.randn(2, len(poses), 3, generator=DRAW, dtype=torch.float64)
    turns = rotation_matrix(noise[0] * math.radians(degrees))
    return pose(poses[:, :3, :3] @ turns, poses[:, :3, 3] + metres * noise[1])


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("frames", [5, 49, 101])
def test_a_preset_of_any_length_keeps_the_speed_of_81_frames(name, frames):
    path, original = benchmarks.preset_at_own_speed(name, frames), preset_path(name, 81)
    assert torch.allclose(path[0], torch.eye(4, dtype=torch.float64), atol=1e-12)
    turns = rot_err(path[:-1], path[1:])
    steps = torch.linalg.vector_norm(path.diff(dim=0)[:, :3, 3], dim=-1)
    assert torch.allclose(turns, rot_err(original[0], original[1]).expand(frames - 1), atol=1e-9)
    assert torch.allclose(steps, original[1, :3, 3].norm().expand(frames - 1), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_of_81_frames_is_the_preset_but_for_the_turn_of_one_step(name):
    path, original = benchmarks.preset_at_own_speed(name, 81), preset_path(name, 81)
    assert torch.allclose(path[:, :3, :3], original[:, :3, :3], atol=1e-12)
    assert torch.allclose(path[:, :3, 3], original[:, :3, 3] @ original[1, :3, :3].T, atol=1e-12)


def test_a_straight_preset_of_another_length_is_the_preset_scaled():
    for name in ("zoom_in", "zoom_out", "pan_left", "tilt_up"):
        scaled = preset_path(name, 41, translation_scale=0.5, rotation_scale=0.5)
        assert torch.allclose(benchmarks.preset_at_own_speed(name, 41), scaled, atol=1e-12)


@pytest.mark.parametrize("frames", [3, 10, 81])
def test_a_constant_extra_rate_of_turn_has_the_rotation_error_of_the_mean_distance_of_two_frames(frames):
    # Over ordered pairs i != j the mean of |i - j| is (N + 1) / 3; over frames that of i is (N - 1) / 2.
    errors = path_errors(turning(0.2, frames), turning(0.5, frames))
    assert errors["rot_deg_mean"] == pytest.approx(0.3 * (frames + 1) / 3)
    assert errors["rot_deg_frame_mean"] == pytest.approx(0.3 * (frames - 1) / 2)
    found = benchmarks.redirect4d_errors(turning(0.2, frames), turning(0.5, frames))
    assert found["rot_err_deg_mean"] == pytest.approx(0.3 * (frames - 1) / 2)


def test_the_similarity_onto_mirrored_centres_is_the_best_rotation_and_no_reflection():
    # A cross with arms a > b > c along the axes; mirrored in z the best rotation is the identity, since flipping back
    # the shortest arm would need a reflection: scale (a2 + b2 - c2) / (a2 + b2 + c2).
    arms = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64).diag()
    points = torch.cat([arms, -arms])
    scale, rotation, _ = umeyama(points, points * torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64))
    assert torch.allclose(rotation, torch.eye(3, dtype=torch.float64), atol=1e-12)
    assert float(scale) == pytest.approx((9 + 4 - 1) / (9 + 4 + 1))


def of_public_code(commanded: Tensor, estimated: Tensor) -> tuple[float, float]:
    """Return TransErr and RotErr by ReDirector's formulas, before rounding."""
    target, source = commanded[:, :3, 3], estimated[:, :3, 3]
    diameter = torch.cdist(target, target).max()
    away, mine = target - target.mean(0), source - source.mean(0)
    left, singular, right = torch.linalg.svd(mine.T @ away)
    sign = torch.tensor([1.0, 1.0, torch.sign(torch.linalg.det(left @ right))], dtype=torch.float64)
    aligned = (singular * sign).sum() / mine.square().sum() * mine @ (left * sign @ right)
    shape = torch.linalg.vector_norm(away - aligned, dim=1) / (diameter + 1e-6)
    angles = [
        math.degrees(math.acos(min(1.0, (float(torch.trace(ours @ theirs.T)) - 1) / 2)))
        for i in range(len(commanded))
        for j in range(len(commanded))
        if i != j
        for ours, theirs in [[path[i, :3, :3].T @ path[j, :3, :3] for path in (commanded, estimated)]]
    ]
    return float(shape.mean()), sum(angles) / len(angles)


@pytest.mark.parametrize("name", PRESETS)
def test_errors_are_printed_as_by_the_public_code_which_gives_a_command_in_place_none_of_translation(name):
    commanded = benchmarks.preset_at_own_speed(name, 13)
    estimated = shaken(commanded)
    theirs = of_public_code(commanded, estimated)
    assert benchmarks.printed_errors(commanded, estimated) == (round(theirs[0], 2), round(theirs[1], 2))
    if any(PRESETS[name].translation):
        assert theirs[0] > 0.05
        assert path_errors(commanded, estimated)["trans_sim3_rel"] == pytest.approx(theirs[0], rel=1e-4)
    else:
        assert theirs[0] == pytest.approx(0, abs=1e-6)


def test_errors_of_redirect4d_see_half_the_speed_in_metres_and_no_common_motion():
    commanded, slow = preset_path("zoom_in", 45), preset_path("zoom_in", 45, translation_scale=0.5)
    world = shaken(commanded[:1], 5.0, 50.0)[0]
    errors = benchmarks.redirect4d_errors(world @ commanded, slow)
    assert errors["trans_err_m_mean"] == pytest.approx(1.988 / 4)
    assert errors["trans_err_m_sum"] == pytest.approx(45 * 1.988 / 4)
    assert errors["rot_err_rad_sum"] == pytest.approx(0, abs=1e-12)
    assert path_errors(commanded, slow)["trans_sim3_rel"] == pytest.approx(0, abs=1e-12)
    assert set(errors) == {
        *("n_frames", "rot_err_rad_per_frame", "trans_err_m_per_frame", "rot_err_rad_mean", "rot_err_deg_mean"),
        *("rot_err_rad_sum", "trans_err_m_mean", "trans_err_m_sum"),
    }
    assert errors["n_frames"] == len(errors["trans_err_m_per_frame"]) == 45


def test_a_world_to_camera_matrix_places_the_camera_where_its_own_origin_is():
    path = shaken(preset_path("arc_left", 7))
    matrices = torch.linalg.inv(path)[:, :3]
    assert torch.allclose(benchmarks.from_world_to_camera(matrices), path, atol=1e-12)
    for bad, words in ((path, "must be"), (1.1 * matrices, "orthonormal")):
        with pytest.raises(ValueError, match=words):
            benchmarks.from_world_to_camera(bad)
