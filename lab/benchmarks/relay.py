"""Relays the bus's own messages and checks nothing: the limit of this stack. It knows one plugin.

It takes the calls of any host to the plugin and the results back, in messages of at most 512 items, written by one
writer a stream that sends whatever waits. The only thing it does to a call is to put its host's number before its id,
so that the result finds its way back. What the bus costs above this is the price of its promises. With ``bare`` it
relays nothing: that is what streams of grpcio cost by themselves. With ``tcp`` it passes bytes on between sockets, and
knows neither gRPC nor protobuf: that is what the kernel takes to wake three processes in turn.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import grpc
import uvloop

from lab.load import peer, workload
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as stubs
from toolbus.v1 import tool_pb2 as pb

WHOLE_FRAME = 512
FRAME_BYTES = 1 << 20  # where calls are large: a default client takes 4 MiB
END: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the published stubs do not know it


class Outlet:
    """What waits for one stream, and its writer."""

    def __init__(self) -> None:
        self.calls: list[pb.ToolCall] = []
        self.results: list[pb.ToolResult] = []
        self.wake = asyncio.Event()  # set while something may be waiting

    async def write_to(self, context: Any) -> None:
        """Writes for as long as the stream lives."""
        while True:
            await self.wake.wait()
            self.wake.clear()
            while self.calls or self.results:
                most = self._most()
                frame = wire.InvokeResponse(calls=self.calls[:most], results=self.results[:WHOLE_FRAME])
                del self.calls[:most], self.results[:WHOLE_FRAME]
                await context.write(frame)

    def _most(self) -> int:
        """Returns how many calls go into a frame, the others being about as large as the first."""
        if not self.calls:
            return WHOLE_FRAME
        return max(1, min(WHOLE_FRAME, FRAME_BYTES // (len(self.calls[0].arguments_json) or 1)))


class Relay(stubs.ToolBusServiceServicer):
    """The servicer: a table of streams, and the plugin among them."""

    def __init__(self) -> None:
        self._outlets: dict[str, Outlet] = {}  # by the number of the stream
        self._plugin: Outlet | None = None  # None until one has attached with a tool
        self._count = 0

    async def Invoke(self, request_iterator: AsyncIterator[wire.InvokeRequest], context: Any) -> None:  # type: ignore[override]
        attach = (await context.read()).attach
        self._count += 1
        number = str(self._count)
        outlet = self._outlets[number] = Outlet()
        if attach.tools:
            self._plugin = outlet
        await context.write(wire.InvokeResponse(attached=wire.Attached(session_id=number, protocol_version=1)))
        writer = asyncio.create_task(outlet.write_to(context))
        try:
            while (frame := await context.read()) is not END:
                if frame.calls:
                    self._to_plugin(frame.calls, number + ":")
                if frame.results:
                    self._to_hosts(frame.results)
        finally:
            writer.cancel()
            del self._outlets[number]
            if self._plugin is outlet:
                self._plugin = None

    def _to_plugin(self, calls: Sequence[pb.ToolCall], prefix: str) -> None:
        if self._plugin is None:
            return
        for call in calls:
            call.call_id = prefix + call.call_id
        self._plugin.calls += calls
        self._plugin.wake.set()

    def _to_hosts(self, results: Sequence[pb.ToolResult]) -> None:
        outlets = self._outlets
        for result in results:
            number, _, result.call_id = result.call_id.partition(":")
            outlet = outlets.get(number)
            if outlet is not None:
                outlet.results.append(result)
                outlet.wake.set()


class Bare(stubs.ToolBusServiceServicer):
    """Answers the first message of a stream, and then only reads.

    A call makes it send all streams an event, the one with which a bus announces a new tool to its watchers.
    """

    def __init__(self) -> None:
        self._streams: dict[Any, None] = {}
        self._last_event: wire.InvokeResponse | None = None  # the last that was sent to all; None before the first

    async def Invoke(self, request_iterator: AsyncIterator[wire.InvokeRequest], context: Any) -> None:  # type: ignore[override]
        await context.read()
        before = self._last_event
        await context.write(wire.InvokeResponse(attached=wire.Attached(session_id="bare", protocol_version=1)))
        self._streams[context] = None
        try:
            # A peer may be attached and call before the write to another one has ended.
            if self._last_event is not None and self._last_event is not before:
                await context.write(self._last_event)
            while (frame := await context.read()) is not END:
                for call in frame.calls:
                    change = wire.CatalogChange(added=[wire.ListedTool(tool=peer.tool(call.name))])
                    self._last_event = wire.InvokeResponse(events=[wire.Event(catalog=change)])
                    await asyncio.gather(*(stream.write(self._last_event) for stream in self._streams))
        finally:
            del self._streams[context]


async def serve(servicer: stubs.ToolBusServiceServicer, name: str) -> None:
    """Serves on a free port of loopback until the process is ended."""
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    stubs.add_ToolBusServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"{name} ready grpc=127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


class Middle(asyncio.Protocol):
    """One connection over TCP; the first that sends `PLUGIN_LINE` gets what all others send."""

    plugin: asyncio.Transport | None = None
    host: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if data == workload.PLUGIN_LINE:
            Middle.plugin = self._transport
            self._transport.write(data)
        elif self._transport is Middle.plugin:
            if Middle.host is not None:
                Middle.host.write(data)
        elif Middle.plugin is not None:
            Middle.host = self._transport
            Middle.plugin.write(data)


async def serve_tcp() -> None:
    """Passes bytes on until the process is ended."""
    server = await asyncio.get_running_loop().create_server(Middle, "127.0.0.1", 0)
    print(f"tcp ready grpc=127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main(way: str = "relay") -> None:
    if way == "tcp":
        uvloop.run(serve_tcp())
    else:
        uvloop.run(serve(Bare() if way == "bare" else Relay(), way))  # type: ignore[abstract]  # no other RPC


if __name__ == "__main__":
    main(*sys.argv[1:])
