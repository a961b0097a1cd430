"""The percentiles by which metrics describe a distribution."""

from __future__ import annotations

from torch import Tensor

PERCENTS = (10, 50, 90)


def percentiles(name: str, values: Tensor) -> dict[str, float]:
    """Return the metrics `<name>_p10`, `<name>_p50` and `<name>_p90` of (n,) finite values, interpolated linearly."""
    return {f"{name}_p{percent}": float(values.quantile(percent / 100)) for percent in PERCENTS}
