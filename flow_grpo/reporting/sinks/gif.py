"""A video as a small animated GIF, for trackers that show no mp4."""

from __future__ import annotations

import io
import itertools
import math
from pathlib import Path

import av
from PIL import Image

FRAMES, ROWS = 24, 120  # at most


def as_gif(path: Path) -> bytes:
    """Return a video file as an animated GIF of at most `FRAMES` of its frames, at most `ROWS` high.

    At full size a video of 480 rows took 18 seconds.
    """
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        every = math.ceil((stream.frames or 1) / FRAMES)
        milliseconds = every * 1000 / float(stream.average_rate or 15)
        smaller = min(1.0, ROWS / stream.height)
        size = {"width": max(1, round(smaller * stream.width)), "height": max(1, round(smaller * stream.height))}
        frames = itertools.islice(container.decode(stream), 0, None, every)
        first, *others = [Image.fromarray(frame.to_ndarray(format="rgb24", **size)) for frame in frames]
    encoded = io.BytesIO()
    first.save(encoded, format="GIF", save_all=True, append_images=others, duration=milliseconds, loop=0)
    return encoded.getvalue()
