"""Downsampling, Gaussian blur and the better of two fits, shared by the rewards that compare images."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

Record = TypeVar("Record")


def shrink(pictures: Tensor, columns: int) -> Tensor:
    """Average images (N, C, h, w) over square blocks so that at most `columns` columns are left."""
    height, width = pictures.shape[-2:]
    block = math.ceil(width / columns)
    return functional.adaptive_avg_pool2d(pictures, (max(1, height // block), max(1, width // block)))


def blur_matrix(length: int, sigma: float) -> Tensor:
    """Return the (length, length) matrix of a Gaussian blur of `sigma` samples with replicated borders."""
    reach = max(1, math.ceil(3 * sigma))
    offsets = torch.arange(-reach, reach + 1)
    kernel = torch.exp(-0.5 * (offsets / sigma).square())
    kernel = kernel / kernel.sum()
    matrix = torch.zeros(length, length)
    rows = torch.arange(length)
    for offset, weight in zip(offsets, kernel, strict=True):
        matrix.index_put_((rows, (rows + offset).clamp(0, length - 1)), weight, accumulate=True)
    return matrix


def blur(pictures: Tensor, sigma: float) -> Tensor:
    """Blur the last two dimensions by a Gaussian of `sigma` pixels with replicated borders."""
    rows, columns = (blur_matrix(length, sigma) for length in pictures.shape[-2:])
    return rows @ pictures @ columns.T


def choose(mask: Tensor, first: Record, second: Record) -> Record:
    """Take the rows of `first` where `mask` is true and those of `second` elsewhere.

    Args:
        mask: bool, of the leading dimensions of every field.
        first: a dataclass whose fields are all tensors.
        second: a record of the same type and shapes.
    """
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(first):  # type: ignore[arg-type]
        mine: Tensor = getattr(first, field.name)
        fields[field.name] = torch.where(
            mask.reshape(*mask.shape, *([1] * (mine.ndim - mask.ndim))), mine, getattr(second, field.name)
        )
    return type(first)(**fields)
