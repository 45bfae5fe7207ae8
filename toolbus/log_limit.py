"""Limits how many lines a second one source may put into a log; what is beyond is counted, and logged once a second.

A part that logs what others cause asks it first: a log that others can flood hides what matters and fills a disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class LogLimit:
    """Lets so many lines pass in each second.

    Args:
        lines: in a second.
        say_more: takes how many lines did not pass, up to a second after the first of them.
        later: calls a function after so many seconds: `loop.call_later`.
        clock: seconds.
    """

    def __init__(
        self,
        lines: int,
        say_more: Callable[[int], object],
        later: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lines = lines
        self._say_more = say_more
        self._later = later
        self._clock = clock
        self._began = float("-inf")  # of the second that counts now
        self._passed = 0  # in it
        self._withheld = 0  # since `say_more`

    def __repr__(self) -> str:
        return f"<LogLimit withheld={self._withheld}>"

    def passes(self) -> bool:
        """Asks whether one more line may be logged now."""
        now = self._clock()
        if now - self._began >= 1.0:
            self._began, self._passed = now, 0
        if self._passed < self._lines:
            self._passed += 1
            return True
        self._withheld += 1
        if self._withheld == 1:
            self._later(1.0, self._tell)
        return False

    def _tell(self) -> None:
        withheld, self._withheld = self._withheld, 0
        self._say_more(withheld)
