"""The least that streams of grpcio cost their server: it answers the first message, and then it only reads.

A call is what it tells all streams of, in the words in which a bus tells its watchers of a new tool.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from lab.benchmarks import peer
from lab.benchmarks.relay import END
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as stubs


class Bare(stubs.ToolBusServiceServicer):
    """The servicer: it keeps nothing but the streams that are open."""

    def __init__(self) -> None:
        self._streams: dict[Any, None] = {}
        self._said: wire.InvokeResponse | None = None  # the last that all were told of

    async def Invoke(self, request_iterator: AsyncIterator[wire.InvokeRequest], context: Any) -> None:  # type: ignore[override]
        """Reads one peer until it ends."""
        await context.read()
        before = self._said
        await context.write(wire.InvokeResponse(attached=wire.Attached(session_id="bare", protocol_version=1)))
        self._streams[context] = None
        try:
            # A peer may read that it is attached, and have all told of a call, before the write to another has ended.
            if self._said is not None and self._said is not before:
                await context.write(self._said)
            while (frame := await context.read()) is not END:
                for call in frame.calls:
                    change = wire.CatalogChange(added=[wire.ListedTool(tool=peer.tool(call.name))])
                    self._said = wire.InvokeResponse(events=[wire.Event(catalog=change)])
                    await asyncio.gather(*(stream.write(self._said) for stream in self._streams))
        finally:
            del self._streams[context]


async def serve() -> None:
    """Serves on a free port of loopback until the process is ended."""
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    bare = Bare()  # type: ignore[abstract]  # a run needs no other RPC
    stubs.add_ToolBusServiceServicer_to_server(bare, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"bare ready grpc=127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve())
