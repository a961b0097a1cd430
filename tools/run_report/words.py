"""Numbers as a reader wants them: few digits, plain decimals, a true minus sign, times and intervals in words."""

from __future__ import annotations

import math
import re

NOTHING, MINUS, GAP = "–", "−", "\u00a0"  # where no line ends: between thousands, before the end of an interval
PLAIN = (-5, 8)  # powers of ten between which a number is written without an exponent
MOST_DIGITS = 5
# With a sign, a point or an exponent; other digits may be a name's.
BY_MACHINE = re.compile(r"(?<![\w.+-])(?=[+-]|\d+(?:\.|e))([+-]?)(\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\w.]*\w)")


def number(
    value: float | None, digits: int = 3, *, differ: float = 0.0, sign: bool = False, zeros: bool = False
) -> str:
    """Return a number as every part of the page writes it, a dash for None and NaN.

    Of more `digits` before the decimal point all are written. `differ` is how far values that stand beside it are away:
    digits are added until that is seen, and zeros at the end kept, as with `zeros`. With `sign`, + is written too.
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    if not value:
        return "0"
    if differ and math.isfinite(differ):
        digits, zeros = max(digits, min(MOST_DIGITS, _power(value) - _power(differ) + 1)), True
    power = _power(value, digits)
    if not PLAIN[0] <= power <= PLAIN[1]:
        first = float(f"{value:.{digits - 1}e}".partition("e")[0])
        mantissa = _decimals(first, digits - 1, sign, zeros)
        return f"{mantissa}e{power}".replace("-", MINUS)
    return _decimals(value, max(0, digits - 1 - power), sign, zeros)


def pair(before: float | None, after: float | None) -> tuple[str, str]:
    """Return two numbers with as many digits as show how far they are apart."""
    differ = math.nan if before is None or after is None else after - before
    return number(before, differ=differ), number(after, differ=differ)


def signed(value: float, digits: int = 3) -> str:
    """Return a number with its sign and all of those digits, a dash for NaN."""
    return number(value, digits, sign=True, zeros=True)


def span(low: float, high: float) -> str:
    """Return an interval, both ends with the decimals that the larger one needs; a dash where there is none."""
    return f" to{GAP}".join(changed(end, low, high) for end in (low, high)) if math.isfinite(low) else NOTHING


def changed(value: float, low: float, high: float) -> str:
    """Return a change with the decimals of its interval; with digits of its own where it has none."""
    largest = max(abs(low), abs(high)) if math.isfinite(low) else 0.0
    if not largest or not math.isfinite(value) or _power(largest) < PLAIN[0]:
        return signed(value)
    return _decimals(value, max(0, 2 - _power(largest)), sign=True, zeros=True)


def tidy(text: str) -> str:
    """Return a sentence that another part of the program wrote, with its numbers as this page writes them."""

    def written(found: re.Match[str]) -> str:
        plus, size = found.groups()
        return number(float(plus + size), 4, sign=plus == "+")

    return BY_MACHINE.sub(written, text)


def percent(share: float) -> str:
    """Return a share in percent, a dash for NaN."""
    if 0 < share < 1e-4:
        return "< 0.01 %"
    return f"{number(100 * share, 2)} %" if math.isfinite(share) else NOTHING


def duration(seconds: float) -> str:
    """Return seconds as "5.8 ms", "12.3 s", "6 min 05 s" or "3 h 20 min"."""
    if not math.isfinite(seconds):
        return NOTHING
    if 0 < seconds < 0.1:
        return f"{number(1000 * seconds, 2)} ms"
    if seconds < 100:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _power(value: float, digits: int = 16) -> int:
    return int(f"{value:.{digits - 1}e}".partition("e")[2])


def _decimals(value: float, decimals: int, sign: bool, zeros: bool) -> str:
    """Return a number with that many decimals; what rounds to nothing is 0 without a sign."""
    grouped = "," if abs(value) >= 1e4 else ""
    text = f"{value:{'+' if sign else ''}{grouped}.{decimals}f}"
    if "." in text and not zeros:
        text = text.rstrip("0").rstrip(".")
    return text.replace(",", GAP).replace("-", MINUS) if text.strip("+-0.") else "0"
