"""What a knob's value may look like, written on a command line or in a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from flow_grpo.settings.schema import Gate, Schedule


@dataclasses.dataclass(frozen=True)
class Kind:
    """The values of one type of knob.

    Attributes:
        meaning: completes the sentence "must be ...".
        example: text as on a command line.
        parse: command-line text -> value; raises ValueError.
        convert: recipe value -> value; raises ValueError.
    """

    meaning: str
    example: str
    parse: Callable[[str], Any]
    convert: Callable[[Any], Any]


def _exactly(kind: type) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if type(value) is not kind:  # not isinstance: True is no number of steps
            raise ValueError
        return value

    return convert


def _to_int(value: Any) -> int:
    number: int = _exactly(int)(value)
    if abs(number) >= 10**18:  # more than any counter holds: arithmetic with floats and texts of it would fail
        raise ValueError
    return number


def _to_text(value: Any) -> str:
    text: str = _exactly(str)(value)
    text.encode()  # a word of the command line that is not UTF-8 comes as half characters: a UnicodeEncodeError
    if "\0" in text:
        raise ValueError
    return text


def _to_float(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError
    return float(value)


def _or_none(convert: Callable[[Any], float]) -> Callable[[Any], float | None]:
    return lambda value: None if value in (None, "none", "None") else convert(value)


def _to_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def _to_tuple(convert: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def convert_all(value: Any) -> tuple[Any, ...]:
        if type(value) not in (tuple, list):
            raise ValueError
        return tuple(convert(item) for item in value)

    return convert_all


def _split(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Parse "1,2,3", with or without brackets round it; nothing between the brackets is the empty tuple."""

    def parse_all(text: str) -> tuple[Any, ...]:
        inner = text.strip().removeprefix("(").removesuffix(")").removeprefix("[").removesuffix("]")
        items = [item.strip().strip("'\"") for item in inner.split(",")]
        return tuple(parse(item) for item in items if item)

    return parse_all


def _parse_weights(text: str) -> dict[str, float]:
    """Parse "target_view=1,source_match=0.3"."""
    pairs = [item.partition("=") for item in text.split(",")]
    return {name.strip(): float(weight) for name, _, weight in pairs}


def _to_addresses(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(_is_address(address) for address in value.values()):
        raise ValueError
    return {_to_text(name): address for name, address in value.items()}


def _is_address(value: Any) -> bool:
    if type(value) is not str:
        return False
    url = urlsplit(value)  # raises ValueError itself, as does a port that is none
    # A name and password before the host would end in logs.
    plain = "@" not in value and not url.query and not url.fragment and value.isascii() and value.isprintable()
    return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0 and plain


def _parse_addresses(text: str) -> dict[str, str]:
    """Parse "hpsv3=http://127.0.0.1:8000,clip=http://127.0.0.1:8001"; nothing at all is the empty table."""
    pairs = [item.partition("=") for item in text.split(",") if item]
    return {name.strip(): address.strip() for name, _, address in pairs}


def _parse_schedule(text: str) -> Schedule:
    """Parse "0:0,50:1", epochs with their weights."""
    pairs = [item.partition(":") for item in text.split(",")]
    return tuple((int(epoch), float(weight)) for epoch, _, weight in pairs)


def _to_schedule(value: Any) -> Schedule:
    points = [_to_tuple(lambda item: item)(point) for point in _to_tuple(lambda item: item)(value)]
    if not points or any(len(point) != 2 for point in points):
        raise ValueError
    return tuple((_to_int(epoch), _to_float(weight)) for epoch, weight in points)


def _parse_schedules(text: str) -> dict[str, Schedule]:
    """Parse "target_view=1:1,50:0.2,motion_mag=0:0,50:1": a name, its points, the next name; nothing is no schedule."""
    points: dict[str, list[str]] = {}
    for item in filter(None, text.split(",")):
        head, equals, tail = item.partition("=")
        if equals:
            name = head.strip()
            points[name] = []
        elif not points:
            raise ValueError
        points[name].append(tail if equals else item)
    return {name: _parse_schedule(",".join(own)) for name, own in points.items()}


def _parse_gate(text: str) -> Gate:
    """Parse "source_match:-0.05"; the name may hold colons itself."""
    name, _, threshold = text.rpartition(":")
    return name.strip(), float(threshold)


def _to_gate(value: Any) -> Gate:
    pair = _to_tuple(lambda item: item)(value)
    if len(pair) != 2:
        raise ValueError
    return _to_text(pair[0]), _to_float(pair[1])


def _parse_gates(text: str) -> dict[str, Gate]:
    """Parse "pose_rot=source_match:-0.05,pose_trans=source_match:-0.05"; nothing at all is no gate."""
    pairs = [item.partition("=") for item in text.split(",") if item]
    return {name.strip(): _parse_gate(gate) for name, _, gate in pairs}


def _to_table(convert: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    def convert_all(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError
        return {_to_text(name): convert(entry) for name, entry in value.items()}

    return convert_all


KINDS: dict[Any, Kind] = {
    bool: Kind("true or false", "true", _to_bool, _exactly(bool)),
    int: Kind("a whole number of at most 18 digits", "8", int, _to_int),
    float: Kind("a number", "0.3", float, _to_float),
    float | None: Kind("a number or none", "0.45", _or_none(float), _or_none(_to_float)),
    str: Kind("a text in UTF-8 without NUL characters", "name", _to_text, _to_text),
    tuple[int, ...]: Kind("whole numbers separated by commas", "1,2,3", _split(int), _to_tuple(_to_int)),
    tuple[str, ...]: Kind("names separated by commas", "first,second", _split(_to_text), _to_tuple(_to_text)),
    dict[str, str]: Kind(
        "names with addresses http://HOST:PORT, without a password",
        "hpsv3=http://127.0.0.1:8000",
        _parse_addresses,
        _to_addresses,
    ),
    dict[str, float]: Kind(
        "names with weights", "target_view=1,source_match=0.3", _parse_weights, _to_table(_to_float)
    ),
    Schedule: Kind("epochs with weights", "0:0,50:1", _parse_schedule, _to_schedule),
    dict[str, Schedule]: Kind(
        "names with epochs and weights",
        "target_view=0:1,50:0.2,source_match=0:0,50:1",
        _parse_schedules,
        _to_table(_to_schedule),
    ),
    Gate: Kind("a reward's name with its least value", "source_match:-0.05", _parse_gate, _to_gate),
    dict[str, Gate]: Kind(
        "names with the reward that decides and its least value",
        "pose_rot=source_match:-0.05,pose_trans=source_match:-0.05",
        _parse_gates,
        _to_table(_to_gate),
    ),
}
