"""Parameters of which `make test` takes some and `make test-slow` the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def some(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the parameters for `parametrize`: all but the kept ones are slow."""
    values = list(values)
    assert kept and all(value in values for value in kept), kept
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]
