"""A few entries are kept, the latest used."""

from __future__ import annotations

from collections import OrderedDict

from flow_grpo.runtime.lru import keep_latest


def test_the_oldest_goes_and_one_that_is_used_again_stays():
    kept: OrderedDict[str, int] = OrderedDict()
    for key in ("a", "b", "a", "c"):
        keep_latest(kept, key, ord(key), 2)
    assert list(kept.items()) == [("a", ord("a")), ("c", ord("c"))]
