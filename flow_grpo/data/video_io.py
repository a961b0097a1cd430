"""Videos on disk and as tensors: frame-exact reading, resize and crop, choice of size bucket."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from av.container import InputContainer
from av.stream import Disposition
from av.video.stream import VideoStream
from einops import rearrange
from torch import Tensor
from torch.nn.functional import interpolate

from flow_grpo.records import WAN_FPS
from flow_grpo.runtime.lru import LruCache
from flow_grpo.runtime.video_file import EXACT_COLOURS, THREADS

# FFmpeg chooses a container by content, not by name: a playlist called .mp4 would have it read other files.
CONTAINERS = "mov,matroska,webm,avi"
# Transfer functions, by their numbers in ITU-T H.273: https://www.itu.int/rec/T-REC-H.273
HDR = {8: "linear", 9: "logarithmic", 10: "logarithmic", 16: "PQ", 17: "SMPTE ST 428", 18: "HLG"}
MOST_OBLONG = 0.05  # FFmpeg notes a few percent where a scaled size was rounded to whole multiples
Size = tuple[int, int, int]
"""(frames, height, width) of a video, in frames and pixels."""


def read_video(path: str | Path, num_frames: int, start: int = 0) -> Tensor:
    """Read frames start .. start + num_frames - 1 as (3, T, h, w) uint8 RGB.

    Frames are counted by decoding from the first one, not by time stamps, so the indices are exact. A decoding error
    raises; FFmpeg's error concealment is off.

    Raises:
        ValueError: missing or unreadable file, or too few frames; names the file, the frames decoded and those needed.
    """
    path, needed = Path(path), start + num_frames
    if not path.is_file():
        raise ValueError(f"video {path} does not exist, got 0 of {needed} frames; check the dataset folder")
    video, decoded = torch.empty(0), 0
    try:
        with opened(path) as (container, stream):
            for decoded, frame in enumerate(container.decode(stream), 1):
                if decoded <= start:
                    continue
                upright, down, right = orientation(path, frame)
                pixels = frame.to_ndarray(format="rgb24", interpolation=EXACT_COLOURS, threads=THREADS)
                pixels = np.ascontiguousarray((pixels if upright else pixels.swapaxes(0, 1))[::down, ::right])
                place = decoded - 1 - start
                if place == 0:  # one buffer: stacking a list of frames would double the memory of a large clip
                    video = torch.empty(3, num_frames, *pixels.shape[:2], dtype=torch.uint8)
                elif (size := pixels.shape[:2]) != (before := tuple(video.shape[2:])):
                    raise ValueError(
                        f"video {path}: frame {decoded - 1} is {size[0]}x{size[1]}, those before it "
                        f"{before[0]}x{before[1]}; encode it again in one size"
                    )
                video[:, place] = rearrange(torch.from_numpy(pixels), "h w c -> c h w")
                if decoded == needed:
                    return video
    except av.FFmpegError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(
            f"video {path} cannot be read, got {decoded} of {needed} frames ({reason}); "
            "fetch or encode it again, or remove its scene"
        ) from error
    raise ValueError(
        f"video {path} is too short, got {decoded} of {needed} frames; lower num_frames or remove its scene"
    )


def video_size(path: str | Path) -> Size:
    """Return (frames, height, width) of a video as it is shown; with a sound header only its first frame is decoded.

    Raises:
        ValueError: missing or unreadable file, or one whose first frame cannot be read as it is to be seen.
    """
    with header(path) as (container, stream):
        first = next(container.decode(stream), None)
        if first is None:
            raise ValueError(f"video {path} holds no frame; fetch or encode it again")
        size = (first.height, first.width) if orientation(path, first)[0] else (first.width, first.height)
        # A cut without encoding leaves frames in the file that are not shown, which the header counts.
        lasts = float((stream.duration or 0) * (stream.time_base or 0) * (stream.average_rate or 0))
        if stream.frames and abs(lasts - stream.frames) <= 1:
            return stream.frames, size[0], size[1]
    with header(path) as (container, stream):
        return sum(1 for _ in container.decode(stream)), size[0], size[1]


def frame_rate(path: str | Path) -> float:
    """Return a video's frames per second by its header, Wan's where that does not say; ValueError as `video_size`."""
    with header(path) as (_, stream):
        return float(stream.average_rate or WAN_FPS)


@contextlib.contextmanager
def header(path: str | Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a video like `opened`; ValueError also for one that is missing or damaged."""
    if not Path(path).is_file():
        raise ValueError(f"video {path} does not exist; check the dataset folder")
    try:
        with opened(Path(path)) as found:
            yield found
    except av.FFmpegError as error:
        raise ValueError(
            f"video {path} is damaged or no video in a container that is read ({CONTAINERS}; {error}); fetch or encode "
            "it again"
        ) from error


def fitted_size(size: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """(height, width) to resize a video of that `size` to, before a centre crop to height x width.

    The scale is max(height / rows, width / columns). The cropped side is rounded so that the crop is symmetric, which
    keeps the principal point exactly in the centre.
    """
    rows, columns = size
    scale = max(height / rows, width / columns)
    return height + 2 * round((rows * scale - height) / 2), width + 2 * round((columns * scale - width) / 2)


def fit_video(video: Tensor, height: int, width: int) -> Tensor:
    """Resize (antialiased) and centre-crop a (3, T, h, w) uint8 video to height x width."""
    rows, columns = fitted_size((video.shape[-2], video.shape[-1]), height, width)
    top, left = (rows - height) // 2, (columns - width) // 2
    fitted = torch.empty(*video.shape[:2], height, width, dtype=torch.uint8)
    # Frame by frame: a whole 1280x1280 clip in fp32 would take gigabytes.
    for number, picture in enumerate(rearrange(video, "c t h w -> t 1 c h w")):
        if (rows, columns) != tuple(video.shape[-2:]):
            picture = interpolate(picture.float(), size=(rows, columns), mode="bilinear", antialias=True).round()
        fitted[:, number] = picture[0, :, top : top + height, left : left + width]
    return fitted


def nearest_bucket(size: Size, buckets: Sequence[Size]) -> Size:
    """Choose the longest bucket that a video of `size` can fill; of equally long ones the nearest aspect ratio.

    Ties in aspect ratio (log ratio equal to 1e-6) go to the bucket with most pixels, then to the first. ValueError if
    the video is shorter than every bucket.
    """
    frames, height, width = size
    longest = max((bucket[0] for bucket in buckets if bucket[0] <= frames), default=None)
    if longest is None:
        raise ValueError(f"{frames} frames fill none of the buckets {list(buckets)}; add a shorter one to data.buckets")
    return min(
        (bucket for bucket in buckets if bucket[0] == longest),
        key=lambda bucket: (round(abs(math.log(bucket[1] * width / (bucket[2] * height))), 6), -bucket[1] * bucket[2]),
    )


class VideoCache:
    """A byte-limited LRU cache of decoded, resized videos: group copies and later epochs read the same files."""

    def __init__(self, limit: int = 2**28) -> None:
        """Cache at most `limit` bytes of pixels."""
        self._videos: LruCache[tuple[object, ...], tuple[Tensor, tuple[int, int], float]] = LruCache(limit, _pixels)

    def read(self, path: Path, num_frames: int, height: int, width: int) -> tuple[Tensor, tuple[int, int], float]:
        """Read the first frames, fitted to (3, num_frames, height, width) uint8; ValueError as `read_video`.

        Beside them are returned the (height, width) of the video itself and its frame rate. The tensor is shared with
        the cache: do not write to it.
        """

        def read() -> tuple[Tensor, tuple[int, int], float]:
            original = read_video(path, num_frames)
            return fit_video(original, height, width), (original.shape[-2], original.shape[-1]), frame_rate(path)

        # A replaced file is read again, as `file_id` hashes it again: encodings are kept under the hash of the content.
        found = path.stat() if path.is_file() else None
        state = (found.st_size, found.st_mtime_ns) if found else None
        return self._videos.get_or_make((path, state, num_frames, height, width), read)


def _pixels(entry: tuple[Tensor, tuple[int, int], float]) -> int:
    return entry[0].nbytes


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a video file and its only picture stream.

    Raises:
        ValueError: no picture stream or several, no readable header, or pixels that are not square.
        av.FFmpegError: damaged, or in a container that is not among `CONTAINERS`.
    """
    with av.open(str(path), container_options={"format_whitelist": CONTAINERS}) as container:
        streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
        if len(streams) != 1:
            raise ValueError(
                f"video {path} has {len(streams)} picture streams, got 0 frames, must have one; fetch or encode it "
                "again"
            )
        if streams[0].codec_context is None:  # for example a file truncated within its header
            raise ValueError(f"video {path} has no readable header, got 0 frames; fetch or encode it again")
        aspect = float(streams[0].sample_aspect_ratio or 1)  # of a pixel; 0 or None where the file does not say
        if abs(aspect - 1) > MOST_OBLONG:
            raise ValueError(
                f"video {path}: pixels are {aspect:.3g} times as wide as high, must be square to {MOST_OBLONG:.0%}; "
                "encode it again with square pixels"
            )
        streams[0].codec_context.thread_count = THREADS
        # Otherwise the decoder conceals damaged frames and reports success.
        streams[0].codec_context.options = {"err_detect": "explode"}
        yield container, streams[0]


def orientation(path: str | Path, frame: av.VideoFrame) -> tuple[bool, int, int]:
    """Return how a frame's display matrix turns and mirrors it: rows stay rows, then the steps along rows and columns.

    A phone that is held upright writes the matrix instead of turning pictures (ISO/IEC 14496-12, 8.5.3).

    Raises:
        ValueError: brightness is coded for HDR, or the matrix is no multiple of a quarter turn.
    """
    if frame.color_trc in HDR:
        raise ValueError(
            f"video {path} is HDR ({HDR[frame.color_trc]}), whose brightness is not that of the models' videos; "
            "convert it: ffmpeg -i IN -vf zscale=t=linear:npl=203,tonemap=hable,zscale=p=bt709:t=bt709:m=bt709:r=tv,"
            "format=yuv420p OUT.mp4"
        )
    data: Any = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return True, 1, 1
    # A place (p, q), to the right and down, is shown at (a p + c q, b p + d q); 65536 is 1.
    a, b, _, c, d = (number / 65536 for number in struct.unpack("=5i", bytes(data)[:20]))
    if (abs(a), abs(b), abs(c), abs(d)) not in {(1, 0, 0, 1), (0, 1, 1, 0)}:
        raise ValueError(
            f"video {path} is shown turned by {frame.rotation} degrees, which is not read; encode it again as it is to "
            "be seen"
        )
    return (True, int(d), int(a)) if a else (False, int(b), int(c))
