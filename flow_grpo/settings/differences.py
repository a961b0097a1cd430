"""Which knobs differ between configurations, as a start prints it and a report shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

OF_EACH_START = ("resume", "run_name", "output_root", "dry_run")  # knobs that are never taken from an earlier start


def as_written(values: Mapping[str, Any], *, by_entry: bool = False) -> dict[str, str]:
    """Return knob -> value as JSON, without knobs of a single start.

    Args:
        values: dotted path -> value, such as `knob_values` returns.
        by_entry: split tables into entries, such as `reward.weights.room_rot`.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name not in OF_EACH_START:
            split = by_entry and isinstance(value, dict)
            found |= {f"{name}.{key}": entry for key, entry in value.items()} if split else {name: value}
    return {name: json.dumps(value, sort_keys=True) for name, value in found.items()}


def differences(*configurations: Mapping[str, str]) -> dict[str, list[str | None]]:
    """Return knob -> its value in each configuration, None where it has none, of the knobs that differ."""
    names = dict.fromkeys(name for one in configurations for name in one)
    found = {name: [one.get(name) for one in configurations] for name in names}
    return {name: values for name, values in found.items() if len(set(values)) > 1}
