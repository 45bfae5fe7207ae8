"""Reads the counts of each tool for digests: the tools called since the last one, or those called most.

A row costs some microseconds, for the quantiles. So a digest has a bounded number of them; the others follow in later
digests.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from operator import attrgetter
from typing import TypeAlias

from toolbus.bus.console.digest import MAX_CALLED, MAX_TOOLS
from toolbus.bus.metrics.call_counts import CallCounts, CallMetrics

ToolRow: TypeAlias = tuple[str, str, int, int, float | None, float | None, float | None]
"""Source, name, calls, those that failed, median and 95th percentile of the seconds, when the last one ended."""

MADE_AT_ONCE = 200  # rows, a millisecond
MAX_STALE = 1_000  # rows of tools that are not counted any more


class CalledTools:
    """The counts of the tools of one bus, as a reader of every digest knows them.

    Args:
        began: added to times of the bus's clock, makes them seconds since the epoch.
    """

    def __init__(self, metrics: CallMetrics, began: float) -> None:
        self._metrics = metrics
        self._began = began
        self._mark = 0  # up to which changes were read
        self._waiting: dict[CallCounts, None] = {}  # called since their last row, the first one longest ago
        self._rows: dict[CallCounts, ToolRow] = {}  # the newest of each tool

    def __repr__(self) -> str:
        return f"<CalledTools waiting={len(self._waiting)}>"

    def __len__(self) -> int:
        return len(self._rows)

    async def prepare(self) -> None:
        """Makes the rows for a new reader, in steps: with many tools they take milliseconds."""
        self._rows.clear()
        for number, counts in enumerate(self._most_called()):
            self._row(counts)
            if not number % MADE_AT_ONCE:
                await asyncio.sleep(0)

    def begin(self) -> list[ToolRow]:
        """Returns the rows of the tools that were called most, for a new reader."""
        self._mark, _ = self._metrics.changed(0)
        self._waiting.clear()
        return self.most_called()

    def changed(self) -> list[ToolRow]:
        """Returns the rows of tools that were called since their last row."""
        self._mark, called = self._metrics.changed(self._mark)
        self._forget()
        waiting = self._waiting
        for counts in called:
            waiting.setdefault(counts)
        rows = list(itertools.islice(waiting, MAX_CALLED))
        for counts in rows:
            del waiting[counts]
        return [self._row(counts) for counts in rows]

    def most_called(self) -> list[ToolRow]:
        """Returns the rows of the tools that were called most."""
        return [self._row(counts) for counts in self._most_called()]

    def _most_called(self) -> list[CallCounts]:
        _, called = self._metrics.changed(0)
        return heapq.nlargest(MAX_TOOLS, called, key=attrgetter("calls"))

    def _forget(self) -> None:
        """Drops the rows of tools that the metrics have forgotten, so that weeks of watching do not fill the memory."""
        if len(self._rows) > len(self._metrics) + MAX_STALE:
            of = self._metrics.of
            self._rows = {counts: row for counts, row in self._rows.items() if of(counts.source, counts.name) is counts}

    def _row(self, counts: CallCounts) -> ToolRow:
        known, calls = self._rows.get(counts), counts.calls
        if known is not None and known[2] == calls:
            return known
        ended, (median, most) = counts.last_ended, counts.quantiles(0.5, 0.95)
        row = self._rows[counts] = (
            counts.source,
            counts.name,
            calls,
            counts.failed,
            median,
            most,
            None if ended is None else round(self._began + ended, 3),
        )
        return row
