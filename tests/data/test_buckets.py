"""Which size a video is delivered in."""

from __future__ import annotations

import pytest
import torch

from flow_grpo.data.buckets import bucket_of_file, nearest_bucket
from flow_grpo.runtime.video_file import write_video

WIDE, TALL, SHORT, LARGE = (81, 480, 832), (81, 832, 480), (49, 480, 832), (81, 720, 1248)


@pytest.mark.parametrize(
    ("video", "wanted"),
    [
        ((81, 1280, 1280), WIDE),  # as near to both: the first of equal size
        ((81, 720, 1280), LARGE),
        ((200, 1920, 1080), TALL),
        ((80, 480, 832), SHORT),
        ((49, 1920, 1080), SHORT),  # no tall one is short enough
    ],
    ids=str,
)
def test_the_longest_bucket_a_video_fills_and_of_these_the_nearest_in_shape(video, wanted):
    buckets = [WIDE, TALL, SHORT] if wanted != LARGE else [WIDE, TALL, SHORT, LARGE]
    assert nearest_bucket(video, buckets) == wanted


def test_of_equal_shapes_the_larger_is_taken():
    assert nearest_bucket((81, 480, 960), [(81, 240, 480), (81, 480, 960)]) == (81, 480, 960)


def test_a_video_that_fills_no_bucket_is_named(tmp_path):
    file = tmp_path / "cam01.mp4"
    write_video(file, torch.zeros(3, 7, 16, 24), lossless=True)
    assert bucket_of_file(file, [(5, 16, 24), (9, 16, 24)]) == (5, 16, 24)
    with pytest.raises(
        ValueError, match=r"cam01.mp4: 7 frames fill none of the buckets \[\(9, 16, 24\)\]; add a short"
    ):
        bucket_of_file(file, [(9, 16, 24)])
    with pytest.raises(ValueError, match="does not exist"):
        bucket_of_file(tmp_path / "cam02.mp4", [(5, 16, 24)])
