"""Tests of `toolbus:this_bus`: what a user may see of the bus, and everything for operators."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest_asyncio

from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus
from toolbus.bus.catalog.policy import AccessRules
from toolbus.errors import Code
from toolbus.sdk import CallContext, Host, Plugin, ToolScope
from toolbus.testing import running_bus


@pytest_asyncio.fixture
async def bus() -> AsyncIterator[Bus]:
    rules = AccessRules.read({"tools": {"of_ann": ["ann"]}})
    async with running_bus(http="127.0.0.1:0", permissions=rules) as bus:
        plugin = Plugin("p", address=bus.grpc_addresses[0])

        @plugin.tool(read_only=True)
        def of_ann() -> str:
            """Answers ann."""
            return "yes"

        @plugin.tool(min_level=50)
        def of_staff() -> str:
            return "yes"

        @bus.tool
        def of_all(scope: ToolScope) -> Any:
            return scope.call_sync("toolbus:this_bus", {"kind": "tools"}).output

        async with plugin:
            await plugin.ready()
            yield bus


def context_of(user: str = "", level: int | None = None) -> CallContext:
    return CallContext(user_id=user, attributes={} if level is None else {"level": str(level)})


async def ask(bus: Bus, kind: str, context: CallContext) -> Any:
    result = await bus.call("toolbus:this_bus", {"kind": kind}, context=context)
    assert result.error is None
    return result.output


async def test_tools_are_those_that_the_user_of_the_call_may_call(bus: Bus) -> None:
    seen = {
        (user, level): [each["name"] for each in await ask(bus, "tools", context_of(user, level))]
        for user, level in (("", None), ("ann", None), ("bob", 60), ("ann", 90))
    }
    assert seen == {
        ("", None): ["of_all"],
        ("ann", None): ["of_all", "of_ann"],
        ("bob", 60): ["of_all", "of_staff"],
        ("ann", 90): ["of_all", "of_ann", "of_staff"],
    }
    row = (await ask(bus, "tools", context_of("ann")))[1]
    assert row == {"name": "of_ann", "source": "p", "description": "Answers ann.", "read_only": True}


async def test_operators_see_which_tools_a_listing_without_a_user_lacks(bus: Bus) -> None:
    rows = await ask(bus, "restricted", context_of("", 90))
    assert [each["name"] for each in rows] == ["of_ann", "of_staff"]
    assert await ask(bus, "restricted", context_of("ann", 60)) == []


async def test_a_tool_is_shown_as_it_is_declared_to_those_who_may_call_it(bus: Bus) -> None:
    async def rows(user: str, level: int | None = None, **named: str) -> Any:
        arguments = {"kind": "tool", **named}
        result = await bus.call("toolbus:this_bus", arguments, context=context_of(user, level))
        assert result.error is None
        return result.output

    (row,) = await rows("ann", name="of_ann", source="p")
    assert (row["description"], row["read_only"], row["hints"]) == ("Answers ann.", True, {"read_only": True})
    assert json.loads(row["parameters_json"])["type"] == "object"
    assert (row["state"], row["sessions"], row["timeout_seconds"]) == ("live", 1, 30.0)
    assert len(row["schema_hash"]) > 8
    assert "warnings" not in row
    (shown,) = await rows("ann", 90, name="of_ann")
    assert shown == {**row, "warnings": [], "last_error": ""}
    assert await rows("", 90, name="of_ann") == [shown], "operators need not be one of its users"
    assert await rows("bob", name="of_ann") == []
    assert await rows("ann", name="of_ann", source="other") == []


async def test_a_tool_that_asks_sees_what_its_own_user_sees(bus: Bus) -> None:
    names = {
        user: [each["name"] for each in (await bus.call("of_all", context=context_of(user))).output]
        for user in ("ann", "b")
    }
    assert names == {"ann": ["of_all", "of_ann"], "b": ["of_all"]}


async def test_plugins_are_those_with_a_tool_for_the_user_and_operators_see_hosts_too(bus: Bus) -> None:
    async with Host(bus.grpc_addresses[0], source="talker") as host:
        await host.ready()
        rows = await ask(bus, "plugins", context_of("ann"))
        assert [(row["source"], row["state"], row["sessions"]) for row in rows] == [
            ("local", "live", 1),
            ("p", "live", 1),
        ]
        assert [row["source"] for row in await ask(bus, "plugins", context_of("bob"))] == ["local"]
        assert {row["source"] for row in await ask(bus, "plugins", context_of("", 90))} == {"local", "p", "talker"}


async def test_calls_are_the_users_own_and_a_call_without_a_user_sees_none(bus: Bus) -> None:
    await bus.call("of_ann", context=context_of("ann"))
    await bus.call("of_ann", context=context_of("bob"))
    await bus.call("of_all")
    (row,) = await ask(bus, "recent_calls", context_of("ann"))
    assert (row["name"], row["source"], row["outcome"], row["user_id"]) == ("of_ann", "p", "OK", "ann")
    assert await ask(bus, "recent_calls", context_of("")) == []
    assert [row["outcome"] for row in await ask(bus, "recent_calls", context_of("bob"))][-1] == "PERMISSION_DENIED"
    all_rows = await ask(bus, "recent_calls", context_of("ann", 90))
    assert {row["user_id"] for row in all_rows} == {"ann", "bob", ""}


async def test_counts_are_of_the_users_calls_and_of_the_whole_bus_for_operators(bus: Bus) -> None:
    await bus.call("of_ann", context=context_of("ann"))
    assert await ask(bus, "stats", context_of("ann")) == {"outcomes": {"OK": 1}}
    assert await ask(bus, "stats", context_of("")) == {"outcomes": {}}
    whole = await ask(bus, "stats", context_of("", 90))
    assert whole["sessions"] == 1
    assert whole["outcomes"] == {"OK": 1}, "to look is not counted"


async def test_an_unknown_kind_is_named(bus: Bus) -> None:
    result = await bus.call("toolbus:this_bus", {"kind": "secrets"})
    assert result.error is not None
    assert result.error.code is Code.INVALID_ARGUMENTS


async def test_over_rest_a_level_shows_what_a_call_with_it_reaches(bus: Bus) -> None:
    async with httpx.AsyncClient(base_url=f"http://{bus.http_address}", verify=False, timeout=WAIT_SECONDS) as http:
        for level, there in ((0, False), (49, False), (50, True)):
            asked = {"level": level}
            listed = (await http.get("/api/tools", params=asked)).json()["tools_by_role"]["default"]
            exported = (await http.get("/api/tools/export", params=asked | {"dialect": "openai"})).json()["names"]
            found = (await http.get("/api/tools/search", params=asked | {"q": "of_staff", "mode": "keyword"})).json()
            body = {"name": "of_staff", "arguments": {}, "context": {"attributes": {"level": str(level)}}}
            called = (await http.post("/api/tools/invoke", json=body)).json()
            assert ["of_staff" in [each["name"] for each in listed], "of_staff" in exported.values()] == [there, there]
            assert [each["name"] for each in found["results"]] == (["of_staff"] if there else [])
            assert (called["is_error"] is False) is there, called
        refused = await http.get("/api/tools", params={"level": -1})
        assert refused.status_code == 422


async def test_over_grpc_a_level_shows_what_a_call_with_it_reaches(bus: Bus) -> None:
    async with Host(bus.grpc_addresses[0], source="talker") as host:
        for level, there in ((None, False), (49, False), (50, True)):
            listed = [each.tool.name for each in await host.list(context=context_of("bob", level))]
            result = await host.call("of_staff", context=context_of("bob", level))
            assert ("of_staff" in listed, result.error is None) == (there, there)
