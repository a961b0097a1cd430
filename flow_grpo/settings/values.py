"""The types of knobs: what pydantic accepts for each, and how each is written on a command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, StrictBool, StrictFloat, StrictInt, StrictStr

MOST = 10**6  # of counts, factors and tolerances, so that their products are finite in fp32
MOST_FRAMES, MOST_PIXELS = 10_001, 16_384  # of a video, and of its sides
SIZE_UNIT = 8  # pixels: the finest codec (4x) times patch (2) in use; a coarser model checks its own multiple


def _must(holds: Callable[[Any], object], text: str) -> AfterValidator:
    """Return a validator that raises ValueError(text), "must be ..." or "must be ...; REMEDY", unless `holds`."""

    def validate(value: Any) -> Any:
        if not holds(value):
            raise ValueError(text)
        return value

    return AfterValidator(validate)


def _is_address(value: str) -> bool:
    try:
        url = urlsplit(value)
        port = url.port  # raises where it is not a number up to 65535
    except ValueError:
        return False
    plain = not url.query and not url.fragment and not re.search(r"[@,\s]", value)  # a password would be logged
    return url.scheme in ("http", "https") and bool(url.hostname) and port != 0 and plain and value.isascii()


def _is_bucket(text: str) -> bool:
    frames, *sides = parse_bucket(text)
    fine = frames % 4 == 1 and 1 < frames <= MOST_FRAMES
    return fine and all(0 < side <= MOST_PIXELS and side % SIZE_UNIT == 0 for side in sides)


def _is_place(value: str) -> bool:
    parts = value.encode(errors="replace").split(b"/")
    return not value.startswith("~") and max(map(len, parts)) <= 255 and sum(map(len, parts)) + len(parts) <= 4096


def _is_rising(numbers: tuple[int, ...]) -> bool:
    return bool(numbers) and list(numbers) == sorted(set(numbers))


def _compile(value: str) -> str:
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"must be a regular expression: {error}; correct it or leave the recipe's") from None
    return value


def parse_bucket(text: str) -> tuple[int, int, int]:
    """Return (frames, height, width) of "81x480x832"; ValueError for another form."""
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if match is None:
        raise ValueError("must be FRAMESxHEIGHTxWIDTH; pass for example 81x480x832,49x832x480")
    return int(match[1]), int(match[2]), int(match[3])


def parse_rule(text: str) -> tuple[str, bool, float]:
    """Return (metric, whether it must not fall below, bound) of "eval_change/rot_err_deg>2"; ValueError otherwise."""
    match = re.fullmatch(r"(\w+/[^<>\s]+)([<>])([-+.\de]+)", text)
    try:
        if match is not None:
            return match[1], match[2] == "<", float(match[3])
    except ValueError:
        pass
    raise ValueError("must be METRIC<BOUND or METRIC>BOUND; pass for example eval_change/target_view_psnr_db<-3")


# Strict types: True is not a number, and 8.0 is not a whole one.
Bool = StrictBool
Int = Annotated[StrictInt, _must(lambda value: abs(value) < 10**18, "must be a whole number of at most 18 digits")]
Float = StrictFloat  # takes whole numbers, too
Text = Annotated[
    StrictStr,
    _must(
        lambda value: not re.search("[\0\ud800-\udfff]", value),  # bytes that are no UTF-8 arrive as surrogates
        "must be a text in UTF-8 without NUL characters",
    ),
]
RunName = Annotated[
    Text,
    _must(
        lambda name: not name or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name),
        "must be at most 100 letters, digits, '.', '_' and '-', beginning with a letter or digit: it names one folder; "
        "pass --config.output_root for another place",
    ),
]
ServerName = Annotated[
    Text,
    _must(
        lambda name: re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,49}", name),
        "must be at most 50 letters, digits, '_' and '-', beginning with a letter or digit: files are named after it",
    ),
]
Address = Annotated[Text, _must(_is_address, "must be an address such as http://127.0.0.1:8000, without a password")]
Place = Annotated[
    Text,
    _must(
        _is_place,
        "must be a path of at most 4095 bytes, with names of at most 255; write your home folder out, ~ is for shells",
    ),
]
Split = Annotated[
    Place,
    _must(
        lambda value: not PurePath(value).is_absolute() and ".." not in PurePath(value).parts,
        "must be a folder below data.root; pass --config.data.root for another place",
    ),
]
Bucket = Annotated[
    Text,
    _must(
        _is_bucket,
        f"must have 4n+1 frames, from 5 to {MOST_FRAMES}, and sides that are multiples of {SIZE_UNIT} up to "
        f"{MOST_PIXELS}; pass for example 81x480x832",
    ),
]
Pattern = Annotated[Text, AfterValidator(_compile)]
Rule = Annotated[Text, AfterValidator(lambda value: parse_rule(value) and value)]
Frames = Annotated[
    Int,
    _must(
        lambda frames: frames % 4 == 1,
        "must be 4n+1: the codec keeps the first frame and packs every four that follow; pass for example 5, 49 or 81",
    ),
]
Trackers = Annotated[
    tuple[Literal["wandb", "tensorboard", "swanlab", "trackio"], ...],
    _must(lambda names: len(set(names)) == len(names), "must name each tracker once; drop the repetition"),
]
Steps = Annotated[tuple[Int, ...], _must(_is_rising, "must be at least one step, each once, in rising order")]
Weight = Annotated[
    Float,
    _must(
        lambda value: 0 <= value <= MOST,
        f"must lie in [0, {MOST:g}]: every reward is written so that more is better; 0 measures it without training",
    ),
]
Schedule = Annotated[
    tuple[tuple[Int, Weight], ...],  # (epoch, weight) points
    _must(
        lambda points: _is_rising([epoch for epoch, _ in points]) and points[0][0] >= 0,
        "must name epochs from 0 on, each once, in rising order; pass for example 0:0,50:1",
    ),
]
Gate = tuple[Text, Float]  # the reward that decides, and the least value at which a sample passes


def notation(kind: Any) -> str:
    """Return how values of a type (without validators) are written on a command line, such as "INTEGER,..."."""
    args, origin = get_args(kind), get_origin(kind)
    if origin is Literal:
        return "|".join(choice or "''" for choice in args)
    if type(None) in args:
        return f"{notation(args[0])}|none"
    if origin is dict:
        return f"NAME={notation(args[1])},..."
    if origin is tuple:
        return f"{notation(args[0])},..." if Ellipsis in args else ":".join(map(notation, args))
    return {bool: "true|false", int: "INTEGER", float: "NUMBER"}.get(kind, "TEXT")


def parse(kind: Any, text: str) -> Any:
    """Parse a command-line text as a value of a type (without validators); ValueError where it is none.

    Lists may have brackets and their items quotes, as Python writes them. A table is "name=value,name=value".
    """
    args = get_args(kind)
    if type(None) in args:
        return None if text in ("none", "None") else parse(args[0], text)
    if get_origin(kind) is dict:
        return {name: parse(args[1], entry) for name, entry in _entries(text)}
    if get_origin(kind) is tuple and Ellipsis in args:
        inner = text.strip().removeprefix("(").removesuffix(")").removeprefix("[").removesuffix("]")
        items = [item.strip().strip("'\"") for item in inner.split(",")]
        return tuple(parse(args[0], item) for item in items if item)
    if get_origin(kind) is tuple:
        first, _, second = text.rpartition(":")  # a reward's name may hold a colon
        return parse(args[0], first.strip()), parse(args[1], second)
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError
        return text.lower() == "true"
    return kind(text) if kind in (int, float) else text


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of "a=0:1,50:0.2,b=1:0": a part without "=" continues the value before it."""
    for entry in filter(None, re.split(r",(?=[^,]*=)", text)):
        name, equals, value = entry.partition("=")
        if not equals:
            raise ValueError
        yield name.strip(), value.strip()
