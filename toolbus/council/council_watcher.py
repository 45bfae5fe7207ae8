"""Somebody who follows what councils do, and may read slowly."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

MAX_WAITING = 100  # events that one watcher has not taken yet
LOST = "COUNCIL_EVENTS_LOST"


class Watcher:
    """The events of all chats or of one, as they happen, in JSON's form. Iterate over it, and close it at the end.

    Of a watcher that is too slow the oldest events are lost. It is told how many, before what comes after them.
    """

    def __init__(self, chat_id: str, on_close: Callable[[Watcher], object]) -> None:
        """Makes a watcher.

        Args:
            chat_id: whose events; "" means all.
            on_close: called when it is closed.
        """
        self._chat_id = chat_id
        self._on_close = on_close
        self._waiting: deque[Mapping[str, Any]] = deque(maxlen=MAX_WAITING)  # oldest first
        self._lost = 0  # events since it was last told
        self._awake = asyncio.Event()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Watcher of {self._chat_id or 'all chats'} waiting={len(self._waiting)} lost={self._lost}>"

    def put(self, event: Mapping[str, Any]) -> None:
        """Takes an event, where it is of the watcher's chat."""
        if self._chat_id in ("", event["chatId"]):
            self._lost += len(self._waiting) == MAX_WAITING
            self._waiting.append(event)
            self._awake.set()

    def close(self) -> None:
        """Ends the iteration, after what waits; may be called again."""
        self._closed = True
        self._awake.set()
        self._on_close(self)

    def __aiter__(self) -> Watcher:
        return self

    async def __anext__(self) -> Mapping[str, Any]:
        while not self._waiting and not self._closed:
            self._awake.clear()
            await self._awake.wait()
        if self._lost:
            lost, self._lost = self._lost, 0
            return {"event": LOST, "chatId": self._chat_id, "count": lost}
        if not self._waiting:
            raise StopAsyncIteration
        return self._waiting.popleft()
