"""Holds the events that one reader has not taken yet: bounded, so a slow reader never blocks senders or fills memory.

A full mailbox drops its oldest event and counts it as lost. A sender that coalesces takes back an event that a newer
one replaces. Iteration ends after `close`, once everything that waits has been read.

Threads: `put`, `take_back` and `close` may be called from any thread. A mailbox belongs to the event loop on which it
was made: only coroutines of that loop may iterate over it, one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """A bounded queue between any number of senders and one reader: ``async for event in mailbox``.

    Attributes:
        lost: how many events were dropped; with ``on_lost``, since the reader was last notified.
    """

    def __init__(
        self,
        limit: int,
        *,
        on_close: Callable[[], object] | None = None,
        on_lost: Callable[[int], Item] | None = None,
        weigh: Callable[[Item], int] = lambda item: 1,
    ) -> None:
        """Makes an empty mailbox for the running event loop.

        Args:
            limit: how many events may wait, at least 1; with ``weigh``, what they may weigh together: one that weighs
                more waits alone.
            on_close: called once, by the first `close`, on its thread.
            on_lost: makes the event that notifies the reader how many were lost, delivered before those that come
                after them. None: the reader is not notified.
            weigh: returns what an event counts for, such as its bytes where these vary.

        Raises:
            RuntimeError: no event loop is running.
        """
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()  # on which the loop runs
        self._limit = limit
        self._weigh = weigh
        self._on_close = on_close
        self._on_lost = on_lost
        self._lock = threading.Lock()  # guards all below, and is held for a few instructions only
        self._waiting: OrderedDict[int, Item] = OrderedDict()  # by the number of the event, oldest first
        self._weight = 0  # of what waits
        self._count = 0  # of all events that were put
        self._closed = False
        self.lost = 0
        self._changed = asyncio.Event()  # set when there is something for the reader

    def __repr__(self) -> str:
        closed = " closed" if self._closed else ""
        return f"<{type(self).__name__} waiting={len(self._waiting)} lost={self.lost}{closed}>"

    def __len__(self) -> int:
        """How many events wait."""
        return len(self._waiting)

    def put(self, item: Item) -> int:
        """Adds an event; a closed mailbox ignores it. Returns the event's number, for `take_back`."""
        with self._lock:
            self._count += 1
            number = self._count
            if self._closed:
                return number
            weight = self._weigh(item)
            while self._waiting and self._weight + weight > self._limit:
                self._weight -= self._weigh(self._waiting.popitem(last=False)[1])
                self.lost += 1
            self._waiting[number] = item
            self._weight += weight
        self._wake()
        return number

    def take_back(self, number: int) -> Item | None:
        """Removes an event that still waits, without counting it as lost. Returns None where it has been read."""
        with self._lock:
            item = self._waiting.pop(number, None)
            if item is not None:
                self._weight -= self._weigh(item)
            return item

    def close(self) -> None:
        """Ends the iteration after what waits; may be called again."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first and self._on_close is not None:
            self._on_close()
        self._wake()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        while True:
            with self._lock:
                if self.lost and self._on_lost is not None:
                    lost, self.lost = self.lost, 0
                    return self._on_lost(lost)
                if self._waiting:
                    item = self._waiting.popitem(last=False)[1]
                    self._weight -= self._weigh(item)
                    return item
                if self._closed:
                    raise StopAsyncIteration
                self._changed.clear()  # under the lock: what is put after this wakes the reader again
            await self._changed.wait()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and its reader with it
            if threading.get_ident() == self._thread:
                self._changed.set()
            else:
                self._loop.call_soon_threadsafe(self._changed.set)
