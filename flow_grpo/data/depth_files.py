"""What is known of a video's depths, in a file beside it: `videos/cam01.depth.npz` for `videos/cam01.mp4`.

Arrays of the file: `depth` (n, h, w), metres along the optical axis of all that the video shows, in any resolution, 0
or not finite where unknown; `frames` (n,), the frame that each was made from, which one for all may leave out. One
number for all of the scene is a `depth` of shape (1, 1, 1).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import interpolate

from flow_grpo.data.video_io import fitted_size
from flow_grpo.records import Depth


def depth_file(video: Path) -> Path:
    """Return where the depths of a video are; the file need not exist."""
    return video.with_suffix(".depth.npz")


def read_depth(video: Path, height: int, width: int) -> Depth | None:
    """Return the depths of a video that is resized and cropped to height x width; None without a file.

    Unknown places have the map's median.

    Raises:
        ValueError: unreadable file, other arrays, or a map in which nothing is known; names the file.
    """
    file = depth_file(video)
    if not file.is_file():
        return None
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            maps = np.asarray(arrays["depth"], np.float32)
            frames = np.asarray(arrays.get("frames", [0]), np.int64)
    except Exception as error:  # of a damaged file zipfile, zlib and NumPy raise a dozen kinds
        raise ValueError(f"depth file {file} cannot be read ({error}); make it again or remove it") from error
    if maps.ndim != 3 or not maps.size or frames.shape != (len(maps),):
        raise ValueError(
            f"depth file {file}: depth has shape {maps.shape} and frames {frames.shape}, must be (n, h, w) and (n,); "
            "make it again or remove it"
        )
    known = np.isfinite(maps) & (maps > 0)
    if not known.any((1, 2)).all():
        raise ValueError(f"depth file {file}: a map has no number above 0, must be metres; make it again or remove it")
    usual = np.nanmedian(np.where(known, maps, np.nan), axis=(1, 2), keepdims=True)
    fitted = torch.from_numpy(np.where(known, maps, usual))
    if maps.shape[1:] != (1, 1):
        rows, columns = fitted_size((maps.shape[1], maps.shape[2]), height, width)
        top, left = (rows - height) // 2, (columns - width) // 2
        fitted = interpolate(fitted[:, None], (rows, columns), mode="bilinear")[:, 0]
        fitted = fitted[:, top : top + height, left : left + width]
    return Depth(fitted.contiguous(), torch.from_numpy(frames))
