"""Following the bus's address for drop-in tools: over its restarts, after a drain, and while it has none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from tests.support.waiting import until
from toolbus.bus import Bus
from toolbus.bus.rooms.streams_room import StreamsRoom
from toolbus.errors import SetupError
from toolbus.parts.dropin.dropin_loader import follow_dropin_address
from toolbus.testing import running_bus


@asynccontextmanager
async def _following(address: str, **pauses: Any) -> AsyncIterator[tuple[list[str], list[str]]]:
    addresses: list[str] = []
    lines: list[str] = []
    task = asyncio.create_task(follow_dropin_address(address, addresses.append, lines.append, **pauses))
    try:
        yield addresses, lines
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_restarted_bus_is_asked_for_the_same_port() -> None:
    async with running_bus() as bus:
        address = bus.grpc_addresses[0]
        following = _following(address)
        addresses, lines = await following.__aenter__()
        await until(lambda: addresses, "the address")
        assert addresses == [await bus.dropin_address()]
    async with running_bus(grpc=(address,)) as bus:
        await until(lambda: len(addresses) == 2, "the address again")
        assert addresses[1] == addresses[0] == await bus.dropin_address()
        await following.__aexit__(None, None, None)
    assert lines == []


async def test_a_drain_by_an_operator_is_logged_and_followed_by_a_reconnect() -> None:
    async with running_bus() as bus, _following(bus.grpc_addresses[0], reconnect_seconds=0.01) as (addresses, lines):
        await until(lambda: addresses, "the address")
        (source,) = bus.core.sessions.presence.by_source
        assert (await bus.call("toolbus:drain", {"source": source})).error is None
        await until(lambda: len(addresses) == 2, "the address again")
        assert "an operator asked this peer to disconnect" in lines[0]


async def test_a_bus_without_an_address_is_asked_again_and_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_bus() as bus:
        address, failures = bus.grpc_addresses[0], _failing(bus, 3, monkeypatch)
        async with _following(address, retry_seconds=0.01) as (addresses, lines):
            await until(lambda: addresses, "the address")
        assert failures() == 0
        (line,) = lines
        assert "gives no address for drop-in tools" in line


def _failing(bus: Bus, times: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Makes a bus fail to open its port this many times; returns how many failures are left."""
    streams = bus.core.rooms.find(StreamsRoom)
    assert streams is not None
    opened, left = streams.listeners._opened, times

    async def fails(port: int) -> object:
        nonlocal left
        if left:
            left -= 1
            raise SetupError("there is no port")
        return await opened(port)

    monkeypatch.setattr(streams.listeners, "_opened", fails)
    return lambda: left
