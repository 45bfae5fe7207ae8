"""Holds the whole state of a bus as its digests tell it: each digest brings what changed, a full one everything.

Knows neither the connection nor the screen. Texts are as the bus sent them: what shows them cleans them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

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


DIGEST_TOOL = "toolbus:digest"  # is not among the tools shown: this program itself calls it, twice a second
MAX_CALLS = 1_000  # ended calls that are remembered, as many as the bus has records
MAX_RATES = 60  # values of the rate of the whole bus
MAX_FAILURES = 500  # pairs of tool and outcome that failed calls are counted for

Row: TypeAlias = dict[str, Any]
ToolKey: TypeAlias = tuple[str, str]
"""Source and name of a tool."""
FailureKey: TypeAlias = tuple[str, str, str]
"""Source, name and outcome of calls that failed in the same way."""

_LISTS = ("tools", "calls", "running", "sessions", "closed", "sources", "gone")  # all other fields are one value


@dataclass(slots=True)
class ToolState:
    """What is known of one tool. Times are seconds since the epoch, durations seconds; None is unknown."""

    source: str
    name: str
    calls: int | None
    failed: int | None
    p50: float | None
    p95: float | None
    last_ended: float | None
    trail: Trail

    @property
    def key(self) -> ToolKey:
        return self.source, self.name


@dataclass(slots=True)
class FailureState:
    """Calls of one tool that failed in the same way, since this program began to read.

    Attributes:
        newest: the record of the newest one.
    """

    count: int
    newest: Row


class BusState:
    """The state of a bus, as the digests read so far tell it.

    Attributes:
        number: of the newest digest; -1 before the first one.
        bus: its fields that are one value, by name; a field that the bus left out is missing.
        tools: by source and name, in the order in which they came.
        sessions, sources: by id and by name.
        running: calls that run, the oldest first, 100 at most.
        calls: ended calls by their number, the oldest first.
        failures: calls that failed, by tool and outcome; the one that failed last stands last.
        rates: calls per second of the whole bus, one of each digest, the newest last.
        ended, failed: calls that ended, and that failed, since this program began to read.
        lost: calls that ended, and that no digest showed: overwritten before they were read.
    """

    def __init__(self) -> None:
        self.number = -1
        self.bus: Row = {}
        self.tools: dict[ToolKey, ToolState] = {}
        self.sessions: dict[str, Row] = {}
        self.sources: dict[str, Row] = {}
        self.running: list[Row] = []
        self.calls: dict[int, Row] = {}
        self.failures: dict[FailureKey, FailureState] = {}
        self.rates: deque[float] = deque(maxlen=MAX_RATES)
        self.ended = self.failed = 0
        self.lost = 0

    @property
    def known(self) -> bool:
        return self.number >= 0

    @property
    def at(self) -> float:
        """When the newest digest was made; 0 before the first one."""
        return float(self.bus.get("at", 0.0))

    def running_of(self) -> dict[ToolKey, int]:
        """Returns how many of the running calls each tool has."""
        counts: dict[ToolKey, int] = {}
        for call in self.running:
            key = (str(call.get("source", "")), str(call.get("name", "")))
            counts[key] = counts.get(key, 0) + 1
        return counts

    def apply(self, digest: Mapping[str, Any]) -> None:
        """Takes a digest: replaces everything where it is full, otherwise what it has."""
        instance = self.bus.get("instance")
        if not digest.get("full") and digest.get("number") == self.number:
            return  # nothing has changed
        if digest.get("full"):
            if instance is not None and digest.get("instance") != instance:
                self._begin_anew()
            self._keep_only(digest)
        self.number = int(digest.get("number", self.number + 1))
        self.bus.update((name, value) for name, value in digest.items() if name not in _LISTS)
        for row in digest.get("tools", ()):
            self._tool(row)
        for row in digest.get("sessions", ()):
            self.sessions[str(row["session"])] = row
        for row in digest.get("sources", ()):
            self.sources[str(row["source"])] = row
        for name in digest.get("closed", ()):
            self.sessions.pop(name, None)
        for name in digest.get("gone", ()):
            self._forget(name)
        if "running" in digest:
            self.running = list(digest["running"])
        self._ended(digest.get("calls", ()))
        if not digest.get("full"):  # a full one is about what was before, too
            self.ended += int(digest.get("ended") or 0)
            self.failed += int(digest.get("failed") or 0)
        self.lost += int(digest.get("lost") or 0)
        if digest.get("rate") is not None:
            self.rates.append(float(digest["rate"]))

    def _begin_anew(self) -> None:
        """Forgets what belongs to an earlier instance of the bus."""
        self.bus.clear()
        self.tools.clear()
        self.calls.clear()
        self.failures.clear()
        self.running = []
        self.ended = self.failed = self.lost = 0

    def _keep_only(self, digest: Mapping[str, Any]) -> None:
        """Forgets the tools, sessions and sources that a full digest does not have."""
        listed = {(str(row[0]), str(row[1])) for row in digest.get("tools", ())}
        for key in self.tools.keys() - listed:
            del self.tools[key]
        self.sessions.clear()
        self.sources.clear()

    def _forget(self, source: str) -> None:
        self.sources.pop(source, None)
        for key in [key for key in self.tools if key[0] == source]:
            del self.tools[key]

    def _tool(self, row: Iterable[Any]) -> None:
        source, name, calls, failed, p50, p95, last_ended, *_ = row
        if name == DIGEST_TOOL:
            return
        tool = self.tools.get((source, name))
        if tool is None:
            trail = Trail(self.at, calls or 0)
            self.tools[source, name] = ToolState(source, name, calls, failed, p50, p95, last_ended, trail)
            return
        tool.calls, tool.failed, tool.p50, tool.p95, tool.last_ended = calls, failed, p50, p95, last_ended
        tool.trail.add(self.at, calls or 0)

    def _ended(self, calls: Iterable[Row]) -> None:
        """Takes the ended calls of a digest, which has the newest first; a full one repeats those already read."""
        fresh = sorted((call for call in calls if call["number"] not in self.calls), key=lambda call: call["number"])
        for call in fresh:
            self.calls[call["number"]] = call
            if is_failure(call):
                self._failed(call)
        while len(self.calls) > MAX_CALLS:
            del self.calls[next(iter(self.calls))]

    def _failed(self, call: Row) -> None:
        key = (str(call["source"]), str(call["name"]), str(call["outcome"]))
        before = self.failures.pop(key, None)  # taken out first: it then stands last
        self.failures[key] = FailureState(before.count + 1 if before else 1, call)
        while len(self.failures) > MAX_FAILURES:
            del self.failures[next(iter(self.failures))]


def is_failure(call: Mapping[str, Any]) -> bool:
    """Tells whether an ended call failed: a call that asked its caller did not."""
    return call["outcome"] not in ("OK", "INPUT_REQUIRED")
