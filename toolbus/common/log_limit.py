"""Limits the lines a second that one source may put into a log; the rest are counted, and the count is logged.

For lines that others cause: a log that others can flood hides what matters and fills a disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from toolbus.common.newest import NewestCache

LINES_OF_ONE = 20  # a second, of one kind of line with one first value, which names the source
LINES_OF_KIND = 200  # a second, of one kind of line
MAX_KEYS = 4_096


class LogLimit:
    """Passes a limited number of lines in each second.

    Args:
        lines: in a second.
        on_withheld: called with how many lines did not pass, a second after the first of them.
        later: calls a function after so many seconds: `loop.call_later`.
        clock: seconds.
    """

    def __init__(
        self,
        lines: int,
        on_withheld: Callable[[int], object],
        later: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lines = lines
        self._on_withheld = on_withheld
        self._later = later
        self._clock = clock
        self._began = float("-inf")  # of the second that counts now
        self._passed = 0  # in it
        self._withheld = 0  # since `on_withheld` was called

    def __repr__(self) -> str:
        return f"<LogLimit withheld={self._withheld}>"

    def passes(self) -> bool:
        """Tells whether one more line may be logged now, and counts it."""
        now = self._clock()
        if now - self._began >= 1.0:
            self._began, self._passed = now, 0
        if self._passed < self._lines:
            self._passed += 1
            return True
        self._withheld += 1
        if self._withheld == 1:
            self._later(1.0, self._report)
        return False

    def _report(self) -> None:
        withheld, self._withheld = self._withheld, 0
        self._on_withheld(withheld)


class LineBudget(logging.Filter):
    """Passes a limited number of log lines a second of each kind, since peers cause them.

    A kind is a logger with a text; lines of one kind are also limited by their first value. The next line of the kind
    says how many were left out. Lines below INFO always pass: who asks for them wants all.

    Args:
        names: of the loggers whose lines are limited, with those below them.
        clock: seconds.
    """

    def __init__(self, names: tuple[str, ...], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._names = names
        self._clock = clock
        # (second, lines in it): by kind, and by kind and first value
        self._of_kind: NewestCache[tuple[object, ...], list[float]] = NewestCache(MAX_KEYS)
        self._of_one: NewestCache[tuple[object, ...], list[float]] = NewestCache(MAX_KEYS)
        self._withheld: NewestCache[tuple[object, ...], int] = NewestCache(MAX_KEYS)  # by kind

    def filter(self, record: logging.LogRecord) -> bool:
        """Tells whether a line passes, and counts it."""
        if record.levelno < logging.INFO or not record.name.startswith(self._names):
            return True
        kind = (record.name, record.msg)
        first = record.args[0] if isinstance(record.args, tuple) and record.args else ""
        now = self._clock() // 1
        passes = _takes(self._of_one, (*kind, str(first)), LINES_OF_ONE, now)
        if not (passes and _takes(self._of_kind, kind, LINES_OF_KIND, now)):
            self._withheld[kind] = self._withheld.get(kind, 0) + 1
            return False
        if withheld := self._withheld.pop(kind, 0):
            record.msg, record.args = f"{record.getMessage()} ({withheld} lines of this kind were left out)", ()
        return True


def _takes(
    counts: NewestCache[tuple[object, ...], list[float]], key: tuple[object, ...], limit: int, now: float
) -> bool:
    count = counts.get(key)
    if count is None or count[0] != now:
        counts[key] = count = [now, 0]
    count[1] += 1
    return count[1] <= limit
