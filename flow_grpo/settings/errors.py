"""The error for a setting that cannot work."""

from __future__ import annotations

import re


class ConfigError(ValueError):
    """A setting that cannot work: field, value, bound and remedy in one line; secrets in URLs are starred."""

    def __init__(self, text: str) -> None:
        # A URL may hold user and password before the host, and tokens behind ? and #.
        text = re.sub(r"\w+://[^\s'\"]*@|[^\s'\"=]*@", "***@", text)
        text = " ".join(text.splitlines())
        super().__init__(re.sub(r"(\w+://[^\s'\"?#]*)[?#][^\s'\"]*", r"\1?***", text))


def refusal(path: str, value: object, text: str) -> ConfigError:
    """Return the error to raise for the value of a knob, given by its dotted path; `text` is "BOUND; REMEDY"."""
    return ConfigError(f"config.{path}: got {value!r:.200}, {text}")
