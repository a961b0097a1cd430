"""An LRU cache with a limit in entries, bytes or any other size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def _one(_: object) -> int:
    return 1  # a function of the module, so that a cache can be pickled


class LruCache(Generic[Key, Value]):
    """Keeps the most recently used values; not thread-safe.

    Args:
        limit: on the sum of the sizes of all values. A single value above it is not kept.
        size_of: size of a value; the default counts entries.
    """

    def __init__(self, limit: int, size_of: Callable[[Value], int] = _one) -> None:
        self._limit = limit
        self._size_of = size_of
        self._size = 0
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def __getitem__(self, key: Key) -> Value:
        """Look up a value and mark it as the most recently used; KeyError if it is not kept."""
        self._values.move_to_end(key)
        return self._values[key]

    def __setitem__(self, key: Key, value: Value) -> None:
        """Add or replace a value, then drop the least recently used ones until the limit holds."""
        if key in self._values:
            self._size -= self._size_of(self._values.pop(key))
        self._values[key] = value
        self._size += self._size_of(value)
        while self._size > self._limit:
            self._size -= self._size_of(self._values.popitem(last=False)[1])

    def get_or_make(self, key: Key, make: Callable[[], Value]) -> Value:
        """Look up a value; `make` and keep it if there is none."""
        if key not in self._values:
            value = make()
            self[key] = value
            return value
        return self[key]
