"""Clips of samples: their captions, and which samples of a batch are shown."""

from __future__ import annotations

import dataclasses

import torch

from flow_grpo.runtime.reporting.clips import log_rows, make_clip, training_clips
from tests.toy import BrightnessReward, ToyPolicy, condition, group, scored


def test_the_caption_names_the_motion_where_it_is_known():
    shown = condition(3)
    named = make_clip(dataclasses.replace(shown, preset="pan_left"), shown.source_video, {"brightness": 0.5})
    unnamed = make_clip(dataclasses.replace(shown, preset=None), shown.source_video, {"brightness": 0.5})
    assert "cam01 to cam02 (pan_left): brightness 0.500" in named.caption
    assert "cam01 to cam02: brightness 0.500" in unnamed.caption


def test_training_clips_are_the_first_samples_and_leave_out_values_that_are_not_valid():
    batch = scored(ToyPolicy(), group(3, 4), reward=BrightnessReward(broken=[(3, 1)]))
    first, second = training_clips(batch, 2)
    assert "brightness" in first.caption and "brightness" not in second.caption
    assert len(training_clips(dataclasses.replace(batch, videos=torch.empty(0)), 2)) == 0


def test_rows_with_different_columns_make_one_table():
    tables = []

    class Recorder:
        def log_table(self, *given):
            tables.append(given)

    log_rows(Recorder(), "eval/presets", [{"a": 1}, {"b": 2}], 7)
    log_rows(Recorder(), "eval/presets", [], 8)
    assert tables == [("eval/presets", ["a", "b"], [[1, ""], ["", 2]], 7)]


def test_a_file_is_named_after_own_rewards_without_their_folder_and_without_a_colon():
    shown = condition(3)
    clip = make_clip(shown, shown.source_video, {"some/folder/mine.py:warmth": 0.5, "remote:judge": 1.0})
    assert clip.name.endswith("_mine.py-warmth_0.500_remote-judge_1.000") and not set(clip.name) & set("/:\\")
    assert "some/folder/mine.py:warmth 0.500" in clip.caption
