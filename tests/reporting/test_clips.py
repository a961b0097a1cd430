"""Clips of samples: their captions, and which samples of a batch are shown."""

import dataclasses

import pytest
import torch

from flow_grpo.reporting.clips import group_clip, make_clip, training_clips
from tests.toy import BrightnessReward, ToyPolicy, condition, group, scored


def test_the_caption_names_the_motion_where_it_is_known_and_the_file_own_rewards_without_their_folder():
    shown = condition(3)
    own = make_clip(shown, shown.source_video, {"some/folder/mine.py:warmth": 0.5, "remote:judge": 1.0})
    assert own.name.endswith("_mine.py-warmth_0.500_remote-judge_1.000") and not set(own.name) & set("/:\\")
    assert "some/folder/mine.py:warmth 0.500" in own.caption
    named = make_clip(dataclasses.replace(shown, preset="pan_left"), shown.source_video, {"brightness": 0.5})
    prompted = make_clip(dataclasses.replace(shown, target_camera=""), shown.source_video, {"brightness": 0.5})
    assert prompted.caption == "a toy room number 3 seen by a moving camera: brightness 0.500"
    assert (prompted.of["prompt"], named.of["prompt"]) == ("a toy room number 3 seen by a moving camera", "")
    unnamed = make_clip(dataclasses.replace(shown, preset=None), shown.source_video, {"brightness": 0.5})
    assert "cam01 to cam02 (pan_left): brightness 0.500" in named.caption
    assert "cam01 to cam02: brightness 0.500" in unnamed.caption


def test_training_clips_are_the_first_samples_and_leave_out_values_that_are_not_valid():
    batch = scored(ToyPolicy(), group(3, 4), reward=BrightnessReward(broken=[(3, 1)]))
    first, second = training_clips(batch, 2)
    assert "brightness" in first.caption and "brightness" not in second.caption
    assert len(training_clips(dataclasses.replace(batch, videos=torch.empty(0)), 2)) == 0


def test_what_is_not_finite_is_shown_a_missing_view_left_out_and_the_base_stands_before_now():
    shown = dataclasses.replace(condition(3), target_video=None)
    clip = make_clip(shown, torch.full_like(shown.source_video, float("nan")), {"brightness": float("nan")})
    assert list(clip.panels) == ["source", "now"] and clip.panels["now"].dtype == torch.uint8
    assert clip.scores == {}
    shown = condition(3)
    clip = make_clip(shown, shown.source_video, {"a": 0.5, "b": 1.0}, base=0 * shown.source_video)
    assert list(clip.panels) == ["source", "base", "now", "true view"]
    assert not clip.panels["base"].any() and clip.panels["now"].any()
    words = clip.lines({"a": 0.25})[1].replace("\u00a0", " ")
    assert words == "a 0.250 → 0.500   b 1.000   (before training → now)"


def test_copies_of_a_group_are_shown_from_the_best_to_the_worst_held_if_there_are_two_and_a_weight():
    batch = scored(ToyPolicy(), [*group(3, 1), *group(5, 3)], reward=BrightnessReward())
    clip = group_clip(batch, {"brightness": 1.0}, k=4)
    assert list(clip.panels) == ["copy 1", "copy 2", "copy 3"] and "3 of 4 copies" in clip.caption
    light = [float(video.float().mean()) for video in clip.panels.values()]
    assert light == sorted(light, reverse=True) and light[0] > light[-1]
    assert clip.of["condition"] == 5 and sum(clip.scores.values()) == pytest.approx(0, abs=1e-6)
    whole = group_clip(batch, {"brightness": 1.0}, k=3)
    assert "all 3 copies" in whole.caption
    batch = scored(ToyPolicy(), [condition(1, 1), condition(2, 2)])
    assert group_clip(batch, {"brightness": 1.0}, k=4) is None
    assert group_clip(scored(ToyPolicy(), group(3, 4)), {"brightness": 0.0}, k=4) is None
    assert group_clip(dataclasses.replace(batch, videos=torch.empty(0)), {"brightness": 1.0}, k=4) is None
