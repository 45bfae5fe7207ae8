"""What a call has said and its reader has not taken yet, where the result is streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from toolbus.bus.gateway.event_stream import event
from toolbus.errors import Code, Stage
from toolbus.tool import CallError, Progress, Result
from toolbus.v1 import tool_pb2 as pb

MANY = 128  # signs that wait, before older progress makes way for newer
OVERHEAD_BYTES = 256  # of one that waits: the record around its text


class ProgressBuffer:
    """ProgressBuffer of life of one call that wait for its reader.

    Of many the newest progress is kept, and every chunk: chunks are pieces of the output, so as many bytes may wait as
    an output may have. The call of a reader that is slower than that ends.

    Attributes:
        awake: set when there is something to do.
        overflowed: whether more came than may wait; nothing is taken any more then.
        on_overflow: called when that happens.
    """

    def __init__(self, max_bytes: int) -> None:
        self.awake = asyncio.Event()
        self.overflowed = False
        self.on_overflow: Callable[[], object] = bool
        self._max_bytes = max_bytes
        self._waiting_bytes = 0
        self._waiting: dict[int, Progress] = {}  # by the order in which they came
        self._count = 0  # of all that came
        self._newest = 0  # which one the newest progress without a chunk is, taken or not; 0 before the first

    def __repr__(self) -> str:
        return f"<ProgressBuffer waiting={len(self._waiting)} bytes={self._waiting_bytes}>"

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, sign: Progress) -> None:
        """Takes a sign of life."""
        if self.overflowed:
            return
        self._count += 1
        if not sign.chunk:
            if len(self._waiting) >= MANY and self._newest in self._waiting:
                self._waiting_bytes -= _weight(self._waiting.pop(self._newest))
            self._newest = self._count
        self._waiting_bytes += _weight(sign)
        if self._waiting_bytes > self._max_bytes + MANY * OVERHEAD_BYTES:
            self.overflowed = True
            self.on_overflow()
        else:
            self._waiting[self._count] = sign
            self.awake.set()

    def take(self) -> bytes:
        """Returns the oldest as an event, or as two."""
        sign = self._waiting.pop(next(iter(self._waiting)))
        self._waiting_bytes -= _weight(sign)
        events = event("chunk", {"text": sign.chunk}) if sign.chunk else b""
        if sign.message or sign.progress or sign.total or not sign.chunk:
            events += event("progress", {"progress": sign.progress, "total": sign.total, "message": sign.message})
        return events

    def refusal(self, call: pb.ToolCall) -> Result:
        """Says why a call ended that said more than its reader took."""
        limit = self._max_bytes
        message = f"more than {limit} bytes of output wait for whoever called {call.name!r}: read the stream faster"
        error = CallError(Code.RESULT_TOO_LARGE, message, Stage.ACCEPTED, limit=("result_bytes", limit))
        return Result(call.call_id, is_error=True, error=error)


def _weight(sign: Progress) -> int:
    return len(sign.chunk.encode()) + len(sign.message.encode()) + OVERHEAD_BYTES
