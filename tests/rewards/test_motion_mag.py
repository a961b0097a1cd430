"""Motion magnitude against hand values; frozen and flickering videos are in test_tricks.py."""

import dataclasses
import math

import pytest
import torch

from flow_grpo.rewards.motion_mag import MotionMag, motion
from tests.room_films import conditions, film

FILM = film(["pan_left", "zoom_in"])


def blinking(step: float, frames: int = 5) -> torch.Tensor:
    """Return a (1, 3, T, 4, 4) video that changes by `step` at every frame."""
    return (0.2 + step * (torch.arange(frames) % 2)).reshape(1, 1, -1, 1, 1).expand(1, 3, -1, 4, 4)


def score(videos, target) -> list[float]:
    result = MotionMag()(videos, [dataclasses.replace(conditions(FILM)[0], target_video=target[0])])
    assert result.valid.all()
    return result.values.tolist()


def test_the_value_is_the_log_of_the_ratio_to_the_motion_of_the_true_view():
    assert motion(blinking(0.1)).tolist() == pytest.approx([0.1])
    expected = -math.log((0.2 + 1 / 255) / (0.1 + 1 / 255))
    assert score(blinking(0.2), blinking(0.1)) == pytest.approx([expected])
    assert score(blinking(0.1), blinking(0.2)) == pytest.approx([expected])
    assert score(blinking(0.2), blinking(0.2)) == pytest.approx([0])


def test_a_source_s_motion_is_not_that_of_another_camera_path():
    """Beside a still source a video that stands still would be the best."""
    known, alone = conditions(FILM)
    result = MotionMag()(FILM.videos, [known, dataclasses.replace(alone, target_video=None)])
    assert result.valid.tolist() == [True, False] and result.values[0] == 0
    assert torch.allclose(result.info["motion"][0], motion(FILM.videos)[0])
    assert "no true view" in result.causes[1] and not result.faults.any()


def test_a_single_frame_is_refused():
    with pytest.raises(ValueError, match="at least 2 frames"):
        MotionMag()(FILM.videos[:, :, :1], conditions(FILM))
