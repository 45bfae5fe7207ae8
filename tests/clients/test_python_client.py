"""The client on generated stubs alone, against a real bus."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from peer import Call, Peer

from tests.support.waiting import until
from toolbus.testing import running_bus

ROOT = Path(__file__).resolve().parents[2]


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
