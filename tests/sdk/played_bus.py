"""A bus that a test plays by hand, for what a real one does not do on demand: refuse, fall silent, hang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.waiting import WAIT_SECONDS
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc

SECONDS = WAIT_SECONDS  # the bound of every wait

Play = Callable[["PlayedStream"], Awaitable[None]]


_Service: Any = rpc.ToolBusServiceServicer  # its methods are abstract to a type checker only


class PlayedStream:
    """One Invoke stream, from the bus's side."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.drained = False  # whether the peer has sent its drain, after which a bus ends the stream

    async def read(self) -> wire.InvokeRequest | None:
        """Returns the next frame; None at the end, and after the peer's drain."""
        if self.drained:
            return None
        read = await asyncio.wait_for(self.context.read(), SECONDS)
        if read is grpc.aio.EOF:  # type: ignore[attr-defined]
            return None
        frame: wire.InvokeRequest = read
        self.drained = frame.HasField("drain")
        return frame

    async def read_until(self, arm: str) -> wire.InvokeRequest:
        """Returns the next frame that has an arm."""
        while (frame := await self.read()) is not None:
            if any(descriptor.name == arm for descriptor, _ in frame.ListFields()):
                return frame
        raise AssertionError(f"the stream ended before any {arm}")

    async def write(self, **arms: Any) -> None:
        await self.context.write(wire.InvokeResponse(**arms))

    async def accept(
        self, heartbeat_seconds: float = 10.0, identity: str = "", expires_seconds: float = 0.0, **limits: int
    ) -> wire.Attach:
        """Reads the attach and answers it."""
        frame = await self.read_until("attach")
        attached = wire.Attached(
            session_id="s",
            heartbeat_seconds=heartbeat_seconds,
            identity=identity,
            expires_seconds=expires_seconds,
            limits=wire.Limits(**{"calls_in_flight": 256, "message_bytes": 1 << 24, "result_bytes": 1 << 22, **limits}),
        )
        await self.write(attached=attached)
        return frame.attach

    async def end(self, code: grpc.StatusCode, text: str) -> None:
        await self.context.abort(code, text)


class PlayedBus(_Service):  # type: ignore[misc]
    """Plays one function for each stream, the last one again for all further ones."""

    def __init__(self, *plays: Play) -> None:
        self.plays = list(plays)
        self.streams = 0
        self.registered: list[wire.RegisterRequest] = []
        self.keys: list[tuple[str, str]] = []  # (RPC, authorization), "" where a request had none
        self.address = ""

    async def Invoke(self, request_iterator: Any, context: Any) -> None:
        play = self.plays[min(self.streams, len(self.plays) - 1)]
        self.streams += 1
        self.note_key("Invoke", context)
        await play(PlayedStream(context))

    async def Register(self, request: wire.RegisterRequest, context: Any) -> wire.RegisterResponse:
        self.registered.append(request)
        self.note_key("Register", context)
        return wire.RegisterResponse(registered=[tool.name for tool in request.tools], ok=True)

    async def List(self, request: wire.ListRequest, context: Any) -> wire.ListResponse:
        self.note_key("List", context)
        return wire.ListResponse(revision=1)

    def note_key(self, method: str, context: Any) -> None:
        self.keys.append((method, dict(context.invocation_metadata()).get("authorization", "")))


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Says that the whole is serving."""

    def __init__(self, bus: PlayedBus) -> None:
        self._bus = bus

    async def List(self, request: Any, context: Any) -> Any:
        self._bus.note_key("Health.List", context)
        serving = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        return health_pb2.HealthListResponse(statuses={"": serving})


@asynccontextmanager
async def played_bus(*plays: Play, tls: grpc.ServerCredentials | None = None) -> AsyncIterator[PlayedBus]:
    """Runs a played bus; its address has no prefix where it speaks TLS."""
    bus = PlayedBus(*plays)
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", 1 << 24),))
    rpc.add_ToolBusServiceServicer_to_server(bus, server)
    health_pb2_grpc.add_HealthServicer_to_server(_Health(bus), server)
    port = server.add_secure_port("127.0.0.1:0", tls) if tls else server.add_insecure_port("127.0.0.1:0")
    bus.address = f"127.0.0.1:{port}"
    await server.start()
    try:
        yield bus
    finally:
        await server.stop(0)
