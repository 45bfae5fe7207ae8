"""Serves the lane: the RPCs of the bus for peers on the SDK, over local sockets beside the addresses of gRPC.

The kernel says whose program connects. The users who may do so are those of the address beside it.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
from collections.abc import Coroutine
from typing import Any

from google.protobuf.message import DecodeError

from toolbus.bus.access.identity import LOCAL
from toolbus.bus.access.neighbours import Neighbours
from toolbus.bus.audit import Audit
from toolbus.bus.streams.grpc_server import ToolBusService
from toolbus.bus.streams.invoke_stream import InvokeStream
from toolbus.common.text import quote
from toolbus.errors import NotOffered, NotPermitted, ToolBusError, grpc_status, status_text
from toolbus.protocol.lane import MESSAGE_ITEMS, FrameKind, LaneConnection, lane_names, program_of
from toolbus.protocol.tool import Limits
from toolbus.v1 import tool_bus_service_pb2 as wire

log = logging.getLogger("toolbus.lane")

OPEN_BYTES = 128  # of the name of an RPC; until one may be used, a connection takes nothing more
OPEN_SECONDS = 30.0  # until a connection has to be opened
LOOK_SECONDS = 0.05  # between two looks whether the peer of a connection has ended that is not read now
LINGER_SECONDS = 5.0  # that a peer may take to read the status of an RPC, behind everything before it
BACKLOG = 1024  # connections that may wait; all peers come back at once after a restart, and gRPC takes the rest


class LaneServer:
    """The sockets of one bus, and their connections.

    Args:
        neighbours: who may use an address on loopback.
        audit: records who was refused.
    """

    def __init__(self, service: ToolBusService, limits: Limits, neighbours: Neighbours, audit: Audit) -> None:
        self.service = service
        self.limits = limits
        self.audit = audit
        self.connections: set[_BusConnection] = set()
        self.closed = False  # whether it takes no further connections
        self._neighbours = neighbours
        self._servers: list[asyncio.Server] = []

    async def start(self, addresses: tuple[str, ...]) -> None:
        """Listens beside addresses of gRPC; where that cannot be done, peers use gRPC."""
        loop = asyncio.get_running_loop()
        for address in addresses:
            # The directory of a unix socket keeps other users out, and the lane's socket is in none.
            allowed = Neighbours() if address.startswith("unix:") else self._neighbours
            for name in () if address.startswith(("tls:", "mtls:")) else lane_names(address):
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    listener.bind(name)
                    server = await loop.create_unix_server(
                        lambda allowed=allowed: _BusConnection(self, allowed, loop),  # type: ignore[misc]
                        sock=listener,
                        backlog=BACKLOG,
                    )
                except OSError as error:
                    listener.close()
                    log.debug("no lane at %s: %s", address, error)
                    continue
                self._servers.append(server)

    def close(self) -> None:
        """Takes no further connections; those that are open stay."""
        self.closed = True
        for server in self._servers:
            # What the loop has accepted in this turn attaches to the server in the next, or nothing closes its socket.
            for each in server.sockets:
                server.get_loop().remove_reader(each.fileno())
            server.get_loop().call_soon(server.close)
        self._servers.clear()

    def stop(self) -> None:
        """Ends everything at once."""
        self.close()
        for connection in list(self.connections):
            connection.write_waiting()  # how streams have ended just now
            connection.abort()


class _BusConnection(LaneConnection):
    """One connection of a peer, which is one RPC."""

    def __init__(self, server: LaneServer, allowed: Neighbours, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(OPEN_BYTES, loop)
        self._server = server
        self._allowed = allowed
        self._address = ""  # for operators; "" before it is connected
        self._uid: int | None = None  # of the peer's user; None where the kernel does not say
        self._method = ""  # the RPC; "" before it is opened
        self._stream: InvokeStream | None = None  # None before the stream is open, and after it
        self._hang_up: select.poll | None = None  # tells of it where nothing is read; None before it is connected
        self._looking = False  # whether `_look` will run
        self._timer: asyncio.TimerHandle | None = None  # ends a connection that is not opened or closed in time

    def connected(self) -> None:
        """Notes who connects."""
        assert self._transport is not None
        if self._server.closed:  # the loop had accepted it just before
            self.abort()
            return
        self._server.connections.add(self)
        connection = self._transport.get_extra_info("socket")
        self._hang_up = select.poll()
        self._hang_up.register(connection, 0)
        try:
            pid, self._uid = program_of(connection)
            self._address = f"lane:{pid}"
        except OSError:
            self._address = "lane:"
        self._timer = self._loop.call_later(OPEN_SECONDS, self.abort)

    def frame(self, kind: int, payload: bytes) -> None:
        """Takes the opening, a message or the half-close."""
        stream = self._stream
        if stream is not None and kind == FrameKind.MESSAGE:
            try:
                message = wire.InvokeRequest.FromString(payload)
            except DecodeError as error:
                stream.undecodable(error)
            else:
                self.hold(stream.take(message)) if stream.waits(message) else stream.receive(message)
        elif stream is not None and kind == FrameKind.HALF_CLOSE:
            stream.half_close()
        elif self._method and stream is None and kind == FrameKind.MESSAGE:
            self.hold(self._answer(payload))
        elif not self._method and kind == FrameKind.OPEN:
            self._open(payload.decode("ascii", "replace"))
        else:
            self.refuse("INVALID_ARGUMENT", f"a frame of the lane has the kind {kind}, which may not come here")

    def hold(self, handling: Coroutine[Any, Any, None]) -> None:
        """Reads no further frame until the one before is handled, or its peer has ended."""
        super().hold(handling)
        if not self._looking:
            self._looking = True
            self._loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._looking = self._holding is not None and self._transport is not None
        if self._looking and self._hang_up is not None and self._hang_up.poll(0):
            self.abort()
        elif self._looking:
            self._loop.call_later(LOOK_SECONDS, self._look)

    def _open(self, method: str) -> None:
        self._method = method
        if self._timer is not None:
            self._timer.cancel()
        self._max_bytes = self._server.limits.message_bytes
        try:
            if refusal := self._allowed.refusal(self._uid):
                self._server.audit.refuse(self._address, f"/toolbus.v1.ToolBusService/{method}", refusal)
                raise NotPermitted(refusal)
            if method == "Invoke":
                self._stream = self._server.service.open_stream(self, LOCAL, self._address)
                self._stream.write_early(MESSAGE_ITEMS, self._write_complete)
            elif method not in self._server.service.unary:
                raise NotOffered(
                    f"the lane has no RPC {quote(method)}: choose Invoke, Register, Unregister, Clear or List"
                )
        except ToolBusError as error:
            self._end(*grpc_status(error))

    async def _answer(self, payload: bytes) -> None:
        try:
            response = await self._server.service.answer(self._method, payload, LOCAL)
        except DecodeError as error:
            self._end("INVALID_ARGUMENT", f"the request cannot be decoded: {error}")
        except Exception as error:
            status, text = grpc_status(error)
            if status == "INTERNAL":
                log.error("a fault of the bus", exc_info=error)
            self._end(status, text)
        else:
            self.write(FrameKind.MESSAGE, response)
            self._end("OK", "")

    def write_waiting(self) -> None:
        """Writes the messages of the stream, and its status behind them."""
        stream = self._stream
        while stream is not None and self.may_write:
            frame = stream.next_frame()
            if frame is None:
                break
            self.write(FrameKind.MESSAGE, frame.SerializeToString())
        if stream is not None and stream.ended is not None and (self.may_write or stream.ended[0] != "OK"):
            self._end(*stream.ended)

    def _write_complete(self) -> None:
        stream = self._stream
        while stream is not None and self.may_write and (frame := stream.next_complete()) is not None:
            self.write(FrameKind.MESSAGE, frame.SerializeToString())

    def refuse(self, status: str, text: str) -> None:
        """Ends the RPC with a status: the peer broke a rule of the frames."""
        if self._stream is not None:
            self._stream.end(status, text)  # `write_waiting` writes it
        else:
            self._end(status, text)

    def _end(self, status: str, text: str) -> None:
        """Writes the status of the RPC, and gives the peer time to read it: it then closes the connection.

        Closing here could break a write of the peer, which would then never see the status.
        """
        if self.over:
            return
        self.over = True
        self._close_stream()
        self.write(FrameKind.STATUS, f"{status}\n{status_text(text)}".encode("utf-8", "replace"))
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(LINGER_SECONDS, self.abort)

    def lost(self) -> None:
        """Ends the stream, whose connection broke if it has not ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._server.connections.discard(self)
        if self._stream is not None:
            self._stream.disconnected()
            self._close_stream()

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.drop()
            self._server.service.close_stream(stream)
