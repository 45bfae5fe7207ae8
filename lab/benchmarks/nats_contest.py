"""The rival: NATS request and reply through ``nats-server``, with nats-py as its documentation shows it.

``python -m lab.benchmarks.nats_contest plugin URL`` answers, ``… host URL`` keeps N requests in flight and measures.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import nats
import uvloop

from lab.load import windows, workload
from lab.load.windows import options_of

SUBJECT = f"tools.{workload.TOOL_NAME}"


async def answer(url: str) -> None:
    """Answers every request until the connection closes."""
    closed = asyncio.Event()

    async def on_closed() -> None:
        closed.set()

    client = await nats.connect(url, allow_reconnect=False, closed_cb=on_closed)
    output = workload.OUTPUT_JSON.encode()

    async def on_request(message: Any) -> None:
        await message.respond(output)

    await client.subscribe(SUBJECT, cb=on_request)
    await client.flush()
    print("attached", flush=True)
    await closed.wait()


async def run() -> None:
    """Connects and runs a window for each cell."""
    options = options_of(__doc__).parse_args(sys.argv[2:])
    client = await nats.connect(options.address, allow_reconnect=False)

    async def ask(text: str) -> None:
        await client.request(SUBJECT, text.encode(), timeout=10)

    await windows.run_cells(windows.preparing(list, ask), options, options.middle_pid)
    await client.close()


if __name__ == "__main__":
    uvloop.run(run() if sys.argv[1] == "host" else answer(sys.argv[2]))
