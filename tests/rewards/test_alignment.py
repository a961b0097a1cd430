"""Direct alignment on a plane, whose views from any pose are a closed form."""

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter, map_coordinates
from scipy.spatial.transform import Rotation

from flow_grpo.rewards.camera.alignment import align, place_pixels
from flow_grpo.rewards.camera.pnp import camera_matrix

SIZE, AWAY = (64, 96), 3.0
CAMERA = camera_matrix((69.0, 69.0, 48.0, 32.0))
TEXTURE = gaussian_filter(np.random.default_rng(0).standard_normal((400, 400)), 6)  # 1 cm a texel


def view(pose):
    """Return what a camera sees of the plane z = `AWAY`, grey."""
    rows, columns = np.mgrid[: SIZE[0], : SIZE[1]]
    rays = np.stack([columns, rows, np.ones(SIZE)], -1) @ np.linalg.inv(CAMERA).T @ pose[:3, :3].T
    at = pose[:2, 3] + rays[..., :2] * ((AWAY - pose[2, 3]) / rays[..., 2:])
    shades = map_coordinates(TEXTURE, 200 + 100 * at[..., ::-1].transpose(2, 0, 1), order=1, mode="reflect")
    return np.clip(128 + 1200 * shades, 0, 255).round().astype(np.uint8)


def poses(turn, move, frames=3):
    """Return a path (F, 4, 4) that turns by a vector in degrees and moves by metres, evenly."""
    path = np.tile(np.eye(4), (frames, 1, 1))
    for share, each in zip(np.linspace(0, 1, frames), path, strict=True):
        each[:3, :3] = Rotation.from_rotvec(share * np.array(turn), degrees=True).as_matrix()
        each[:3, 3] = share * np.array(move)
    return path


def found(video):
    """Return the path of a video (F, h, w) beside a source at the origin, started there."""
    source = np.stack([view(np.eye(4))] * len(video))
    places = place_pixels(np.full((32, 48), AWAY), np.eye(3), CAMERA, SIZE)
    return align(video, source, np.stack([places] * len(video)), CAMERA, np.tile(np.eye(4), (len(video), 1, 1, 1)))


@pytest.mark.parametrize(
    ("turn", "move"), [((0, 6, 0), (0, 0, 0)), ((2, -3, 1), (0.2, -0.1, 0.3)), ((0, 0, 0), (0, 0, -0.4))]
)
def test_a_path_is_found_from_where_the_source_stands(turn, move):
    path = poses(turn, move)
    seen = found(np.stack([view(pose) for pose in path]))
    assert np.linalg.norm(seen[:, :3, 3] - path[:, :3, 3], axis=1).max() < 0.02
    apart = Rotation.from_matrix(seen[:, :3, :3].transpose(0, 2, 1) @ path[:, :3, :3]).magnitude()
    assert np.rad2deg(apart).max() < 0.3


def test_less_contrast_and_another_brightness_move_no_camera():
    path = poses((2, -3, 1), (0.2, -0.1, 0.3))
    video = np.stack([view(pose) for pose in path])
    changed = found((0.6 * video + 60).round().astype(np.uint8))
    assert np.linalg.norm(changed[:, :3, 3] - path[:, :3, 3], axis=1).max() < 0.03


def test_what_does_not_look_like_the_source_is_not_located():
    noise = np.random.default_rng(1).integers(256, size=(2, *SIZE)).astype(np.uint8)
    assert np.isnan(found(np.concatenate([noise, np.full((1, *SIZE), 128, np.uint8)]))).all()


def test_a_place_is_where_its_pixel_s_ray_has_the_depth():
    turn = Rotation.from_rotvec([0, 30, 0], degrees=True).as_matrix()
    depth = np.full((32, 48), AWAY)
    depth[:, 24:] = 2 * AWAY
    local = place_pixels(depth, turn, CAMERA, SIZE) @ turn
    pixels = local @ CAMERA.T
    columns = pixels[:, 0] / pixels[:, 2]
    assert np.allclose(local[:, 2], np.where(columns < 48, AWAY, 2 * AWAY))
    assert np.allclose(np.unique(columns.round(6)), np.arange(1, 96, 2))
