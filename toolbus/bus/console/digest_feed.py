"""Builds the digests of one bus: once in an interval, the same bytes for all watchers.

Nothing is read without watchers. A new watcher waits for the next digest, which is then built at once, and gets a full
one; the others get the changes. A watcher that reads too slowly begins anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import NamedTuple

from toolbus.bus.calls.call_records import CallRecords
from toolbus.bus.console.called_tools import CalledTools
from toolbus.bus.console.digest import MAX_CALLS, MAX_FAILED, KnownRows, Row, describe_call, encode, is_quiet
from toolbus.bus.console.readings import Readings
from toolbus.bus.metrics.call_counts import CallMetrics
from toolbus.limits import Timings

log = logging.getLogger("toolbus.console")

MAX_WATCHERS = 20  # streams at the same time
FAULT_SECONDS = 1.0  # until a digest is tried again
MAX_FRAMES = 8  # how many digests a watcher may be behind
CLOSEST_SECONDS = 0.05  # between two digests, also where a watcher waits for one
RECENT_SECONDS = 5.0  # that the rates of the first digest cover
LINGER_SECONDS = 10.0  # how long digests are built after a request for one: its client may send another


class Frame(NamedTuple):
    """One digest.

    Attributes:
        number: of the digest.
        body: the digest as JSON.
        event: the digest as an event of a stream.
    """

    number: int
    body: bytes
    event: bytes

    @classmethod
    def of(cls, digest: Row) -> Frame:
        """Encodes a digest."""
        number, body = digest["number"], encode(digest)
        return cls(number, body, b"event: digest\nid: %d\ndata: %b\n\n" % (number, body))


class TooMany(Exception):
    """The limit of watchers is reached."""


class Ended(Exception):
    """The bus stops."""


class TooSlow(Exception):
    """A watcher has not taken the digests as fast as they were made."""


class DigestFeed:
    """The digests of one bus.

    Args:
        timings: how often a digest is built.
    """

    def __init__(self, records: CallRecords, metrics: CallMetrics, readings: Readings, timings: Timings) -> None:
        self._records = records
        self._readings = readings
        self._timings = timings
        self._number = time.time_ns() // 1_000_000  # of the newest; rises across restarts too
        self._frames: deque[Frame] = deque(maxlen=MAX_FRAMES)  # the newest, without a gap; empty without watchers
        self._joining: list[asyncio.Future[Frame]] = []  # requests for a full one
        self._waiting = asyncio.Event()  # set, and replaced, with each digest
        self._due = asyncio.Event()  # whether one is requested before its time
        self._streams = 0
        self._requests = 0  # for one digest, waiting
        self._requested_at = -LINGER_SECONDS  # when the last such request ended
        self._building: asyncio.Task[None] | None = None  # None without watchers
        self._sessions, self._sources = KnownRows(), KnownRows()
        self._tools = CalledTools(metrics, records.began)
        self._last: Row | None = None  # the newest digest; None without watchers
        self._last_at = self._looked_at = (
            0.0  # when it was built, and when the bus was last read, by the monotonic clock
        )
        self._position = 0  # number of the last call that it covers
        self._ended = self._failed = 0  # calls when it was built
        self.closed = False

    def __repr__(self) -> str:
        return f"<DigestFeed number={self._number} watchers={self.watchers}>"

    @property
    def watchers(self) -> int:
        """How many streams and waiting requests there are."""
        return self._streams + self._requests

    def close(self) -> None:
        """Ends every stream and every wait."""
        self.closed = True
        if self._building is not None:
            self._building.cancel()
        self._announce()
        for waiting in self._joining:
            if not waiting.done():
                waiting.set_exception(Ended)

    async def stream(self) -> AsyncGenerator[Frame]:
        """Yields a full digest, and then each one as it is built, until the bus stops.

        Raises:
            TooMany: there are `MAX_WATCHERS` streams already.
            Ended: the bus stops.
            TooSlow: the watcher is more than `MAX_FRAMES` digests behind.
        """
        if self._streams >= MAX_WATCHERS:
            raise TooMany
        self._streams += 1
        try:
            frame = await self._full()
            yield frame
            known = frame.number
            while not self.closed:
                if known == self._number:
                    await self._waiting.wait()
                    continue
                if not self._frames or self._frames[0].number > known + 1:
                    raise TooSlow
                frame = self._frames[known - self._number]
                yield frame
                known = frame.number
        finally:
            self._streams -= 1

    async def after(self, since: int, wait_seconds: float) -> bytes:
        """Returns the digest after another one, or a full one if several came between.

        Args:
            since: the number of the digest that is known.
            wait_seconds: how long to wait for a change.

        Raises:
            Ended: the bus stops.
        """
        self._requests += 1
        try:
            if self._frames and since == self._number and not await self._next(wait_seconds):
                await self._next(None)
            if self._frames and since == self._number - 1:
                return self._frames[-1].body
            return (await self._full()).body
        finally:
            self._requests -= 1
            self._requested_at = time.monotonic()

    async def _next(self, wait_seconds: float | None) -> bool:
        """Waits for the next digest; None: builds it now. Returns whether it came."""
        self._ensure_building()
        if wait_seconds is None:
            self._due.set()
        try:
            async with asyncio.timeout(wait_seconds):
                await self._waiting.wait()
        except TimeoutError:
            return False
        return True

    async def _full(self) -> Frame:
        """Returns a full digest, built for all who wait for one."""
        if self.closed:
            raise Ended
        waiting: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._joining.append(waiting)
        self._due.set()
        self._ensure_building()
        try:
            return await waiting
        finally:
            if waiting in self._joining:
                self._joining.remove(waiting)

    # -- building --------------------------------------------------------------------------------------------------

    def _ensure_building(self) -> None:
        if self._building is None and not self.closed:
            self._building = asyncio.get_running_loop().create_task(self._build_all(), name="toolbus digests")

    async def _build_all(self) -> None:
        try:
            while self._is_watched():
                await self._pause()
                try:
                    await self._readings.prepare()
                    if self._last is None:
                        await self._tools.prepare()
                    self._looked_at = time.monotonic()
                    self._build(self._looked_at)
                except Exception:
                    log.exception("a fault of the bus while it made a digest")
                    self._number += 1  # its changes are lost: all watchers begin anew
                    self._frames.clear()
                    self._looked_at = time.monotonic() + FAULT_SECONDS
        finally:
            self._building = None
            self._frames.clear()
            self._last = None
            self._sessions, self._sources = KnownRows(), KnownRows()

    def _is_watched(self) -> bool:
        return bool(self.watchers) or time.monotonic() - self._requested_at < LINGER_SECONDS

    async def _pause(self) -> None:
        """Waits until the next digest is due."""
        since = time.monotonic() - self._looked_at
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timings.digest_seconds - since):
                await self._due.wait()
        await asyncio.sleep(max(0.0, self._looked_at + CLOSEST_SECONDS - time.monotonic()))

    def _build(self, now: float) -> None:
        """Makes the next digest, unless it has no news and no watcher waits for it."""
        is_due = self._due.is_set()
        self._due.clear()
        changes = self._changes(now)
        early = not is_due and now - self._last_at < self._timings.digest_idle_seconds
        if early and self._last is not None and is_quiet(self._last, changes):
            return
        frame = Frame.of(changes)
        joined = Frame.of(self._whole(changes)) if self._joining else frame
        self._number, self._last, self._last_at = frame.number, changes, now
        self._position = self._records.ended
        self._ended, self._failed = self._readings.ended()
        self._frames.append(frame)
        joining, self._joining = self._joining, []
        for waiting in joining:
            if not waiting.done():
                waiting.set_result(joined)
        self._announce()

    def _changes(self, now: float) -> Row:
        """Returns the changes since the last digest."""
        records, readings = self._records, self._readings
        if self._last is None:
            ended, failed, since = records.recent(max(now - RECENT_SECONDS, readings.started - records.began))
            self._position, seconds = records.ended - ended, now - since
        else:
            total, total_failed = readings.ended()
            ended, failed, seconds = total - self._ended, total_failed - self._failed, now - self._last_at
        calls = records.latest(self._position, MAX_CALLS, MAX_FAILED)
        sessions, closed = self._sessions.update(readings.sessions())
        sources, gone = self._sources.update(readings.sources())
        return {
            "number": self._number + 1,
            "at": round(records.began + now, 3),
            "full": False,
            **(scalars := readings.scalars()),
            "in_flight": max(0, scalars["in_flight"] - self._requests),  # without the requests for this digest
            "seconds": round(seconds, 3),
            "ended": ended,
            "failed": failed,
            "rate": round(ended / seconds, 2) if seconds > 0 else 0.0,
            "watchers": self.watchers,
            "tools": self._tools.changed() if self._last is not None else self._tools.begin(),
            "calls": [describe_call(record, records.began) for record in calls.records],
            "skipped": records.ended - self._position - calls.lost - len(calls.records),
            "lost": calls.lost,
            "running": readings.running(),
            "sessions": sessions,
            "closed": closed,
            "sources": sources,
            "gone": gone,
        }

    def _whole(self, changes: Row) -> Row:
        """Returns the full digest of the same moment."""
        records = self._records
        calls = records.latest(0, MAX_CALLS, MAX_FAILED).records
        return changes | {
            "full": True,
            "tools": self._tools.most_called(),
            "calls": [describe_call(record, records.began) for record in calls],
            "sessions": self._sessions.all,
            "closed": [],
            "sources": self._sources.all,
            "gone": [],
        }

    def _announce(self) -> None:
        waiting, self._waiting = self._waiting, asyncio.Event()
        waiting.set()
