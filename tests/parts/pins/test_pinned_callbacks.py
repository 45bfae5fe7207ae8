"""Pinned sources with callback URLs: a changed registration is refused until it is approved, across restarts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.faults.callbacks import CallbackPlugin, Legacy, Start, callback_tool, names, starting
from tests.support.waiting import until
from toolbus.bus import Bus
from toolbus.bus.catalog.policy import VERBS_OF_TOOLS
from toolbus.cli.command_line import app
from toolbus.parts.pins.pins import FINGERPRINTS
from toolbus.sdk import Plugin
from toolbus.testing import running_bus

BLOCK: dict[str, Any] = {"pins": {"shop*": "block"}}


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts a bus on this test's data directory."""
    return starting(tmp_path / "data")


async def approve(bus: Bus, **arguments: Any) -> Any:
    result = await bus.call("toolbus:approve", arguments)
    assert not result.is_error, result.text
    return result.output


async def test_a_changed_registration_is_refused_over_rest_until_it_is_approved(start: Start) -> None:
    with CallbackPlugin().come() as plugin:
        tool = {"name": "buy", "source": "shop", "callback_url": plugin.url()}
        async with start(**BLOCK) as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", **tool, description="Buys.")
            await legacy.ask("register", **{**tool, "callback_url": plugin.url("other")}, description="Buys.")
        async with start(**BLOCK) as bus, Legacy.of(bus) as legacy:
            refused = await legacy.post("register", **tool, description="Buys and tells.")
            assert refused.status_code == 403
            assert "`toolbus access approve shop buy`" in refused.text
            assert names(bus) == [], "what it was is withdrawn"
            again = await legacy.post("register", **tool, description="Buys and tells.")
            assert (again.status_code, again.text) == (403, refused.text)
            new = await legacy.post("register", **{**tool, "name": "sell"})
            assert "is new since source 'shop' was trusted" in new.text
            assert (await approve(bus, source="shop", tool="buy"))["waiting"] == ["tool:sell"]
            await legacy.ask("register", **tool, description="Buys and tells.")
            assert names(bus) == ["buy"]
            assert (await bus.call("buy", {"n": 1})).output == {"n": 1}
        async with start(**BLOCK) as bus:
            assert names(bus) == ["buy"]


async def test_a_changed_tool_over_grpc_is_refused_by_name_and_its_neighbour_is_offered(start: Start) -> None:
    with CallbackPlugin().come() as plugin:
        async with start(**BLOCK) as bus, Legacy.of(bus) as legacy:
            both = [callback_tool("a", plugin), callback_tool("b", plugin)]
            assert (await legacy.register("shop", *both)).ok
            changed = callback_tool("a", plugin, description="x")
            answer = await legacy.register("shop", changed, both[1])
            assert [(each.name, "toolbus access approve shop a" in each.error) for each in answer.refused] == [
                ("a", True)
            ]
            assert names(bus) == ["b"]
            await approve(bus, source="shop")
            assert (await legacy.register("shop", changed, both[1])).ok


async def test_a_registration_of_before_is_trusted_and_one_that_waits_now_does_not_come_back(
    start: Start, tmp_path: Path
) -> None:
    with CallbackPlugin().come() as plugin:
        tool = {"name": "buy", "source": "shop", "callback_url": plugin.url()}
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", **tool)
            assert bus.core.program.store.load(FINGERPRINTS) == {}, "nothing is remembered of who is not pinned"
        async with start(pins={"shop": "warn"}) as bus, Legacy.of(bus) as legacy:
            assert names(bus) == ["buy"]
            await legacy.ask("register", **tool, description="x")
            entry = bus.registry.find("buy", "A")
            assert "toolbus access approve shop" in " ".join(entry.all_warnings if entry is not None else ())
        async with start(**BLOCK) as bus:
            assert names(bus) == []


async def test_the_command_shows_the_difference_asks_and_offers_what_a_session_was_refused(start: Start) -> None:
    def plugin(description: str) -> Plugin:
        made = Plugin("weather", address=bus.grpc_addresses[0], instance="one")
        made.tool(name="forecast", description=description)(lambda: 1)
        return made

    async def run(*words: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, [*words, "--bus", bus.grpc_addresses[0]])

    async with start(pins={"weather": "block"}) as bus:
        async with plugin("Forecasts.") as first:
            await first.ready()
            assert "nothing of source weather waits" in (await run("approve", "weather")).output
        async with plugin("Forecasts and tells.") as changed:
            await until(lambda: changed.refused)
            [refused] = changed.refused
            assert (refused.name, "`toolbus access approve weather forecast`" in refused.error) == ("forecast", True)
            asked = await run("approve", "weather")
            assert (asked.exit_code, "--yes" in asked.output) == (2, True)  # nobody is at the terminal
            assert '+ "description": "Forecasts and tells."' in asked.output
            done = await run("approve", "weather", "forecast", "--yes", "--json")
            assert json.loads(done.stdout) == {"source": "weather", "approved": ["tool:forecast"], "waiting": []}
            assert names(bus, away=False) == ["forecast"]
            await until(lambda: not changed.refused)
        assert "neither pinned nor a mount" in (await run("approve", "nobody")).output


async def test_approvals_are_tools_of_the_bus_that_need_the_verb_permit() -> None:
    assert (VERBS_OF_TOOLS["approvals"], VERBS_OF_TOOLS["approve"]) == ("permit", "permit")
    async with running_bus(pins={"s": "warn"}) as bus:
        own = {entry.name for entry in bus.registry.offered_by("toolbus")}
        assert {"toolbus:approvals", "toolbus:approve"} <= own
        assert "toolbus:mount_approve" not in own
