"""Limits the rate of a model's calls by a sliding window: a realtime conversation has no rounds to count."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from toolbus.errors import Code, SetupError, Stage
from toolbus.tool import CallError, Result

# Above this rate a model calls tools instead of talking to its user.
WINDOW_CALLS = 4
WINDOW_SECONDS = 15.0


class CallRateLimit:
    """Counts the calls of the last seconds. A refused call does not count, so the limit always ends.

    Raises:
        SetupError: from the constructor, if a limit is not above 0.
    """

    def __init__(self, calls: int, seconds: float, clock: Callable[[], float]) -> None:
        for label, value in (("window_calls", calls), ("window_seconds", seconds)):
            if not value > 0:  # NaN is refused too
                raise SetupError(f"{label} is {value!r}: give it a number above 0")
        self._calls = calls
        self._seconds = seconds
        self._clock = clock
        self._made: deque[float] = deque()  # when the calls of the window were made, oldest first

    def refusal(self, name: str) -> Result | None:
        """Returns the error that replaces a call's result; None if the call may be made, which then counts.

        Args:
            name: of the tool, as the model knows it.
        """
        now = self._clock()
        while self._made and now - self._made[0] >= self._seconds:
            self._made.popleft()
        if len(self._made) < self._calls:
            self._made.append(now)
            return None
        wait = self._made[0] + self._seconds - now
        error = CallError(
            Code.OVERLOADED,
            f"{name} was not run: a live conversation may make {self._calls} tool calls in {self._seconds:g} seconds, "
            f"and the next call is possible in {math.ceil(wait)} seconds. Call no tool until then, also not with other "
            "arguments: tell the user what you already know.",
            Stage.NOT_DISPATCHED,
            limit=("window_calls", float(self._calls)),
            retry_after_seconds=wait,
        )
        return Result(is_error=True, error=error)
