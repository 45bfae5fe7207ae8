"""Measures the floor: the same three processes with nothing between them but TCP, lines of text and event loops.

``python -m lab.benchmarks.tcp_contest middle`` passes bytes on, ``… plugin ADDRESS`` answers each line, ``…
host ADDRESS`` keeps N lines in flight and measures. No gRPC, no protobuf, no ids but the slot: what is left is what
the kernel takes to wake three processes in turn. The distance from here to `relay` is gRPC's, the distance from
`relay` to the bus is the price of its promises.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import cast

import uvloop

from lab.load import windows, workload
from lab.load.windows import MAX_BYTES, options_of

LINE_BYTES = 2 * MAX_BYTES
PLUGIN = b"plugin\n"  # the plugin's first line


class Middle(asyncio.Protocol):
    """One connection to the middle; the first that sends PLUGIN gets what all others send."""

    plugin: asyncio.Transport | None = None
    host: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stores where to write."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Passes bytes on as they come."""
        if data == PLUGIN:
            Middle.plugin = self._transport
            self._transport.write(PLUGIN)
        elif self._transport is Middle.plugin:
            if Middle.host is not None:
                Middle.host.write(data)
        elif Middle.plugin is not None:
            Middle.host = self._transport
            Middle.plugin.write(data)


async def relay() -> None:
    """Serves on a free port of loopback until the process is ended."""
    server = await asyncio.get_running_loop().create_server(Middle, "127.0.0.1", 0)
    print(f"tcp ready grpc=127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port), limit=LINE_BYTES)


async def answer(address: str) -> None:
    """Answers every line with its slot and the workload's output."""
    reader, writer = await _connect(address)
    writer.write(PLUGIN)
    await reader.readline()
    print("attached", flush=True)
    output = b" " + workload.OUTPUT_JSON.encode() + b"\n"
    while line := await reader.readline():
        writer.write(line.partition(b" ")[0] + output)


async def run() -> None:
    """Connects and runs a window for each cell."""
    options = options_of(__doc__).parse_args(sys.argv[2:])
    reader, writer = await _connect(options.address)
    waiting: dict[bytes, asyncio.Future[None]] = {}

    async def read() -> None:
        while line := await reader.readline():
            waiting.pop(line.partition(b" ")[0]).set_result(None)

    def write(texts: Sequence[str]) -> list[tuple[bytes, bytes]]:
        return [(str(slot).encode(), f"{slot} {text}\n".encode()) for slot, text in enumerate(texts)]

    async def ask(body: tuple[bytes, bytes]) -> None:
        slot, line = body
        answered = waiting[slot] = asyncio.get_running_loop().create_future()
        writer.write(line)
        await answered

    reading = asyncio.create_task(read())
    await windows.run_cells(windows.preparing(write, ask), options, options.middle_pid)
    reading.cancel()
    writer.close()


if __name__ == "__main__":
    role = sys.argv[1]
    uvloop.run(relay() if role == "middle" else run() if role == "host" else answer(sys.argv[2]))
