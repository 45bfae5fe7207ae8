"""Parses server-sent events within a limit, as the WHATWG standard has them (HTML, section 9.2.6)."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE_ENDS = re.compile(rb"\r\n|\r")
_BOM = b"\xef\xbb\xbf"


class EventTooLong(Exception):
    """A stream has an event beyond the limit, in data or in all of its lines; nothing more of it can be read."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
        data: its lines of data; empty where the event only carries an id.
        id: the last one of the stream, this event's own included; "" before the first.
        kind: "message" unless it says otherwise.
    """

    data: bytes
    id: str
    kind: str = "message"


class SseParser:
    """Turns the bytes of one stream into events, in pieces of any size.

    Args:
        max_bytes: of one event, its comments and other fields included.

    Attributes:
        last_id: with which the stream can be resumed; "" where it cannot.
        retry_seconds: how long to wait before that; None where the server does not say.
    """

    def __init__(self, max_bytes: int) -> None:
        self.last_id = ""
        self.retry_seconds: float | None = None
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []  # of a line that has not ended
        self._size = 0  # bytes of the event that has not ended
        self._data: list[bytes] = []  # lines of data of that event
        self._kind = ""
        self._has_id = False  # whether that event has an id of its own
        self._after_cr = False  # whether a line feed would belong to the line before
        self._at_start = True

    def restarted(self) -> SseParser:
        """Returns a parser for the stream that goes on where this one ended."""
        parser = SseParser(self._max_bytes)
        parser.last_id, parser.retry_seconds = self.last_id, self.retry_seconds
        return parser

    def feed(self, chunk: bytes) -> list[Event]:
        """Takes what has arrived; returns the events that it ends.

        Raises:
            EventTooLong: the parser takes nothing more.
        """
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        if not chunk:
            return []
        self._after_cr = chunk[-1:] == b"\r"
        if b"\r" in chunk:
            chunk = _LINE_ENDS.sub(b"\n", chunk)
        first, *lines = chunk.split(b"\n")
        self._pieces.append(first)
        if not lines:
            self._grow(len(first))
            return []
        events: list[Event] = []
        self._end_line(b"".join(self._pieces) if len(self._pieces) > 1 else first, len(first), events)
        for line in lines[:-1]:
            self._end_line(line, len(line), events)
        self._pieces = [lines[-1]]
        self._grow(len(lines[-1]))
        return events

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > self._max_bytes:
            self._pieces, self._data = [], []
            raise EventTooLong(f"an event has more than {self._max_bytes} bytes")

    def _end_line(self, line: bytes, size: int, events: list[Event]) -> None:
        self._grow(size)
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BOM)
        if line:
            self._take_field(line)
            return
        if self._data or self._has_id:
            events.append(Event(b"\n".join(self._data), self.last_id, self._kind or "message"))
        self._data, self._kind, self._has_id, self._size = [], "", False, 0

    def _take_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"id" and b"\0" not in value:
            self.last_id = value.decode("utf-8", "replace")
            self._has_id = True
        elif name == b"event":
            self._kind = value.decode("utf-8", "replace")
        elif name == b"retry" and value.isdigit() and len(value) < 16:
            self.retry_seconds = int(value) / 1000
