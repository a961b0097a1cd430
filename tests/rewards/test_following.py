"""Cameras beside a source that is too small for features: a furnished room at 64x96, filmed from one place."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from flow_grpo.data.multicam import MultiCamDataset
from flow_grpo.data.tiny_world import FURNISHED, TINY_WORLDS, make_scene, render_views, write_tiny_world
from flow_grpo.maths.pictures import blur
from flow_grpo.maths.poses import rot_err, trans_err
from flow_grpo.rewards.camera.anchors import PosedFrames
from flow_grpo.rewards.camera.features import find_features
from flow_grpo.rewards.camera.find_source import find_source
from flow_grpo.rewards.camera.fixed_source import FixedSource, make_fixed_source
from flow_grpo.rewards.camera.following import corresponding, to_follow
from flow_grpo.rewards.camera.pnp import camera_matrix
from flow_grpo.rewards.camera.pose import _facts
from flow_grpo.rewards.frames import grey_frames

FRAMES = range(9)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Return (condition, what locates its videos) of a scene's seven commands, without poses of the source."""
    root = tmp_path_factory.mktemp("clips") / "world"
    write_tiny_world(root, dataclasses.replace(TINY_WORLDS["footage"], scenes={"held_out_clips": 1}))
    data = MultiCamDataset(root, "held_out_clips", (9, 64, 96), prompt="a room")
    conditions = [data.condition(index) for index in range(len(data))]
    unposed = [dataclasses.replace(each, source_poses=None, reference_pose=None) for each in conditions]
    return [(each, find_source(*_facts(dataclasses.replace(each, target_video=None)))) for each in unposed]


def located(condition, source: FixedSource, video):
    """Return the share of frames that are located, and their mean errors in metres and degrees."""
    seen = [find_features(picture) for picture in grey_frames(video, FRAMES)]
    found, path = torch.from_numpy(source.locate(seen, condition.need_poses().numpy())), condition.need_poses()
    known = found.isfinite().all(-1).all(-1)
    errors = trans_err(path, found)[known].mean(), rot_err(path, found)[known].rad2deg().mean()
    return float(known.double().mean()), *map(float, errors)


def test_cameras_are_found_to_centimetres_by_depths_that_are_off_by_a_tenth(clips):
    assert {condition.source_camera for condition, _ in clips} == {"cam01", "cam02"}  # a still one and a panning one
    exact = np.array([located(each, source, each.target_video) for each, source in clips])
    assert (exact[:, 0] == 1).all() and exact[:, 1].mean() < 0.05 and exact[:, 2].mean() < 0.6
    soft = np.array([located(each, source, blur(each.target_video, 0.8)) for each, source in clips])
    assert (soft[:, 0] == 1).all() and soft[:, 1].mean() < 0.08 and soft[:, 2].mean() < 1.0


def test_where_no_map_tells_depths_a_small_video_is_followed_by_flow(clips):
    followed = [(each, dataclasses.replace(source, places=None)) for each, source in clips]
    exact = np.array([located(each, source, each.target_video) for each, source in followed])
    assert (exact[:, 0] == 1).all() and exact[:, 1].mean() < 0.05 and exact[:, 2].mean() < 0.6


def test_a_camera_that_stands_still_or_turns_back_is_far_from_its_command(clips):
    for condition, source in clips:
        right = located(condition, source, condition.target_video)
        for video in (condition.source_video, condition.target_video.flip(1)):
            wrong = located(condition, source, video)
            assert wrong[0] > 0.8 and sum(wrong[1:]) > sum(right[1:])


@pytest.mark.parametrize("trick", ["noise", "black", "mirrored"])
def test_what_does_not_show_the_source_is_not_located(clips, trick):
    draw = torch.Generator().manual_seed(0)
    change = {
        "noise": functools.partial(torch.rand_like, generator=draw),
        "black": torch.zeros_like,
        "mirrored": lambda video: video.flip(-1),
    }[trick]
    shares = [located(each, source, change(each.target_video))[0] for each, source in clips]
    assert np.mean(np.array(shares) < 0.5) > 0.8


@pytest.mark.parametrize("kind", ["moving", "truck_right", "pedestal_up"])
def test_a_source_whose_camera_moves_is_none(kind):
    for number in range(3):
        scene = make_scene(FURNISHED, "moves", number, (kind,))
        (film,) = render_views(FURNISHED, [scene], [0])
        unposed = PosedFrames(grey_frames(film, FRAMES), np.full((9, 4, 4), np.nan), tuple(FRAMES))
        made = make_fixed_source(unposed, camera_matrix(FURNISHED.intrinsics().tolist()))
        assert "its camera moves" in made.fault


def test_a_darker_video_is_found_as_well(clips):
    dark = np.array([located(each, source, 0.8 * each.target_video) for each, source in clips])
    assert (dark[:, 0] == 1).all() and dark[:, 1].mean() < 0.08 and dark[:, 2].mean() < 0.9


def test_nothing_is_followed_from_a_flat_picture():
    flat, lively = (
        to_follow(find_features(p)) for p in (np.zeros((64, 96), np.uint8), np.eye(64, 96, dtype=np.uint8) * 200)
    )
    assert not len(flat) and len(lively)
    for first, second in ((flat, lively), (lively, flat)):
        assert not len(corresponding(first, second)[0])
