"""The anti-aliased renderer: its derivatives, and its agreement with a finely sampled image."""

import dataclasses
import math

import pytest
import torch

from flow_grpo.maths.poses import pose, rotation_matrix
from flow_grpo.maths.room import Room, pixel_rays, random_room, render_video, stack_rooms
from flow_grpo.maths.soft_room import Raster, draw, draw_slopes
from tests.room_films import FOCAL, HEIGHT, INTRINSICS, WIDTH, reference_pose


def raster(softness: float = 1 / math.sqrt(12)) -> Raster:
    rays = pixel_rays(INTRINSICS, HEIGHT, WIDTH).double()
    pixels = torch.cat([FOCAL * rays[:, :2] + INTRINSICS[2:], rays[:, 2:]], dim=-1)
    unproject = torch.tensor([[1.0, 0, -WIDTH / 2], [0, 1, -HEIGHT / 2], [0, 0, FOCAL]], dtype=torch.float64) / FOCAL
    return Raster(pixels, unproject[None], softness)


def room(seed: int = 0) -> Room:
    stacked = stack_rooms([random_room(torch.Generator().manual_seed(seed))])
    return Room(**{f.name: getattr(stacked, f.name).double() for f in dataclasses.fields(Room)})


@pytest.mark.parametrize("yaw", [-25, 0, 25])
def test_the_drawing_is_what_many_samples_a_pixel_show(yaw):
    turn = torch.tensor([0.0, math.radians(yaw), 0.0], dtype=torch.float64)
    turned = reference_pose() @ pose(rotation_matrix(turn), torch.zeros(3, dtype=torch.float64))
    drawn = draw(room(), turned[None, None], raster()).reshape(3, HEIGHT, WIDTH)
    plain = stack_rooms([random_room(torch.Generator().manual_seed(0))])
    sampled = render_video(plain, turned.float()[None, None], INTRINSICS, HEIGHT, WIDTH, supersample=12)[0, :, 0]
    assert (drawn - sampled).square().mean().sqrt() < 0.012
    once = render_video(plain, turned.float()[None, None], INTRINSICS, HEIGHT, WIDTH, supersample=1)[0, :, 0]
    assert (drawn - sampled).square().mean() < 0.3 * (once - sampled).square().mean()


@pytest.mark.parametrize("parameter", range(6))
def test_slopes_are_the_derivatives_by_turn_and_by_move_edges_included(parameter):
    seen, view, start = room(), raster(), reference_pose()[None, None]
    step = torch.zeros(6, dtype=torch.float64)
    step[parameter] = 1e-5

    def moved(change: torch.Tensor) -> torch.Tensor:
        return pose(rotation_matrix(change[:3]) @ start[..., :3, :3], start[..., :3, 3] + change[3:])

    numeric = (draw(seen, moved(step), view) - draw(seen, moved(-step), view)) / 2e-5
    slopes = draw_slopes(seen, start, view)
    assert torch.allclose(slopes[0], draw(seen, start, view))
    difference = (slopes[1 + parameter] - numeric).abs()
    assert difference.median() < 1e-6
    # The texture beyond an edge is held still, so fringe pixels may differ a little.
    assert difference.mean() < 0.06 * numeric.abs().mean()
    edge = numeric.abs() > 5 * numeric.abs().mean()
    assert difference[edge].mean() < 0.1 * numeric[edge].abs().mean()


def test_an_edge_moves_with_the_camera_by_less_than_a_sample():
    seen, view, start = room(), raster(), reference_pose()[None, None]
    yaw = math.atan(0.02 / FOCAL)  # a fiftieth of a pixel
    turned = pose(rotation_matrix(torch.tensor([0.0, 0.0, yaw]).double()) @ start[..., :3, :3], start[..., :3, 3])
    change = (draw(seen, turned, view) - draw(seen, start, view)).abs()
    assert 0 < change.max() < 0.04  # a jump of a whole sample would be the contrast of two walls
