"""Parses server-sent events within a limit, by the WHATWG standard (HTML, section 9.2.6)."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE_ENDS = re.compile(rb"\r\n|\r")
_BOM = b"\xef\xbb\xbf"


class EventTooLong(Exception):
    """An event of a stream exceeds the limit, with all of its lines; the rest of the stream cannot be read."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
        data: its lines of data; empty if the event has only an id.
        id: its own, or the last earlier one of the stream; "" before the first.
        kind: "message" if the event names none.
    """

    data: bytes
    id: str
    kind: str = "message"


class SseParser:
    """Turns the chunks of one stream into events.

    Args:
        max_bytes: of one event, with comments and all fields.

    Attributes:
        last_id: the id from which the stream can be resumed; "" if it cannot.
        retry_seconds: the server's pause before a resume; None if it sent none.
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
        """Returns a parser for the resumed stream."""
        parser = SseParser(self._max_bytes)
        parser.last_id, parser.retry_seconds = self.last_id, self.retry_seconds
        return parser

    def feed(self, chunk: bytes) -> list[Event]:
        """Takes a chunk; returns the events that are complete with it.

        Raises:
            EventTooLong: the parser must not be used again.
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
