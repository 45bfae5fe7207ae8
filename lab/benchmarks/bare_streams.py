"""Serves streams of grpcio with as little as possible: it answers the first message, and then it only reads.

A call makes it send all streams an event, the one with which a bus announces a new tool to its watchers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import uvloop

from lab.benchmarks.relay import END, serve
from lab.load import peer
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as stubs


class Bare(stubs.ToolBusServiceServicer):
    """The servicer: it holds nothing but the open streams."""

    def __init__(self) -> None:
        self._streams: dict[Any, None] = {}
        self._last_event: wire.InvokeResponse | None = None  # the last that was sent to all; None before the first

    async def Invoke(self, request_iterator: AsyncIterator[wire.InvokeRequest], context: Any) -> None:  # type: ignore[override]
        """Reads one peer until it ends."""
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


if __name__ == "__main__":
    uvloop.run(serve(Bare(), "bare"))  # type: ignore[abstract]  # a run needs no other RPC
