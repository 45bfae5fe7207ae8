"""Collects what waits to be written on one stream and makes the messages: the one place that does."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from toolbus.v1 import tool_bus_service_pb2 as messages

MESSAGE_ITEMS = 128
MESSAGE_BYTES = 1024 * 1024
# What the bus means by a limit that it does not state.
RESULT_BYTES = 4 * 1024 * 1024
SENDABLE_BYTES = 16 * 1024 * 1024
MARGIN = 1024  # bytes of a message that are not for the one item in it
ITEM_OVERHEAD = 8  # bytes that an item adds to its message beside its own: a tag, and its length
HOLD_SECONDS = 0.001  # for so long the results of calls that came together may wait for each other
SINGLE = ("attach", "heartbeat", "drain")  # fields that a message holds once


class Outbox:
    """One queue for items of all kinds: so what was put first, progress before its result, is read first.

    Attributes:
        result_bytes: the largest payload of a result that the bus takes.
        largest_item: in bytes; a larger one would end the stream.
    """

    def __init__(self) -> None:
        self.limit(RESULT_BYTES, SENDABLE_BYTES)
        self._items: deque[tuple[str, Any, int]] = deque()  # (field, item, its bytes in a message), oldest first
        self._wake = asyncio.Event()  # set while the writer has something to do: what is held does not set it
        self._hold: asyncio.TimerHandle | None = None  # wakes the writer for what is held; None where nothing is
        self._closed = False  # whether nothing more is taken

    def limit(self, result_bytes: int, message_bytes: int) -> None:
        """Sets what the bus takes."""
        self.result_bytes = result_bytes
        self.largest_item = message_bytes - MARGIN

    @property
    def closed(self) -> bool:
        """Whether the stream is over, or this side of it."""
        return self._closed

    def put(self, field: str, item: Any, *, hold: bool = False) -> None:
        """Adds an item; drops it if the stream is over.

        Args:
            hold: leaves the item until another one is put, but not for long: more are about to come.
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
        """Lets the writer send what waits and then half-close."""
        self._closed = True
        self._wake.set()

    async def take(self) -> messages.InvokeRequest | None:
        """Returns a message of what waits, oldest first; None when the outbox is closed and empty."""
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
        """Returns the ids of the calls that no message was made of."""
        return {item.call_id for field, item, _ in self._items if field == "calls"}
