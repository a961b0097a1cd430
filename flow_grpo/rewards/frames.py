"""Which frames of a video are scored, their weights and their grey levels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_FRAMES = 21  # scored per video, evenly spread: every fourth of 81
LAST_FRAME_WEIGHT = 3.0  # times the first frame's
LUMA = (0.299, 0.587, 0.114)


def frame_numbers(frames: int, most: int = MOST_FRAMES) -> list[int]:
    """Return which frames of a video are scored: all up to `most`, else as many from the first to the last."""
    count = min(frames, most)
    return [round(number) for number in np.linspace(0, frames - 1, count).tolist()]


def frame_weights(visible: Tensor) -> Tensor:
    """Return weights (F,) float64 of sum 1 that grow from 1 to 3 along a video, 0 where `visible` (F,) is False."""
    growth = torch.linspace(1.0, LAST_FRAME_WEIGHT, len(visible), dtype=torch.float64)
    weights = growth * visible
    return weights / weights.sum()


def luma(video: Tensor) -> Tensor:
    """Return the brightness (T, h, w) of a video (3, T, h, w), both in [0, 1]."""
    return torch.einsum("cthw,c->thw", video.float(), torch.tensor(LUMA, dtype=torch.float32))


def grey_frames(video: Tensor, frames: Sequence[int]) -> NDArray[np.uint8]:
    """Return chosen frames (F, h, w) of a video (3, T, h, w) in [0, 1] as grey levels."""
    pictures: NDArray[np.uint8] = (255 * luma(video[:, list(frames)])).round().clamp(0, 255).to(torch.uint8).numpy()
    return pictures
