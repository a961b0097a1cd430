"""Row-wise choice between two records of tensors: what a fit keeps when only some rows got better."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch
from torch import Tensor

Record = TypeVar("Record")


def choose(mask: Tensor, first: Record, second: Record) -> Record:
    """Return a record whose rows come from `first` where `mask` is true, else from `second`.

    Args:
        mask: bool; its dimensions are the leading ones of every field.
        first: a dataclass all of whose fields are tensors.
        second: another one of the same type and shapes.
    """
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(first):  # type: ignore[arg-type]
        mine: Tensor = getattr(first, field.name)
        fields[field.name] = torch.where(
            mask.reshape(*mask.shape, *([1] * (mine.ndim - mask.ndim))), mine, getattr(second, field.name)
        )
    return type(first)(**fields)
