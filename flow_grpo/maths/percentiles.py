"""The percentiles by which metrics describe a distribution."""

from __future__ import annotations

from torch import Tensor

PERCENTS = (10, 50, 90)


def percentiles(prefix: str, values: Tensor) -> dict[str, float]:
    """Return the metrics `<prefix>10`, `<prefix>50` and `<prefix>90` of (n,) finite values, interpolated linearly."""
    return {f"{prefix}{percent}": float(values.quantile(percent / 100)) for percent in PERCENTS}
