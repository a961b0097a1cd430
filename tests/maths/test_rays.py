"""Plücker rays against numbers computed by hand."""

import math

import pytest
import torch

from flow_grpo.maths import poses, rays


def camera(centre=(0.0, 0.0, 0.0), yaw_degrees: float = 0.0, intrinsics=(2.0, 1.0, 1.0, 0.5)) -> torch.Tensor:
    """Return a camera (16,) float64 turned about y, of a picture of 1 x 2 pixels by default."""
    turn = poses.rotation_matrix(torch.tensor([0.0, math.radians(yaw_degrees), 0.0], dtype=torch.float64))
    matrix = poses.pose(turn, torch.tensor(centre, dtype=torch.float64))
    return torch.cat([matrix[:3].flatten(), torch.tensor(intrinsics, dtype=torch.float64)])


def path(*xs: float) -> torch.Tensor:
    matrices = torch.eye(4, dtype=torch.float64).repeat(len(xs), 1, 1)
    matrices[:, 0, 3] = torch.tensor(xs)
    return matrices


# Pixels of the row of two lie at x = -1/4 and 1/4 of the plane z = 1, and at y = 0.
SIDE = 0.25 / math.sqrt(1 + 0.25**2)
AHEAD = 1 / math.sqrt(1 + 0.25**2)


@pytest.mark.parametrize(
    ("given", "left", "right"),
    [
        (camera(), (0, 0, 0, -SIDE, 0, AHEAD), (0, 0, 0, SIDE, 0, AHEAD)),
        # (0, 2, 0) x (x, 0, z) = (2 z, 0, -2 x)
        (camera((0, 2, 0)), (2 * AHEAD, 0, 2 * SIDE, -SIDE, 0, AHEAD), (2 * AHEAD, 0, -2 * SIDE, SIDE, 0, AHEAD)),
        # Turned right by 90 degrees the camera looks along +x, and its right is -z.
        (camera((0, 0, 0), 90), (0, 0, 0, AHEAD, 0, SIDE), (0, 0, 0, AHEAD, 0, -SIDE)),
        # (0, 0, 3) x (x, 0, z) = (0, 3 x, 0)
        (camera((0, 0, 3), 90), (0, 3 * AHEAD, 0, AHEAD, 0, SIDE), (0, 3 * AHEAD, 0, AHEAD, 0, -SIDE)),
    ],
)
def test_rays_are_moment_and_direction_through_pixel_centres(given, left, right):
    found = rays.plucker_rays(given, 1, 2)
    assert found.shape == (6, 1, 2) and found.dtype == torch.float64
    assert found[:, 0, 0].tolist() == pytest.approx(left, abs=1e-12)
    assert found[:, 0, 1].tolist() == pytest.approx(right, abs=1e-12)


def test_rows_use_fy_and_cy():
    found = rays.plucker_rays(camera(intrinsics=(2.0, 4.0, 0.5, 1.0)), 2, 1)
    length = math.sqrt(1 + 0.125**2)
    assert found[3:, 0, 0].tolist() == pytest.approx([0, -0.125 / length, 1 / length], abs=1e-12)
    assert found[3:, 1, 0].tolist() == pytest.approx([0, 0.125 / length, 1 / length], abs=1e-12)


def test_the_first_video_frame_counts_for_a_whole_latent_frame():
    numbers = torch.arange(9.0)[:, None].expand(9, 16)
    found = rays.by_latent_frame(numbers.expand(2, 9, 16))
    assert found.shape == (2, 3, 4, 16)
    assert found[1, :, :, 0].tolist() == [[0, 0, 0, 0], [1, 2, 3, 4], [5, 6, 7, 8]]
    assert rays.by_latent_frame(numbers[:1]).shape == (1, 4, 16)
    with pytest.raises(ValueError, match=r"8 frames, must be 4n\+1"):
        rays.by_latent_frame(numbers[:8])


def test_packed_channels_run_over_frames_first():
    group = torch.stack([camera((x, 1.0, -x), 10 * x) for x in range(4)])
    single = [rays.plucker_rays(one, 3, 5) for one in group]
    packed = rays.packed_rays(group[None], 3, 5)
    assert packed.shape == (1, 24, 3, 5)
    for channel in range(6):
        for frame in range(4):
            assert torch.equal(packed[0, 4 * channel + frame], single[frame][channel])


def test_both_paths_are_relative_to_the_sources_first_frame():
    intrinsics = torch.tensor([100.0, 90.0, 8.0, 4.0])
    found = rays.camera_pair(path(1, 2), path(5, 7), intrinsics)
    assert found.shape == (2, 2, 16) and found.dtype == torch.float32
    assert found[:, :, 3].tolist() == [[-4, -3], [0, 2]]
    assert found[0, 0, :12].tolist() == [1, 0, 0, -4, 0, 1, 0, 0, 0, 0, 1, 0]
    assert (found[..., 12:] == intrinsics).all()
    turned = poses.pose(poses.rotation_matrix(torch.tensor([0.1, 0.7, -0.4])), torch.tensor([3.0, 1.0, 2.0])).double()
    moved = rays.camera_pair(turned @ path(1, 2), turned @ path(5, 7), intrinsics)
    torch.testing.assert_close(moved, found, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("intrinsics", "source", "message"),
    [
        ((0.0, 1.0, 1.0, 1.0), (0, 1), "fx and fy positive"),
        ((1.0, math.nan, 1.0, 1.0), (0, 1), "fx and fy positive"),
        ((1.0, 1.0, 1.0), (0, 1), "must be fx, fy, cx, cy"),
        ((1.0, 1.0, 1.0, 1.0), (0, 1, 2), "2 poses and source path 3"),
    ],
)
def test_cameras_without_rays_are_refused(intrinsics, source, message):
    with pytest.raises(ValueError, match=message):
        rays.camera_pair(path(0, 1), path(*source), torch.tensor(intrinsics))
