"""What is kept of earlier batches, for the copies of a condition that come later: a few entries, the latest used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def keep_latest(kept: OrderedDict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Add an entry, or make it the latest, and let the oldest go until `most` are left."""
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
