"""Offers the workload's tool as authors of plugins do: ``python -m lab.load.sdk_plugin plain|async|pattern ADDRESS``.

``plain`` and ``async`` are functions on the SDK, ``pattern`` is an async one on clients/python, the client that others
copy. Each answers at once, and the process prints ``attached`` when its tool is offered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from lab.load import workload
from lab.stage import ROOT, stop_event
from toolbus.sdk import Plugin

SOURCE = "bench-plugin"


def forecast(place: str, days: int, note: str = "") -> dict[str, object]:
    """Returns the result, as a plain function."""
    return {"celsius": 21.5, "sky": "clear"}


async def by_sdk(address: str, way: str) -> None:
    """Offers a function on the SDK."""
    plugin = Plugin(SOURCE, address=address, max_in_flight=workload.MAX_IN_FLIGHT)
    plugin.add_tool(workload.forecast if way == "async" else forecast, name=workload.TOOL_NAME)
    async with plugin:
        await plugin.ready()
        print("attached", flush=True)
        await stop_event().wait()


async def by_pattern(address: str) -> None:
    """Offers a function on clients/python."""
    sys.path.insert(0, str(ROOT / "clients" / "python"))
    from peer import Call, Peer

    peer, stops = Peer(address, SOURCE, max_in_flight=workload.MAX_IN_FLIGHT), stop_event()

    @peer.tool(workload.DESCRIPTION, json.loads(workload.PARAMETERS_JSON))
    async def forecast(arguments: dict[str, Any], call: Call) -> dict[str, object]:
        return await workload.forecast(**arguments)

    running = asyncio.create_task(peer.run())
    await peer.attached.wait()
    print("attached", flush=True)
    await stops.wait()
    peer.drain()
    await running


def main() -> None:
    """Reads the command line and serves until the process is terminated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("plain", "async", "pattern"))
    parser.add_argument("address")
    options = parser.parse_args()
    asyncio.run(by_pattern(options.address) if options.way == "pattern" else by_sdk(options.address, options.way))


if __name__ == "__main__":
    main()
