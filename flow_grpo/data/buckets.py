"""Which of several sizes a video is delivered in, so that videos of one size can share a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from flow_grpo.data.video_io import video_size

Size = tuple[int, int, int]
"""Frames, rows and columns of a video."""


def nearest_bucket(size: Size, buckets: Sequence[Size]) -> Size:
    """Return the bucket that keeps most of a video: the longest it can fill, of these the nearest in aspect ratio.

    Of equally near ones the one with most pixels is taken, and of those the first.

    Args:
        size: of the video.
        buckets: sizes to choose from.

    Raises:
        ValueError: the video is shorter than every bucket.
    """
    frames, rows, columns = size
    fitting = [bucket for bucket in buckets if bucket[0] <= frames]
    if not fitting:
        raise ValueError(f"{frames} frames fill none of the buckets {list(buckets)}; add a shorter one to data.buckets")
    longest = max(bucket[0] for bucket in fitting)
    return min(
        (bucket for bucket in fitting if bucket[0] == longest),
        key=lambda bucket: (round(abs(math.log(bucket[1] * columns / (bucket[2] * rows))), 6), -bucket[1] * bucket[2]),
    )


def bucket_of_file(path: Path, buckets: Sequence[Size]) -> Size:
    """Return the bucket of a video file, by its header.

    Raises:
        ValueError: the file cannot be read, or the video is shorter than every bucket; names the file.
    """
    size = video_size(path)
    try:
        return nearest_bucket(size, buckets)
    except ValueError as error:
        raise ValueError(f"video {path}: {error}") from error
