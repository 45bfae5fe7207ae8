"""Buffers the progress of one call whose result is streamed, until its HTTP client reads it.

Where many updates wait, newer progress replaces older; chunks are pieces of the output and all stay, up to the size of
an output. A client that reads more slowly than that ends its call.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from toolbus.bus.gateway.event_stream import event
from toolbus.errors import Code, Stage
from toolbus.mailbox import Mailbox
from toolbus.tool import CallError, Progress, Result
from toolbus.v1 import tool_pb2 as pb

MAX_WAITING = 128  # updates that wait before newer progress replaces older
OVERHEAD_BYTES = 256  # of one that waits: the record around its text


class ProgressBuffer:
    """The progress of one call that waits for its reader. Belongs to the loop that it was made on.

    Attributes:
        overflowed: whether more came than may wait; nothing more is accepted then.
        on_overflow: called when that happens.
    """

    def __init__(self, max_bytes: int) -> None:
        self.overflowed = False
        self.on_overflow: Callable[[], object] = bool
        self._max_bytes = max_bytes
        self._limit_bytes = max_bytes + MAX_WAITING * OVERHEAD_BYTES
        self._waiting_bytes = 0
        self._waiting = Mailbox[Progress](self._limit_bytes // OVERHEAD_BYTES + 1)  # bounded by bytes before that
        self._newest = 0  # number of the newest progress without a chunk, read or not; 0 before the first

    def __repr__(self) -> str:
        return f"<ProgressBuffer waiting={len(self._waiting)} bytes={self._waiting_bytes}>"

    def put(self, update: Progress) -> None:
        """Adds an update; where many wait, it replaces the newest progress that has not been read."""
        if self.overflowed:
            return
        if not update.chunk and len(self._waiting) >= MAX_WAITING:
            replaced = self._waiting.take_back(self._newest)
            self._waiting_bytes -= 0 if replaced is None else _weight(replaced)
        self._waiting_bytes += _weight(update)
        if self._waiting_bytes > self._limit_bytes:
            self.overflowed = True
            self.on_overflow()
            return
        number = self._waiting.put(update)
        if not update.chunk:
            self._newest = number

    def close(self) -> None:
        """Ends `events` after the updates that wait."""
        self._waiting.close()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yields the updates as server-sent events, until `close`."""
        async for update in self._waiting:
            self._waiting_bytes -= _weight(update)
            yield _events(update)

    def refusal(self, call: pb.ToolCall) -> Result:
        """Returns the result of a call that ended because its client read too slowly."""
        limit = self._max_bytes
        message = (
            f"more than {limit} bytes of output (limit result_bytes) wait for the client that called {call.name!r}: "
            "read the stream faster"
        )
        error = CallError(Code.RESULT_TOO_LARGE, message, Stage.ACCEPTED, limit=("result_bytes", limit))
        return Result(call.call_id, is_error=True, error=error)


def _events(update: Progress) -> bytes:
    """Returns an update as one event, or as two."""
    events = event("chunk", {"text": update.chunk}) if update.chunk else b""
    if update.message or update.progress or update.total or not update.chunk:
        events += event("progress", {"progress": update.progress, "total": update.total, "message": update.message})
    return events


def _weight(update: Progress) -> int:
    return len(update.chunk.encode()) + len(update.message.encode()) + OVERHEAD_BYTES
