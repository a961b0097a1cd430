"""What a checkpoint's state must look like: checked as a whole before any of it is restored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, PlainValidator, StrictFloat, StrictInt, StrictStr, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import NotRequired, TypedDict


def _floats(value: object) -> object:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"must be a tensor of floats, got {kind}")
    return value


def _random_state(value: object) -> object:
    if not isinstance(value, Tensor):
        raise ValueError(f"must be a tensor, got {type(value).__name__}")
    try:
        torch.Generator().set_state(value)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"must be a state of torch's generator: {error}") from None
    return value


Weights = dict[StrictStr, Annotated[Any, PlainValidator(_floats)]]
Count = Annotated[StrictInt, Field(ge=0)]
Numbers = dict[StrictStr, StrictFloat]
Moment = Annotated[Any, PlainValidator(lambda value: _floats(value) if isinstance(value, Tensor) else value)]
Moments = dict[Count, dict[StrictStr, Moment]]


class Learned(TypedDict):
    """What an optimizer step changes."""

    trained: Weights
    ema: Weights | None
    moments: Moments


class Random(TypedDict):
    """The random states of a rank; a device's own is checked by the device."""

    cpu: Annotated[Any, PlainValidator(_random_state)]


class Position(TypedDict):
    """Numbers of the sampler's state; the sampler compares the others."""

    next_step: Count
    num_replicas: Count
    batch_size: Count


class Tail(TypedDict):
    """What a run knows of its short tail, see `TailRecord`."""

    fingerprint: StrictStr
    forwards: StrictFloat
    values: Weights


class Shared(TypedDict):
    """What is the same on every rank; what is not required was added later."""

    finished: Count
    sampler: Position
    train_seconds: Annotated[StrictFloat, Field(ge=0)]
    shortages: list[Count]
    before: Numbers | None
    before_rows: NotRequired[list[dict[StrictStr, StrictStr | Numbers]] | None]
    floor: NotRequired[Numbers]
    measured_on: NotRequired[dict[StrictStr, StrictStr | StrictFloat | StrictInt]]
    fixed: NotRequired[Numbers]
    fixed_on: NotRequired[StrictStr]
    tail: NotRequired[Tail]
    broken: NotRequired[StrictStr]
    forward_equivalents: NotRequired[StrictFloat]
    bad_steps: NotRequired[list[StrictStr]]
    grad_norms: NotRequired[list[StrictFloat]]
    steps_taken: NotRequired[Count]


class OfRank(TypedDict):
    """What every rank has of its own."""

    random: Random


def check_saved(path: Path, kind: type[Any], state: Mapping[str, Any]) -> None:
    """Check a part of the state of the checkpoint at `path`, which is to be a `Shared`, `OfRank` or `Learned`.

    Entries that `kind` does not name are of a later version, and ignored.

    Raises:
        ValueError: an entry is missing, or its value is of another type or out of bounds.
    """
    try:
        TypeAdapter(kind).validate_python(state)
    except ValidationError as error:
        first = error.errors()[0]
        place, text = "/".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        got = "" if first["type"] in ("missing", "value_error") else f", got {first['input']!r:.60}"
        raise ValueError(
            f"{path} holds no state of this program: {place}: {text}{got}; resume from another checkpoint"
        ) from None
