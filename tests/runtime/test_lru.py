"""The LRU cache keeps what was used last, within its limit."""

import pickle

import pytest

from flow_grpo.runtime.lru import LruCache


def test_the_least_recently_used_entry_is_dropped():
    cache: LruCache[str, int] = LruCache(2)
    cache["a"], cache["b"] = 1, 2
    assert cache["a"] == 1
    cache["c"] = 3
    assert "a" in cache and "b" not in cache and "c" in cache
    with pytest.raises(KeyError):
        cache["b"]


def test_sizes_count_against_the_limit_and_a_replaced_value_counts_once():
    cache: LruCache[str, str] = LruCache(10, size_of=len)

    def kept() -> list[str]:
        return [key for key in ("a", "b", "c", "large") if key in cache]

    for _ in range(3):
        cache["a"] = "12345"
    cache["b"] = "12345"
    assert kept() == ["a", "b"]
    cache["c"] = "1"
    assert kept() == ["b", "c"]
    cache["large"] = "x" * 11
    assert kept() == []
    cache["b"] = "x" * 10
    assert kept() == ["b"]


def test_a_value_is_made_once_while_it_is_kept():
    made: list[str] = []
    cache: LruCache[str, int] = LruCache(1)
    for key in ("a", "a", "b", "a"):
        assert cache.get_or_make(key, lambda key=key: made.append(key) or ord(key)) == ord(key)
    assert made == ["a", "b", "a"]
    assert pickle.loads(pickle.dumps(cache)).get_or_make("a", lambda: pytest.fail("was not kept")) == ord("a")
