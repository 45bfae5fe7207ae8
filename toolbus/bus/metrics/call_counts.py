"""Counts the calls of each tool: how they ended, and how long they took.

Outcomes are exact. Durations are two observations for each run of calls of one tool that end in one frame, taken at
random from its halves and weighted, so a call costs a frame of results next to nothing and quantiles are unbiased.

The number of tools that are counted, and of those with a series of their own, is bounded. A series never goes
backwards: calls that a tool counted before it had a series stay in ``other``, later ones never move there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from heapq import nlargest, nsmallest
from itertools import accumulate
from operator import attrgetter
from random import random

from toolbus.errors import Code
from toolbus.protocol.questions import INPUT_REQUIRED, INPUT_REQUIRED_OUTCOME

MAX_COUNTED = 10_000  # tools; 1 kB each at the most
MAX_ALONE = 32  # calls of a tool that ended alone in their frames, until they are counted
MAX_SWAPS = 20  # of tools with series and tools without, at a scrape
MAX_CHECKED = 500  # tools, in each search for those that left the catalog
MAX_IDENTITIES = 1_000  # that are counted one by one
FORGET_SECONDS = 3_600.0  # from when a tool was last seen in the catalog until its series goes
OFFSET = 40  # a duration is counted in units of 2^-40 s: the index of its bucket is the number of their bits
UNITS = 2.0**OFFSET
BUCKETS = 72  # the first one holds calls that ended in their own frame, in 0 s; the last one ends at 2^31 s
OTHER = "other"  # the name of tools without a series of their own
UNKNOWN = "unknown"  # the name of tools that were called and do not exist

_CALLS = attrgetter("calls")
_OUTCOMES = {code.value: code.name if code else "OK" for code in Code} | {INPUT_REQUIRED: INPUT_REQUIRED_OUTCOME}


def outcome_of(code: int) -> str:
    """Returns the name of a call's outcome."""
    return _OUTCOMES.get(code, "INTERNAL")  # a plugin may send one of a newer protocol


def bucket_of(seconds: float) -> int:
    """Returns the index of the bucket that a duration is counted in."""
    return int(seconds * UNITS).bit_length()


def bound_of(index: int) -> float:
    """Returns the seconds below which a bucket's durations are."""
    return float(2.0 ** (index - OFFSET))


class Snapshot:
    """The counts up to a moment."""

    __slots__ = ("failures", "histogram", "seconds", "succeeded")

    def __init__(self) -> None:
        self.succeeded = 0
        self.failures: dict[int, int] | None = None  # by code, `INPUT_REQUIRED` included; None before the first
        self.histogram = [0] * BUCKETS  # observations by `bucket_of`
        self.seconds = 0.0  # their sum

    @property
    def calls(self) -> int:
        """How many have ended."""
        return self.succeeded + sum(self.failures.values()) if self.failures else self.succeeded

    @property
    def failed(self) -> int:
        """How many ended neither in a success nor in questions."""
        failures = self.failures
        return sum(failures.values()) - failures.get(INPUT_REQUIRED, 0) if failures else 0

    @property
    def outcomes(self) -> dict[str, int]:
        """How many ended how, by `outcome_of`."""
        counts = {"OK": self.succeeded} if self.succeeded else {}
        return counts | {outcome_of(code): count for code, count in sorted((self.failures or {}).items())}

    def quantiles(self, *shares: float) -> list[float | None]:
        """Returns the seconds that each of some shares of the calls took at most; several cost little more than one.

        They are exact within a factor of two. None: no call was sent.

        Args:
            shares: from 0 to 1.
        """
        histogram = self.histogram
        passed = list(accumulate(histogram))
        observed = passed[-1]
        if not observed:
            return [None] * len(shares)
        only = bisect_right(passed, 0)
        if passed[only] == observed:  # all are in one bucket: their mean is known, and says more than its bounds
            bound = bound_of(only) if only else 0.0
            return [min(max(self.seconds / observed, bound / 2.0), bound)] * len(shares)
        seconds: list[float | None] = []
        for share in shares:
            rank = share * observed
            index = bisect_left(passed, rank) if rank > 0 else bisect_right(passed, 0)
            count = histogram[index]
            bound = bound_of(index) if index else 0.0
            seconds.append(bound / 2.0 * float(2.0 ** ((rank - passed[index] + count) / count)))
        return seconds

    def merge(self, other: Snapshot, sign: int = 1) -> None:
        """Adds the counts of another one, or with sign -1 subtracts them."""
        self.succeeded += sign * other.succeeded
        self.seconds += sign * other.seconds
        if other.failures:
            failures = self.failures = self.failures or {}
            for code, count in other.failures.items():
                failures[code] = failures.get(code, 0) + sign * count
        self.histogram = [one + sign * two for one, two in zip(self.histogram, other.histogram, strict=True)]

    def cumulative(self, bounds: Sequence[float]) -> list[int]:
        """Returns how many calls took at most so many seconds, and last how many took any time.

        Args:
            bounds: powers of two, each twice the one before.
        """
        first = bucket_of(bounds[0])  # the bucket that begins at the bound
        counts = [sum(self.histogram[:first]), *self.histogram[first : first + len(bounds) - 1]]
        return [*accumulate(counts), sum(self.histogram)]

    def copy(self) -> Snapshot:
        """Returns the counts of now, which change no more."""
        copied = Snapshot()
        copied.merge(self)
        return copied


class CallCounts(Snapshot):
    """The calls of one tool.

    Attributes:
        source, name: whose tool it is, and its name as it is listed.
        last_ended: when its last call ended, on the bus's monotonic clock; None before the first.
        exemplars: the newest traced call of each bucket: its trace, its seconds, when it ended; None: none was traced.
    """

    __slots__ = (*("_alone", "_base", "_others", "exemplars", "last_ended", "mark", "name", "noted", "seen", "source"),)

    def __init__(self, source: str, name: str, others: CallCounts | None = None) -> None:
        super().__init__()
        self.source = source
        self.name = name
        self.last_ended: float | None = None
        self.mark = 0  # of the newest change that was noted, see `CallMetrics.changed`
        self.noted = 0  # how many calls there were then
        self.seen = 0.0  # when it was last known to be in the catalog
        self.exemplars: dict[int, tuple[str, float, float]] | None = None
        self._alone: list[float] = []  # seconds of calls that ended one by one and are counted together
        self._others = others  # where its calls count too; None: it has a series of its own
        self._base: Snapshot | None = None  # what it had counted when it got its series; None: nothing

    def __repr__(self) -> str:
        return f"<CallCounts {self.name} of {self.source} calls={self.calls} failed={self.failed}>"

    @property
    def calls(self) -> int:
        """How many have ended."""
        self.count_alone()
        return super().calls

    @property
    def outcomes(self) -> dict[str, int]:
        """How many ended how, by `outcome_of`."""
        self.count_alone()
        return super().outcomes

    def quantiles(self, *shares: float) -> list[float | None]:
        """Returns the seconds that each of some shares took at most, see `Snapshot.quantiles`."""
        self.count_alone()
        return super().quantiles(*shares)

    def copy(self) -> Snapshot:
        """Returns a snapshot of now."""
        self.count_alone()
        return super().copy()

    @property
    def has_series(self) -> bool:
        """Whether it has a series of its own."""
        return self._others is None

    @property
    def series(self) -> Snapshot:
        """The counts of its own series: the calls since it has one."""
        if self._base is None:
            self.count_alone()
            return self
        shown = self.copy()
        shown.merge(self._base, -1)
        return shown

    def begin_series(self) -> None:
        """Gives it a series of its own, which begins at 0; its earlier calls stay in `other`."""
        self._others, self._base, self.exemplars = None, self.copy(), None

    def end_series(self, others: CallCounts) -> None:
        """Ends its series; its calls from now on count in `other`."""
        self.count_alone()
        self._others, self._base, self.exemplars = others, None, None

    def add_one(self, started: float, ended: float) -> None:
        """Counts a call that ended well, alone in its frame."""
        self.last_ended = ended
        alone = self._alone
        alone.append(ended - started)
        if len(alone) >= MAX_ALONE:
            self.count_alone()

    def count_alone(self) -> None:
        """Counts the calls that `add_one` has collected: together they cost half."""
        alone = self._alone
        if not alone:
            return
        self.succeeded += len(alone)
        self.seconds += sum(alone)
        if self._others is not None:
            self._others.add_all(alone, self.last_ended)
        alone.sort()  # so that each bucket is counted at once
        counted = 0
        while counted < len(alone):
            index = bucket_of(alone[counted])
            end = bisect_left(alone, bound_of(index), counted)
            self.histogram[index] += end - counted
            counted = end
        alone.clear()

    def add_all(self, durations: Sequence[float], ended: float | None) -> None:
        """Counts calls that ended well, with all their durations."""
        self.last_ended = ended
        self._alone += durations
        self.count_alone()

    def add_run(self, starts: Sequence[float], ended: float) -> None:
        """Counts calls that ended well, in one frame.

        Args:
            starts: when each began; at least two.
            ended: when all of them ended.
        """
        count = len(starts)
        half = count >> 1
        self.succeeded += count
        self.last_ended = ended
        self.seconds += ended * count - sum(starts)
        self.histogram[bucket_of(ended - starts[int(random() * half)])] += half
        self.histogram[bucket_of(ended - starts[half + int(random() * (count - half))])] += count - half
        if self._others is not None:
            self._others.add_run(starts, ended)

    def add(self, code: int, ended: float, seconds: float | None) -> None:
        """Counts a call that ended in any way.

        Args:
            code: 0 for a success, `INPUT_REQUIRED` for questions.
            seconds: how long it took; None: it was refused, and never sent.
        """
        if code == 0:
            self.succeeded += 1
        else:
            failures = self.failures = self.failures or {}
            code = code if code in _OUTCOMES else Code.INTERNAL  # otherwise a plugin could fill memory with keys
            failures[code] = failures.get(code, 0) + 1
        self.last_ended = ended
        if seconds is not None:
            self.histogram[bucket_of(seconds)] += 1
            self.seconds += seconds
        if self._others is not None:
            self._others.add(code, ended, seconds)

    def add_exemplar(self, trace_id: str, seconds: float, ended: float) -> None:
        """Stores a traced call as the example of its bucket; it is counted already."""
        if self._others is None:  # it has a series
            if self.exemplars is None:
                self.exemplars = {}
            self.exemplars[int(seconds * UNITS).bit_length()] = trace_id, seconds, ended


class Times:
    """How often something was done, and how many seconds it took in all."""

    __slots__ = ("count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Counts one time."""
        self.count += 1
        self.seconds += seconds


class CallMetrics:
    """The calls of all tools of one bus.

    Args:
        tools: how many tools have series of their own.
        counts: whether calls are counted at all.
        most: how many tools are counted one by one; those beyond count as others.

    Attributes:
        others: the calls of tools without series of their own.
        unknown: calls of names that no tool has.
        refused: calls that were never sent, by code.
        identity_calls, identity_limited: calls that were sent for an identity, and those that its quota refused.
        sweeps: of the deadlines of calls.
    """

    def __init__(self, tools: int = 200, *, counts: bool = True, most: int = MAX_COUNTED) -> None:
        self.counts = counts
        self.others = CallCounts("", OTHER)
        self.unknown = CallCounts("", UNKNOWN)
        self.refused: Counter[int] = Counter()
        self.identity_calls: Counter[str] = Counter()
        self.identity_limited: Counter[str] = Counter()
        self.sweeps = Times()
        self._mark = 0  # see `changed`
        self._max_series = tools
        self._most = most
        self._series = 0  # how many tools have one
        self._tools: dict[tuple[str, str], CallCounts] = {}
        self._to_check: deque[CallCounts] = deque()  # all of them; the first was checked longest ago

    def __repr__(self) -> str:
        return f"<CallMetrics tools={len(self._tools)} series={self._series}>"

    def __len__(self) -> int:
        return len(self._tools)

    def of(self, source: str, name: str) -> CallCounts | None:
        """Returns the counts of a tool; None where none of its calls was counted one by one."""
        return self._tools.get((source, name))

    def take(self, source: str, name: str) -> CallCounts:
        """Returns the counts of a tool that exists, from its first call on; `others` where too many are counted."""
        counts = self._tools.get((source, name))
        if counts is None:
            if len(self._tools) >= self._most:
                return self.others
            has_series = self._series < self._max_series
            counts = CallCounts(source, name, None if has_series else self.others)
            self._series += has_series
            self._tools[source, name] = counts
            self._to_check.append(counts)
        return counts

    def changed(self, mark: int) -> tuple[int, list[CallCounts]]:
        """Returns the tools that counted something since a mark, and the mark of now; 0 stands for the start."""
        self._mark += 1
        changed = []
        for counts in self._tools.values():
            calls = counts.calls
            if calls != counts.noted:
                counts.noted, counts.mark = calls, self._mark
            if counts.mark > mark:
                changed.append(counts)
        return self._mark, changed

    def count_identity(self, name: str, sent: int = 0, limited: int = 0) -> None:
        """Counts calls of an identity; for tokens of issuers (NAME/USER) by its NAME alone."""
        name = name.partition("/")[0]
        if name not in self.identity_calls and len(self.identity_calls) >= MAX_IDENTITIES:
            name = OTHER
        self.identity_calls[name] += sent
        self.identity_limited[name] += limited

    def with_series(self) -> list[CallCounts]:
        """Returns the tools that have series of their own, after those with most calls got one.

        A tool takes the place of another only with twice as many calls: series that come and go are of no use.
        """
        if self._series < len(self._tools):
            for counts in self._tools.values():
                counts.count_alone()  # into the others, too
            if self._max_series:
                self._choose()
        return [counts for counts in self._tools.values() if counts.has_series]

    def _choose(self) -> None:
        waiting = nlargest(MAX_SWAPS, (each for each in self._tools.values() if not each.has_series), _CALLS)
        least = nsmallest(len(waiting), (each for each in self._tools.values() if each.has_series), _CALLS)
        for counts in waiting:
            if self._series < self._max_series:
                self._series += 1
            elif least and counts.calls > 2 * least[0].calls:
                least.pop(0).end_series(self.others)
            else:
                return
            counts.begin_series()

    def forget(self, now: float, is_known: Callable[[str, str], bool], most: int = MAX_CHECKED) -> None:
        """Drops tools that have not been in the catalog for an hour; checks some of them each time.

        Args:
            is_known: whether the catalog has a tool, by source and listed name.
        """
        for _ in range(min(most, len(self._to_check))):
            counts = self._to_check.popleft()
            if is_known(counts.source, counts.name):
                counts.seen = now
            elif now - max(counts.seen, counts.last_ended or 0.0) > FORGET_SECONDS:
                del self._tools[counts.source, counts.name]
                self._series -= counts.has_series
                continue
            self._to_check.append(counts)
