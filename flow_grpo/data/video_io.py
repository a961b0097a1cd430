"""Videos on disk and as tensors: frame-exact reading, resize and crop, choice of size bucket."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import av
import torch
from av.container import InputContainer
from av.stream import Disposition
from av.video.stream import VideoStream
from einops import rearrange
from torch import Tensor
from torch.nn.functional import interpolate

from flow_grpo.runtime.lru import LruCache
from flow_grpo.runtime.video_file import EXACT_COLOURS, THREADS

# FFmpeg chooses a container by content, not by name: a playlist called .mp4 would have it read other files.
CONTAINERS = "mov,matroska,webm,avi"
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
    if num_frames < 1 or start < 0:
        raise ValueError(f"video {path}: num_frames={num_frames}, start={start}, must be at least 1 and 0")
    if not path.is_file():
        raise ValueError(f"video {path} does not exist, got 0 of {needed} frames; check the dataset folder")
    video, decoded = torch.empty(0), 0
    try:
        with opened(path) as (container, stream):
            for decoded, frame in enumerate(container.decode(stream), 1):
                if decoded <= start:
                    continue
                pixels = frame.to_ndarray(format="rgb24", interpolation=EXACT_COLOURS, threads=THREADS)
                place = decoded - 1 - start
                if place == 0:  # one buffer: stacking a list of frames would double the memory of a large clip
                    video = torch.empty(3, num_frames, *pixels.shape[:2], dtype=torch.uint8)
                _check_frame(path, decoded - 1, frame, tuple(video.shape[2:]))
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
    """Read (frames, height, width) from the file's header; frames are decoded only if it has no count.

    Raises:
        ValueError: missing or unreadable file.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"video {path} does not exist; check the dataset folder")
    try:
        with opened(path) as (container, stream):
            return stream.frames or sum(1 for _ in container.decode(stream)), stream.height, stream.width
    except av.FFmpegError as error:
        raise ValueError(f"video {path} is damaged or no video ({error}); fetch or encode it again") from error


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

    Ties in aspect ratio (log ratio equal to 1e-6) go to the bucket with most pixels, then to the first.

    Raises:
        ValueError: the video is shorter than every bucket.
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
        self._videos: LruCache[tuple[object, ...], tuple[Tensor, tuple[int, int]]] = LruCache(limit, _pixels)

    def read(self, path: Path, num_frames: int, height: int, width: int) -> tuple[Tensor, tuple[int, int]]:
        """Read the first frames, fitted to (3, num_frames, height, width) uint8, and the file's own (height, width).

        The tensor is shared with the cache: do not write to it.

        Raises:
            ValueError: as `read_video`.
        """

        def read() -> tuple[Tensor, tuple[int, int]]:
            original = read_video(path, num_frames)
            return fit_video(original, height, width), (original.shape[-2], original.shape[-1])

        # A replaced file is read again, as `file_id` hashes it again: encodings are kept under the hash of the content.
        found = path.stat() if path.is_file() else None
        state = (found.st_size, found.st_mtime_ns) if found else None
        return self._videos.get_or_make((path, state, num_frames, height, width), read)


def _pixels(entry: tuple[Tensor, tuple[int, int]]) -> int:
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


def _check_frame(path: Path, number: int, frame: av.VideoFrame, size: tuple[int, ...]) -> None:
    if (frame.height, frame.width) != size:
        raise ValueError(
            f"video {path}: frame {number} is {frame.height}x{frame.width}, those before it {size[0]}x{size[1]}; "
            "encode it again in one size"
        )
    if frame.rotation:
        raise ValueError(
            f"video {path}: players rotate frame {number} by {frame.rotation} degrees, which is not read; "
            "encode it again as it is to be seen"
        )
