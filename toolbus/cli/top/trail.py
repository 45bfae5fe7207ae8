"""Remembers how a count grew: its rate over the last seconds, and its course over the last minute."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

WINDOW = 5.0  # seconds: shorter, and two calls a minute would look like a burst
STEP = 4.0  # seconds of one bar of a course
BARS = 15  # of a course: a minute
_APART = 1.2  # seconds between three marks at least: a digest comes every 0.5 s, and 1,000 tools have a trail each


class Trail:
    """The counts of the last minute, each with its time (seconds since the epoch).

    Args:
        at: the time of the first known count; nothing is known of what was before.
    """

    __slots__ = ("_marks",)

    def __init__(self, at: float, count: int) -> None:
        self._marks: deque[tuple[float, int]] = deque(((at, count),))  # times rise; the count holds until the next

    def __len__(self) -> int:
        """How many counts are remembered."""
        return len(self._marks)

    def add(self, at: float, count: int) -> None:
        """Notes what the count is at a time."""
        marks = self._marks
        if len(marks) > 1 and marks[-2][0] > at - _APART:
            marks.pop()
        marks.append((at, count))
        while len(marks) > 2 and marks[1][0] < at - STEP * (BARS + 1):
            marks.popleft()

    def rate(self, now: float) -> float | None:
        """Returns how much a second the count grew lately; None where only one moment is known."""
        first, newest = self._marks[0][0], self._marks[-1][1]
        since = max(first, now - WINDOW)
        if self._marks[-1][0] <= since:
            return 0.0 if now > since else None
        return (newest - self._count_at(since)) / (now - since) if now > since else None

    def course(self, now: float) -> list[float]:
        """Returns how much the count grew in each step of the last minute, the oldest first."""
        end = now // STEP * STEP  # whole steps, so that a bar stays what it is while it moves
        first = self._marks[0][0]
        edges = [self._count_at(max(first, end - STEP * number)) for number in range(BARS, -1, -1)]
        return [float(after - before) for before, after in pairwise(edges)]

    def _count_at(self, at: float) -> int:
        for time, count in reversed(self._marks):
            if time <= at:
                return count
        return self._marks[0][1]
