"""Measures how soon an MCP client learns of a change of the catalog, and how much memory MCP takes in a bus."""

from __future__ import annotations

import asyncio
import time

import httpx
import uvloop

from lab.benchmarks.contest import Plan
from lab.benchmarks.facts import Fact
from lab.child import ChildFailed
from lab.load.callbacks import register_at
from lab.load.raw_http import McpTarget
from lab.stage import LOOPBACK, Stage

SECONDS = 30.0
CALLS = 200
SETTLE_SECONDS = 1.0
_CHANGED = b"notifications/tools/list_changed"


async def _event(reader: asyncio.StreamReader) -> bytes:
    """Returns the data of the next event of a stream; empty where the stream has ended."""
    async with asyncio.timeout(SECONDS):
        while line := await reader.readline():
            if line.startswith(b"data:") and len(line) > 8:
                return line
    return b""


def list_changed(stage: Stage, plan: Plan, repeats: int) -> Fact:
    """Times a registration, to the notification at a client that listens."""
    samples = uvloop.run(_notified(stage.bus(http=LOOPBACK).http, repeats))
    sentence = "registration answered, to list_changed at a modern client that listens"
    return Fact("list_changed", sentence, "ms", 100.0, tuple(samples))


async def _notified(url: str, repeats: int) -> list[float]:
    target, samples = McpTarget(url), []
    reader, writer = await target.connect()
    writer.write(target.message(1, "subscriptions/listen", {"notifications": {"toolsListChanged": True}}))
    await _event(reader)  # the first is about the stream itself
    for number in range(repeats):
        tool = {"name": f"tool_{number}", "callback_url": "http://127.0.0.1:9/run", "source": "lab"}
        await register_at(url, tool)
        began_at = time.monotonic()
        event = await _event(reader)
        samples.append((time.monotonic() - began_at) * 1e3)
        if _CHANGED not in event:
            raise ChildFailed(f"expected {_CHANGED!r}, got {event!r}")
    return samples


def mcp_weight(stage: Stage, plan: Plan, repeats: int) -> Fact:
    """Reads what MCP adds to the memory of a bus."""
    bus, _, url = stage.bus(http=LOOPBACK)
    httpx.get(f"{url}/api/tools", timeout=SECONDS, trust_env=False, verify=False)
    unused = bus.settled_bytes(SETTLE_SECONDS)
    uvloop.run(_list(url))
    used = bus.settled_bytes(SETTLE_SECONDS)
    sentence = f"memory that {2 * CALLS} requests of MCP add to a bus"
    return Fact("mcp_weight", sentence, "MB", 10.0, ((used - unused) / 1e6,))


async def _list(url: str) -> None:
    """Lists the tools again and again, as a legacy client and a modern one do."""
    legacy, modern = (McpTarget(url), McpTarget(url))
    clients = {target: await target.connect() for target in (legacy, modern)}
    await legacy.shake_hands(clients[legacy])
    for _ in range(CALLS):
        for target, connection in clients.items():
            status, _, body = await connection.ask(target.message(2, "tools/list", {}))
            if status != 200 or b'"result"' not in body:
                raise ChildFailed(f"tools/list was answered with HTTP {status} {body[:500]!r}")
