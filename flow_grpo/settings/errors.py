"""The errors that end a run in one line: settings that cannot work, and training that cannot go on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any


class ConfigError(ValueError):
    """A setting that cannot work: field, value, bound and remedy in one line; secrets in URLs are starred."""

    def __init__(self, text: str) -> None:
        super().__init__(re.sub(r"[^\s'\"]+", _starred, " ".join(text.splitlines())))


class RunStoppedError(ValueError):
    """Training cannot go on; raised on every rank with the same message. Its kinds say what the checkpoint holds."""

    rewind = True  # a resumed run samples the epoch in progress again
    save = True  # the finished epochs are saved


def all_of(checks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return what the checks return; ConfigError that says at once, in one line, what several of them refuse."""
    found, refused = [], []
    for check in checks:
        try:
            found.append(check())
        except ValueError as error:
            refused.append(error)
    if len(refused) > 1:
        raise ConfigError("; AND ".join(map(str, refused))) from refused[0]
    if refused:
        raise refused[0]
    return found


def _starred(word: re.Match[str]) -> str:
    """Star what a URL holds before the @ of its host (user, password) and behind ? and # (tokens); linear in time."""
    text = word[0]
    scheme, at = text.find("://"), text.rfind("@")
    if at >= 0:
        begin = scheme if 0 <= scheme < at else text.find("@")
        text = f"{text[: text.rfind('=', 0, begin) + 1]}***{text[at:]}"
    if scheme < 0:
        return text
    host = max(text.find("://"), text.find("@"))
    cut = min((place for mark in "?#" if (place := text.find(mark, host)) >= 0), default=0)
    return f"{text[:cut]}?***" if cut else text


def refusal(path: str, value: object, text: str) -> ConfigError:
    """Return the error to raise for the value of a knob, given by its dotted path; `text` is "BOUND; REMEDY"."""
    return ConfigError(f"config.{path}: got {value!r:.200}, {text}")
