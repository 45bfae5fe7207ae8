"""Asking a bus where it takes drop-in tools in: while it is there, when it is there again, and when it says no."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from tests.faults.raw_peer import until
from toolbus.bus import Bus
from toolbus.dropin import dropin_address
from toolbus.dropin.dropin_address import follow_entrance
from toolbus.errors import SetupError
from toolbus.testing import running_bus


@asynccontextmanager
async def _following(address: str) -> AsyncIterator[tuple[list[str], list[str]]]:
    found: list[str] = []
    said: list[str] = []
    task = asyncio.create_task(follow_entrance(address, found.append, said.append))
    try:
        yield found, said
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_bus_that_is_started_again_is_asked_for_the_same_port() -> None:
    async with running_bus() as bus:
        address = bus.grpc_addresses[0]
        following = _following(address)
        found, said = await following.__aenter__()
        await until(lambda: found, "the address")
        assert found == [await bus.dropin_address()]
    async with running_bus(grpc=(address,)) as bus:
        await until(lambda: len(found) == 2, "the address again")
        assert found[1] == found[0] == await bus.dropin_address()
        await following.__aexit__(None, None, None)
    assert said == []


async def test_who_is_sent_away_says_so_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropin_address, "SENT_AWAY_SECONDS", 0.01)
    async with running_bus() as bus, _following(bus.grpc_addresses[0]) as (found, said):
        await until(lambda: found, "the address")
        (source,) = bus._presence.by_source
        assert (await bus.call("toolbus:drain", {"source": source})).error is None
        await until(lambda: len(found) == 2, "the address again")
        assert "an operator asked this peer to go" in said[0]


async def test_a_bus_that_does_not_say_is_asked_again_and_complained_about_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dropin_address, "AGAIN_SECONDS", 0.01)
    async with running_bus() as bus:
        address, failures = bus.grpc_addresses[0], _failing(bus, 3, monkeypatch)
        async with _following(address) as (found, said):
            await until(lambda: found, "the address")
        assert failures() == 0
        (complaint,) = said
        assert "does not say where it takes drop-in tools in" in complaint


def _failing(bus: Bus, times: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Has a bus fail to open its port so many times; returns how many are left."""
    opened, left = bus._grpc._opened, times

    async def fails(port: int) -> object:
        nonlocal left
        if left:
            left -= 1
            raise SetupError("there is no port")
        return await opened(port)

    monkeypatch.setattr(bus._grpc, "_opened", fails)
    return lambda: left
