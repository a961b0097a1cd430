"""Pictures as vision models of `transformers` take them, by PIL and torch: its own processors may want torchvision."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor


class Preprocessor:
    """Resize, crop the centre and normalise as a model folder's preprocessor_config.json says.

    What the PIL backend of `transformers` computes, to fp32 rounding. DINOv3's processor has no such backend and
    resizes in fp32, from which this differs by at most about a level of 8 bits.

    Raises:
        ValueError: the file does not say how.
    """

    def __init__(self, file: Path) -> None:
        said = json.loads(file.read_text(encoding="utf-8"))
        try:
            self._resample, size = said["resample"], said["size"]
            self._edge = size.get("shortest_edge")
            self._size = None if self._edge else (size["width"], size["height"])
            self._fits = bool(said.get("keep_aspect_ratio"))
            self._multiple = said.get("ensure_multiple_of") or 1
            crop = said["crop_size"] if said.get("do_center_crop") else None
            self._crop = crop and (crop["width"], crop["height"])
            self._mean, self._std = (torch.tensor(said[f"image_{name}"])[:, None, None] for name in ("mean", "std"))
        except (KeyError, TypeError, AttributeError) as error:
            text = "must say size, resample, image_mean and image_std as the published one does; fetch that again"
            raise ValueError(f"{file} cannot be followed ({type(error).__name__}: {error}), {text}") from error

    def __call__(self, picture: Image.Image) -> Tensor:
        """Return fp32 (3, H, W) of an RGB picture; what a crop cuts off at the sides is not seen by the model."""
        size = self._size or tuple(self._edge * side // min(picture.size) for side in picture.size)
        if self._fits:  # of the two scales the one nearer to 1, both sides whole multiples
            scale = min((new / old for new, old in zip(size, picture.size, strict=True)), key=lambda x: abs(1 - x))
            size = tuple(self._multiple * round(scale * side / self._multiple) for side in picture.size)
        picture = picture.resize(size, self._resample)
        if self._crop:
            left, top = ((side - kept) // 2 for side, kept in zip(picture.size, self._crop, strict=True))
            picture = picture.crop((left, top, left + self._crop[0], top + self._crop[1]))
        levels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        pixels = levels.view(picture.height, picture.width, 3).permute(2, 0, 1) / 255
        return (pixels - self._mean) / self._std
