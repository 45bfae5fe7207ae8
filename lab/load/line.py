"""Passes TCP connections on over loopback: slowly, half-open, reset or refused, as a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

_PIECE = 64 * 1024
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close sends RST


class Line:
    """Passes on what comes to a port to another one.

    Args:
        port: where to listen; 0: anywhere.

    Attributes:
        delay: seconds that each piece takes, in both directions.
        port: where it listens, once it is open.
    """

    def __init__(self, port: int, target: int) -> None:
        self.port = port
        self._target = target
        self._server: asyncio.Server | None = None  # None while it does not listen
        self._ways: set[asyncio.StreamWriter] = set()  # both ends of every connection
        self._serving: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()  # clear while nothing passes
        self._flows.set()
        self.delay = 0.0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self.reset()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def stall(self) -> None:
        """Passes nothing on; neither end notices."""
        self._flows.clear()

    def flow(self) -> None:
        self._flows.set()

    def reset(self) -> None:
        """Sends RST to both ends of every connection."""
        for way in list(self._ways):
            if (sock := way.get_extra_info("socket")) is not None:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            way.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # this is one
        self._serving.add(task)
        self._ways.add(writer)
        there: asyncio.StreamWriter | None = None
        try:
            far, there = await asyncio.open_connection("127.0.0.1", self._target)
            self._ways.add(there)
            ways = [asyncio.create_task(self._pass(reader, there)), asyncio.create_task(self._pass(far, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the target does not listen, or this line closes
        finally:
            for each in (writer, there):
                if each is not None:
                    self._ways.discard(each)
                    each.transport.abort()
            self._serving.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes one direction on to its end, which it hands on too."""
        while piece := await reader.read(_PIECE):
            if self.delay:
                await asyncio.sleep(self.delay)
            await self._flows.wait()
            writer.write(piece)
            await writer.drain()
        await self._flows.wait()
        if writer.can_write_eof():
            writer.write_eof()
