"""Writes a stream of server-sent events to a client, and stores the last events for a client that resumes it.

Sending never waits: the queue of events has a limit, beyond which the oldest are dropped. The newest is never dropped,
so the answer at the end always arrives. A stream with an id can be resumed (`Last-Event-ID`), one without cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque

from starlette.types import Send

MAX_EVENTS = 256
MAX_BYTES = 1024 * 1024
# After which a client resumes a stream. Official SDKs try twice with this pause, and then never again.
RETRY_MS = 5_000
POLL_RETRY_MS = 500  # after the bus has closed a long stream

HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_PING = b": ping\n\n"


class MessageStream:
    """The messages of one stream.

    Args:
        id: of the stream; "" for one that cannot be resumed, which does not store written events.
    """

    def __init__(self, id: str = "") -> None:
        self.id = id
        self.closed = False  # whether no further message follows
        self.writing = 0  # how many responses write it
        self._events: deque[tuple[int, bytes]] = deque()  # number and message
        self._bytes = 0  # of these messages
        self._last = 0  # the number of the newest message
        self._writer = 0  # the number of the newest response; older ones end
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"<MessageStream {self.id} events={len(self._events)}{' closed' if self.closed else ''}>"

    @property
    def size(self) -> int:
        """The bytes of its stored messages."""
        return self._bytes

    @property
    def takes_messages(self) -> bool:
        return True

    def ended_with(self, number: int) -> bool:
        """Tells whether an event is the last one of a closed stream."""
        return self.closed and number >= self._last

    def send(self, message: bytes) -> None:
        """Adds a message; never waits."""
        self._last += 1
        self._events.append((self._last, message))
        self._bytes += len(message)
        while len(self._events) > MAX_EVENTS or (self._bytes > MAX_BYTES and len(self._events) > 1):
            self._drop()
        self._wake.set()

    def close(self) -> None:
        """Ends the stream after all messages are written."""
        self.closed = True
        self._wake.set()

    async def write(
        self,
        send: Send,
        *,
        after: int = 0,
        ping_seconds: float,
        primed: bool = False,
        poll_seconds: float | None = None,
        headers: list[tuple[bytes, bytes]] = HEADERS,
    ) -> None:
        """Writes the stream as a response, until it is closed or another response replaces this one.

        Args:
            after: the number of the last event that the client has.
            ping_seconds: a comment is written after so long without an event.
            primed: whether the response begins with an empty event, from which a client can resume.
            poll_seconds: after which the response ends while the stream continues; None: never.
        """
        self._writer += 1
        self.writing += 1
        self._wake.set()
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if primed and self.id:
                await _write(send, b"id: %b-%d\nretry: %d\ndata: \n\n" % (self.id.encode(), after, RETRY_MS))
            await self._write_events(send, self._writer, after, ping_seconds, poll_seconds)
            if primed and self.id and not self.closed:
                await _write(send, b"retry: %d\n\n" % POLL_RETRY_MS)
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.writing -= 1

    async def _write_events(
        self, send: Send, writer: int, after: int, ping_seconds: float, poll_seconds: float | None
    ) -> None:
        loop = asyncio.get_running_loop()
        end = math.inf if poll_seconds is None else loop.time() + poll_seconds
        while self._writer == writer:
            self._wake.clear()
            while self._writer == writer and (event := self._next(after)) is not None:
                after, message = event
                await _write(send, self._text(after, message))
                if not self.id:
                    self._forget(after)
            left = end - loop.time()
            if self.closed or left <= 0:
                return
            if not await _ends_within(self._wake, min(ping_seconds, left)) and ping_seconds < left:
                await _write(send, _PING)

    def _forget(self, number: int) -> None:
        while self._events and self._events[0][0] <= number:
            self._drop()

    def _next(self, after: int) -> tuple[int, bytes] | None:
        return next((event for event in self._events if event[0] > after), None)

    def _drop(self) -> None:
        _, message = self._events.popleft()
        self._bytes -= len(message)

    def _text(self, number: int, message: bytes) -> bytes:
        mark = b"id: %b-%d\n" % (self.id.encode(), number) if self.id else b""
        return b"%bevent: message\ndata: %b\n\n" % (mark, message)


async def _write(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _ends_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
            return True
    return False
