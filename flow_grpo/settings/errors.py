"""How a setting that cannot work is refused."""

from __future__ import annotations

import re


class ConfigError(ValueError):
    """A setting that cannot work: field, value, bound and way out in one line, secrets of addresses starred."""

    def __init__(self, text: str) -> None:
        # Before the host stand a name and a password, behind ? and # there may be tokens.
        text = re.sub(r"\w+://[^\s'\"]*@|[^\s'\"=]*@", "***@", text)
        text = " ".join(text.splitlines())
        super().__init__(re.sub(r"(\w+://[^\s'\"?#]*)[?#][^\s'\"]*", r"\1?***", text))


def refusal(path: str, value: object, text: str) -> ConfigError:
    """Return the error to raise for the value of a knob, given by its dotted path; `text` is "BOUND; WAY OUT"."""
    return ConfigError(f"config.{path}: got {value!r:.200}, {text}")
