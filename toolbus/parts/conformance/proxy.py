"""Connects a client to the scripted bus, and acts like a network or a dead bus: it refuses, resets, goes silent.

The port stays reserved while it is closed, so no other program can answer there meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from pathlib import Path

CHUNK_BYTES = 65_536
Way = tuple[asyncio.StreamReader, asyncio.StreamWriter]

# A frame of HTTP/2 with ENHANCE_YOUR_CALM, as a server writes it to a client that pings too often.
GOAWAY = struct.pack(">BHBBIII", 0, 22, 7, 0, 0, 2**31 - 1, 11) + b"too_many_pings"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST at once


class Proxy:
    """Passes bytes between one address for clients and the port of a server.

    Args:
        path: of a unix socket to listen at; None for a free port on loopback.

    Attributes:
        attempts: when clients connected, by ``loop.time()``.
        attempted: set at the first of them.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._holder: socket.socket | None = None  # keeps the port while nothing listens there
        self._listener: asyncio.Server | None = None
        self._target = 0  # the server's port
        self._refusing = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._connections: dict[int, tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = {}  # by our port there
        self._tasks: set[asyncio.Task[None]] = set()
        self.attempts: list[float] = []
        self.attempted = asyncio.Event()
        if path is None:
            self._holder = reserved()
            self._port = self._holder.getsockname()[1]

    @property
    def address(self) -> str:
        """Where clients find it: ``HOST:PORT`` or ``unix:PATH``."""
        return f"127.0.0.1:{self._port}" if self._path is None else f"unix:{self._path}"

    async def open(self, target: int, *, refusing: bool = False) -> None:
        """Listens, and connects clients to a port; ``refusing`` resets them instead."""
        self._target, self._refusing = target, refusing
        if self._listener is not None:
            return
        if self._path is not None:
            self._listener = await asyncio.start_unix_server(self._accept, self._path)
        else:
            self._listener = await asyncio.start_server(self._accept, sock=bound(self._port))

    async def close(self) -> None:
        """Stops listening and resets all connections, as a bus does that was killed."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            if self._path is not None:
                self._path.unlink(missing_ok=True)
        self.cut()

    async def stop(self) -> None:
        """Ends it for good."""
        await self.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._holder is not None:
            self._holder.close()

    def cut(self, port: int | None = None) -> None:
        """Resets the connection that has a port at the server's side, or all."""
        ports = list(self._connections) if port is None else [port]
        for each in ports:
            for writer in self._connections.pop(each, ()):
                _reset(writer)

    def send_away(self, port: int) -> None:
        """Ends the connection that has a port at the server's side with GOAWAY, as for too many pings."""
        if port in self._connections:
            back, there = self._connections.pop(port)
            back.write(GOAWAY)
            back.close()
            there.close()

    def stall(self, stalled: bool) -> None:
        """Stops passing bytes on, or continues with those that waited."""
        (self._flowing.clear if stalled else self._flowing.set)()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.attempts.append(self._loop.time())
        self.attempted.set()
        if self._refusing:
            _reset(writer)
            return
        try:
            there_reader, there = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            _reset(writer)
            return
        port = there.get_extra_info("sockname")[1]
        self._connections[port] = (writer, there)
        task = self._loop.create_task(self._connect((reader, there), (there_reader, writer), port))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, there: Way, back: Way, port: int) -> None:
        """Passes bytes both ways until both have ended; a reset of one side resets the other."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(*there))
                group.create_task(self._pump(*back))
        except* OSError:
            self.cut(port)
        for writer in self._connections.pop(port, ()):
            writer.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(CHUNK_BYTES):
            await self._flowing.wait()
            sink.write(data)
            await sink.drain()
        sink.write_eof()


def reserved() -> socket.socket:
    """Returns a socket that has a port of loopback which systems do not hand out; `bound` may share it.

    Programs whose bus has ended look for it at the port that it was given, and would be taken for the client. So would
    the client of another run; hence a port is taken by a bind that fails where another socket has it.
    """
    for port in (*(random.randrange(15_000, 30_000) for _ in range(100)), 0):
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        with contextlib.suppress(OSError):
            made.bind(("127.0.0.1", port))
            _share(made)
            return made
        made.close()
    raise OSError("no port of loopback is free")


def _share(made: socket.socket) -> None:
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        made.setsockopt(socket.SOL_SOCKET, option, 1)


def bound(port: int) -> socket.socket:
    """Returns another socket for a port that is `reserved`; it does not listen, so connections are refused there."""
    # asyncio sends small pieces at once only on sockets that name their protocol. Otherwise some of what passes here
    # would wait 40 ms for an acknowledgement, and the client would be blamed.
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    _share(made)
    made.bind(("127.0.0.1", port))
    return made


def _reset(writer: asyncio.StreamWriter) -> None:
    made = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
