"""Runs a bus with everything that a console shows: real plugins and hosts, calls that worked and calls that failed.

Names, texts and the order of calls are fixed, so that pictures of two runs differ in times and ids alone. `inhabited`
fills any bus, such as that of a `toolbus serve`; `demo_world` and `empty_world` bring their own.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
from aiohttp import web

from tests.parts.console.page import world_plugins as plugins
from tests.support.processes import ROOT, Running
from tests.support.waiting import WAIT_SECONDS, within
from toolbus import Host
from toolbus.sdk import CallContext
from toolbus.testing import running_bus
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb
from toolbus.v1.tool_bus_service_pb2_grpc import ToolBusServiceStub

SUPERVISED = (ROOT / "examples" / "weather" / "plugin.py", Path(__file__).parent / "plugins" / "billing.py")
MEMBERS: tuple[dict[str, Any], ...] = (
    {"id": "mira", "name": "Mira", "role": "Archivist", "tools": ["tavern:lore"]},
    {"id": "tom", "name": "Tom", "role": "Pacing", "tools": ["tavern:pace", "tavern:gone"]},
)
FAILING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("book_seat", {"train": "ICE 75"}),  # raises
    ("charge_card", {"customer": "C-1043", "amount": 2500}),  # is refused by the tool
    ("charge_card", {"customer": "C-1044", "amount": "a lot"}),  # breaks the schema
    ("export_ledger", {"year": 2024}),  # takes too long
    ("render_invoice", {"number": 7}),  # kills its process
)

USER, GUEST = CallContext(user_id="u-17"), CallContext(user_id="u-12")


@dataclass(frozen=True, slots=True)
class World:
    """A bus with its inhabitants.

    Attributes:
        grpc, http: where it listens.
        assistant: a host that has made the calls.
    """

    grpc: str
    http: str
    assistant: Host

    @property
    def page(self) -> str:
        """The address of the console."""
        return f"http://{self.http}/console"

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Sends a request of a host that knows HTTP only; returns the answer."""
        return await _post(self.http, path, body)


@asynccontextmanager
async def demo_world(*, tools: int = 1000, **settings: Any) -> AsyncIterator[World]:
    """Runs a bus with its inhabitants, after their calls.

    Args:
        tools: how many the catalog plugin has.
        settings: of `toolbus.bus.Config`.
    """
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "examples" / "dropin", Path(folder, "tools"))
        kept = {"tools_dir": Path(folder, "tools"), "data_dir": Path(folder, "data"), "grace_seconds": 3600}
        async with running_bus(http="127.0.0.1:0", **{**kept, **settings}) as bus:
            assert bus.http_address is not None
            async with inhabited(bus.grpc_addresses[0], bus.http_address, tools=tools) as world:
                bus.revoke("old-scraper")
                bus.permit("tools", "charge_card", ["u-7", "u-12"])
                bus.permit("sources", "reports", ["u-17"])
                running = await _live(world)
                yield world
                await world.assistant.call("toolbus:cancel_task", {"task_id": running}, context=USER)


@asynccontextmanager
async def empty_world() -> AsyncIterator[World]:
    """Runs a bus on which nothing is, but a host."""
    async with running_bus(http="127.0.0.1:0") as bus, Host(bus.grpc_addresses[0], source="assistant") as host:
        assert bus.http_address is not None
        yield World(bus.grpc_addresses[0], bus.http_address, host)


@asynccontextmanager
async def inhabited(address: str, http: str, *, tools: int = 1000, run: bool = True) -> AsyncIterator[World]:
    """Attaches the plugins and a host to a bus.

    Args:
        run: whether `toolbus run` supervises two more plugins, in processes of their own.
    """
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        own = [*plugins.trips(address), *plugins.oddities(address), plugins.reports(address), plugins.tavern(address)]
        for plugin in (*own, plugins.catalog(address, tools)):
            await stack.enter_async_context(plugin)
            await within(plugin.ready())
        await _vanish(address)
        await stack.enter_async_context(_pager(http))
        host = await stack.enter_async_context(Host(address, source="assistant"))
        await within(host.ready())
        if run:
            await stack.enter_async_context(Running(Path(folder), "run", *SUPERVISED, "--bus", address))
            await within(_listed(host, "print_slip", "get_sun_times"))
        yield World(address, http, host)


async def _live(world: World) -> str:
    """Makes the calls that the pictures show; returns the id of a task that runs on."""
    host = world.assistant
    for name, arguments in FAILING:
        await host.call(name, arguments, context=GUEST, timeout=5 if name == "render_invoice" else None)
    await within(_listed(host, "print_slip"))  # its supervisor has started it again
    await asyncio.gather(*(host.call("print_slip", {"number": number}, timeout=5) for number in range(4)))
    for city in ("Tokyo", "Lima", "Oslo", "Cairo", "Quito"):
        await host.call("get_sun_times", {"city": city, "date": "2024-06-21"}, context=USER)
    for name in ("list_order", "find_shipment", "count_pallet", "find_shipment", "read_invoice", "find_shipment"):
        await host.call(name, {"id": "42"})
    await host.call("page_on_call", {"text": "the freezer is warm"}, context=USER)
    await host.call("stock_table", {"id": "仓库七"})
    await host.call(plugins.LONGEST_NAME, {"id": "7"})
    for seconds, year in ((0.05, 2024), (0.05, 2101), (600, 2025)):
        arguments = {"year": year, "seconds": seconds}
        begun = await host.call("yearly_report", arguments, context=USER, background_after=0.001)
    await world.post("/api/tools/invoke", {"name": "find_the_lost_parcel"})
    messages = [{"role": "user", "content": "Who lives at the lighthouse?"}]
    for chat in ("the-inn", "the-lighthouse"):
        await world.post("/api/council/run", {"messages": messages, "chat_id": chat, "members": MEMBERS})
    for start, goal in (("Bern", "Vienna"), ("Oslo", "Rome")):
        await host.call("plan_trip", {"start": start, "goal": goal}, context=USER)
    return str(begun.unwrap()["task_id"])


async def _post(http: str, path: str, body: dict[str, Any]) -> Any:
    async with httpx.AsyncClient(base_url=f"http://{http}", trust_env=False, verify=False) as client:
        answer = await client.post(path, json=body, timeout=WAIT_SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


@asynccontextmanager
async def traffic(world: World) -> AsyncIterator[None]:
    """Has hosts make calls all the time, now more, now fewer."""

    async def call() -> None:
        names = ("find_order", "list_shipment", "count_pallet", "read_invoice", "stock_table", "get_sun_times")
        for turn in itertools.count():
            calls: list[tuple[str, Any]] = []
            for name in names[: 2 + turn % 5]:
                calls.append((name, {"city": "Oslo"} if name == "get_sun_times" else {"id": str(turn)}))
            await world.assistant.call_many(calls)
            if turn % 16 == 0:
                await world.assistant.call("plan_trip", {"start": "Bern", "goal": "Vienna"}, context=USER)
            if turn % 24 == 0:
                await world.assistant.call("export_ledger", {"year": 2024}, context=GUEST)
            await asyncio.sleep(0.12 + 0.1 * math.sin(turn / 4))

    calling = asyncio.create_task(call())
    try:
        yield
    finally:
        calling.cancel()


async def _listed(host: Host, *names: str) -> None:
    """Waits until tools are offered."""
    while True:
        found = {tool.name for tool in await host.list(names=names)}
        if found.issuperset(names):
            return
        await asyncio.sleep(0.05)


async def _vanish(address: str) -> None:
    """Leaves a source behind that is offline: its connection broke without a drain."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = ToolBusServiceStub(channel)
        stream = stub.Invoke()
        tool = pb.Tool(name="scan_barcode", description="Scans a barcode at the gate.", parameters_json="{}")
        attach = wire.Attach(protocol_version=1, source="gate-scanner", instance="gate-3", tools=[tool])
        await stream.write(wire.InvokeRequest(attach=attach))
        await within(stream.read())
        stream.cancel()


@asynccontextmanager
async def _pager(http: str) -> AsyncIterator[None]:
    """Serves a tool that is called at its callback URL."""

    async def page(_: web.Request) -> web.Response:
        return web.json_response({"output": "paged Ada", "is_error": False})

    app = web.Application()
    app.router.add_post("/tool_invoke", page)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        tool = {
            "name": "page_on_call",
            "description": "Pages whoever is on call.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
            "callback_url": f"http://127.0.0.1:{port}/tool_invoke",
            "source": "pager",
        }
        await _post(http, "/api/tools/register", tool)
        yield
    finally:
        await runner.cleanup()
