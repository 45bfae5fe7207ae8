"""Builds the digests of one bus: once in an interval, the same bytes for all watchers.

Nothing is read without watchers. A new watcher waits for the next digest, which is then built at once, and gets a full
one; the others get the changes. A watcher that reads too slowly begins anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import orjson

from toolbus.bus.calls.call import Call
from toolbus.bus.calls.call_records import CallRecord, CallRecords, origin_of
from toolbus.bus.catalog.entry import BUS_SOURCE, Entry, Handler
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.core import Core
from toolbus.bus.metrics.call_counts import CallCounts, CallMetrics
from toolbus.bus.operators.admin_tools import OFFLINE, handlers_of, state_of
from toolbus.bus.streams.peer import Peer
from toolbus.common.version import VERSION
from toolbus.protocol.limits import Timings
from toolbus.protocol.questions import INPUT_REQUIRED

# Pure: readings of the bus in, an object for JSON out, with bounded rows and bytes.

MAX_CALLS = 50  # newest calls of a digest, whatever their outcome
MAX_FAILED = 50  # further calls of a digest that failed
MAX_RUNNING = 100  # calls in flight, the oldest
MAX_CALLED = 250  # tools with new counts: a thousand busy ones are all shown every two seconds
MAX_TOOLS = 1_000  # tools of a full digest, those that were called most
MAX_ROWS = 1_000  # sessions, and as many sources, of a full digest
MAX_BYTES = 1_000_000  # of an encoded digest: the longest list is cut until it fits
_LISTS = ("tools", "calls", "running", "sessions", "sources", "closed", "gone")
_CONTENTS = ("arguments", "output")  # of a record; ten kilobytes a call would be most of a digest

Row = dict[str, Any]


class KnownRows:
    """The rows of one list as a reader of every digest knows them."""

    def __init__(self) -> None:
        self._rows: Mapping[str, Row] = {}  # by key

    def __repr__(self) -> str:
        return f"<KnownRows {len(self._rows)}>"

    @property
    def all(self) -> list[Row]:
        return list(self._rows.values())

    def update(self, rows: Mapping[str, Row]) -> tuple[list[Row], list[str]]:
        """Replaces the rows. Returns those that are new or changed, and the keys of those that were removed."""
        before, self._rows = self._rows, rows
        changed = [row for key, row in rows.items() if before.get(key) != row]
        return changed, [key for key in before if key not in rows]


def describe_call(record: CallRecord, began: float) -> Row:
    """Returns an ended call without its contents, which a reader gets from the records by its number."""
    row = record.described(began)
    for name in _CONTENTS:
        row.pop(name, None)
    return row


def encode(digest: Row) -> bytes:
    """Returns a digest as JSON of at most `MAX_BYTES`: its longest lists are cut until it fits."""
    body = orjson.dumps(digest)
    while len(body) > MAX_BYTES and any(digest.get(name) for name in _LISTS):
        digest = dict(digest)
        longest = max(_LISTS, key=lambda name: len(digest.get(name, ())))
        digest[longest] = digest[longest][: len(digest[longest]) // 2]
        body = orjson.dumps(digest)
    return body


def is_quiet(before: Row, digest: Row) -> bool:
    """Tells whether a digest has no news since the one before it."""
    moving = ("number", "at", "full", "seconds", "rate", "loop_lag", "settings_age", "held_bytes", "running")
    same = all(digest[key] == before.get(key) for key in digest if key not in moving and key not in _LISTS)
    news = any(digest[key] for key in _LISTS if key != "running")
    return same and not news and _seen(digest["running"]) == _seen(before["running"])


def _seen(running: Iterable[Row]) -> list[tuple[str, str]]:
    return [(row["id"], row["stage"]) for row in running]


# Everything is read on the bus's loop, in constant time for each row: the tools of a source are counted only after a
# change, and very long lists in steps, before the digest.

COUNTED_AT_ONCE = 5_000  # entries of the catalog, in less than a millisecond
LONG_SECONDS = 5.0  # between two counts of an owner with more
# Kinds of sources by their names: the name alone, or followed by the separator.
_OWN = (("bus", BUS_SOURCE, "."), ("dropin", "dropin", ":"))
_OWN_KINDS = tuple(name for _, name, _ in _OWN)

Addresses = dict[str, Any]


class ToolCounts:
    """How many tools sources and sessions have; counted again where the number of their entries has changed.

    Args:
        at_once: how many entries of the catalog are counted before others get their turn.
    """

    def __init__(self, registry: Registry, at_once: int = COUNTED_AT_ONCE) -> None:
        self._registry = registry
        self._at_once = at_once
        self._known: dict[Handler | str, tuple[int, int]] = {}  # by owner: its entries, and its tools
        self._long_at: dict[Handler | str, float] = {}  # when owners with very many tools were counted
        self._budget = self._at_once

    def begin(self) -> None:
        self._budget = self._at_once

    def retain(self, owners: Iterable[Handler | str]) -> None:
        """Forgets all but some owners."""
        self._known = {owner: self._known[owner] for owner in owners if owner in self._known}
        self._long_at = {owner: when for owner, when in self._long_at.items() if owner in self._known}

    async def count_long(self, owner: Handler | str, entries: int) -> None:
        """Counts an owner with very many tools, in steps."""
        if entries <= self._at_once or self._known.get(owner, (-1,))[0] == entries:
            return
        now = time.monotonic()
        if now - self._long_at.get(owner, -LONG_SECONDS) < LONG_SECONDS:
            return
        self._long_at[owner] = now
        everything, names = self._registry.all_entries(owner), set[str]()
        for first in range(0, len(everything), self._at_once):
            names |= self._names(everything[first : first + self._at_once])
            await asyncio.sleep(0)
        self._known[owner] = entries, len(names)

    def of(self, owner: Handler | str, entries: int) -> int | None:
        known = self._known.get(owner)
        if known is not None and known[0] == entries:
            return known[1]
        if entries > self._budget:
            return known[1] if known is not None else None
        self._budget -= entries
        count = len(self._names(self._registry.all_entries(owner)))
        self._known[owner] = entries, count
        return count

    def _names(self, entries: Iterable[Entry]) -> set[str]:
        hides = self._registry.tables.hides
        return {entry.bare_name for entry in entries if not hides(entry)}


class Readings:
    """The readings of one bus.

    Args:
        addresses: returns where it listens.
        started: when it began, in seconds since the epoch.
    """

    def __init__(self, core: Core, addresses: Callable[[], Addresses], started: float) -> None:
        self._core = core
        self._addresses = addresses
        self._counts = ToolCounts(core.catalog.registry)
        self._began = core.calls.records.began  # added to times of the monotonic clock, makes them those of the epoch
        self.started = started

    async def prepare(self) -> None:
        """Counts the long lists, which would hold the loop up."""
        registry = self._core.catalog.registry
        for source, entries in registry.sources().items():
            await self._counts.count_long(source, entries)
        for peer in self._sessions():
            await self._counts.count_long(peer, registry.max_offers(peer))
        self._counts.begin()

    def scalars(self) -> Row:
        core = self._core
        dispatcher, presence = core.calls.dispatcher, core.sessions.presence
        total, failed = self.ended()
        return {
            "began": round(self.started, 3),
            "instance": presence.handshake.boot_id,
            "version": VERSION,
            "bus_id": core.config.bus_id,
            "draining": presence.draining,
            "revision": core.catalog.registry.revision,
            "roles": list(core.catalog.registry.roles),
            "addresses": self._addresses(),
            "in_flight": dispatcher.in_flight.active,
            "stuck": dispatcher.in_flight.stuck,
            "held_bytes": dispatcher.in_flight.held,
            "late": core.calls.records.late,
            "loop_lag": round(core.program.stalls.lag, 6),
            "settings_age": None if (age := core.program.store.age) is None else round(age, 1),
            "records_errors": core.calls.records.texts,
            "total": total,
            "total_failed": failed,
        }

    def ended(self) -> tuple[int, int]:
        """Returns how many calls have ended, and how many of them failed."""
        outcomes = self._core.calls.records.outcomes
        total = outcomes.total()
        return total, total - outcomes[0] - outcomes[INPUT_REQUIRED]

    def running(self) -> list[Row]:
        """Returns the calls in flight, the oldest first."""
        return [self._running(call) for call in self._core.calls.dispatcher.in_flight.oldest(MAX_RUNNING)]

    def sessions(self) -> dict[str, Row]:
        return {peer.session_id: self._session(peer) for peer in self._sessions()}

    def sources(self) -> dict[str, Row]:
        registry, presence = self._core.catalog.registry, self._core.sessions.presence
        offering = registry.sources()
        names = {**presence.by_source, **presence.grace_ends, **offering}
        refused: dict[str, int] = {}
        for peer in presence.review.refused.peers:
            refused[peer.source] = refused.get(peer.source, 0) + len(presence.review.refused.of(peer))
        shown = list(itertools.islice(names, MAX_ROWS))
        self._counts.retain([*shown, *self._sessions()])
        return {name: self._source(name, offering.get(name, 0), refused.get(name, 0)) for name in shown}

    def _sessions(self) -> list[Peer]:
        return list(itertools.islice(self._core.sessions.presence.sessions.values(), MAX_ROWS))

    def _source(self, name: str, entries: int, refused: int) -> Row:
        handlers = handlers_of(self._core, name)
        row = {
            "source": name,
            "kind": _kind_of(name, handlers),
            "state": state_of(*handlers),
            "sessions": len(self._core.sessions.presence.by_source.get(name, ())),
            "refused": refused,
        }
        core = self._core
        if row["state"] == OFFLINE and (until := core.sessions.presence.grace_ends.get(name)) is not None:
            row["offline_since"] = round(self._began + until - core.catalog.registry.grace_seconds, 3)
            row["offline_until"] = round(self._began + until, 3)
        if not core.catalog.policy.may_offer(name):
            row["silenced"] = True
        tools = self._counts.of(name, entries)
        return row if tools is None else row | {"tools": tools}

    def _session(self, peer: Peer) -> Row:
        row = {
            "session": peer.session_id,
            "source": peer.source,
            "kind": _kind_of(peer.source, [peer]),
            "state": state_of(peer),
            "attached": round(self._began + peer.attached, 3),
            "identity": peer.principal.identity.name,
            "peer": peer.address,
            "in_flight": len(peer.pending) - peer.stuck,
            "max_in_flight": peer.max_in_flight,
            "pending": len(peer.in_flight),
            "stuck": peer.stuck,
        }
        tools = self._counts.of(peer, self._core.catalog.registry.max_offers(peer))
        return row if tools is None else row | {"tools": tools}

    def _running(self, call: Call) -> Row:
        return {
            "id": call.id,
            "parent": call.parent.id if call.parent is not None else "",
            "call_id": call.call_id,
            "name": call.entry.name,
            "source": call.entry.source,
            "caller": call.caller.source,
            "user_id": origin_of(call.context)[0] if call.context is not None else "",
            "started": round(self._began + call.started, 6),
            "deadline": round(self._began + call.deadline, 6),
            "stage": self._core.calls.dispatcher.in_flight.stage(call).name.lower(),
            "trace_id": call.trace.trace_id if call.trace is not None else "",
        }


def _kind_of(source: str, handlers: Sequence[Handler]) -> str:
    if source.startswith(_OWN_KINDS):
        for kind, name, separator in _OWN:
            if source == name or source.startswith(name + separator):
                return kind
    return handlers[0].kind if handlers else "peer"  # an offline source had a session


# A row costs some microseconds, for the quantiles. So a digest has a bounded number of them; the others follow in later
# digests.

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
        self._last_at = self._looked_at = 0.0  # when it was built, and when the bus was read; by the monotonic clock
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
            while bool(self.watchers) or time.monotonic() - self._requested_at < LINGER_SECONDS:
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
