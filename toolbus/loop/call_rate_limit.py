"""Bounds how many calls a model makes within a sliding length of time: one that speaks has no rounds to count."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from toolbus.errors import Code, SetupError, Stage
from toolbus.tool import CallError, Result

# More than this is a model that talks to its tools instead of its user.
WINDOW_CALLS = 4
WINDOW_SECONDS = 15.0


class CallWindow:
    """Counts the calls that are made. What is refused does not count, so a window frees itself.

    Raises:
        SetupError: from the constructor, where a limit is not above 0.
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
        """Returns what the model reads instead of a call's result; None where it may be made, which then counts.

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
            f"{name} was not run: a live conversation has {self._calls} tool calls in {self._seconds:g} seconds, and "
            f"they are used up for the next {math.ceil(wait)}. Call no more tools now, also not with other arguments: "
            "tell the user what you know already.",
            Stage.NOT_DISPATCHED,
            limit=("window_calls", float(self._calls)),
            retry_after_seconds=wait,
        )
        return Result(is_error=True, error=error)
