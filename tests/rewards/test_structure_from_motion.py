"""The held-out estimator on filmed rooms, with pycolmap and without: paths, turns alone, what shows no scene."""

import time

import numpy as np
import pytest
import torch
from torch import Tensor

from flow_grpo.maths.path_errors import path_errors
from flow_grpo.maths.poses import PRESETS, pose, preset_path, rotation_matrix
from flow_grpo.rewards.camera import structure_from_motion as motion
from flow_grpo.rewards.camera.anchors import PosedFrames, make_source
from flow_grpo.rewards.camera.features import find_features
from flow_grpo.rewards.camera.matched_motion import Estimate
from flow_grpo.rewards.camera.pnp import camera_matrix, locate_video
from flow_grpo.rewards.camera.structure_from_motion import reconstruct
from flow_grpo.runtime.video_file import write_video
from tests.textured_room import LARGE, SMALL, film, grey, intrinsics, shoot, source_path
from tools.evaluate import estimate

TINY, FRAMES, ALL_FRAMES = (160, 288), 5, 21


def focal(size: tuple[int, int]) -> float:
    return float(intrinsics(size)[0])


@pytest.fixture(autouse=True, params=["pycolmap", "without"])
def installed(request, monkeypatch):
    """What makes the estimate: pycolmap, which has no wheel for aarch64, or our own matches."""
    if request.param == "without":
        monkeypatch.setattr(motion, "pycolmap", None)
    elif motion.pycolmap is None:
        pytest.skip("pycolmap has no wheel here")
    return request.param


def errors(commanded: Tensor, seen: Estimate) -> dict[str, float | None]:
    return path_errors(commanded, torch.from_numpy(seen.poses), metric=seen.metric)


@pytest.mark.parametrize("preset", ["arc_right", "translate_up", "zoom_in"])
def test_a_path_is_found_up_to_world_and_unit_and_the_same_each_time(installed, preset):
    pictures = grey(film(preset, TINY, FRAMES))
    seen = reconstruct(pictures, focal(TINY))
    measured = errors(preset_path(preset, FRAMES), seen)
    assert seen.found.all() and not seen.centred and seen.points > 200
    assert measured["rot_deg_mean"] < 0.12 and measured["trans_sim3_rel"] < 0.003
    assert measured["trans_m_mean"] is None
    assert np.array_equal(reconstruct(pictures, focal(TINY)).poses, seen.poses)
    assert motion.name() == {"pycolmap": "pycolmap 4.2.1 global_mapping"}.get(installed, "opencv 5.0.0 matched_motion")


def test_cameras_that_only_turn_or_stand_still_are_found_without_parallax():
    seen = reconstruct(grey(film("pan_right", TINY, FRAMES)), focal(TINY))
    measured = errors(preset_path("pan_right", FRAMES), seen)
    assert seen.found.all() and seen.centred and not seen.poses[:, :3, 3].any()
    assert measured["rot_deg_mean"] < 0.1 and seen.parallax_deg < 0.2
    still = film("arc_right", TINY, FRAMES)[:, :1].expand(-1, FRAMES, -1, -1)
    seen = reconstruct(grey(still), focal(TINY))
    assert seen.found.all() and seen.centred and seen.parallax_deg == pytest.approx(0, abs=0.02)
    assert errors(preset_path("arc_right", FRAMES), seen)["rot_deg_frame_mean"] == pytest.approx(14.91, abs=0.01)


def test_drift_where_the_camera_should_only_turn_shows_as_parallax():
    """A pan that slides by 20 cm before a wall at 4.5 m: 2.5 degrees between its ends."""
    turns = torch.linspace(0, 10, FRAMES, dtype=torch.float64)[:, None] * torch.tensor([0.0, 1.0, 0.0])
    slides = torch.linspace(0, 0.2, FRAMES, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.0, 0.0])
    path = pose(rotation_matrix(turns.double().deg2rad()), slides.double())
    seen = reconstruct(grey(shoot(path, TINY)), focal(TINY))
    assert 2 < seen.parallax_deg < 3.2 and not seen.centred
    assert errors(path, seen)["rot_deg_mean"] < 0.1


@pytest.mark.parametrize("what", ["noise", "flat", "tiny"])
def test_what_shows_no_scene_is_not_registered(what):
    video = film("arc_right", TINY, FRAMES)
    draw = torch.Generator().manual_seed(0)
    shown = {"noise": torch.rand(video.shape, generator=draw), "flat": 0.5 + 0 * video, "tiny": video[..., :24, :32]}
    seen = reconstruct(grey(shown[what]), focal(TINY))
    assert not seen.found.any() and seen.points == 0 and np.isnan(seen.parallax_deg)


def test_a_cut_leaves_the_larger_part():
    """Two scenes in one video: only the frames of one can stand in one world."""
    video = torch.cat([film("arc_right", TINY, FRAMES), shoot(preset_path("arc_right", 4)[:3], TINY, seed=5)], dim=1)
    seen = reconstruct(grey(video), focal(TINY))
    assert seen.found.tolist() == [True] * FRAMES + [False] * 3


def test_the_focal_length_is_believed():
    """A wrong one bends the path instead of being put right: the same for every model that is judged."""
    wrong = reconstruct(grey(film("arc_right", TINY, FRAMES)), 0.8 * focal(TINY))
    assert errors(preset_path("arc_right", FRAMES), wrong)["rot_deg_mean"] > 0.5


def test_chosen_frames_of_a_file_are_judged(tmp_path):
    write_video(tmp_path / "a.mp4", film("arc_right", TINY, FRAMES), lossless=True)
    seen = estimate(tmp_path / "a.mp4", FRAMES, [0, 2, 3, 4], focal(TINY))
    assert seen.found.all() and seen.cpu_seconds > 0.1
    assert errors(preset_path("arc_right", FRAMES)[[0, 2, 3, 4]], seen)["rot_deg_mean"] < 0.15
    with pytest.raises(ValueError, match="too short, got 5 of 6 frames"):
        estimate(tmp_path / "a.mp4", 6, [0, 1, 2], 100.0)


@pytest.mark.slow
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["240x416", "480x832"])
@pytest.mark.parametrize("preset", ["pan_right", "arc_right", "zoom_in"])
def test_it_agrees_with_the_reward_it_is_to_check(preset, size):
    video, commanded = film.__wrapped__(preset, size, ALL_FRAMES), preset_path(preset, ALL_FRAMES)
    begun = time.process_time()
    seen = reconstruct(grey(video), focal(size))
    spent = time.process_time() - begun
    measured = errors(commanded, seen)
    camera, frames = camera_matrix(intrinsics(size).tolist()), tuple(range(ALL_FRAMES))
    known = PosedFrames(grey(film("source", size, ALL_FRAMES)), source_path(ALL_FRAMES).numpy(), frames)
    located = locate_video(
        [find_features(picture) for picture in grey(video)], frames, make_source(known, None, camera).views, camera
    )
    reward = path_errors(commanded, torch.from_numpy(located), metric=True)
    between = path_errors(torch.from_numpy(located), torch.from_numpy(seen.poses))
    shape = "undefined" if measured["trans_sim3_rel"] is None else f"{measured['trans_sim3_rel']:.5f}"
    turns = f"{measured['rot_deg_mean']:.3f} | {reward['rot_deg_mean']:.3f} | {between['rot_deg_mean']:.3f}"
    print(f"\n| {preset} {size[0]}x{size[1]} | {turns} | {shape} | {seen.points} | {spent:.0f} |")
    assert seen.found.all() and measured["rot_deg_mean"] < 0.1
    assert between["rot_deg_mean"] < 0.1
    moves = any(PRESETS[preset].translation)
    assert seen.centred != moves and (not moves or measured["trans_sim3_rel"] < 0.002)
