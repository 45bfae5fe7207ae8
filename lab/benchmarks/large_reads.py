"""Measures what readers of a large catalog cost a bus after one tool of it has changed: lists, searches and exports."""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import select
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvloop

from lab.benchmarks.contest import Plan
from lab.benchmarks.facts import Column, Fact, Line, Measured, measured_here
from lab.benchmarks.growth import ANSWER_SECONDS, PART, attached_plugin
from lab.load import peer
from lab.load.raw_http import META, MODERN
from lab.stage import LOOPBACK, ROOT, Stage
from toolbus.v1 import tool_bus_service_pb2 as wire

TOOLS = 100_000
HEALTH_SECONDS = 0.01  # between two questions whether the bus is well
SETTLE_SECONDS = 0.3
Read = Callable[[], Awaitable[object]]


def reads(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Reads a catalog of 100,000 tools in each way, after one change of it and again, while health is asked for."""
    return uvloop.run(_reads(stage, plan.rounds, max(3, repeats)))


async def _reads(stage: Stage, rounds: int, repeats: int) -> tuple[Fact, ...]:
    bus = stage.bus(http=LOOPBACK)
    plugins = [await attached_plugin(bus.grpc, begin, PART) for begin in range(0, TOOLS, PART)]
    writer = plugins[0][0]
    async with httpx.AsyncClient(base_url=bus.http, timeout=ANSWER_SECONDS) as client:
        ways: dict[str, Read] = {
            "nothing is read": functools.partial(asyncio.sleep, SETTLE_SECONDS),
            "GET /api/tools": functools.partial(_get, client, "/api/tools"),
            "search by words": functools.partial(_get, client, "/api/tools/search?q=tool_7+weather&mode=bm25"),
            "search, the default": functools.partial(_get, client, "/api/tools/search?q=tool_7+weather"),
            "export for openai": functools.partial(_get, client, "/api/tools/export?dialect=openai"),
            "MCP tools/list, every page": functools.partial(_mcp, client),
            "List over gRPC, every page": functools.partial(_list, writer),
        }
        lines: dict[str, Line] = {
            name: functools.partial(_read, bus.child.pid, bus.http, writer, read, repeats)
            for name, read in ways.items()
        }
        for read in ways.values():  # the first of its kind builds what is kept
            await read()
        facts = await measured_here("reads", f"{TOOLS:,} tools, of which one changes", lines, rounds)
    for plugin, reading in plugins:
        reading.cancel()
        await plugin.close()
    return facts


async def _read(pid: int, url: str, writer: peer.Peer, read: Read, repeats: int) -> Measured:
    found: dict[Column, list[float]] = {}
    for number in range(repeats):
        tools = [peer.tool(f"new_{number}_{time.monotonic_ns()}")]
        request = wire.RegisterRequest(session_id=writer.attached.session_id, tools=tools)
        async with _asking_health(url) as waits:
            await writer.stub.Register(request, timeout=ANSWER_SECONDS)
            for sentence in ("after a change", "again"):
                before = spent(pid)
                await read()
                found.setdefault((f"processor time, {sentence}", "ms"), []).append((spent(pid) - before) * 1e3)
        found.setdefault(("longest wait for /healthz", "ms"), []).append(max(waits) * 1e3)
    return {**found}


@asynccontextmanager
async def _asking_health(url: str) -> AsyncIterator[list[float]]:
    """Has a process of its own ask; the longest wait is in the list at the end."""
    waits: list[float] = []
    command = [sys.executable, "-m", "lab.benchmarks.large_reads", url]
    asking = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert asking.stdout is not None
    await asking.stdout.readline()  # it has begun
    try:
        await asyncio.sleep(SETTLE_SECONDS)
        yield waits
    finally:
        longest, _ = await asking.communicate(b"")
        waits.append(float(longest))


def ask_health(url: str) -> None:
    """Asks whether a bus is well until the end of standard input, and then writes the longest wait, in seconds."""
    waits: list[float] = []
    address = urlsplit(url)
    with closing(http.client.HTTPConnection(address.netloc, timeout=ANSWER_SECONDS)) as connection:
        while not select.select([sys.stdin], [], [], HEALTH_SECONDS if waits else 0.0)[0]:
            began = time.perf_counter()
            connection.request("GET", "/healthz")
            connection.getresponse().read()
            waits.append(time.perf_counter() - began)
            if len(waits) == 1:
                print("asking", flush=True)
    print(max(waits))


def spent(pid: int) -> float:
    """Returns the processor time of all threads of a process, in seconds, by the scheduler."""
    return sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


async def _get(client: httpx.AsyncClient, path: str) -> None:
    (await client.get(path)).raise_for_status()


async def _mcp(client: httpx.AsyncClient) -> None:
    headers = {
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": MODERN,
        "Mcp-Method": "tools/list",
    }
    params: dict[str, Any] = {"_meta": META}
    while True:
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": params}
        text = (await client.post("/mcp", json=body, headers=headers)).text
        result = json.loads(text if text.startswith("{") else text.rpartition("data: ")[2])["result"]
        if "nextCursor" not in result:
            return
        params = {"_meta": META, "cursor": result["nextCursor"]}


async def _list(some: peer.Peer) -> None:
    request = wire.ListRequest()
    while True:
        request.page_token = (await some.stub.List(request, timeout=ANSWER_SECONDS)).next_page_token
        if not request.page_token:
            return


if __name__ == "__main__":
    ask_health(sys.argv[1])
