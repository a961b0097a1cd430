"""Write mp4 files that any player shows, atomically and reproducibly, and read them back."""

from __future__ import annotations

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

from flow_grpo.runtime.atomic_file import atomic_path

# One thread per call: loader workers and ranks already run concurrently, and the output must not depend on the
# number of cores.
THREADS = 1
# The default conversion between yuv420p and RGB rounds down: -1.2 levels in the mean; these flags remove the bias.
EXACT_COLOURS = Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
# Visually lossless, in half the time of the default preset. Chroma is averaged over 2x2 pixels, so it is sited at the
# centre (chromaloc=1); undeclared, decoders assume the left edge and shift colours by half a pixel.
# mbtree is off because x264's AVX-512 version reads uninitialised memory: on CPUs with AVX-512, equal videos gave
# dozens of different files. qcomp=0.8 instead keeps the error and most of the size.
PLAYABLE = {"crf": "16", "preset": "veryfast", "x264-params": "chromaloc=1:mbtree=0:qcomp=0.8"}


def write_video(path: str | Path, video: Tensor, fps: float = 15, lossless: bool = False) -> None:
    """Write an mp4 file atomically; missing folders are created.

    Args:
        path: the file; an existing one is replaced.
        video: (3, T, h, w), floats in [0, 1] or uint8.
        fps: frames per second.
        lossless: keep every RGB value (H.264 in RGB, which browsers do not play). Otherwise yuv420p, playable
            anywhere; it needs even sizes, so the last row or column of an odd one is repeated.

    Raises:
        ValueError: wrong shape or type, or values that are not within [0, 1].
    """
    if video.ndim != 4 or video.shape[0] != 3 or 0 in video.shape:
        raise ValueError(f"video to write has shape {tuple(video.shape)}, must be (3, T, h, w)")
    video = video.detach().cpu()
    if video.is_floating_point():
        video = levels(video)
    if video.dtype != torch.uint8:
        raise ValueError(f"video to write is {video.dtype}, must be uint8 or floating point")
    frames: NDArray[np.uint8] = rearrange(video, "c t h w -> t h w c").contiguous().numpy()
    if not lossless:
        odd = [(0, size % 2) for size in frames.shape[1:3]]
        frames = np.pad(frames, [(0, 0), *odd, (0, 0)], mode="edge")
    with atomic_path(Path(path)) as temporary:
        _encode(temporary, frames, fps, lossless)


def levels(video: Tensor) -> Tensor:
    """Round a video of floats in [0, 1] to uint8.

    Raises:
        ValueError: values that are not within [0, 1].
    """
    scaled = (video.float() * 255).round()
    if not ((scaled >= 0) & (scaled <= 255)).all():  # also false for NaN
        low, high = video.min().item(), video.max().item()
        raise ValueError(f"video to write has values from {low:g} to {high:g}, must be within [0, 1]; clamp first")
    return scaled.to(torch.uint8)


def _encode(path: Path, frames: NDArray[np.uint8], fps: float, lossless: bool) -> None:
    codec, options = ("libx264rgb", {"qp": "0"}) if lossless else ("libx264", PLAYABLE)
    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as container:
        rate = Fraction(fps).limit_denominator(1001)
        stream = cast(VideoStream, container.add_stream(codec, rate=rate, options=options))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "rgb24" if lossless else "yuv420p"
        stream.codec_context.thread_count = THREADS
        if not lossless:
            # Stored in the file: players otherwise guess the colour matrix from the picture size.
            stream.codec_context.colorspace = Colorspace.ITU601
            stream.codec_context.color_range = ColorRange.MPEG
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            if not lossless:
                picture = picture.reformat(
                    format="yuv420p",
                    dst_colorspace=Colorspace.ITU601,
                    dst_color_range=ColorRange.MPEG,
                    interpolation=EXACT_COLOURS | Interpolation.FULL_CHR_H_INP,
                    threads=THREADS,
                )
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


def read_frames(path: str | Path) -> Iterator[NDArray[np.uint8]]:
    """Yield the frames (h, w, 3) of a video file, colours as close to those written as the file allows.

    Raises:
        OSError, av.FFmpegError: it cannot be read.
    """
    with av.open(str(path)) as container:
        container.streams.video[0].codec_context.thread_count = THREADS
        for frame in container.decode(video=0):
            yield frame.to_ndarray(format="rgb24", interpolation=EXACT_COLOURS, threads=THREADS)
