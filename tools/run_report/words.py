"""Numbers as a reader wants them: few digits, a true minus sign, times and intervals in words."""

from __future__ import annotations

import math

NOTHING, MINUS = "–", "−"


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with that many significant digits, a dash for None and NaN."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value and abs(value) >= 10**digits:
        return f"{value:,.0f}".replace("-", MINUS).replace(",", " ")
    return f"{value:.{digits}g}".replace("-", MINUS)


def signed(value: float, digits: int = 3) -> str:
    """Return a number with its sign and all of those digits, a dash for NaN."""
    if not value or not math.isfinite(value) or abs(value) >= 10**digits:
        return ("+" if value > 0 else "") + number(value, digits)
    return f"{value:+#.{digits}g}".rstrip(".").replace("-", MINUS)


def span(low: float, high: float) -> str:
    """Return an interval, both ends with the decimals that the larger one needs; a dash where there is none."""
    if not math.isfinite(low):
        return NOTHING
    largest = max(abs(low), abs(high))
    if not largest:
        return "0 to 0"
    decimals = max(0, 2 - math.floor(math.log10(largest)))
    return " to ".join(f"{end:+.{decimals}f}".replace("-", MINUS) for end in (low, high))


def percent(share: float) -> str:
    """Return a share in percent, a dash for NaN."""
    return f"{number(100 * share, 2)} %" if math.isfinite(share) else NOTHING


def duration(seconds: float) -> str:
    """Return seconds as "5.8 ms", "12.3 s", "6 min 05 s" or "3 h 20 min"."""
    if not math.isfinite(seconds):
        return NOTHING
    if 0 < seconds < 0.1:
        return f"{number(1000 * seconds, 2)} ms"
    if seconds < 100:
        return f"{number(seconds, 3)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
