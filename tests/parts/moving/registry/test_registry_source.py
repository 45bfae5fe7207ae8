"""A registry as the source of a tool loop."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.parts.models.loop.scripted_model import ScriptedModel, call, says
from tests.parts.moving.registry.example_tools import ANYTHING, CITY, BlockedTool, offer, with_tools
from tests.support.waiting import WAIT_SECONDS, within
from toolbus.errors import Code, SetupError
from toolbus.loop import ToolLoop, ToolSource, source_of
from toolbus.sdk import CallContext, ToolScope
from toolbus.testing import running_bus
from toolbus.tools import TaskManager, ToolRegistry


def test_a_registry_makes_a_source_of_tools() -> None:
    registry = with_tools("one")
    source = registry.as_source("ann")
    assert isinstance(source, ToolSource)
    assert source_of(source) is source
    assert isinstance(source_of(registry), ToolSource)
    assert repr(source) == "<RegistrySource tools=1 user='ann'>"
    with pytest.raises(SetupError):
        source_of(registry, names=["one"])


@pytest.mark.parametrize("way", ["source", "source_of"])
async def test_a_tool_loop_lists_and_calls_its_tools(way: str) -> None:
    registry = ToolRegistry()

    @registry.tool("get_weather", "Tells the weather.", CITY)
    async def weather(location: str, ctx: Any = None) -> str:
        return f"sunny in {location} {ctx}"

    source = registry.as_source(ctx="given") if way == "source" else source_of(registry)
    model = ScriptedModel(says("", call("get_weather", {"location": "Oslo"})), says("sunny"))
    reply = await within(ToolLoop(source, model.endpoint).run("?"))
    assert model.offered(0) == ["get_weather"]
    assert model.results(1) == [f"sunny in Oslo {'given' if way == 'source' else None}"]
    assert reply.text == "sunny"


async def test_a_tool_registered_while_the_loop_runs_is_offered_in_the_next_round() -> None:
    registry = ToolRegistry()

    @registry.tool("adds", "d", ANYTHING)
    async def adds() -> str:
        offer(registry, "added")
        return "done"

    model = ScriptedModel(says("", call("adds")), says("", call("added")), says("ok"))
    await within(ToolLoop(registry.as_source(), model.endpoint).run("?"))
    assert model.offered(1) == ["adds", "added"]
    assert model.results(2)[-1] == "added"


async def test_a_loop_is_offered_what_its_user_may_call_and_calls_on_behalf_of_that_user() -> None:
    registry = with_tools("anns", "bobs")

    @registry.tool("who", "d", ANYTHING)
    async def who(scope: ToolScope) -> str:
        return scope.context.user_id

    registry.set_permissions({"anns": ["ann"], "bobs": ["bob"]})
    model = ScriptedModel(says("", call("who"), call("bobs")), says("ok"))
    await within(ToolLoop(registry.as_source("ann"), model.endpoint).run("?"))
    assert model.offered(0) == ["anns", "who"]
    assert model.results(1)[0] == "ann"
    assert "bobs" in model.results(1)[1]
    result = await registry.as_source("ann").call("who", "{}", context=CallContext(user_id="bob"), schema_hash="")
    assert result.output == "bob"


async def test_a_failure_is_a_result_and_never_an_exception() -> None:
    source = with_tools("one").as_source()
    for name, arguments in (("nobody", "{}"), ("one", "{"), ("one", "\ud800"), ("\ud800", "{}"), ("one", "[]")):
        result = await source.call(name, arguments, context=None, schema_hash="")
        assert result.is_error
        assert result.error is not None
    stale = await source.call("one", "{}", context=None, schema_hash="other")
    assert stale.error is not None
    assert stale.error.code is Code.CATALOG_STALE


async def test_changes_from_any_thread_arrive_in_the_order_of_revisions() -> None:
    registry = ToolRegistry()
    changes = registry.as_source().changes()
    known = await within(anext(changes))
    for name in ("one", "two"):
        await asyncio.to_thread(offer, registry, name)
        newer = await within(anext(changes))
        assert newer > known
        known = newer
    assert (await registry.as_source().tools())[0] == known


async def test_the_revision_of_a_list_is_never_newer_than_the_list() -> None:
    registry = with_tools("one")
    revision, tools = await registry.as_source().tools()
    registry.set_permissions({"one": []})
    newer, for_ann = await registry.as_source("ann").tools()
    assert newer > revision
    assert ([each.name for each in tools], for_ann) == (["one"], [])


async def test_a_call_that_becomes_a_task_answers_the_loop_with_its_envelope() -> None:
    tasks, held = TaskManager(timeout=0.02), BlockedTool()
    registry = ToolRegistry(tasks)
    registry.tool("waits", "d", ANYTHING)(held)
    model = ScriptedModel(says("", call("waits")), says("later"))
    await within(ToolLoop(registry.as_source("ann"), model.endpoint).run("?"))
    (answer,) = model.results(1)
    assert json.loads(answer)["task_id"] == tasks.list_tasks("ann")[0].task_id
    held.release()
    tasks.close()


async def test_cancelling_the_loop_cancels_its_calls() -> None:
    registry, held = ToolRegistry(), BlockedTool()
    registry.tool("waits", "d", ANYTHING)(held)
    loop = ToolLoop(registry.as_source(), ScriptedModel(says("", call("waits"))).endpoint)
    running = asyncio.create_task(loop.run("?"))
    async with asyncio.timeout(WAIT_SECONDS):
        while not held.begun:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        while not held.cancelled:
            await asyncio.sleep(0)


async def test_a_registry_on_a_bus_is_a_source_of_the_tools_of_the_bus() -> None:
    async with running_bus(unix=True) as bus:
        registry = ToolRegistry(bus=bus)
        bus.tool(name="of_the_bus")(lambda: "bus")
        offer(registry, "of_the_registry")
        model = ScriptedModel(says("", call("of_the_bus"), call("of_the_registry")), says("ok"))
        await within(ToolLoop(source_of(registry), model.endpoint).run("?"))
        assert model.offered(0) == ["of_the_bus", "of_the_registry"]
        assert model.results(1) == ["bus", "of_the_registry"]
