"""Counts what a model reads for one task over 60 tools: call by call, all calls at once, and by one script.

    python -m lab.script_turns [--orders 20] [--json]

The model is scripted, so the figures are those of a model that makes no mistake: requests, and characters of them all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from toolbus import Bus, Plugin
from toolbus.dropin import run_script
from toolbus.loop import LoopSettings, ToolLoop, allow_all
from toolbus.testing import ScriptedModel, Step, calls, running_bus, says

TOOLS = 60
SCRIPT = """
const ids = await call("list_orders", {});
const orders = await Promise.all(ids.map((id) => call("get_order", { id })));
return orders.filter((order) => order.total > 100).length;
"""


def offer(bus: Bus, orders: int) -> None:
    """Offers the tools of the task, and others that a model sees besides."""

    @bus.tool
    def list_orders() -> list[int]:
        """Lists the numbers of all orders."""
        return list(range(orders))

    @bus.tool
    def get_order(id: int) -> dict[str, Any]:
        """Gets an order by its number."""
        return {"id": id, "total": 5 * id, "customer": f"customer {id}", "lines": [{"sku": f"A-{id}", "count": 1}]}

    for number in range(TOOLS - 3):

        @bus.tool(name=f"report_{number}")  # type: ignore[untyped-decorator]
        def report(year: int, region: str = "all") -> str:
            """Writes a report about a year."""
            return f"{year} {region}"


def ways(orders: int) -> dict[str, list[Step]]:
    """Returns the steps of the model for each way to do the task."""
    ids = range(orders)
    one = [calls("get_order", {"id": each}) for each in ids]
    return {
        "one call a turn": [calls("list_orders"), *one, says("19")],
        "all calls in one turn": [
            calls("list_orders"),
            Step(calls=[("get_order", {"id": id}) for id in ids]),
            says("19"),
        ],
        "one script": [calls("run_script", {"script": SCRIPT}), says("19")],
    }


async def measure(orders: int) -> list[dict[str, Any]]:
    """Plays the ways; returns a row for each."""
    rows = []
    async with running_bus() as bus:
        offer(bus, orders)
        plugin = Plugin("scripts", address=bus.grpc_addresses[0])
        plugin.tool(run_script)
        async with plugin:
            await plugin.ready()
            for way, steps in ways(orders).items():
                model, settings = ScriptedModel(*steps), LoopSettings(rounds=orders + 2, rounds_most=orders + 2)
                loop = ToolLoop(bus, model.endpoint, settings=settings, approve=allow_all)
                with model:
                    reply = await loop.run("How many orders are above 100?")
                failed = [call.result.text for call in reply.calls if call.result.is_error]
                assert not failed, failed
                sizes = [len(json.dumps(request)) for request in model.requests]
                rows.append({"way": way, "requests": len(sizes), "characters": sum(sizes), "calls": len(reply.calls)})
    return rows


def main() -> None:
    """Reads the words of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", type=int, default=20, help="how many calls the task needs, at most 23")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args()
    rows = asyncio.run(measure(given.orders))
    if given.json:
        print(json.dumps(rows, indent=2))
        return
    least = rows[-1]["characters"]
    for row in rows:
        ratio = row["characters"] / least
        print(f"{row['way']:24}{row['requests']:4} requests  {row['characters']:>10,} characters  {ratio:5.1f} x")


if __name__ == "__main__":
    main()
