"""`torch.where` for dataclasses of tensors: keep the better of two fits, row by row."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch
from torch import Tensor

Record = TypeVar("Record")


def choose(mask: Tensor, first: Record, second: Record) -> Record:
    """Return a record with the rows of `first` where `mask` is true and those of `second` elsewhere.

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
