"""Limits the lines a second that one source may put into a log; the rest are counted, and the count is logged.

For lines that others cause: a log that others can flood hides what matters and fills a disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable


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
