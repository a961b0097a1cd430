"""Anchors against a room whose walls are known."""

import functools

import numpy as np
import pytest
import torch
from torch import Tensor

from flow_grpo.maths.poses import pose, preset_path, rotation_matrix
from flow_grpo.rewards.camera import anchors
from flow_grpo.rewards.camera.pnp import MappedView, camera_matrix
from tests.textured_room import SMALL, WALKER, WALLS, film, grey, intrinsics, shoot, slowed, source_path

FRAMES = 5
CAMERA = camera_matrix(intrinsics(SMALL).tolist())


def filmed(video: Tensor, poses: Tensor) -> anchors.PosedFrames:
    return anchors.PosedFrames(grey(video), poses.numpy(), tuple(range(len(poses))))


@functools.cache
def moving() -> anchors.Source:
    return anchors.make_source(filmed(film("source"), source_path(FRAMES)), None, CAMERA)


def second_camera() -> anchors.PosedFrames:
    return filmed(film("arc_right", speed=0.5), slowed("arc_right", FRAMES, 0.5))


def off_the_walls(xyz: np.ndarray, walls: list = WALLS) -> np.ndarray:
    """Return the distance (N,) of points to the nearest wall or panel, in metres."""
    distances = []
    for corner, right, down in walls:
        normal = np.cross(right, down)
        places = (xyz - corner) @ np.linalg.inv(np.stack([right, down, normal / np.linalg.norm(normal)]))
        outside = np.abs(places[:, :2] - 0.5).max(1) > 0.5
        distances.append(np.where(outside, np.inf, np.abs(places[:, 2])))
    return np.min(distances, axis=0)


def test_anchors_lie_on_the_walls():
    source = moving()
    assert source.fault == "" and len(source) > 1000
    distance = np.concatenate([off_the_walls(view.xyz) for view in source.views])
    assert np.median(distance) < 0.01
    assert (distance < 0.1).mean() > 0.95


def test_views_are_spread_and_leave_frames_to_check_with():
    assert anchors.split_rows(21) == ([0, 4, 8, 12, 16, 20], [1, 6, 10, 14, 19])
    assert anchors.split_rows(5) == ([0, 2, 4], [1, 3])
    assert anchors.split_rows(3) == ([0, 2], [1])
    assert anchors.split_rows(2) == ([0, 1], [])


def test_parallax_is_the_angle_between_the_rays():
    xyz = np.array([[0.0, 0.0, 1.0], [np.nan] * 3])
    angle = anchors.parallax(xyz, np.array([-1.0, 0.0, 0.0]), np.array([1.0, 0.0, 0.0]))
    assert np.allclose(angle, [np.pi / 2, 0])


@pytest.mark.parametrize("preset", ["pan_right", "tilt_up"])
def test_a_source_that_only_turns_has_no_anchors_of_its_own_and_enough_with_a_second_camera(preset):
    turning = filmed(film(preset), preset_path(preset, FRAMES))
    alone = anchors.make_source(turning, None, CAMERA)
    assert len(alone) == 0 and "no parallax" in alone.fault
    both = anchors.make_source(turning, second_camera(), CAMERA)
    assert both.fault == "" and len(both) > anchors.FEWEST_ANCHORS
    assert both.visible.all()
    assert np.median(np.concatenate([off_the_walls(view.xyz) for view in both.views])) < 0.015


def test_a_source_that_hardly_moves_has_no_anchors_and_one_that_stands_still_those_of_a_second_camera():
    poses = torch.eye(4, dtype=torch.float64).repeat(FRAMES, 1, 1)
    poses[:, 0, 3] = torch.linspace(0, 0.03, FRAMES)  # half a degree at 3.5 m
    assert len(anchors.make_source(filmed(shoot(poses, SMALL), poses), None, CAMERA)) == 0
    still = torch.eye(4, dtype=torch.float64).expand(FRAMES, 4, 4)
    source = filmed(shoot(still, SMALL), still)
    assert len(anchors.make_source(source, None, CAMERA)) == 0
    assert anchors.make_source(source, second_camera(), CAMERA).fault == ""


def by_source_and_target(walk: float) -> list[MappedView]:
    still = torch.eye(4, dtype=torch.float64).expand(FRAMES, 4, 4)
    arc = slowed("arc_right", FRAMES, 0.5)
    source, target = (filmed(shoot(poses, SMALL, walk=walk), poses) for poses in (still, arc))
    return anchors.across_cameras(source, target, anchors.split_rows(FRAMES)[0], CAMERA)


def test_what_moves_serves_only_frames_of_its_time():
    for walk in (0.6, 0.0):
        middle = by_source_and_target(walk)[2]  # at frame 0 both cameras stand in one place
        assert middle.frame == 2
        corner, right, down = WALLS[WALKER]
        panel = off_the_walls(middle.xyz, [((corner[0] + walk / 2, *corner[1:]), right, down)]) < 0.05
        assert panel.sum() > 20
        assert middle.lasting[~panel].mean() > 0.5
        lasting = middle.lasting[panel].mean()
        assert lasting < 0.1 if walk else lasting > 0.5


def flipped(poses: Tensor) -> Tensor:
    """Label a path with y pointing up."""
    mirror = torch.diag(torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=torch.float64))
    return mirror @ poses @ mirror


@pytest.mark.parametrize("wrong", ["focal length", "axis", "unit", "frames held out"])
def test_wrong_labels_are_refused(wrong):
    camera, poses = CAMERA.copy(), source_path(FRAMES)
    if wrong == "focal length":
        camera[1, 1] *= 363.6 / 630.3  # what 18 mm becomes when the rows are taken for the sensor
    elif wrong == "axis":
        poses = flipped(poses)
    elif wrong == "frames held out":
        poses = poses.clone()
        poses[[1, 3], 0, 3] += 0.05
    else:
        poses = pose(poses[:, :3, :3], 1.2 * poses[:, :3, 3] + 0.3 * torch.linspace(0, 1, FRAMES)[:, None] ** 2)
    assert anchors.make_source(filmed(film("source"), poses), None, camera).fault


def test_a_wrong_focal_length_is_not_saved_by_a_second_camera_and_too_few_frames_are_refused():
    camera = CAMERA.copy()
    camera[1, 1] *= 363.6 / 630.3
    assert anchors.make_source(filmed(film("source"), source_path(FRAMES)), second_camera(), camera).fault
    poses = source_path(2)
    assert "needs 3" in anchors.make_source(filmed(shoot(poses, SMALL), poses), None, CAMERA).fault


def test_frames_of_the_true_view_that_the_source_does_not_show_and_views_from_elsewhere_are_not_judged():
    turn = torch.tensor([[0.0, degrees, 0.0] for degrees in (0, 5, 10, 110, 170)], dtype=torch.float64).deg2rad()
    away = pose(rotation_matrix(turn), torch.zeros(FRAMES, 3, dtype=torch.float64))
    source = anchors.make_source(filmed(film("source"), source_path(FRAMES)), filmed(shoot(away, SMALL), away), CAMERA)
    assert source.fault == ""
    assert source.visible.tolist() == [True, True, True, False, False]
    true, label = slowed("arc_right", FRAMES, 0.5), preset_path("arc_right", FRAMES)
    source_view, slow = filmed(film("source"), source_path(FRAMES)), film("arc_right", speed=0.5)
    assert "frames of the true view" in anchors.make_source(source_view, filmed(slow, label), CAMERA).fault
    right = anchors.make_source(source_view, filmed(slow, true), CAMERA)
    assert right.fault == "" and right.visible.all()
