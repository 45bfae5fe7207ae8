"""Collects the items for one stream and makes messages of them; no other file makes messages."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from toolbus.v1 import tool_bus_service_pb2 as messages

MESSAGE_ITEMS = 128
MESSAGE_BYTES = 1024 * 1024
# The limits of a bus that does not state them.
RESULT_BYTES = 4 * 1024 * 1024
SENDABLE_BYTES = 16 * 1024 * 1024
MARGIN = 1024  # bytes of a message that its one item must leave free
ITEM_OVERHEAD = 8  # bytes of a message for each item: a tag, and a length
HOLD_SECONDS = 0.001  # that the results of calls of one message may wait for each other
SINGLE = ("attach", "heartbeat", "drain")  # fields that a message holds once


class Outbox:
    """One queue for items of all kinds, so that the bus reads them in their order: progress before its result.

    Attributes:
        result_bytes: the largest payload of a result that the bus takes.
        largest_item: in bytes; a larger one would end the stream.
    """

    def __init__(self) -> None:
        self.limit(RESULT_BYTES, SENDABLE_BYTES)
        self._items: deque[tuple[str, Any, int]] = deque()  # (field, item, its bytes in a message), oldest first
        self._wake = asyncio.Event()  # set while the writer has something to do; held items do not set it
        self._hold: asyncio.TimerHandle | None = None  # wakes the writer for held items; None without any
        self._closed = False  # whether further items are dropped

    def limit(self, result_bytes: int, message_bytes: int) -> None:
        """Sets the limits of the bus."""
        self.result_bytes = result_bytes
        self.largest_item = message_bytes - MARGIN

    @property
    def closed(self) -> bool:
        """Whether the stream is over, or this side of it."""
        return self._closed

    def put(self, field: str, item: Any, *, hold: bool = False) -> None:
        """Adds an item; drops it if the stream is over.

        Args:
            hold: lets the item wait a short time for others, which will follow.
        """
        if self._closed:
            return
        self._items.append((field, item, item.ByteSize() + ITEM_OVERHEAD))
        if not hold:
            self._wake.set()
        elif self._hold is None:
            self._hold = asyncio.get_running_loop().call_later(HOLD_SECONDS, self._release)

    def _release(self) -> None:
        self._hold = None
        self._wake.set()

    def close(self) -> None:
        """Lets the writer send the waiting items and then half-close."""
        self._closed = True
        self._wake.set()

    async def take(self) -> messages.InvokeRequest | None:
        """Returns a message of the waiting items, oldest first; None when the outbox is closed and empty."""
        while not (self._items and self._wake.is_set()):
            if self._closed and not self._items:
                return None
            if not self._items:
                self._wake.clear()
            await self._wake.wait()
        message, size, items = messages.InvokeRequest(), 0, 0
        while self._items and items < MESSAGE_ITEMS:
            field, item, item_bytes = self._items[0]
            size += item_bytes
            if items and (size > MESSAGE_BYTES or (field in SINGLE and message.HasField(field))):  # type: ignore[arg-type]
                break
            if field in SINGLE:
                getattr(message, field).CopyFrom(item)
            else:
                getattr(message, field).append(item)
            self._items.popleft()
            items += 1
        if not self._items:
            self._wake.clear()
        return message

    def unwritten_calls(self) -> set[str]:
        """Returns the ids of the calls that are in no message yet."""
        return {item.call_id for field, item, _ in self._items if field == "calls"}
