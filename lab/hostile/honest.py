"""Honest plugins, and a host that calls at an even pace: ``python -m lab.hostile.honest tea|pot|host ADDRESS …``.

The host writes a line for each call: when it was due, how long it took from then on, and its error, if any.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import uvloop

from lab.hostile.watched_bus import FIRST, take_priority
from lab.load.callers import InFlight
from lab.stage import stop_event
from toolbus.sdk import Host, Plugin

CALLS_PER_SECOND = 500.0
SLOW_SECONDS = 2.0


async def brew(number: int) -> int:
    """Answers at once."""
    return number


async def pour(number: int) -> int:
    """Answers at once, to others."""
    return number


async def steep() -> str:
    """Takes a while."""
    await asyncio.sleep(SLOW_SECONDS)
    return "strong"


async def offer(source: str, address: str, *tools: Callable[..., object]) -> None:
    """Offers tools until it is stopped."""
    plugin, stops = Plugin(source, address=address), stop_event()
    for tool in tools:
        plugin.add_tool(tool, allow_repeat=True)
    async with plugin:
        await plugin.ready()
        print("ready", flush=True)
        await stops.wait()


async def host(address: str, path: str) -> None:
    """Calls until it is stopped, and writes down how each call ended."""
    stops, calling = stop_event(), InFlight()
    lines: list[str] = []
    async with Host(address, source="honest") as caller:
        await caller.ready()

        async def call(number: int, due: float) -> None:
            result = await caller.call("brew", {"number": number})
            error = result.error.code.name if result.error is not None else "" if result.output == number else "WRONG"
            lines.append(f"{due} {time.monotonic() - due} {error}")

        print("ready", flush=True)
        began, number = time.monotonic(), 0
        while not stops.is_set():
            due = began + number / CALLS_PER_SECOND
            if (early := due - time.monotonic()) > 0:
                await asyncio.sleep(early)
            calling.begin(call(number, due))
            number += 1
        left = await calling.finish(30.0)
    lines += [f"{time.monotonic()} 30.0 LOST"] * left
    with open(path, "w") as file:  # noqa: ASYNC230  # at its end
        file.write("\n".join(lines))


if __name__ == "__main__":
    take_priority(FIRST)
    kind, address = sys.argv[1:3]
    if kind == "host":
        uvloop.run(host(address, sys.argv[3]))
    else:  # the tools of the honest host have their own plugin: how many slots one gives to each caller is its matter
        uvloop.run(offer(kind, address, *((brew,) if kind == "tea" else (pour, steep))))
