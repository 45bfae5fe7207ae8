"""Carries a peer's messages: one Invoke stream, and unary RPCs beside it. Here is the lane; gRPC has its own module.

An attempt has a transport of its own. It knows the outbox, whose messages it writes in their order, and one function,
which takes each message that it reads; what they mean is the attempt's. Statuses are gRPC's, by name.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from toolbus.common.local_users import unmapped_uid
from toolbus.protocol.lane import MESSAGE_ITEMS, FrameKind, LaneConnection, lane_names, program_of
from toolbus.protocol.session import Outbox
from toolbus.sdk.bus_address import BusAddress
from toolbus.sdk.connection_settings import MESSAGE_BYTES
from toolbus.sdk.shared_loop import SocketStream, TurnLoop
from toolbus.v1 import tool_bus_service_pb2 as wire

Receive = Callable[[wire.InvokeResponse], None]
STOPPED = "UNAVAILABLE", "the bus stopped answering"  # how a stream ends that this end cancels
BROKE = "UNAVAILABLE", "the connection to the bus broke"

_RESPONSES: dict[str, Any] = {
    "Register": wire.RegisterResponse,
    "Unregister": wire.UnregisterResponse,
    "Clear": wire.ClearResponse,
    "List": wire.ListResponse,
}


class UnaryFailed(Exception):
    """A unary RPC failed.

    Attributes:
        code: the name of its status.
        text: that of the bus, or why it was not reached.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


class PeerTransport(Protocol):
    """Carries one stream. Everything runs on the connection's loop.

    Attributes:
        name: ``grpc`` or ``lane``.
    """

    name: str

    @property
    def reached(self) -> bool:
        """Whether it has reached a server, which may then have read what was written."""

    def start(self, receive: Receive) -> None:
        """Begins to connect and to write; passes each message to ``receive``, one after the other.

        An error that ``receive`` raises ends the stream, and `ended` raises it.
        """

    async def ended(self) -> tuple[str, str]:
        """Waits until the stream has ended; returns its status and the text of that."""

    def wake(self) -> None:
        """Writes soon what waits in the outbox."""

    def half_close(self) -> None:
        """Ends this end's direction once everything is written."""

    def cancel(self) -> None:
        """Ends the stream at once."""

    async def unary(self, method: str, request: Any, timeout: float | None = None) -> Any:
        """Sends a request to a unary RPC of the service; returns the response.

        Raises:
            UnaryFailed: it failed. UNAVAILABLE where the transport was closed under it.
        """

    async def close(self) -> None:
        """Ends everything that still runs."""


def connect_lane(bus: BusAddress) -> socket.socket | None:
    """Returns a connection to the lane of a bus of this user or root; None where there is none, at once.

    The kernel names the user whose program listens. Any other may be a stranger with the address of a bus: there gRPC
    has its own rules.
    """
    for name in () if bus.tls else lane_names(bus.target):
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            return None
        try:
            connection.setblocking(False)
            connection.connect(name)
            uid = program_of(connection)[1]
            if uid in (os.geteuid(), 0) and uid != unmapped_uid():
                return connection
        except OSError:  # nobody listens there, or a sandbox forbids it
            pass
        connection.close()
    return None


class _LaneCall(LaneConnection):
    """One RPC over a connection of its own.

    Attributes:
        status: how it ended; a future.
    """

    def __init__(self, connection: socket.socket, method: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(MESSAGE_BYTES, loop)
        self.status: asyncio.Future[tuple[str, str]] = loop.create_future()
        self._socket = connection
        self._method = method

    async def run(self) -> tuple[str, str]:
        """Runs it to its end; returns the status."""
        await self._loop.create_unix_connection(lambda: self, sock=self._socket)
        return await self.status

    def connected(self) -> None:
        """Opens the RPC and writes what waits."""
        if self.over:
            self.abort()
            return
        self.write(FrameKind.OPEN, self._method.encode())
        self.wake()

    def frame(self, kind: int, payload: bytes) -> None:
        """Takes a message or the status."""
        try:
            if kind == FrameKind.MESSAGE:
                self.message(payload)
            elif kind == FrameKind.STATUS:
                code, _, text = payload.decode("utf-8", "replace").partition("\n")
                self.finish((code or "UNKNOWN", text))
        except DecodeError as error:
            self.refuse("INTERNAL", f"the bus sent what is not a message: {error}")
        except Exception as error:
            if not self.status.done():
                self.status.set_exception(error)
            self.abort()

    def message(self, payload: bytes) -> None:
        """Takes a message."""
        raise NotImplementedError

    def refuse(self, status: str, text: str) -> None:
        """Ends the RPC because of what the bus sent."""
        self.finish((status, text))

    def finish(self, status: tuple[str, str]) -> None:
        """Ends the RPC and its connection."""
        if not self.status.done():
            self.status.set_result(status)
        self.abort()

    def lost(self) -> None:
        """Ends the RPC, if the bus has not."""
        self.finish(BROKE)

    def drop(self) -> None:
        """Ends what still runs."""
        self.finish(STOPPED)
        if self._transport is None:
            self._socket.close()


class _LaneUnary(_LaneCall):
    """A unary RPC: a request, and its response in ``response``."""

    def __init__(self, connection: socket.socket, method: str, request: bytes, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(connection, method, loop)
        self.response = b""
        self._request = request

    def write_waiting(self) -> None:
        """Writes the request."""
        self.write(FrameKind.MESSAGE, self._request)

    def resume_writing(self) -> None:
        """Has nothing more to write."""

    def message(self, payload: bytes) -> None:
        """Takes the response."""
        self.response = payload


class LaneTransport(_LaneCall):
    """The stream of one attempt over the lane: read and written on the loop itself, without a task."""

    name = "lane"
    reached = True

    def __init__(
        self,
        connection: socket.socket,
        bus: BusAddress,
        outbox: Outbox[wire.InvokeRequest],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(connection, "Invoke", loop)
        self._bus = bus
        self._outbox = outbox
        self._closing = False  # whether to half-close once everything is written
        self._half_closed = False
        self._receive: Receive | None = None  # None before the start
        self._unary: set[_LaneUnary] = set()  # those that run now
        outbox.write_early(MESSAGE_ITEMS, self._write_complete)
        if isinstance(loop, TurnLoop):
            self._soon = loop.call_at_end

    async def run(self) -> tuple[str, str]:
        """Runs the stream to its end; returns the status."""
        if not isinstance(self._loop, TurnLoop):
            return await super().run()
        SocketStream(self._loop, self._socket, self)
        return await self.status

    def start(self, receive: Receive) -> None:
        """Sets who takes the messages; `ended` connects."""
        self._receive = receive

    async def ended(self) -> tuple[str, str]:
        """Connects, and waits until the stream has ended."""
        return await self.run()

    def message(self, payload: bytes) -> None:
        """Passes a message on."""
        assert self._receive is not None  # it was started, and ignores what comes after its end
        self._receive(wire.InvokeResponse.FromString(payload))

    def write_waiting(self) -> None:
        """Writes the messages of the outbox, and the half-close behind them."""
        self._write_complete()
        if self.may_write and self._closing and not self._half_closed:
            self._half_closed = True
            self.write(FrameKind.HALF_CLOSE)

    def _write_complete(self) -> None:
        while self.may_write and (frame := self._outbox.take()) is not None:
            self.write(FrameKind.MESSAGE, frame.SerializeToString())

    def half_close(self) -> None:
        """Ends this end's direction once everything is written."""
        self._closing = True
        self.wake()

    def cancel(self) -> None:
        """Ends the stream at once."""
        self.finish(STOPPED)

    async def unary(self, method: str, request: Any, timeout: float | None = None) -> Any:
        """Sends a request over a connection of its own; raises UnaryFailed."""
        connection = None if self.over else connect_lane(self._bus)
        if connection is None:
            raise UnaryFailed(*BROKE)
        call = _LaneUnary(connection, method, request.SerializeToString(), self._loop)
        self._unary.add(call)
        try:
            code, text = await asyncio.wait_for(call.run(), timeout)
        except TimeoutError:
            raise UnaryFailed("DEADLINE_EXCEEDED", f"the bus has not answered within {timeout:g} s") from None
        finally:
            self._unary.discard(call)
            call.drop()
        if code != "OK":
            raise UnaryFailed(code, text)
        return _RESPONSES[method].FromString(call.response)

    async def close(self) -> None:
        """Ends the stream and the unary RPCs."""
        for call in list(self._unary):
            call.finish(BROKE)
        self.drop()
        self._receive = None
