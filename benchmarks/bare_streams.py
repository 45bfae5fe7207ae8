"""The least that a stream of grpcio costs its server: it answers the first message and then only reads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from benchmarks.relay import END
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as stubs


class Bare(stubs.ToolBusServiceServicer):
    """The servicer: it keeps nothing."""

    async def Invoke(self, request_iterator: AsyncIterator[wire.InvokeRequest], context: Any) -> None:  # type: ignore[override]
        """Reads one peer until it ends."""
        await context.read()
        await context.write(wire.InvokeResponse(attached=wire.Attached(session_id="bare", protocol_version=1)))
        while await context.read() is not END:
            pass


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
