"""Writes values for people: durations, rates, sizes, times of day, and rows of values as a sparkline."""

from __future__ import annotations

import time
from collections.abc import Iterable

UNKNOWN = "–"  # what the bus did not say
_BARS = "▁▂▃▄▅▆▇█"
_SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_LONG = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))


def duration(seconds: float | None) -> str:
    """Returns a length of time in two to three digits: `0.4 ms`, `12 ms`, `3.2 s`, `4 min 5 s`, `2 d 3 h`."""
    if seconds is None:
        return UNKNOWN
    if seconds < 0.0995:
        milliseconds = max(0.0, seconds) * 1_000
        return f"{milliseconds:.1f} ms" if milliseconds < 9.95 else f"{milliseconds:.0f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1_000:.0f} ms"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    whole = round(seconds)
    for unit, name, smaller, smaller_name in _LONG:
        if whole >= unit:
            rest = whole % unit // smaller
            return f"{whole // unit} {name} {rest} {smaller_name}" if rest else f"{whole // unit} {name}"
    return f"{whole} s"


def rate(value: float | None) -> str:
    """Returns a number per second: `0`, `0.2`, `7.5`, `240`, `12,300`."""
    if value is None:
        return UNKNOWN
    if value < 0.05:
        return "0"
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def count(value: float | None) -> str:
    """Returns a whole number, its thousands apart."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def size(value: float | None) -> str:
    """Returns a number of bytes."""
    if value is None:
        return UNKNOWN
    for unit, name in _SIZES:
        if value >= unit:
            return f"{value / unit:.1f} {name}"
    return f"{value:.0f} B"


def clock(at: float | None) -> str:
    """Returns the time of day of a moment (seconds since the epoch), where this program runs."""
    return UNKNOWN if at is None else time.strftime("%H:%M:%S", time.localtime(at))


def sparkline(values: Iterable[float], width: int) -> str:
    """Draws the last values as bars, the highest a full one; a value above 0 is never as low as 0."""
    shown = list(values)[-width:] if width else []
    highest = max(shown, default=0.0)
    if highest <= 0:
        return (_BARS[0] * len(shown)).rjust(width)
    top = len(_BARS) - 1
    return "".join(_BARS[max(1, round(each / highest * top)) if each > 0 else 0] for each in shown).rjust(width)
