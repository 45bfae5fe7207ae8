"""Tests a bus and a host as sources of tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

import toolbus
from tests.parts.models.loop.scripted_model import FunctionSource, ScriptedModel, call, says
from tests.support.waiting import WAIT_SECONDS
from toolbus.bus.config import Config
from toolbus.errors import Code, SetupError
from toolbus.functions.call_context import CallContext
from toolbus.functions.scope import ToolScope
from toolbus.loop import ToolLoop, ToolSource, source_of
from toolbus.protocol.tool import Progress


@pytest.fixture
async def bus() -> AsyncIterator[toolbus.Bus]:
    config = Config(grpc=("127.0.0.1:0",), http="off", roles=("mia", "tom"), data_dir=None, grace_seconds=0.001)
    async with toolbus.Bus(config) as bus:

        @bus.tool(description="Adds.")  # type: ignore[untyped-decorator]
        def add(a: int, b: int) -> int:
            return a + b

        @bus.tool(description="Tells who asks.")  # type: ignore[untyped-decorator]
        async def who(scope: ToolScope) -> dict[str, Any]:
            scope.progress(1, message="looking")
            return {"user": scope.context.user_id, **scope.context.attributes}

        @bus.tool(description="Only mia's.", role="mia")  # type: ignore[untyped-decorator]
        def sing() -> str:
            return "la"

        yield bus


@pytest.fixture(params=["bus", "host"])
async def offered(request: pytest.FixtureRequest, bus: toolbus.Bus) -> AsyncIterator[Any]:
    if request.param == "bus":
        yield bus
        return
    async with toolbus.Host(bus.grpc_addresses[0], source="host") as host:
        yield host


async def names(source: ToolSource) -> list[str]:
    _, tools = await source.tools()
    return [tool.name for tool in tools]


async def test_a_bus_and_a_host_list_their_tools_in_order(offered: Any) -> None:
    assert await names(source_of(offered, role="mia")) == ["add", "who", "sing"]
    assert await names(source_of(offered, role="tom")) == ["add", "who"]
    assert await names(source_of(offered, names=["who", "add"])) == ["add", "who"]
    assert await names(source_of(offered, names=[])) == []


async def test_a_revision_is_listed_once_and_a_change_is_seen_at_once(offered: Any, bus: toolbus.Bus) -> None:
    source = source_of(offered)
    revision, tools = await source.tools()
    assert (await source.tools())[1] is tools
    bus.remove_tool("sing")
    changed, fewer = await source.tools()
    assert changed > revision
    assert [tool.name for tool in fewer] == ["add", "who"]


async def test_a_call_carries_context_and_reports_progress(offered: Any) -> None:
    source = source_of(offered)
    _, tools = await source.tools()
    hashes = {tool.name: tool.schema_hash for tool in tools}
    seen: list[Progress] = []
    context = CallContext(user_id="ann", attributes={"round": "1"})
    result = await source.call(
        "who", "{}", context=context, schema_hash=hashes["who"], timeout=5, on_progress=seen.append
    )
    assert result.output == {"user": "ann", "round": "1"}
    assert [progress.message for progress in seen] == ["looking"]


async def test_the_context_of_a_source_applies_to_calls_without_one(offered: Any) -> None:
    source = source_of(offered, context=CallContext(user_id="bob"))
    result = await source.call("who", "{}", context=None, schema_hash="")
    assert result.output == {"user": "bob"}
    model = ScriptedModel(says("", call("who")), says("bob"))
    reply = await ToolLoop(source, model.endpoint).run("?")
    assert reply.calls[0].result.output == {"user": "bob", "round": "1", "order": "0"}


async def test_a_role_sees_and_calls_its_own_tools_only(offered: Any) -> None:
    source = source_of(offered, role="tom")
    result = await source.call("sing", "{}", context=None, schema_hash="")
    assert result.error is not None
    assert result.error.code is Code.NOT_FOUND


async def test_a_source_lists_the_tools_that_its_user_may_call(offered: Any, bus: toolbus.Bus) -> None:
    sources = {user: source_of(offered, context=CallContext(user_id=user)) for user in ("ann", "bob")}
    bus.permit("tools", "who", ["ann"])
    assert await names(sources["ann"]) == ["add", "who", "sing"]
    assert await names(sources["bob"]) == ["add", "sing"]
    bus.permit("tools", "who", None)
    assert await names(sources["bob"]) == ["add", "who", "sing"]


async def test_a_call_that_outlives_its_soft_deadline_becomes_a_task_whose_id_is_the_result(
    offered: Any, bus: toolbus.Bus
) -> None:
    go = asyncio.Event()

    @bus.tool(description="Waits.")  # type: ignore[untyped-decorator]
    async def wait() -> str:
        await go.wait()
        return "waited"

    model = ScriptedModel(says("", call("wait")), says("it goes on"))
    reply = await ToolLoop(source_of(offered, background_after=0.01), model.endpoint).run("?")
    begun = reply.calls[0].result.output
    assert begun["status"] == "running"
    assert begun["task_id"] in model.results(1)[0]
    go.set()
    task = await asyncio.wait_for(bus.tasks.await_result(begun["task_id"]), WAIT_SECONDS)
    assert task is not None
    assert task.text == "waited"


async def test_a_call_with_an_old_hash_is_refused(offered: Any) -> None:
    result = await source_of(offered).call("add", '{"a":1,"b":2}', context=None, schema_hash="0" * 32)
    assert result.error is not None
    assert result.error.code is Code.CATALOG_STALE


async def test_a_model_is_offered_the_tools_of_a_bus_that_has_just_restarted(
    tmp_path: Path,
) -> None:
    config = Config(grpc=(f"unix:{tmp_path}/bus.sock",), http="off", data_dir=None)
    model = ScriptedModel(says("1"), says("2"), says("3"), says("4"))
    async with toolbus.Host(config.grpc[0]) as host:
        loop = ToolLoop(host, model.endpoint)
        async with toolbus.Bus(config) as bus:
            bus.tool(lambda: 1, name="add")
            bus.tool(lambda: 1, name="sing")
            await loop.run("?")
            settling = [host.settling]
            bus.remove_tool("sing")  # by its plugin: it is gone at once
            await loop.run("?")
        async with toolbus.Bus(config) as bus:
            bus.tool(lambda: 1, name="who")  # the first plugin that is back
            await loop.run("?")
            settling.append(host.settling)
            bus.tool(lambda: 1, name="add")
            await loop.run("?")
    assert [model.offered(request) for request in range(4)] == [["add", "sing"], ["add"], ["add"], ["who", "add"]]
    assert settling == [False, True]


async def test_a_tool_that_is_not_registered_when_the_bus_has_settled_is_not_offered() -> None:
    source, model = FunctionSource(add=lambda: 1, sing=lambda: 1), ScriptedModel(says("1"), says("2"), says("3"))
    loop = ToolLoop(source, model.endpoint)
    await loop.run("?")
    source.remove("sing")
    source.settling = True
    await loop.run("?")
    source.settling = False
    await loop.run("?")
    assert [model.offered(request) for request in range(3)] == [["add", "sing"], ["add", "sing"], ["add"]]


async def test_changes_are_yielded_as_revisions(offered: Any, bus: toolbus.Bus) -> None:
    source = source_of(offered)
    async with asyncio.timeout(WAIT_SECONDS), aclosing(source.changes()) as changes:  # type: ignore[type-var]
        before = await anext(changes)
        bus.remove_tool("sing")
        after = await anext(changes)
    assert before < after == (await source.tools())[0]


async def test_a_loop_runs_on_a_bus_and_on_a_host(offered: Any) -> None:
    model = ScriptedModel(says("", call("add", {"a": 1, "b": 2}), call("add", {"a": "x"})), says("3"))
    reply = await ToolLoop(offered, model.endpoint).run("?")
    assert reply.text == "3"
    assert [done.outcome for done in reply.calls] == ["ok", "invalid_arguments"]


async def test_a_tool_of_several_roles_is_offered_once_as_it_would_be_called(bus: toolbus.Bus) -> None:
    @bus.tool(name="sing", description="Only tom's.", role="tom")  # type: ignore[untyped-decorator]
    def sing_low() -> str:
        return "lo"

    source = source_of(bus)
    _, tools = await source.tools()
    assert [tool.description for tool in tools if tool.name == "sing"] == ["Only mia's."]
    result = await source.call("sing", "{}", context=None, schema_hash=tools[-1].schema_hash)
    assert result.output == "la"


def test_a_source_is_returned_unchanged_and_takes_no_other_options() -> None:
    source = FunctionSource()
    assert source_of(source) is source
    with pytest.raises(SetupError, match="is a source of tools already"):
        source_of(source, role="mia")
    with pytest.raises(SetupError, match="is a source of tools already"):
        source_of(source, background_after=1)


@pytest.mark.parametrize("offered", [None, 42, toolbus.SyncHost("127.0.0.1:1"), toolbus.Plugin("p")])
def test_any_other_object_is_refused_with_the_accepted_ones(offered: Any) -> None:
    with pytest.raises(SetupError, match=r"is not a source of tools: give a toolbus\.Bus"):
        source_of(offered)
