"""The bus does for a raw client what toolbus/parts/conformance/bus.jsonl says, step by step over a real connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from tests.support.waiting import until
from toolbus.bus import Bus
from toolbus.parts.conformance.bus_player import run_scenario, settled
from toolbus.parts.conformance.script import bus_scenarios
from toolbus.testing import PATIENT, running_bus


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bus() -> AsyncIterator[Bus]:
    """One bus for all scenarios: each uses names of its own."""
    timings = replace(PATIENT, tick_seconds=0.05)  # the grace ends at a tick
    async with running_bus(http="off", grace_seconds=0.05, timings=timings) as bus:
        (only,) = bus.grpc_addresses
        await settled(only)
        yield bus


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("scenario", [pytest.param(each, id=each["scenario"]) for each in bus_scenarios()])
async def test_the_bus_plays_its_part(bus: Bus, scenario: dict[str, Any]) -> None:
    # What an earlier scenario left behind is gone: the end of its grace period would change the catalog.
    await until(lambda: not bus.list(include_offline=True), "an empty catalog")
    await run_scenario(bus.grpc_addresses[0], scenario)
