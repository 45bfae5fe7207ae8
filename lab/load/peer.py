"""Attaches to a bus as a raw peer: generated stubs, one stream, one coalescing writer; no SDK.

Load generators use it, so that what they show is the bus and not an SDK.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, cast

import grpc

from lab.load import workload
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as stubs
from toolbus.v1 import tool_pb2 as pb

SLICE = 128  # items a message, as the protocol asks of every writer
SLICE_BYTES = 1 << 20  # and so many bytes, unless one item has more
HALF_CLOSE_LOOK_SECONDS = 0.01


class Peer:
    """One attached stream. Fill ``calls``, ``results`` or ``cancels``, then ``flush()``; read with ``read()``."""

    def __init__(self, address: str, *, own_connection: bool = False) -> None:
        # By default channels of one process to one address share a connection.
        options = (("grpc.use_local_subchannel_pool", 1),) if own_connection else ()
        self._channel = grpc.aio.insecure_channel(address, options=options)
        # A cast: the published stubs of grpc.aio know neither a stream without an iterator nor its read and write.
        self.stub = cast(Any, stubs.ToolBusServiceStub(self._channel))
        self._stream = self.stub.Invoke()
        self.slice = SLICE  # items of one message: fewer where they are large
        self._wake = asyncio.Event()  # set while the outbox may hold something
        self._writer: asyncio.Task[None] | None = None  # None until attached
        self.calls: list[pb.ToolCall] = []
        self.results: list[pb.ToolResult] = []
        self.cancels: list[pb.ToolCancel] = []
        self._echo: wire.Heartbeat | None = None  # a heartbeat to be answered
        self.attached = wire.Attached()  # the bus's answer, once there is one

    async def attach(
        self, source: str, tools: list[pb.Tool], *, watch: bool = False, max_in_flight: int = workload.MAX_IN_FLIGHT
    ) -> wire.Attached:
        """Opens the session and returns the bus's answer."""
        attach = wire.Attach(protocol_version=1, source=source, tools=tools, max_in_flight=max_in_flight)
        if watch:
            attach.subscribe.append(wire.SUBSCRIPTION_CATALOG)
        await self._stream.write(wire.InvokeRequest(attach=attach))
        first = await self._stream.read()
        if not isinstance(first, wire.InvokeResponse) or not first.HasField("attached"):
            raise RuntimeError(f"the bus did not answer the attach of {source}: {first!r}")
        self._writer = asyncio.create_task(self._write())
        self.attached = first.attached
        return self.attached

    async def read(self, *, echo: bool = True) -> wire.InvokeResponse | None:
        """Returns the next frame, or None at the end of the stream; heartbeats are answered on the way."""
        frame = await self._stream.read()
        if not isinstance(frame, wire.InvokeResponse):
            return None
        if echo and frame.HasField("heartbeat"):
            self._echo = wire.Heartbeat(sequence=frame.heartbeat.sequence)
            self._wake.set()
        return frame

    async def next_results(self) -> Sequence[pb.ToolResult]:
        """Returns the results of the next frame that has some.

        Raises:
            RuntimeError: the stream ended.
        """
        while (frame := await self.read()) is not None:
            if frame.results:
                return frame.results
        raise RuntimeError("the stream ended")

    def flush(self) -> None:
        self._wake.set()

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self.calls or self.results or self.cancels or self._echo:
                await self._stream.write(self._next())

    def _next(self) -> wire.InvokeRequest:
        most = self.slice
        request = wire.InvokeRequest(
            calls=self.calls[:most], results=self.results[:most], cancels=self.cancels[:most], heartbeat=self._echo
        )
        del self.calls[:most], self.results[:most], self.cancels[:most]
        self._echo = None
        return request

    async def half_close(self) -> None:
        """Ends this side of the stream, once nothing waits any more."""
        while self.calls or self.results or self.cancels:
            await asyncio.sleep(HALF_CLOSE_LOOK_SECONDS)
        await self._stream.done_writing()

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await self._writer
        await self._channel.close(None)


def tool(name: str = workload.TOOL_NAME) -> pb.Tool:
    """Returns the declaration of the workload's tool under a name."""
    return pb.Tool(
        name=name, description=workload.DESCRIPTION, parameters_json=workload.PARAMETERS_JSON, allow_repeat=True
    )


def call(call_id: str, slot: int = 0, name: str = workload.TOOL_NAME, size: int = 0) -> pb.ToolCall:
    return pb.ToolCall(call_id=call_id, name=name, arguments_json=workload.arguments_json(slot, size))


def slice_of(size: int) -> int:
    """Returns how many items of a size go into one message."""
    return max(1, min(SLICE, SLICE_BYTES // max(1, size)))
