"""The rival: NATS request and reply through ``nats-server``, with nats-py as its documentation shows it.

``python -m benchmarks.nats_contest plugin URL`` answers, ``… host URL`` keeps N requests in flight and measures.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import nats
import uvloop

from benchmarks import load_host, window, workload

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


async def measure(client: Any, clock: window.Clock, in_flight: int) -> window.Window:
    """Runs one window: as many tasks as calls in flight, each asking again as soon as it is answered."""
    figures: list[window.Window] = []  # the first call that ends after the window closes it

    async def ask(slot: int) -> None:
        arguments = workload.arguments_json(slot).encode()
        while not figures:
            sent_at = time.perf_counter_ns()
            await client.request(SUBJECT, arguments, timeout=10)
            now = time.perf_counter_ns()
            if now >= clock.begins_at:
                clock.begin(now)
            clock.latencies.append(now - sent_at)
            if now >= clock.ends_at and not figures:
                figures.append(clock.close(now))

    await asyncio.gather(*(ask(slot) for slot in range(in_flight)))
    return figures[0]


async def run() -> None:
    """Connects and runs a window for each number of calls in flight."""
    options = load_host.options_of(__doc__).parse_args(sys.argv[2:])
    client = await nats.connect(options.address, allow_reconnect=False)
    for in_flight in options.in_flight:
        clock = window.Clock(in_flight, options.warm_up, options.seconds, options.middle_pid)
        (await measure(client, clock, in_flight)).print()
    await client.close()


if __name__ == "__main__":
    uvloop.run(run() if sys.argv[1] == "host" else answer(sys.argv[2]))
