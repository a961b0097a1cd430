"""Displacement from the true view: hand values, order, and what masks a sample."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from flow_grpo.records import Condition
from flow_grpo.rewards.camera import feature_pool, view_disp
from flow_grpo.rewards.camera.feature_pool import FeaturePool
from flow_grpo.rewards.camera.features import find_features
from flow_grpo.rewards.camera.pose import PoseMeasurer, PoseRot
from flow_grpo.rewards.camera.view_disp import ViewDisp, displacements
from flow_grpo.rewards.process_pool import CallPool
from tests.textured_room import condition, film, grey, source_path

SIZE, FRAMES = (120, 208), 3


def shot(preset: str, speed: float = 1.0) -> Tensor:
    return film(preset, SIZE, FRAMES, speed)


def asked(preset: str, **changes: object) -> Condition:
    return condition(preset, shot("source"), source_path(FRAMES), shot(preset), **changes)


def score(videos: list[Tensor], conditions: list[Condition], reward: ViewDisp | None = None):
    return (reward or ViewDisp(FeaturePool(CallPool())))(torch.stack(videos), conditions)


def test_a_shift_is_measured_in_pixels_of_a_picture_832_wide_and_late_frames_count_threefold():
    pictures = grey(shot("arc_right"))
    there, moved = (tuple(map(find_features, shown)) for shown in (pictures, np.roll(pictures, 7, axis=2)))
    assert displacements(moved, there) == pytest.approx([7] * FRAMES, abs=0.02)
    assert displacements(there, there).tolist() == [0] * FRAMES
    video = shot("arc_right")
    late = video.clone()
    late[:, 2] = video[:, 2].roll(5, -1)
    result = score([video.roll(5, -1), late], [asked("arc_right")] * 2)
    assert result.valid.all() and result.causes == ("", "")
    wide = 5 * 832 / 208
    assert result.values.tolist() == pytest.approx([-wide / 100, -wide / 100 * 3 / 6], abs=0.002)
    assert result.info["disp_px"].tolist() == pytest.approx([wide, wide / 3], abs=0.2)
    assert result.info["matched_frames"].tolist() == [1, 1]


def test_a_frame_is_never_worse_than_the_cap():
    video = shot("pan_right")
    far = score([video.roll(60, -1)], [asked("pan_right")])
    assert far.values == pytest.approx(-1) and far.info["disp_px"] == pytest.approx(100)
    assert far.info["matched_frames"] == 1


def test_eleven_matches_are_too_few():
    features = find_features(grey(shot("arc_right"))[0])
    for count, known in ((11, False), (12, True)):
        few = dataclasses.replace(features, points=features.points[:count], descriptors=features.descriptors[:count])
        assert np.isfinite(displacements((features,), (few,))).tolist() == [known]


@pytest.mark.parametrize("preset", ["arc_right", "pan_right", "zoom_in"])
def test_nearer_to_the_command_is_better(preset):
    videos = [*(shot(preset, speed) for speed in (1.0, 0.95, 0.8, 0.5)), shot(preset)[:, :1].expand(-1, FRAMES, -1, -1)]
    result = score(videos, [asked(preset)] * 5)
    assert (result.values.diff() < -3 * ViewDisp.floor).all()


@pytest.mark.parametrize("what", ["noise", "flat"])
def test_what_does_not_match_takes_the_cap_and_is_still_a_score(what):
    video = shot("arc_right")
    shown = {"noise": torch.rand(video.shape, generator=torch.Generator().manual_seed(0))}
    result = score([shown.get(what, torch.full_like(video, 0.5))], [asked("arc_right")])
    assert result.valid.all() and result.values == pytest.approx(-1)
    assert result.info["matched_frames"] == 0


def test_without_a_true_view_of_its_shape_and_with_texture_a_sample_is_masked_with_the_cause():
    missing, shorter = asked("arc_right", target_video=None), asked("arc_right", target_video=shot("arc_right")[:, :2])
    result = score([shot("arc_right")] * 3, [asked("arc_right"), missing, shorter])
    assert result.valid.tolist() == [True, False, False]
    assert result.values[0] == 0 and result.values[1:].isnan().all() and result.info["disp_px"][1:].isnan().all()
    assert "has no true view" in result.causes[1] and "shape" in result.causes[2]
    alone = score([shot("arc_right")], [missing])
    assert not alone.valid.any() and set(alone.info) == set(ViewDisp.measures)
    flat = torch.full((3, FRAMES, *SIZE), 0.5)
    partly = shot("arc_right").clone()
    partly[:, 2] = 0.5
    result = score([shot("arc_right")] * 2, [asked("arc_right", target_video=view) for view in (flat, partly)])
    assert result.valid.tolist() == [False, True]
    assert "no texture" in result.causes[0]
    assert result.values[1] == 0 and result.info["matched_frames"][1] == 1


def test_a_picture_s_features_are_found_once_for_all_rewards_up_to_a_limit(monkeypatch, calls_made):
    measurer = PoseMeasurer()
    rewards = [PoseRot(measurer), ViewDisp(measurer.features)]
    for reward in rewards:
        score([shot("arc_right"), shot("pan_right")], [asked("arc_right")] * 2, reward)
    once = 2 * FRAMES - 1  # the true view is the first of two videos that begin with the same picture
    assert calls_made.count("find_features") == once
    monkeypatch.setattr(feature_pool, "KEPT", 1)
    reward = ViewDisp(FeaturePool(CallPool()))
    for _ in range(2):
        assert score([shot("arc_right")], [asked("arc_right")], reward).values.tolist() == [0]
    assert calls_made.count("find_features") == once + FRAMES + (FRAMES - 1)


def test_it_reads_the_features_of_the_pose_rewards():
    assert ViewDisp().features is view_disp.shared_measurer().features
