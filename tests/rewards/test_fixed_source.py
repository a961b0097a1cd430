import functools

import numpy as np
import pytest
import torch

from flow_grpo.maths.poses import rot_err, trans_err
from flow_grpo.rewards.camera.anchors import PosedFrames
from flow_grpo.rewards.camera.features import find_features
from flow_grpo.rewards.camera.fixed_source import FixedSource, make_fixed_source
from flow_grpo.rewards.camera.pnp import camera_matrix
from tests.textured_room import SMALL, depths, grey, intrinsics, shoot, slowed, source_path, spoiled, standing

FRAMES = 5
CAMERA = camera_matrix(intrinsics(SMALL).tolist())
PATHS = {
    "still": standing(FRAMES),
    "panning": slowed("pan_right", FRAMES, 0.5),
    "moving": source_path(FRAMES),
    "creeping": torch.lerp(standing(FRAMES), source_path(FRAMES), 0.25),
}


def filmed(path, *, posed, **changes):
    poses = path.numpy() if posed else np.full((FRAMES, 4, 4), np.nan)
    return PosedFrames(grey(spoiled(shoot(path, SMALL, walk=0.5), **changes)), poses, tuple(range(FRAMES)))


@functools.cache
def source(kind, *, posed=True, depth="true") -> FixedSource:
    known = {"true": depths(PATHS[kind], SMALL), "one": np.full((1, 1, 1), 4.0), "none": None}[depth]
    return make_fixed_source(filmed(PATHS[kind], posed=posed), CAMERA, known)


@functools.cache
def along(command, speed=1.0, take=3):
    return shoot(slowed(command, FRAMES, speed), SMALL, take=take, walk=0.5)


def located(made, command, video):
    """Return the share of frames located, the mean error in degrees and in metres of those, and the poses."""
    path = slowed(command, FRAMES, 1.0)
    found = torch.from_numpy(made.locate(tuple(map(find_features, grey(video))), path.numpy()))
    seen = found.isfinite().all(-1).all(-1)
    errors = rot_err(path, found)[seen].rad2deg().mean(), trans_err(path, found)[seen].mean()
    return float(seen.double().mean()), *map(float, errors), found


@pytest.mark.parametrize("posed", [True, False])
@pytest.mark.parametrize("kind", ["still", "panning"])
@pytest.mark.parametrize("command", ["arc_right", "zoom_in", "pan_left"])
def test_the_path_of_a_spoiled_video_is_found_by_the_source_alone(kind, posed, command):
    video = spoiled(along(command), sigma=2.5, quality=70, sprite=True)
    share, degrees, metres, _ = located(source(kind, posed=posed), command, video)
    assert share == 1
    assert degrees < 0.15  # 0.4 for a blurred pan where points could take up noise by their depth
    assert metres < 0.01


@pytest.mark.parametrize("command", ["arc_right", "zoom_in"])
def test_speed_direction_and_turn_are_measured_wherever_the_search_starts(command):
    for speed in (0.0, 0.5, 0.9, -1.0):
        path = slowed(command, FRAMES, speed)
        _, _, metres, found = located(source("still"), command, along(command, speed))
        assert rot_err(path, found).rad2deg().mean() < 0.3
        assert trans_err(path, found).mean() < 0.02
        assert metres == pytest.approx(float(trans_err(path, slowed(command, FRAMES, 1.0)).mean()), abs=0.03)


def test_a_depth_that_is_wrong_by_a_tenth_makes_a_path_that_is_wrong_by_a_tenth():
    wrong = 1.1 * depths(PATHS["still"], SMALL) * np.exp(0.05 * np.random.default_rng(0).normal(size=(FRAMES, *SMALL)))
    made = make_fixed_source(filmed(PATHS["still"], posed=True), CAMERA, wrong)
    _, degrees, _, found = located(made, "arc_right", along("arc_right"))
    path = slowed("arc_right", FRAMES, 1.0)
    assert degrees < 0.3
    assert found[-1, :3, 3].norm() / path[-1, :3, 3].norm() == pytest.approx(1.1, abs=0.02)


@pytest.mark.parametrize("depth", ["one", "none"])
def test_without_a_depth_map_turns_and_direction_are_found(depth):
    made = source("still", depth=depth)
    assert made.metric == (depth == "one")
    _, degrees, _, found = located(made, "arc_right", along("arc_right"))
    asked, way = slowed("arc_right", FRAMES, 1.0)[-1, :3, 3], found[-1, :3, 3]
    assert degrees < 0.6
    assert asked @ way / asked.norm() / way.norm() > 0.99


@pytest.mark.parametrize("trick", ["noise", "mirrored", "another room"])
def test_what_does_not_show_the_source_is_not_located(trick):
    video = along("arc_right")
    if trick == "another room":
        video = shoot(slowed("arc_right", FRAMES, 1.0), SMALL, seed=7)
    else:
        video = (
            torch.rand(video.shape, generator=torch.Generator().manual_seed(0)) if trick == "noise" else video.flip(-1)
        )
    assert located(source("still"), "arc_right", video)[0] == 0


def test_frames_after_a_cut_are_not_located():
    cut = torch.cat([along("arc_right")[:, :2], shoot(standing(3), SMALL, seed=7)], 1)
    assert located(source("still"), "arc_right", cut)[0] == 0.4


@pytest.mark.parametrize("posed", [True, False])
@pytest.mark.parametrize("kind", ["moving", "creeping"])
def test_a_source_whose_camera_moves_is_none(kind, posed):
    path = PATHS[kind] if not posed else standing(FRAMES)
    pictures = filmed(PATHS[kind], posed=True).pictures
    poses = path.numpy() if posed else np.full((FRAMES, 4, 4), np.nan)  # still by its file, or without one
    made = make_fixed_source(PosedFrames(pictures, poses, tuple(range(FRAMES))), CAMERA, None)
    assert "its camera moves: a turn explains" in made.fault


def test_an_object_that_moves_through_a_third_of_the_picture_is_no_moving_camera():
    assert not make_fixed_source(filmed(PATHS["still"], posed=False, sprite=True, quality=70), CAMERA).fault


def test_a_source_with_a_cut_says_so_and_blames_no_movement():
    pictures = filmed(PATHS["still"], posed=False).pictures.copy()
    pictures[3] = grey(shoot(standing(1), SMALL, seed=7))[0]
    made = make_fixed_source(PosedFrames(pictures, np.full((FRAMES, 4, 4), np.nan), tuple(range(FRAMES))), CAMERA)
    assert made.fault.startswith("frame 3 shares under 50 features")


def test_a_source_without_texture_is_none():
    pictures = np.full((FRAMES, *SMALL), 128, np.uint8)
    made = make_fixed_source(PosedFrames(pictures, standing(FRAMES).numpy(), tuple(range(FRAMES))), CAMERA)
    assert "a frame has 0 features, needs 50: no texture" in made.fault
