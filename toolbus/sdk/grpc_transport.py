"""Carries a peer's messages over gRPC: a channel, the Invoke stream on it, one read loop and one write loop.

Each attempt has a channel of its own: a channel that failed waits for a backoff of its own, which on loopback is far
too long.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any

from toolbus.common.cancellation import is_being_cancelled
from toolbus.common.grpc_switch import switched
from toolbus.protocol.session import Outbox
from toolbus.sdk.bus_address import BusAddress
from toolbus.sdk.connection_settings import MESSAGE_BYTES
from toolbus.sdk.transport import STOPPED, Receive, UnaryFailed
from toolbus.v1 import tool_bus_service_pb2 as wire

with switched():
    import grpc
    import grpc.aio

    from toolbus.v1 import tool_bus_service_pb2_grpc as rpc

    WITHOUT_ENGINE = "-event_engine_client" in os.environ.get("GRPC_EXPERIMENTS", "")

if TYPE_CHECKING:
    from toolbus.sdk.credential import Credential

log = logging.getLogger("toolbus.sdk.connection")  # one logger for all of a connection

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),  # we check the bus's limits ourselves, with an error text
    ("grpc.use_local_subchannel_pool", 1),  # else all peers of a process share one TCP connection and its backoff
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: the keepalive time below decides how many
)
UNANSWERED_MS = 40_000  # after which a stopped bus is given up
KEEPALIVE_MS = 30_000
# Without its event engine, grpc's client often overlooks a connection that is reset right after a write. The next ping
# notices it.
KEEPALIVE_WITHOUT_ENGINE_MS = 2_000

# The text of grpcio in place of a stream's status where a write failed before the status was read (grpc issue 36066).
HIDDEN_STATUS = "Internal error from Core"

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing from grpcio's stubs


class GrpcTransport:
    """The stream of one attempt over gRPC.

    Args:
        writer_seconds: for the writer to notice that its stream has ended.
    """

    name = "grpc"

    def __init__(
        self,
        bus: BusAddress,
        credential: Credential | None,
        outbox: Outbox[wire.InvokeRequest],
        writer_seconds: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._outbox = outbox
        self._writer_seconds = writer_seconds
        self._loop = loop
        self._metadata = credential.metadata if credential is not None else ()  # of every RPC
        self._channel = _open_channel(bus, credential)
        stub: Any = rpc.ToolBusServiceStub(self._channel)
        self._stub = stub
        self._stream: Any = stub.Invoke(metadata=self._metadata)
        self._wake = asyncio.Event()  # wakes the writer
        self._finish = False  # whether the writer half-closes once everything is written
        self._writer: asyncio.Task[None] | None = None  # None before the start
        self._receive: Receive | None = None  # None before the start
        self.wake = self._wake.set

    @property
    def reached(self) -> bool:
        """Whether the channel has reached a server."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    def start(self, receive: Receive) -> None:
        """Starts the writer; `ended` is the reader."""
        self._receive = receive
        self._writer = self._loop.create_task(self._write())

    async def ended(self) -> tuple[str, str]:
        """Reads until the stream ends; returns how it ended."""
        stream, receive = self._stream, self._receive
        assert receive is not None  # it was started
        try:
            while (frame := await stream.read()) is not _EOF:
                receive(frame)
        except grpc.aio.AioRpcError as error:
            return status_of(error)
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            return STOPPED
        return "OK", "the bus ended the stream"

    def half_close(self) -> None:
        """Lets the writer end our direction once everything is written."""
        self._finish = True
        self._wake.set()

    def cancel(self) -> None:
        """Ends the stream at once."""
        self._stream.cancel()

    async def unary(self, method: str, request: Any, timeout: float | None = None) -> Any:
        """Sends a request to a unary RPC; raises UnaryFailed."""
        try:
            return await getattr(self._stub, method)(request, timeout=timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise UnaryFailed(error.code().name, error.details() or "") from None
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            raise UnaryFailed("UNAVAILABLE", "the channel was closed") from None

    async def close(self) -> None:
        """Ends writer, stream and channel."""
        self._stream.cancel()
        self.half_close()
        if self._writer is not None:
            # A writer is never cancelled while its stream lives: it ends with the stream. But in grpcio a write that
            # waits for the first metadata never ends if the stream is cancelled before they arrive.
            await asyncio.wait([self._writer], timeout=self._writer_seconds)
            self._writer.cancel()
        await self._channel.close(None)
        self._receive = None  # what it refers to refers to this: grpcio keeps the connection until both are freed

    async def _write(self) -> None:
        """Writes the frames of the outbox until `half_close` or the end of the stream; the stream's one writer."""
        outbox, stream = self._outbox, self._stream
        try:
            while True:
                frame = outbox.take()
                if frame is not None:
                    await stream.write(frame)
                elif self._finish:
                    await stream.done_writing()
                    return
                else:
                    self._wake.clear()
                    await self._wake.wait()
        except (Exception, asyncio.CancelledError) as error:
            # Of any type: the connection is lost, and the read loop reports why.
            log.debug("writing ended: %r", error)
            stream.cancel()


def _open_channel(bus: BusAddress, credential: Credential | None) -> grpc.aio.Channel:
    if not bus.tls:
        return grpc.aio.insecure_channel(bus.target, options=_options())
    from toolbus.sdk.credential import tls_credentials  # most peers have no TLS

    options = [*_options(), *([("grpc.ssl_target_name_override", bus.name)] if bus.name else [])]
    return grpc.aio.secure_channel(bus.target, tls_credentials(credential), options=options)


def _options() -> list[tuple[str, int]]:
    """Returns the options of a channel."""
    every = KEEPALIVE_WITHOUT_ENGINE_MS if WITHOUT_ENGINE else KEEPALIVE_MS
    answer = UNANSWERED_MS - every
    return [
        *OPTIONS,
        ("grpc.keepalive_time_ms", every),
        ("grpc.keepalive_timeout_ms", answer),
        ("grpc.http2.ping_timeout_ms", answer),  # grpc's own is 60 s
    ]


def status_of(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """Returns how a stream ended: the name of its status, and the text."""
    if error.details() == HIDDEN_STATUS:
        text = "the stream ended while something was written to it; grpc hides why, the bus's log has the reason"
        return "UNAVAILABLE", text
    return error.code().name, error.details() or ""
