"""Videos on disk and as tensors: frame-exact reading, resizing and cropping, atomic H.264 writing."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import cast

import av
import numpy as np
import torch
from av.video.reformatter import ColorRange, Colorspace, Interpolation
from av.video.stream import VideoStream
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

# One thread per call: loader workers and ranks already run side by side, and the encoder's output does not depend on
# the number of cores.
THREADS = 1
# The default conversion between yuv420p and RGB rounds down: -1.2 levels in the mean; these flags remove the bias.
EXACT_COLOURS = Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
# Hard to tell from the original, in half the time of the default preset. The colour samples of 2x2 pixels are averaged,
# so their place is the centre (1); undeclared, decoders take the left edge and shift the colours by half a pixel.
# Without mbtree, because x264's AVX-512 form of it reads memory that nothing has written: on CPUs that have it, equal
# videos then gave dozens of different files. qcomp=0.8 in its place keeps the error and most of the size.
PLAYABLE = {"crf": "16", "preset": "veryfast", "x264-params": "chromaloc=1:mbtree=0:qcomp=0.8"}


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


def write_video(path: str | Path, video: Tensor, fps: float = 15, lossless: bool = False) -> None:
    """Write an mp4 file that appears whole or not at all; missing folders are made.

    Args:
        path: the file; an existing one is replaced.
        video: (3, T, h, w), floats in [0, 1] or uint8.
        fps: frames per second.
        lossless: keep every RGB value (H.264 in RGB, which browsers do not play). Otherwise yuv420p, playable
            anywhere; it has even sizes only, so the last row or column is doubled where one is odd.

    Raises:
        ValueError: wrong shape or type, or values that are not within [0, 1].
    """
    path = Path(path)
    frames = _to_frames(video)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        _encode(partial, frames, fps, lossless)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


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


def _to_frames(video: Tensor) -> NDArray[np.uint8]:
    if video.ndim != 4 or video.shape[0] != 3 or 0 in video.shape:
        raise ValueError(f"video to write has shape {tuple(video.shape)}, must be (3, T, h, w)")
    video = video.detach().cpu()
    if video.is_floating_point():
        levels = (video.float() * 255).round()
        if not ((levels >= 0) & (levels <= 255)).all():  # also false for NaN
            low, high = video.min().item(), video.max().item()
            raise ValueError(f"video to write has values from {low:g} to {high:g}, must be within [0, 1]; clamp first")
        video = levels.to(torch.uint8)
    if video.dtype != torch.uint8:
        raise ValueError(f"video to write is {video.dtype}, must be uint8 or floating point")
    frames: NDArray[np.uint8] = rearrange(video, "c t h w -> t h w c").contiguous().numpy()
    return frames


def _encode(path: Path, frames: NDArray[np.uint8], fps: float, lossless: bool) -> None:
    if not lossless:
        odd = [(0, size % 2) for size in frames.shape[1:3]]
        frames = np.pad(frames, [(0, 0), *odd, (0, 0)], mode="edge")
    codec, options = ("libx264rgb", {"qp": "0"}) if lossless else ("libx264", PLAYABLE)
    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as container:
        rate = Fraction(fps).limit_denominator(1001)
        stream = cast(VideoStream, container.add_stream(codec, rate=rate, options=options))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "rgb24" if lossless else "yuv420p"
        stream.codec_context.thread_count = THREADS
        if not lossless:
            # Said in the file: players otherwise guess the colour matrix from the picture size.
            stream.codec_context.colorspace = Colorspace.ITU601
            stream.codec_context.color_range = ColorRange.MPEG
        for frame in frames:
            container.mux(stream.encode(_picture(frame, lossless)))
        container.mux(stream.encode())


def _picture(frame: NDArray[np.uint8], lossless: bool) -> av.VideoFrame:
    picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
    if lossless:
        return picture
    return picture.reformat(
        format="yuv420p",
        dst_colorspace=Colorspace.ITU601,
        dst_color_range=ColorRange.MPEG,
        interpolation=EXACT_COLOURS | Interpolation.FULL_CHR_H_INP,
        threads=THREADS,
    )
