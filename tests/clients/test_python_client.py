"""The client on generated stubs alone does what the vectors ask of every client library."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from peer import Call, Peer

from tests.support.waiting import until
from tests.vectors.play_peer import Player, scenarios
from toolbus.testing import running_bus

ROOT = Path(__file__).resolve().parents[2]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def player() -> AsyncIterator[Player]:
    """One player, and one process of the client for as long as scenarios succeed."""
    command = (sys.executable, str(ROOT / "clients" / "python" / "conformance.py"))
    async with Player(command, environment={"PYTHONPATH": str(ROOT)}) as one:
        yield one


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("scenario", [pytest.param(each, id=each["scenario"]) for each in scenarios()])
async def test_the_python_client_plays_its_part(player: Player, scenario: dict[str, Any]) -> None:
    await player.play(scenario)


async def test_a_refused_tool_is_data_and_one_warning_and_what_a_grant_brings_back_is_not_refused_any_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_bus() as bus:
        peer = Peer(bus.grpc_addresses[0], "weather")

        @peer.tool("works", {"type": "object"})
        async def good(arguments: dict[str, Any], call: Call) -> int:
            return 1

        @peer.tool("does not", {"$ref": "#"})
        async def bad(arguments: dict[str, Any], call: Call) -> int:
            return 1

        running = asyncio.ensure_future(peer.run())
        await until(peer.attached.is_set, "the answer of the bus")
        assert [listing.tool.name for listing in bus.list()] == ["good"]
        assert list(peer.refused) == [("bad", "")]
        bus.revoke("weather")
        await until(lambda: ("good", "") in peer.refused, "the refusal of what it may not offer")
        bus.grant("weather")
        await until(lambda: list(peer.refused) == [("bad", "")], "the tool that the grant brings back")
        peer.drain()
        await running
    warnings = [record.message for record in caplog.records if "does not offer the tool 'bad'" in record.message]
    assert len(warnings) == 1
    assert "without end" in warnings[0]
