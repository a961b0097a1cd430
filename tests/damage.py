"""An adversary with a seed: damages files, JSON and texts in every way that disks, tools and people do."""

import copy
import json
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SECONDS = 60  # after which a case counts as hanging, however busy the machine is

NASTY = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 1e308, -0.0, 0.5, float("nan"), float("inf")),
    *("", " ", "0", "-1", "1_0", "nan", "\0", "\ud800", "a\nb", "../../x", "/etc/passwd", "~", "é" * 300, "x" * 5000),
    *([], [[]], {}, {"": None}, [0] * 100, [[1, 0, 0, 0]] * 4, {"tensor": "x"}, {"dict": [["a", 1]]}),
]


class HangError(AssertionError):
    """A case did not end."""


@contextmanager
def ends() -> Iterator[None]:
    """Raise HangError in a block that does not end."""

    def hang(*_: object) -> None:
        raise HangError(f"no end after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    """Return other bytes: cut, with a hole, a flipped bit, bytes added, repeated or in another order or encoding."""
    start = draw.randrange(len(content) + 1)
    end = min(len(content), start + draw.choice([1, 2, 8, 64, len(content)]))
    some = draw.randbytes(draw.choice([1, 4, 50]))
    ways: list[Callable[[], bytes]] = [
        lambda: b"",
        lambda: content[:start],
        lambda: content[start:],
        lambda: content[:start] + content[end:],
        lambda: content[:start] + bytes(end - start) + content[end:],
        lambda: content[:start] + some + content[start:],
        lambda: content[:start] + some + content[start + len(some) :],
        lambda: content[:end] + content[start:],
        lambda: content[start:] + content[:start],
        lambda: b"\xff\xfe" + content.decode("latin-1").encode("utf-16-le"),
        lambda: b"\xef\xbb\xbf" + content,
        lambda: content.replace(b"\n", b"\r"),
        lambda: some * 100,
    ]
    return draw.choice(ways)()


def damaged_json(content: Any, draw: random.Random) -> Any:
    """Return a copy in which one value is nasty, missing, under another name, or in the place of another."""
    holder = {"": copy.deepcopy(content)}
    places = list(_places(holder))
    # Deep places are many: a level is drawn first, so that the outer ones get their share.
    depth = draw.choice(sorted({level for level, _, _ in places}))
    _, parent, key = draw.choice([place for place in places if place[0] == depth])
    way = draw.randrange(5)
    if way == 0 and parent is not holder:
        del parent[key]
    elif way == 1 and isinstance(parent, dict):
        parent[draw.choice(["x", "", "frame99", f"{key} "])] = parent.pop(key)
    elif way == 2:
        _, other, its = draw.choice(places)
        parent[key] = copy.deepcopy(other[its]) if other is not holder else None
    else:
        parent[key] = draw.choice(NASTY)
    return next(iter(holder.values()))


def damaged_text(content: Any, draw: random.Random) -> bytes:
    """Return the bytes of a JSON file that is damaged as JSON or as bytes."""
    if draw.random() < 0.6:
        content = damaged_json(content, draw)
        return json.dumps(content).encode()
    return damaged_bytes(json.dumps(content).encode(), draw)


def _places(tree: Any, level: int = 0) -> Iterator[tuple[int, Any, Any]]:
    """Yield (depth, container, key) of every value of nested containers."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield level, tree, key
        yield from _places(tree[key], level + 1)
