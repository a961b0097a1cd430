"""Camera poses: the file format, the preset table, and every error against numbers computed by hand."""

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flow_grpo.maths import poses as p
from tests.maths.test_path_errors import path

ZERO_BASELINE = ("pan_right", "pan_left", "tilt_up", "tilt_down")


def random_rotation(generator: torch.Generator, *shape: int) -> Tensor:
    return p.rotation_matrix(torch.randn(*shape, 3, generator=generator, dtype=torch.float64))


def random_path(generator: torch.Generator, *shape: int) -> Tensor:
    centres = torch.randn(*shape, 3, generator=generator, dtype=torch.float64)
    return p.pose(random_rotation(generator, *shape), centres)


def about_y(degrees: list[float]) -> Tensor:
    return path(degrees, [0.0] * len(degrees))


def on_x(metres: list[float]) -> Tensor:
    return path([0.0] * len(metres), metres)


def unreal(x_cm: float, y_cm: float, z_cm: float, yaw_degrees: float = 0.0) -> Tensor:
    """Return a matrix as MultiCamVideo writes it: rows are forward, right, up and the position in centimetres."""
    c, s = math.cos(math.radians(yaw_degrees)), math.sin(math.radians(yaw_degrees))
    return torch.tensor([[c, s, 0, 0], [-s, c, 0, 0], [0, 0, 1, 0], [x_cm, y_cm, z_cm, 1]], dtype=torch.float64)


def test_the_file_becomes_opencv_axes_and_metres() -> None:
    level = p.multicam_to_opencv(unreal(100, 200, 300))
    assert level[:3].mT.tolist() == [[0, 1, 0], [0, 0, -1], [1, 0, 0], [1, 2, 3]]  # right, down, forward, centre
    still = p.multicam_to_opencv(unreal(100, 200, 300, 30))
    c, s = math.cos(math.radians(30)), math.sin(math.radians(30))
    moves = {
        (0.0, 0.0, 1.0): unreal(100 + 100 * c, 200 + 100 * s, 300, 30),  # forward along its own axis
        (1.0, 0.0, 0.0): unreal(100 - 100 * s, 200 + 100 * c, 300, 30),  # to its right
        (0.0, -1.0, 0.0): unreal(100, 200, 400, 30),  # up
    }
    for expected, matrix in moves.items():
        relative = p.relative(still, p.multicam_to_opencv(matrix))
        assert relative[:3, 3].tolist() == pytest.approx(expected, abs=1e-12)
        assert torch.allclose(relative[:3, :3], torch.eye(3, dtype=torch.float64), atol=1e-12)
    turned = p.relative(still, p.multicam_to_opencv(unreal(100, 200, 300, 50)))
    assert torch.allclose(turned, about_y([20])[0], atol=1e-12)  # turning right is positive about y (down)


def test_the_conversion_round_trips() -> None:
    poses = random_path(torch.Generator().manual_seed(0), 2, 5)
    kept = poses.clone()
    assert torch.allclose(p.multicam_to_opencv(p.opencv_to_multicam(poses)), poses, rtol=0, atol=1e-14)
    matrix = unreal(12.5, -80, 160, 25)
    assert torch.allclose(p.opencv_to_multicam(p.multicam_to_opencv(matrix)), matrix, rtol=0, atol=1e-12)
    assert torch.equal(poses, kept)
    assert p.multicam_to_opencv(matrix.float()).dtype == torch.float64


# Name, motion in ReCamMaster's file, end in metres, end in degrees, centimetres and degrees per frame of 81.
TABLE = [
    ("pan_right", "cam01", (0, 0, 0), (0, 19.88, 0), 0, 0.248),
    ("pan_left", "cam02", (0, 0, 0), (0, -19.88, 0), 0, 0.248),
    ("tilt_up", "cam03", (0, 0, 0), (9.94, 0, 0), 0, 0.124),
    ("tilt_down", "cam04", (0, 0, 0), (-9.94, 0, 0), 0, 0.124),
    ("zoom_in", "cam05", (0, 0, 1.988), (0, 0, 0), 2.48, 0),
    ("zoom_out", "cam06", (0, 0, -1.988), (0, 0, 0), 2.48, 0),
    ("translate_up", "cam07", (0, -0.994, 0), (-13.95, 0, 0), 1.24, 0.17),
    ("translate_down", "cam08", (0, 0.994, 0), (13.95, 0, 0), 1.24, 0.17),
    ("arc_left", "cam09", (-1.988, 0, 0.533), (0, 29.82, 0), 2.57, 0.37),
    ("arc_right", "cam10", (1.988, 0, 0.533), (0, -29.82, 0), 2.57, 0.37),
]


@pytest.mark.parametrize("row", TABLE, ids=[row[0] for row in TABLE])
def test_preset_table_through_the_file_format(row: tuple[Any, ...]) -> None:
    name, camera, translation, rotation, centimetres, degrees = row
    assert p.PRESETS[name].camera == camera
    start = p.multicam_to_opencv(unreal(340, 0, 160, 15))
    text = json.dumps(p.opencv_to_multicam(start @ p.preset_path(name, 81)).tolist())
    absolute = p.multicam_to_opencv(torch.tensor(json.loads(text), dtype=torch.float64))
    path = p.relative(absolute[0], absolute)
    assert path[-1, :3, 3].tolist() == pytest.approx(translation, abs=1e-12)
    turn = p.rotation_matrix(torch.tensor(rotation, dtype=torch.float64).deg2rad())
    assert torch.allclose(path[-1, :3, :3], turn, atol=1e-12)
    steps = p.trans_err(path[:-1], path[1:])
    turns = p.rot_err(path[:-1], path[1:]).rad2deg()
    assert (100 * steps).tolist() == pytest.approx([centimetres] * 80, abs=6e-3)
    assert turns.tolist() == pytest.approx([degrees] * 80, abs=5e-3)
    assert p.is_static(path[:, :3, 3]).item() is (name in ZERO_BASELINE)


def test_a_preset_starts_at_the_identity_and_makes_its_whole_motion_at_any_length() -> None:
    for frames in (2, 5, 9, 81):
        path = p.preset_path("arc_right", frames)
        assert path.shape == (frames, 4, 4) and path.dtype == torch.float64
        assert torch.equal(path[0], torch.eye(4, dtype=torch.float64))
        assert torch.allclose(path[-1], p.preset_path("arc_right", 81)[-1])
    assert torch.equal(p.preset_path("arc_right", 1)[0], torch.eye(4, dtype=torch.float64))
    half = p.preset_path("translate_up", 9, translation_scale=0.5, rotation_scale=2.0)
    assert half[-1, :3, 3].tolist() == pytest.approx([0, -0.497, 0])
    assert p.rot_err(half[0], half[-1]).rad2deg().item() == pytest.approx(27.9)
    for arguments, message in ((("pan", 9), "must be one of pan_right"), (("pan_right", 0), "must be at least 1")):
        with pytest.raises(ValueError, match=message):
            p.preset_path(*arguments)


def test_relative_poses_take_one_reference_for_all_or_one_per_path() -> None:
    generator = torch.Generator().manual_seed(1)
    paths = random_path(generator, 3, 5)
    references = random_path(generator, 3)
    each = p.relative(references, paths)
    for i in range(3):
        alone = p.relative(references[i], paths[i])
        assert torch.allclose(each[i], alone, atol=1e-12)
        assert torch.allclose(references[i] @ alone, paths[i], atol=1e-12)
    assert torch.allclose(p.relative(references[0], paths)[2], p.relative(references[0], paths[2]), atol=1e-12)
    assert p.relative(references[0].float(), paths[0].float()).dtype == torch.float64


def test_camera_tokens_are_the_rows_of_every_fourth_pose() -> None:
    path = torch.arange(9 * 16, dtype=torch.float64).view(9, 4, 4)
    tokens = p.camera_tokens(path)
    assert tokens.shape == (3, 12) and tokens.dtype == torch.float32
    assert tokens[1].tolist() == list(range(64, 76))
    assert p.camera_tokens(path.expand(2, 9, 4, 4)).shape == (2, 3, 12)
    assert p.camera_tokens(path, stride=2).shape == (5, 12)
    with pytest.raises(ValueError, match="has 8 frames, must be 4n"):
        p.camera_tokens(path[:8])


def broken(row: int, column: int, value: float) -> Tensor:
    pose = torch.eye(4, dtype=torch.float64)
    pose[row, column] = value
    return pose


@pytest.mark.parametrize(
    ("pose", "message"),
    [
        (broken(0, 0, 0.0), "singular, scaled or sheared"),
        (broken(0, 0, 2.0), "off orthonormal by 3"),
        (broken(0, 1, 0.5), "sheared"),
        (broken(0, 3, math.nan), "not finite"),
        (broken(3, 0, 100.0), "is the matrix transposed"),
        (torch.eye(3, dtype=torch.float64), r"shape \(3, 3\), must be \(..., 4, 4\)"),
    ],
)
def test_matrices_that_are_no_poses_are_refused(pose: Tensor, message: str) -> None:
    good = torch.eye(4, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        p.relative(good, pose)
    with pytest.raises(ValueError, match="reference pose"):
        p.relative(pose, good)


def test_rotation_matrix_has_a_gradient_at_zero_and_an_inverse() -> None:
    matrix = p.rotation_matrix(torch.tensor([0, 0, math.pi / 2], dtype=torch.float64))
    assert torch.allclose(matrix[:, 0], torch.tensor([0.0, 1, 0], dtype=torch.float64), atol=1e-15)
    vector = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    p.rotation_matrix(vector)[1, 0].backward()
    assert vector.grad is not None and vector.grad.tolist() == [0, 0, 1]
    vectors = torch.tensor([[0, 0, 0], [1e-9, 0, 0], [0.3, -0.2, 0.1], [0, 2.5, 0]], dtype=torch.float64)
    assert torch.allclose(p.rotation_vector(p.rotation_matrix(vectors)), vectors, rtol=0, atol=1e-12)


@pytest.mark.parametrize("degrees", [1e-6, 1e-4, 0.01, 1.0, 45.0, 90.0, 179.0, 180.0])
def test_rotation_error_is_exact_from_a_millionth_of_a_degree_to_a_half_turn(degrees: float) -> None:
    base = random_path(torch.Generator().manual_seed(2), 7)
    axis = torch.nn.functional.normalize(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), dim=0)
    turned = base.clone()
    turned[:, :3, :3] = base[:, :3, :3] @ p.rotation_matrix(axis * math.radians(degrees))
    tolerance = 1e-9 * degrees + 1e-12 if degrees < 179.5 else 1e-5  # asin is steep at the half turn
    assert p.rot_err(base, turned).rad2deg().tolist() == pytest.approx([degrees] * 7, abs=tolerance)


def test_identical_rotations_have_no_error_even_when_given_in_fp32() -> None:
    base = random_path(torch.Generator().manual_seed(3), 500)
    assert p.rot_err(base, base @ torch.eye(4, dtype=torch.float64)).rad2deg().max() < 1e-6
    assert p.rot_err(base.float(), base.float()).rad2deg().max() < 1e-6


def test_pair_mean_compares_every_frame_seen_from_every_other() -> None:
    generator = torch.Generator().manual_seed(5)
    a, b = random_path(generator, 2, 5), random_path(generator, 2, 5)
    errors = [p.rot_err(p.relative(a[:, i], a), p.relative(b[:, i], b)).rad2deg() for i in range(5)]
    assert torch.allclose(p.rot_deg_pair_mean(a, b), torch.stack(errors).sum(dim=(0, 2)) / 20)
    with pytest.raises(ValueError, match="at least 2 frames, got 1"):
        p.rot_deg_pair_mean(a[0, :1], b[0, :1])


def test_translation_and_cammc_by_hand() -> None:
    commanded, estimated = on_x([0, 1, 2]), on_x([0, 1, 2])
    estimated[:, :3, 3] += torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)
    assert p.trans_err(commanded, estimated).tolist() == pytest.approx([5, 5, 5])
    assert p.cam_mc(commanded, estimated).tolist() == pytest.approx([5, 5, 5])
    estimated[:, :3, :3] = about_y([90])[0, :3, :3]
    assert p.cam_mc(commanded, estimated).tolist() == pytest.approx([math.sqrt(25 + 4)] * 3)
    for measure in (p.rot_err, p.trans_err, p.cam_mc):
        assert measure(commanded.float(), estimated.float()).dtype == torch.float64


def test_aligned_error_is_undefined_without_a_baseline_or_with_two_frames() -> None:
    wander = p.preset_path("arc_left", 9)
    for name in ZERO_BASELINE:
        assert p.trans_sim3_rel(p.preset_path(name, 9), wander).isnan()
    assert p.trans_sim3_rel(wander[:2], wander[:2]).isnan()
    assert p.trans_sim3_rel(on_x([0, 1e-9, 0]), on_x([1] * 3)).isnan()
    both = torch.stack([wander, p.preset_path("pan_left", 9)])
    assert p.trans_sim3_rel(both, wander.expand(2, 9, 4, 4)).isnan().tolist() == [False, True]


def test_lost_frames_do_not_look_like_an_error_of_zero() -> None:
    commanded = p.preset_path("arc_left", 5)
    lost = commanded.clone()
    lost[2] = math.nan
    assert p.rot_err(commanded, lost).isnan().tolist() == [False, False, True, False, False]
    for measure in (p.trans_sim3_rel, p.rot_deg_pair_mean):
        assert measure(commanded, lost).isnan()


def test_umeyama_recovers_random_similarities() -> None:
    generator = torch.Generator().manual_seed(6)
    source = torch.randn(4, 8, 3, generator=generator, dtype=torch.float64)
    rotation = random_rotation(generator, 4)
    scale = torch.rand(4, generator=generator, dtype=torch.float64) + 0.2
    shift = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    target = scale[:, None, None] * source @ rotation.mT + shift[:, None]
    for found, true in zip(p.umeyama(target, source), (scale, rotation, shift), strict=True):
        assert torch.allclose(found, true, atol=1e-12)


def test_umeyama_refuses_reflections_on_straight_paths_too() -> None:  # of others: test_benchmarks.py
    scale, rotation, _ = p.umeyama(on_x([0, 2, 4])[:, :3, 3], p.preset_path("zoom_in", 3)[:, :3, 3])
    assert torch.linalg.det(rotation).item() == pytest.approx(1)
    assert scale.item() == pytest.approx(4 / 1.988)


def test_umeyama_is_undefined_without_baseline_with_two_points_or_with_lost_points() -> None:
    moving = torch.randn(5, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    lost = moving.clone()
    lost[0, 0] = math.nan
    still = torch.ones(5, 3, dtype=torch.float64)
    for target, source in ((still, moving), (moving, still), (moving[:2], moving[:2]), (moving, lost), (lost, moving)):
        assert all(part.isnan().all() for part in p.umeyama(target, source))
    mixed, _, _ = p.umeyama(torch.stack([moving, moving]), torch.stack([moving, still]))
    assert mixed.isnan().tolist() == [False, True]
