"""Lets a command continue while its output is not read: a terminal that Ctrl-S stopped, a pipe whose reader hangs.

`toolbus run` and `toolbus serve` print on the thread that does everything else. A text that a stream does not take at
once is written by a thread of its own. A print waits for that thread: so a slow reader slows the command down as any
output does, and a closed pipe is noticed at once. A stream that takes nothing for a while is stuck: texts are then
stored up to a bound, and further lines are counted; once the stream goes on, a line says how many were left out. So it
does of lines for which a full disk had no room, once there is some.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TextIO

STUCK_SECONDS = 0.25  # without progress; the command stands still for so long, once each time that a stream gets stuck
WAITING_BYTES = 1 << 20  # that wait for a stuck stream
END_SECONDS = 1.0  # without progress, at the end of the command
_LINE_BREAK = ord("\n")
_PIECE = 4096  # a pipe takes so many at a time, so that progress is seen

_NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))  # there may be room again

Note = Callable[..., str]
UNREAD = "this output was not read for a while"


def text_note(count: int, why: str = UNREAD) -> str:
    """Returns the line about lines that were left out."""
    return f"toolbus: {_left_out(count, why)}"


def json_note(key: str, **fields: str) -> Note:
    """Returns what makes that line a JSON object, with the text under a key among other fields."""
    return lambda count, why=UNREAD: json.dumps({**fields, key: _left_out(count, why)})


def _left_out(count: int, why: str) -> str:
    return f"{count} line{'s were' if count != 1 else ' was'} not shown, because {why}"


class SteadyStream(io.TextIOBase):
    """A stream of text that is stuck for a moment at most. Any thread may write.

    Args:
        stream: what is written to, by its descriptor.
        note: returns the line about so many lines that were left out.
    """

    def __init__(
        self, stream: TextIO, note: Note, *, stuck_seconds: float = STUCK_SECONDS, waiting_bytes: int = WAITING_BYTES
    ) -> None:
        self._stream = stream
        self._descriptor = stream.fileno()
        self._note = note
        self._stuck_seconds = stuck_seconds
        self._waiting_bytes = waiting_bytes
        self._changed = threading.Condition()  # guards all below
        self._line = ""  # the beginning of a line that has not ended
        self._waiting: deque[bytes] = deque()  # the first is being written
        self._size = 0  # of those
        self._written = 0  # bytes
        self._left_out = 0  # lines since the stream got stuck
        self._dropped = 0  # lines for which there was no room
        self._no_room = ""  # why the last of them was dropped
        self._at_start = True  # whether the last byte that was written ended a line
        self._stuck = False
        self._error: OSError | None = None  # why nothing can be written any more
        self._writer: threading.Thread | None = None  # None before the thread is needed
        # What can be written without a wait; None for a terminal, which may have room for less than a line.
        self._poll = None if stream.isatty() else select.poll()
        if self._poll is not None:
            self._poll.register(self._descriptor, select.POLLOUT)

    def __repr__(self) -> str:
        return f"<SteadyStream {self._stream.name} waiting={self._size} left_out={self._left_out}>"

    @property
    def encoding(self) -> str:  # type: ignore[override]  # the base class has an attribute
        return self._stream.encoding

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Writes a text, up to its last line break.

        Raises:
            OSError: nothing can be written any more.
        """
        with self._changed:
            lines, end, self._line = (self._line + text).rpartition("\n")
            if end:
                self._put(f"{lines}\n")
        return len(text)

    def flush(self) -> None:
        """Writes the beginning of a line too.

        Raises:
            OSError: nothing can be written any more.
        """
        with self._changed:
            text, self._line = self._line, ""
            if text:
                self._put(text)

    def finish(self, seconds: float = END_SECONDS) -> None:
        """Waits until all is written, as long as the stream takes some of it within so many seconds."""
        with self._changed, contextlib.suppress(OSError):
            self._stuck = False
            self._wait(seconds)

    def _put(self, text: str) -> None:
        if self._error is not None:
            raise self._error
        data = text.encode(self._stream.encoding, "backslashreplace")
        if self._left_out or (self._stuck and self._size + len(data) > self._waiting_bytes):
            self._left_out += text.count("\n")
            return
        if not self._waiting and self._takes(data):
            data = data[self._write_now(data) :]
        if not data:
            return
        self._waiting.append(data)
        self._size += len(data)
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, daemon=True, name="output")
            self._writer.start()
        self._changed.notify_all()
        self._wait(self._stuck_seconds)

    def _takes(self, data: bytes) -> bool:
        """Tells whether a text is written without a wait for sure: that is five times as fast as with the thread."""
        return self._poll is not None and len(data) <= _PIECE and bool(self._poll.poll(0))

    def _write_now(self, data: bytes | memoryview) -> int:
        """Returns how many bytes are done: written, or dropped since there is no room for them."""
        try:
            if self._no_room:
                self._write_note()
            count = os.write(self._descriptor, data)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._no_room = error.strerror or "no room"
            self._dropped += max(1, bytes(data).count(b"\n"))
            return len(data)
        if count:
            self._at_start = data[count - 1] == _LINE_BREAK
        return count

    def _write_note(self) -> None:
        """Writes the line about lines that had no room; raises if there is still none."""
        note = self._note(
            self._dropped, f"there was no room for {'them' if self._dropped != 1 else 'it'} ({self._no_room})"
        )
        data = f"{'' if self._at_start else chr(10)}{note}\n".encode()
        count = os.write(self._descriptor, data)
        self._at_start = data[count - 1] == _LINE_BREAK
        self._dropped, self._no_room = 0, ""

    def _wait(self, seconds: float) -> None:
        """Waits until all is written; a stream that takes nothing for so many seconds is stuck."""
        while (self._waiting or self._left_out) and not self._stuck and self._error is None:
            before = self._written
            if not self._changed.wait(seconds) and self._written == before:
                self._stuck = True
        if self._error is not None:
            raise self._error

    def _write_all(self) -> None:
        """Writes what waits; the thread of its own."""
        try:
            while True:
                self._write(self._next())
                with self._changed:
                    self._size -= len(self._waiting.popleft())
        except OSError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> bytes:
        """Returns what is to be written next, once there is something."""
        with self._changed:
            if not self._waiting and self._left_out:
                note = f"{self._note(self._left_out)}\n".encode()
                self._waiting.append(note)
                self._size += len(note)
                self._left_out = 0
            while not self._waiting:
                self._stuck = False
                self._changed.notify_all()
                self._changed.wait()
            return self._waiting[0]

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            count = self._write_now(rest[:_PIECE])
            if not count:  # another program has made the terminal so that it does not block
                select.select([], [self._descriptor], [])
            self._written += count
            rest = rest[count:]


@contextlib.contextmanager
def steady_output(note: Note) -> Iterator[None]:
    """Has standard output and standard error be stuck for a moment at most; not where they are not files."""
    before = sys.stdout, sys.stderr
    try:
        streams = [SteadyStream(stream, note) for stream in before]
    except (OSError, AttributeError):  # a test's own streams; none at all
        yield
        return
    for stream in before:
        stream.flush()
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for steady in streams:
            steady.finish()
