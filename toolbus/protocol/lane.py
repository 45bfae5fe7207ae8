"""Carries messages between a bus and peers on the SDK over a local socket: without HTTP/2, threads and copies.

The lane is private to this project: gRPC is the wire of all others, and what peers use wherever the lane is not there.
A connection carries one RPC. A frame is the length of its payload (4 bytes, the highest first), its kind (1 byte) and
the payload:

    OPEN        to the bus    the name of the RPC
    MESSAGE     both ways     a message as the RPC has it
    HALF_CLOSE  to the bus    the peer sends nothing more
    STATUS      to the peer   the name of a gRPC status, a line feed, its text; nothing follows

A connection that ends without a status broke. The name of the socket has the version of these frames: ends of
different versions do not find each other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import sys
from collections.abc import Callable, Coroutine
from enum import IntEnum
from typing import Any, cast

log = logging.getLogger("toolbus.lane")

# Items of a message, or a quarter of the calls under way. Each is written once it is complete, so that the other end
# works on it meanwhile: with 64 calls in flight that makes 1.6 times the calls a second of messages that hold them all.
# Fewer items cost more than they gain.
MESSAGE_ITEMS = 32
HEADER = struct.Struct(">IB")
_CREDENTIALS = struct.Struct("=iII")  # struct ucred of unix(7): pid, uid, gid
_NAME = "\0toolbus-lane-1/"
_LOOPBACK = ("127.0.0.1", "::1")


class FrameKind(IntEnum):
    """What the payload of a frame is."""

    OPEN = 1
    MESSAGE = 2
    HALF_CLOSE = 3
    STATUS = 4


def lane_names(address: str) -> tuple[str, ...]:
    """Returns the names of the lane's sockets beside an address of gRPC; none where it has none.

    They are in Linux's abstract namespace, which belongs to a network namespace, as ports do: nothing is left on disk,
    and whoever cannot reach the port does not reach the lane. The name beside a unix socket is made of its inode, since
    a path may be another file in another container.

    Args:
        address: ``HOST:PORT`` or ``unix:PATH``, without TLS.
    """
    if not sys.platform.startswith("linux"):
        return ()
    if address.startswith("unix:"):
        try:
            file = os.stat(address[5:].removeprefix("//"))
        except OSError:
            return ()
        return (f"{_NAME}{file.st_dev}:{file.st_ino}",)
    host, _, port = address.rpartition(":")
    host = host.strip("[]").lower()
    return tuple(f"{_NAME}{each}:{port}" for each in (_LOOPBACK if host == "localhost" else (host,)))


def program_of(connection: socket.socket) -> tuple[int, int]:
    """Returns process id and uid of the program at the other end, as the kernel recorded them when it connected.

    Raises:
        OSError: the kernel does not say.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


class LaneConnection(asyncio.Protocol):
    """One end of one connection: cuts what arrives into frames, and writes as fast as the other end reads.

    Args:
        max_bytes: the largest payload that it accepts.

    Attributes:
        over: whether further input is ignored.
    """

    def __init__(self, max_bytes: int, loop: asyncio.AbstractEventLoop) -> None:
        self.over = False
        self._max_bytes = max_bytes
        self._loop = loop
        self._soon: Callable[[Callable[[], object]], object] = loop.call_soon
        self._part = bytearray()  # the beginning of a frame
        self._needed = 0  # bytes of that frame, as far as its header has come
        self._transport: asyncio.Transport | None = None  # None before it is connected, and after its end
        self._paused = False  # whether the other end reads too slowly
        self._planned = False  # whether `_flush` will run soon
        self._holding: asyncio.Task[None] | None = None  # handles the frame before the next ones are read; None: none

    # -- for the ends --------------------------------------------------------------------------------------------

    def connected(self) -> None:
        """Begins."""

    def frame(self, kind: int, payload: bytes) -> None:
        """Takes a frame."""
        raise NotImplementedError

    def refuse(self, status: str, text: str) -> None:
        """Ends the connection, because the other end broke a rule of the frames."""
        raise NotImplementedError

    def write_waiting(self) -> None:
        """Writes what waits, while `may_write`."""

    def lost(self) -> None:
        """Handles that the connection has ended."""

    @property
    def may_write(self) -> bool:
        """Whether the other end reads what it gets."""
        return not self._paused and self._transport is not None

    def write(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Writes a frame; one that has to wait in this process for the other end clears `may_write`."""
        if self._transport is not None:
            self._transport.write(HEADER.pack(len(payload), kind) + payload)

    def hold(self, handling: Coroutine[Any, Any, None]) -> None:
        """Reads no further frame until the one before is handled."""
        if self._transport is not None:
            self._transport.pause_reading()
        self._holding = self._loop.create_task(handling)
        self._holding.add_done_callback(self._go_on)

    def _go_on(self, handled: asyncio.Task[None]) -> None:
        self._holding = None
        if self._transport is not None and not handled.cancelled():
            self._transport.resume_reading()
            self.data_received(b"")

    def wake(self) -> None:
        """Has `write_waiting` called soon, once for all that is put in before that."""
        if not self._planned and self._transport is not None:
            self._planned = True
            self._soon(self._flush)

    def abort(self) -> None:
        """Ends the connection at once."""
        self.over = True
        if self._transport is not None:
            self._transport.abort()

    # -- for the loop --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins."""
        self._transport = cast(asyncio.Transport, transport)
        self.connected()

    def connection_lost(self, error: Exception | None) -> None:
        """Ends."""
        self._transport = None
        self._part.clear()
        self.over = True
        if self._holding is not None:
            self._holding.cancel()
        self.lost()

    def pause_writing(self) -> None:
        """Stops writing: the other end does not read."""
        self._paused = True

    def resume_writing(self) -> None:
        """Writes on."""
        self._paused = False
        self.wake()

    def data_received(self, data: bytes) -> None:
        """Cuts what has arrived into frames."""
        part = self._part
        if part:
            part += data
            if len(part) < self._needed:
                return
            data = bytes(part)
            part.clear()
        start, length = 0, len(data)
        while length - start >= HEADER.size and not self.over and self._holding is None:
            size, kind = HEADER.unpack_from(data, start)
            if size > self._max_bytes:
                text = f"a message of {size} bytes is above the limit message_bytes = {self._max_bytes}: send less"
                self.refuse("RESOURCE_EXHAUSTED", text)
                return
            begin = start + HEADER.size
            if begin + size > length:
                self._needed = HEADER.size + size
                break
            start = begin + size
            self.frame(kind, data[begin:start])
        else:
            self._needed = HEADER.size
        if start < length and not self.over:
            part += data[start:]

    def _flush(self) -> None:
        self._planned = False
        try:
            self.write_waiting()
        except Exception:
            log.exception("a fault of toolbus while it wrote a message")
            self.abort()
