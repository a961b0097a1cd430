"""The room renderer: geometry, textures and sampling against numbers computed by hand."""

import dataclasses
import json
import math

import pytest
import torch
from torch import Tensor

from flow_grpo.data.rooms import bare_room, furnished_room
from flow_grpo.maths.room import Room, pixel_rays, render, render_video, stack_rooms, trace
from tests.room_films import INTRINSICS, LOOKING_FORWARD, reference_pose

PLAIN = {"base": (3,), "amplitude": (1, 3), "frequency": (1, 2), "phase": (1,)}  # shapes of a grey surface's texture
AHEAD = torch.tensor([[0.0, 0.0, 1.0]])  # the ray through the principal point


def room(seed: int = 0, half_size: tuple[float, float, float] = (3.0, 2.0, 1.5)) -> Room:
    return bare_room(torch.Generator().manual_seed(seed), half_size=half_size)


def camera(rotation: Tensor, centre: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> Tensor:
    """Return poses (1, 1, 4, 4)."""
    pose = torch.eye(4)
    pose[:3, :3], pose[:3, 3] = rotation.float(), torch.tensor(centre)
    return pose[None, None]


def looking(forward: tuple[float, float, float]) -> Tensor:
    """Return a matrix whose third column is the viewing direction; the ray AHEAD uses no other."""
    return torch.stack([torch.zeros(3), torch.zeros(3), torch.tensor(forward)], dim=1)


def test_pixel_centres_are_half_a_pixel_from_the_corner():
    rays = pixel_rays(torch.tensor([10.0, 20.0, 2.0, 1.0]), 2, 4)
    assert rays.shape == (8, 3)
    assert rays[[0, -1]].flatten().tolist() == pytest.approx([-0.15, -0.025, 1.0, 0.15, 0.025, 1.0])
    fine = pixel_rays(INTRINSICS, 24, 32, supersample=3).reshape(24, 3, 32, 3, 3).mean(dim=(1, 3))
    assert torch.allclose(fine.reshape(-1, 3), pixel_rays(INTRINSICS, 24, 32), atol=1e-6)


@pytest.mark.parametrize(
    ("forward", "face", "depth", "u", "v"),
    [
        ((1, 0, 0), 1, 2.5, 0.2, 0.1),
        ((-1, 0, 0), 0, 3.5, 0.2, 0.1),
        ((0, 1, 0), 3, 1.8, 0.5, 0.1),
        ((0, -1, 0), 2, 2.2, 0.5, 0.1),
        ((0, 0, 1), 5, 1.4, 0.5, 0.2),
        ((0, 0, -1), 4, 1.6, 0.5, 0.2),
    ],
)
def test_a_ray_along_an_axis_meets_the_wall_in_front_of_it(forward, face, depth, u, v):
    hits = trace(stack_rooms([room()]), camera(looking(forward), (0.5, 0.2, 0.1)), AHEAD)
    assert hits.surface.item() == face
    along = [value for axis, value in enumerate(hits.point.flatten().tolist()) if axis != face // 2]
    assert [hits.depth.item(), *along] == pytest.approx([depth, u, v])


def test_the_picture_s_right_is_world_right_and_its_bottom_is_world_down():
    rays = torch.tensor([[0.0, 0.0, 1.0], [0.1, 0.0, 1.0], [0.0, 0.1, 1.0]])
    hits = trace(stack_rooms([room()]), camera(LOOKING_FORWARD), rays)
    assert hits.surface.flatten().tolist() == [1, 1, 1]
    assert hits.point[1].flatten().tolist() == pytest.approx([0.0, 0.3, 0.0], abs=1e-6)  # y, right, 3 m ahead
    assert hits.point[2].flatten().tolist() == pytest.approx([0.0, 0.0, -0.3], abs=1e-6)  # z, up


def test_colours_are_the_logistic_of_base_and_waves():
    base, amplitude = torch.zeros(6, 3), torch.zeros(6, 1, 3)
    frequency, phase = torch.zeros(6, 1, 2), torch.zeros(6, 1)
    base[1] = torch.tensor([0.5, 0.0, -0.5])
    amplitude[1, 0] = torch.tensor([1.0, 2.0, 0.0])
    frequency[1, 0] = torch.tensor([0.25, 0.5])
    phase[1, 0] = 0.3
    plain = stack_rooms(
        [Room(torch.tensor([3.0, 2.0, 1.5]), torch.zeros(0, 3, 3), torch.zeros(4), base, amplitude, frequency, phase)]
    )
    wave = math.cos(2 * math.pi * (0.25 * 0.4 + 0.5 * 0.2) + 0.3)
    expected = [1 / (1 + math.exp(-logit)) for logit in (0.5 + wave, 2 * wave, -0.5)]
    seen, _ = render(plain, camera(looking((1, 0, 0)), (0.0, 0.4, 0.2)), AHEAD)
    assert seen.flatten().tolist() == pytest.approx(expected)


def test_a_thing_hides_the_wall_behind_it_and_moves_over_the_video():
    textures = {name: torch.zeros(7, *shape) for name, shape in PLAIN.items()}
    box = torch.tensor([[[1.0, 0.0, 0.0], [0.25, 0.5, 0.5], [0.0, 2.0, 0.0]]])
    seen = stack_rooms([Room(torch.tensor([3.0, 2.0, 1.5]), box, torch.zeros(4), **textures)])
    rays = torch.tensor([[0.0, 0.0, 1.0], [0.6, 0.0, 1.0], [0.8, 0.0, 1.0]])
    for time, surfaces, depths in ((0.0, [6, 6, 3], [0.75, 0.75, 2.5]), (1.0, [1, 1, 3], [3.0, 3.0, 2.5])):
        hits = trace(seen.at(torch.tensor([time])), camera(LOOKING_FORWARD), rays)
        assert hits.surface.flatten().tolist() == surfaces
        assert hits.depth.flatten().tolist() == pytest.approx(depths)


def test_a_lamp_shades_what_is_turned_away_from_it():
    textures = {name: torch.zeros(6, *shape) for name, shape in PLAIN.items()}
    lamp = torch.tensor([0.0, 1.0, 0.0, 0.6])  # its share of the light is 0.6
    lit = stack_rooms([Room(torch.tensor([3.0, 2.0, 1.5]), torch.zeros(0, 3, 3), lamp, **textures)])
    ahead, _ = render(lit, camera(LOOKING_FORWARD, (0.0, 0.0, 0.0)), AHEAD)
    cosine = 3 / math.hypot(3, 1)  # 3 m before the wall, 1 m beside the point
    assert ahead.flatten().tolist() == pytest.approx([0.5 * (0.4 + 0.6 * cosine)] * 3)


def test_rooms_of_a_batch_do_not_mix():
    rays, pose = pixel_rays(INTRINSICS, 24, 32), camera(LOOKING_FORWARD)
    both, _ = render(stack_rooms([room(1), room(2)]), pose.expand(2, 1, 4, 4), rays)
    for row, seed in enumerate((1, 2)):
        assert torch.equal(both[:, row], render(stack_rooms([room(seed)]), pose, rays)[0][:, 0])


def test_rendering_is_differentiable_in_the_pose():
    seen = stack_rooms([room()])
    seen = Room(**{f.name: getattr(seen, f.name).double() for f in dataclasses.fields(Room)})
    rays = pixel_rays(INTRINSICS, 4, 4).double() * torch.tensor([0.3, 0.3, 1.0])  # the far wall only, no edges
    pose = reference_pose()[None, None].requires_grad_()
    render(seen, pose, rays)[0].sum().backward()
    step = torch.zeros_like(pose)
    step[0, 0, 1, 3] = 1e-6
    with torch.no_grad():
        change = (render(seen, pose + step, rays)[0] - render(seen, pose - step, rays)[0]).sum() / 2e-6
    assert pose.grad[0, 0, 1, 3].item() == pytest.approx(change.item(), rel=1e-6)
    assert abs(change.item()) > 1e-3


def test_a_supersampled_video_is_the_mean_of_a_finer_one():
    seen, poses = stack_rooms([room()]), reference_pose().float()[None, None]
    coarse = render_video(seen, poses, INTRINSICS, 24, 32, supersample=2)
    fine = render_video(seen, poses, 2 * INTRINSICS, 48, 64, supersample=1)
    assert coarse.shape == (1, 3, 1, 24, 32)
    assert torch.allclose(coarse, fine.reshape(1, 3, 1, 24, 2, 32, 2).mean(dim=(4, 6)), atol=1e-6)
    assert coarse.min() >= 0 and coarse.max() <= 1


def test_a_room_survives_json_to_the_last_bit():
    first = furnished_room(torch.Generator().manual_seed(0))
    values = json.loads(json.dumps(first.to_dict()))
    again = Room.from_dict(values)
    for field in dataclasses.fields(Room):
        assert torch.equal(getattr(first, field.name), getattr(again, field.name))
    del values["phase"]
    with pytest.raises(KeyError, match="phase"):
        Room.from_dict(values)


def test_rooms_share_a_house_and_differ_in_the_far_wall():
    first, second, again = room(1), room(2), room(1)
    others = [0, 2, 3, 4, 5]
    for name in ("base", "amplitude", "frequency", "phase"):
        one, two = getattr(first, name), getattr(second, name)
        assert torch.equal(one, getattr(again, name))
        assert torch.equal(one[others], two[others])
        assert not torch.equal(one[1], two[1])
