"""How a setting that cannot work is refused."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that cannot work: field, value, bound and way out in one line."""


def refusal(path: str, value: object, bound: str, way_out: str) -> ConfigError:
    """Return the error to raise for a knob.

    Args:
        path: of the knob, dotted.
        value: what it was set to.
        bound: completes the sentence "got VALUE, ...".
        way_out: what to do instead.
    """
    return ConfigError(f"config.{path}: got {value!r}, {bound}; {way_out}")
