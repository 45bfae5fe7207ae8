"""Makes the plugins of the demo world that run in the process of the test: real peers over gRPC."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from toolbus import Plugin
from toolbus.functions.scope import ToolScope
from toolbus.sdk import Extension, ToolInvocation

VERBS = {
    "add": "Adds",
    "approve": "Approves",
    "archive": "Archives",
    "assign": "Assigns",
    "audit": "Audits",
    "cancel": "Cancels",
    "check": "Checks",
    "compare": "Compares",
    "copy": "Copies",
    "count": "Counts",
    "describe": "Describes",
    "export": "Exports",
    "find": "Finds",
    "import": "Imports",
    "label": "Labels",
    "list": "Lists",
    "lock": "Locks",
    "merge": "Merges",
    "move": "Moves",
    "print": "Prints",
    "read": "Reads",
    "rename": "Renames",
    "report": "Reports",
    "split": "Splits",
    "update": "Updates",
}
NOUNS = (
    *("account", "address", "batch", "bin", "bill", "box", "carrier", "claim", "contract", "crate"),
    *("customer", "delivery", "depot", "discount", "driver", "fee", "forecast", "invoice", "item", "label"),
    *("lane", "manifest", "offer", "order", "package", "pallet", "payment", "price", "product", "quota"),
    *("receipt", "return", "route", "shelf", "shipment", "supplier", "tariff", "ticket", "truck", "voucher"),
)
LONGEST_NAME = "reconcile_the_quarterly_statement_of_the_regional_warehouse_now_"
LONGEST_SOURCE = f"warehouse.{'northern-region.' * 6}backup-controller-07"
WIDE = "显示所有仓库的库存和预计到货时间,并用表格返回结果。 全倉庫の在庫と入荷予定を表で返します。 📦🚚🏬"
RIGHT_TO_LEFT = "يعرض حالة الشحنة رقم 42 مع التاريخ (ISO 8601) ثم يعيد النتيجة. מציג את מצב המשלוח"
SEARCH_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"id": {"type": "string", "description": "Number of the record."}},
}


def trips(address: str) -> tuple[Plugin, ...]:
    """Returns three plugins whose tools call one another, three deep."""
    travel, routes, fares = (Plugin(source, address=address) for source in ("travel", "routes", "fares"))

    @travel.tool
    async def plan_trip(start: str, goal: str, ctx: ToolScope, days: int = 2) -> dict[str, Any]:
        """Plans a trip: the route, what it costs, and when the sun rises there.

        Args:
            start: city where the trip begins.
            goal: city where it ends.
            days: how long it takes.
        """
        await asyncio.sleep(0.02)
        found = await asyncio.gather(
            ctx.call("fastest_route", {"start": start, "goal": goal}),
            ctx.call("fastest_route", {"start": goal, "goal": start}),
        )
        await asyncio.sleep(0.01)
        sun = await ctx.call("get_sun_times", {"city": goal, "date": "2024-06-21"})
        return {"days": days, "routes": [each.output for each in found], "sun": sun.output}

    @travel.tool
    async def book_seat(train: str) -> str:
        """Books a seat of a train."""
        raise ConnectionError(f"the booking of {train} was answered with 502 Bad Gateway")

    @routes.tool(read_only=True)
    async def fastest_route(start: str, goal: str, ctx: ToolScope) -> dict[str, Any]:
        """Finds the fastest route by rail and its price."""
        await asyncio.sleep(0.03)
        prices = [await ctx.call("quote_fare", {"leg": leg}) for leg in (f"{start}-Basel", f"Basel-{goal}")]
        return {"via": ["Basel"], "fares": [each.output for each in prices]}

    @fares.tool(read_only=True)
    async def quote_fare(leg: str) -> dict[str, object]:
        """Tells the price of one leg."""
        await asyncio.sleep(0.04 if leg.startswith("Basel") else 0.02)
        return {"leg": leg, "price": 39.5, "currency": "EUR"}

    return travel, routes, fares


def oddities(address: str) -> tuple[Plugin, ...]:
    """Returns plugins whose texts a page may stumble over: long, wide, from right to left, empty."""
    longest = Plugin(LONGEST_SOURCE, address=address)
    texts = Plugin("texts", address=address, notices=("the translations of 3 tools are older than the tools",))

    async def answer(id: str = "") -> str:
        return f"record {id}"

    longest.add_tool(answer, name=LONGEST_NAME, description="Long. " * 400, parameters=SEARCH_SCHEMA)
    texts.add_tool(
        answer, name="stock_table", display_name="库存表 / 在庫表", description=WIDE, parameters=SEARCH_SCHEMA
    )
    texts.add_tool(
        answer, name="shipment_state", display_name="حالة الشحنة", description=RIGHT_TO_LEFT, parameters=SEARCH_SCHEMA
    )
    texts.add_tool(answer, name="without_words", description="", parameters={"type": "object"})
    return longest, texts


def catalog(address: str, count: int = 1000) -> Plugin:
    """Returns a plugin of many tools."""
    plugin = Plugin("catalog", address=address)

    async def run(id: str = "") -> dict[str, str]:
        return {"id": id, "state": "done"}

    for verb, noun in itertools.islice(itertools.product(VERBS, NOUNS), count):
        article = "an" if noun[0] in "aio" else "a"
        plugin.add_tool(
            *(run,),
            name=f"{verb}_{noun}",
            description=f"{VERBS[verb]} {article} {noun} of the warehouse.",
            parameters=SEARCH_SCHEMA,
            read_only=verb in ("audit", "check", "compare", "count", "describe", "find", "list", "read", "report"),
            destructive=verb in ("cancel", "merge", "split"),
        )
    return plugin


def reports(address: str) -> Plugin:
    """Returns a plugin whose calls take long enough to become tasks."""
    plugin = Plugin("reports", address=address)

    @plugin.tool
    async def yearly_report(year: int, ctx: ToolScope, seconds: float = 0.1) -> str:
        """Writes the report of a year, which takes a while."""
        for done in range(0, 100, 25):
            ctx.progress(done, total=100, message=f"{done} % of {year}")
            await asyncio.sleep(seconds / 4)
        if year > 2100:
            raise LookupError(f"there are no figures of {year} yet")
        return f"all about {year}"

    return plugin


def tavern(address: str) -> Extension:
    """Returns the extension whose tools the members of the council have."""
    extension = Extension("tavern", address=address)

    @extension.tool(display_name="Lore", council_eligible=True, inline_available=True)
    async def lore(query: str = "") -> str:
        """Finds what is known about anything that was mentioned."""
        await asyncio.sleep(0.02)
        return "The bell of the inn rings by itself when somebody lies."

    extension.register_tool(name="pace", display_name="Pace", description="Measures replies.", council_eligible=True)

    @extension.on_invocation
    def pace(call: ToolInvocation) -> str:
        """Answers for all tools without a function of their own: here `pace`."""
        return f"{call['councilMember']['name']}: the last reply has 62 words; shorten the next one."

    return extension
