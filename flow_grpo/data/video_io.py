"""Videos on disk and as tensors: frame-exact reading, resizing and cropping."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import av
import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import interpolate

from flow_grpo.runtime.video_file import EXACT_COLOURS, THREADS


def read_video(path: str | Path, num_frames: int, start: int = 0) -> Tensor:
    """Return frames start .. start + num_frames - 1 as (3, T, h, w) uint8 RGB.

    Frames are counted by decoding from the beginning, not by time stamps, so the count is exact. Damage that the
    decoder notices is an error, not a concealed frame.

    Raises:
        ValueError: missing or unreadable file, or too few frames; names the file, the frames got and those needed.
    """
    path, needed = Path(path), start + num_frames
    if num_frames < 1 or start < 0:
        raise ValueError(f"video {path}: num_frames={num_frames}, start={start}, must be at least 1 and 0")
    if not path.is_file():
        raise ValueError(f"video {path} does not exist, got 0 of {needed} frames; check the dataset folder")
    video, decoded = torch.empty(0), 0
    try:
        for frame in _decode(path):
            if decoded >= start:
                pixels = frame.to_ndarray(format="rgb24", interpolation=EXACT_COLOURS, threads=THREADS)
                picture = rearrange(torch.from_numpy(pixels), "h w c -> c h w")
                if decoded == start:
                    video = torch.empty(3, num_frames, *picture.shape[1:], dtype=torch.uint8)
                video[:, decoded - start] = picture
            decoded += 1
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


def video_size(path: str | Path) -> tuple[int, int, int]:
    """Return (frames, rows, columns) as the file's header says; nothing is decoded unless the header names no count.

    Raises:
        ValueError: missing or unreadable file.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"video {path} does not exist; check the dataset folder")
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            return stream.frames or sum(1 for _ in container.decode(stream)), stream.height, stream.width
    except (av.FFmpegError, IndexError) as error:
        raise ValueError(f"video {path} is damaged or no video ({error}); fetch or encode it again") from error


def fitted_size(size: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """Return the (rows, columns) to which a video of `size` is resized so that a centre crop gives height x width.

    The scale is max(height / rows, width / columns). The longer side is rounded such that equally much is cut off at
    both ends, which keeps the principal point exactly in the middle.
    """
    rows, columns = size
    scale = max(height / rows, width / columns)
    return (
        height + 2 * round((rows * scale - height) / 2),
        width + 2 * round((columns * scale - width) / 2),
    )


def fit_video(video: Tensor, height: int, width: int) -> Tensor:
    """Resize (antialiased) and centre-crop a (3, T, h, w) uint8 video to height x width."""
    rows, columns = fitted_size((video.shape[-2], video.shape[-1]), height, width)
    top, left = (rows - height) // 2, (columns - width) // 2
    fitted = torch.empty(*video.shape[:2], height, width, dtype=torch.uint8)
    # Frame by frame: a whole 1280x1280 clip in floats would take gigabytes.
    for number, picture in enumerate(rearrange(video, "c t h w -> t 1 c h w")):
        if (rows, columns) != tuple(video.shape[-2:]):
            picture = interpolate(picture.float(), size=(rows, columns), mode="bilinear", antialias=True).round()
        fitted[:, number] = picture[0, :, top : top + height, left : left + width]
    return fitted


class VideoCache:
    """Decoded, fitted videos within a byte limit: copies of a group and later epochs read the same files."""

    def __init__(self, limit: int) -> None:
        """Keep at most `limit` bytes of pixels, dropping what was used longest ago."""
        self._limit = limit
        self._kept: OrderedDict[tuple[Path, int, int, int], tuple[Tensor, tuple[int, int]]] = OrderedDict()
        self._bytes = 0

    def read(self, path: Path, num_frames: int, height: int, width: int) -> tuple[Tensor, tuple[int, int]]:
        """Return (3, num_frames, height, width) uint8, not to be written to, and the file's own (rows, columns).

        Raises:
            ValueError: like `read_video`.
        """
        name = (path, num_frames, height, width)
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        original = read_video(path, num_frames)
        found = fit_video(original, height, width), (original.shape[-2], original.shape[-1])
        self._kept[name] = found
        self._bytes += found[0].nbytes
        while self._bytes > self._limit:
            self._bytes -= self._kept.popitem(last=False)[1][0].nbytes
        return found


def _decode(path: Path) -> Iterator[av.VideoFrame]:
    with av.open(str(path)) as container:
        if not container.streams.video:
            raise ValueError(f"video {path} has no picture stream, got 0 frames; fetch or encode it again")
        stream = container.streams.video[0]
        if stream.codec_context is None:  # as in a file that ends within its header
            raise ValueError(f"video {path} has no readable header, got 0 frames; fetch or encode it again")
        stream.codec_context.thread_count = THREADS
        # Without this the decoder paints over damaged pictures and reports success.
        stream.codec_context.options = {"err_detect": "explode"}
        yield from container.decode(stream)
