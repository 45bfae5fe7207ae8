"""Notifies the rooms of a bus of changes: of the catalog, the health of sources, readiness, keys and ended calls.

A change of the catalog reaches two kinds of listeners: some see each change at once, on the bus's loop; watchers
get all changes as one step, at most once in `Timings.watch_seconds`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

from toolbus.bus.access.identity import OBSERVER, Principal
from toolbus.bus.calls.call_records import CallRecords
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.changes import CatalogChanges
from toolbus.bus.catalog.registry import Registry
from toolbus.functions.workers import ChangeSignal


class Signals:
    """The changes of one bus. `catalog_changed` may be called from any thread, all else on the bus's loop.

    Args:
        watch_seconds: how often watchers are notified at most.

    Attributes:
        on_change: listeners, called at once after every change of the catalog.
        on_notify: called when watchers are to be notified.
        on_source: called with each source whose health may have changed.
        on_readiness: called when the bus begins or ceases to take calls.
        on_keys: called when keys may have ended or changed, with whether the server's certificate did.
        on_close: called when the bus stops, while its connections are still open.
    """

    def __init__(self, registry: Registry, view: CatalogView, records: CallRecords, watch_seconds: float) -> None:
        self._registry = registry
        self._view = view
        self._records = records
        self._watch_seconds = watch_seconds
        self._loop: asyncio.AbstractEventLoop | None = None  # None until started
        self._thread = 0  # the loop's, by its identity; 0 until started
        self._timer: asyncio.TimerHandle | None = None  # the next notification of watchers
        self._notified_at = 0.0  # when watchers were last notified, by the loop's clock
        self.on_change: list[Callable[[], object]] = []
        self.on_notify: list[Callable[[], object]] = []
        self.on_source: list[Callable[[str], object]] = []
        self.on_readiness: list[Callable[[], object]] = []
        self.on_keys: list[Callable[[bool], object]] = []
        self.on_close: list[Callable[[], object]] = []
        self._watchers: set[asyncio.Event] = set()
        self._call_ended = ChangeSignal()  # for all who wait for the next call
        self.closed = False  # whether watchers are to end

    @property
    def watching(self) -> int:
        """How many watchers there are."""
        return len(self._watchers)

    def start(self) -> None:
        """Belongs to the running loop from now on."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def close(self) -> None:
        """Ends every watcher; nothing is notified any more."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        for event in self._watchers:
            event.set()
        for listener in self.on_close:
            listener()
        self._call_ended.notify()

    def source_changed(self, source: str) -> None:
        """Notifies that the health of a source may have changed."""
        for listener in self.on_source:
            listener(source)

    def readiness_changed(self) -> None:
        """Notifies that the bus began or ceased to take calls."""
        for listener in self.on_readiness:
            listener()
        self._call_ended.notify()

    async def next_call(self) -> None:
        """Waits until a further call has ended; returns without one when the bus begins to drain, and when it stops."""
        if self.closed:
            return
        if not self._call_ended.is_awaited:
            self._records.on_next(self._call_ended.notify)
        await self._call_ended.next()

    def keys_changed(self, *, server: bool) -> None:
        """Notifies that keys may have ended or changed.

        Args:
            server: whether the server's own certificate changed.
        """
        for listener in self.on_keys:
            listener(server)

    def catalog_changed(self) -> None:
        """Notifies that the catalog changed; from any thread."""
        if self._loop is not None and threading.get_ident() != self._thread:
            self._loop.call_soon_threadsafe(self.catalog_changed)
            return
        for listener in self.on_change:
            listener()
        if self._loop is None or self._timer is not None or self.closed:
            return
        wait = max(0.0, self._notified_at + self._watch_seconds - self._loop.time())
        self._timer = self._loop.call_later(wait, self._notify)

    def _notify(self) -> None:
        assert self._loop is not None  # the timer is of this loop
        self._timer = None
        self._notified_at = self._loop.time()
        for listener in self.on_notify:
            listener()
        for event in self._watchers:
            event.set()

    async def watch(self, since: int = -1, principal: Principal = OBSERVER) -> AsyncIterator[CatalogChanges]:
        """Yields the whole catalog first, then what changes, until the bus stops.

        Args:
            since: the revision that is known already; only what changed after it is yielded, if that is still known.
            principal: who watches, and therefore sees only what it may call.
        """
        event = asyncio.Event()
        self._watchers.add(event)
        revision = since
        try:
            while not self.closed:
                event.clear()
                if self._registry.revision != revision:
                    changes = self._view.since(revision, principal)
                    revision = changes.revision
                    yield changes
                await event.wait()
        finally:
            self._watchers.discard(event)
