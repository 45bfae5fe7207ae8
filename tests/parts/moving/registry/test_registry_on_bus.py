"""A registry that is part of a running bus."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.parts.moving.registry.example_tools import ANYTHING, CITY, BlockedTool, offer
from tests.support.waiting import WAIT_SECONDS, until, within
from toolbus.bus import Bus, Config
from toolbus.bus.catalog.policy import AccessRules
from toolbus.errors import SetupError
from toolbus.parts.moving.registry.backend import SOURCE
from toolbus.sdk import CallContext, Host, Plugin, ToolScope
from toolbus.sdk.shared_loop import SharedLoop
from toolbus.testing import running_bus
from toolbus.tools import TaskManager, ToolRegistry


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with running_bus(unix=True, grace_seconds=0.0) as bus:
        yield bus


@pytest.fixture
def registry(bus: Bus) -> ToolRegistry:
    return ToolRegistry(bus=bus)


@pytest.fixture
def elsewhere() -> Iterator[SharedLoop]:
    """Another thread with a loop of its own."""
    thread = SharedLoop("elsewhere")
    thread.start()
    yield thread
    thread.stop()


async def on(thread: SharedLoop, work: Any) -> Any:
    return await within(asyncio.wrap_future(thread.submit(work)))


@asynccontextmanager
async def plugin(bus: Bus, *functions: Any, **options: Any) -> AsyncIterator[Plugin]:
    offered = Plugin("plugin", address=bus.grpc_addresses[0])
    for function in functions:
        offered.tool(**options)(function)
    await offered.start()
    await within(offered.ready())
    try:
        yield offered
    finally:
        await offered.close(1.0)


async def shout(word: str) -> str:
    """Says a word loudly."""
    return word.upper()


async def test_its_tools_are_called_over_grpc(bus: Bus, registry: ToolRegistry) -> None:
    @registry.tool("weather", "Tells the weather.", CITY)
    async def weather(location: str, ctx: Any = None) -> str:
        return f"{location} {ctx.user_id} {ctx.channel_id} {ctx.platform}"

    async with Host(bus.grpc_addresses[0]) as host:
        (listed,) = await host.list()
        assert (listed.tool.name, listed.source, listed.tool.parameters) == ("weather", SOURCE, CITY)
        context = CallContext(user_id="ann", attributes={"channel_id": "7", "platform": "matrix"})
        called = await host.call("weather", {"location": "Oslo"}, context=context)
        assert called.unwrap() == "Oslo ann 7 matrix"


async def test_tools_in_other_processes_learn_where_the_conversation_of_a_callers_context_takes_place(
    bus: Bus, registry: ToolRegistry
) -> None:
    class Ctx:
        channel_id, platform, secrets = 7, "discord", "not sent"

    async def where(scope: ToolScope) -> dict[str, str]:
        return {**scope.context.attributes, "channel": scope.channel_id, "user": scope.user_id}

    async with plugin(bus, where):
        answer = json.loads(await registry.call("where", {}, "ann", Ctx()))
        assert answer == {"channel_id": "7", "platform": "discord", "channel": "7", "user": "ann"}


async def test_its_tools_are_called_over_rest() -> None:
    async with running_bus(http="127.0.0.1:0") as bus:
        registry = ToolRegistry(bus=bus)
        offer(registry, "one")
        async with httpx.AsyncClient(
            base_url=f"http://{bus.http_address}", trust_env=False, verify=False, timeout=WAIT_SECONDS
        ) as http:
            answer = await http.post("/api/tools/invoke", json={"name": "one", "arguments": {}})
            assert answer.json()["output"] == "one"


async def test_a_plugins_tools_are_listed_exported_and_called_here(bus: Bus, registry: ToolRegistry) -> None:
    offer(registry, "one")
    async with plugin(bus, shout, no_background=True, allow_repeat=True):
        assert registry.tool_names() == {"one", "shout"}
        assert len(registry) == 2
        assert registry.repeat_allowed_tools() == {"shout"}
        (exported,) = registry.get_openai_tools_by_names({"shout"})
        assert exported["function"]["parameters"]["required"] == ["word"]
        assert await within(registry.call("shout", {"word": "hey"})) == "HEY"
        definition = registry.list_tools()[1]
        assert (definition.description, definition.no_background) == ("Says a word loudly.", True)
        assert definition.handler is not None
        assert await definition.handler(word="hey") == "HEY"
    await until(lambda: registry.tool_names() == {"one"}, "the plugin's tool to go")


async def test_calls_from_another_thread_run_on_the_loop_of_the_bus_with_context_and_variables(
    bus: Bus, registry: ToolRegistry, elsewhere: SharedLoop
) -> None:
    @registry.tool("where", "d", ANYTHING)
    async def where(scope: ToolScope, ctx: Any = None) -> str:
        return f"{asyncio.get_running_loop() is bus.loop} {ctx} {scope.context.user_id}"

    async with plugin(bus, shout):
        assert await on(elsewhere, registry.call("where", {}, "ann", "given")) == "True given ann"
        assert await on(elsewhere, registry.call("shout", {"word": "hey"})) == "HEY"
        assert await asyncio.to_thread(lambda: asyncio.run(registry.call("shout", {"word": "hey"}))) == "HEY"
        assert (await on(elsewhere, registry.call("nobody", {}))).startswith("there is no tool 'nobody'")


async def test_progress_arrives_on_the_callers_event_loop_before_the_result(
    registry: ToolRegistry, elsewhere: SharedLoop
) -> None:
    @registry.tool("counts", "d", ANYTHING)
    async def counts(scope: ToolScope) -> str:
        for number in (1, 2, 3):
            scope.progress(number)
        return "counted"

    seen: list[tuple[float, bool]] = []

    async def ask() -> list[tuple[float, bool]]:
        here = threading.get_ident()
        await registry.call_result(
            "counts", {}, on_progress=lambda sign: seen.append((sign.progress, threading.get_ident() == here))
        )
        return list(seen)

    assert await on(elsewhere, ask()) == [(1, True), (2, True), (3, True)]


async def test_cancelling_a_caller_on_another_thread_cancels_the_handler(
    registry: ToolRegistry, elsewhere: SharedLoop
) -> None:
    held = BlockedTool()
    registry.tool("waits", "d", ANYTHING, no_background=True)(held)
    call = elsewhere.submit(registry.call("waits", {}))
    await until(lambda: held.begun, "the call to begin")
    call.cancel()
    await until(lambda: held.cancelled, "the handler to be cancelled")


async def test_watchers_get_changes_that_another_thread_makes(bus: Bus, registry: ToolRegistry) -> None:
    async with Host(bus.grpc_addresses[0]) as host:
        changes = host.watch()
        assert (await within(anext(changes))).full
        await asyncio.to_thread(offer, registry, "one")
        assert [each.tool.name for each in (await within(anext(changes))).added] == ["one"]
        await asyncio.to_thread(registry.unregister_tool, "one")
        assert [each.name for each in (await within(anext(changes))).removed] == ["one"]
        await asyncio.to_thread(offer, registry, "two")
        await within(anext(changes))
        await asyncio.to_thread(registry.set_permissions, {"two": ["ann"]})
        assert [each.name for each in (await within(anext(changes))).removed] == ["two"]


async def test_tools_may_come_before_the_bus_has_started_and_calls_then_are_error_texts() -> None:
    bus = Bus(Config(grpc=("127.0.0.1:0",), http="off"))
    registry = ToolRegistry(bus=bus)
    offer(registry, "before")
    assert registry.tool_names() == {"before"}
    assert await registry.call("before", {}) == "the bus has not been started: no tool can be called"
    async with bus:
        offer(registry, "after")
        for name in ("before", "after"):
            assert await registry.call(name, {}) == (await bus.call(name)).unwrap() == name
    text = await registry.call("before", {})
    assert "draining" in text


def test_after_the_event_loop_of_the_bus_ended_calls_are_error_texts_and_registering_still_works() -> None:
    async def once() -> ToolRegistry:
        async with running_bus() as bus:
            registry = ToolRegistry(bus=bus)
            offer(registry, "one")
            return registry

    registry = asyncio.run(once())
    assert asyncio.run(registry.call("one", {})) == "the bus has stopped: no tool can be called"
    offer(registry, "two")
    registry.set_permissions({"two": []})
    assert registry.unregister_tool("two")
    thread = threading.Thread(target=offer, args=(registry, "three"))
    thread.start()
    thread.join()
    assert registry.tool_names() == {"one", "three"}


async def test_a_call_in_flight_when_the_loop_of_the_bus_ends_is_an_error_text(elsewhere: SharedLoop) -> None:
    bus, held = Bus(Config(grpc=("127.0.0.1:0",), http="off")), BlockedTool()
    bus.loop = elsewhere.loop  # as if it had been started there, by a program that ends without stopping it
    registry = ToolRegistry(bus=bus)
    registry.tool("waits", "d", ANYTHING, no_background=True)(held)
    call = asyncio.create_task(registry.call("waits", {}))
    await until(lambda: held.begun, "the call to begin")
    await asyncio.to_thread(elsewhere.stop)
    assert await within(call) == "the bus's event loop ended: no tool can be called"


async def test_calls_in_flight_when_the_bus_stops_are_error_texts(elsewhere: SharedLoop) -> None:
    held = BlockedTool()
    async with running_bus() as bus:
        registry = ToolRegistry(bus=bus)
        registry.tool("waits", "d", ANYTHING, no_background=True)(held)
        calls = [
            asyncio.create_task(registry.call("waits", {})),
            asyncio.wrap_future(elsewhere.submit(registry.call("waits", {}))),
        ]
        await until(lambda: held.begun == 2, "both calls to begin")
    assert await within(asyncio.gather(*calls)) == ["the bus stopped"] * 2


async def test_a_call_that_takes_long_becomes_a_task_of_the_bus() -> None:
    held = BlockedTool()
    async with running_bus(unix=True, background_after_seconds=0.02) as bus:
        registry = ToolRegistry(bus=bus)
        registry.tool("waits", "d", ANYTHING)(held)
        assert registry.task_manager is bus.tasks
        task_id = json.loads(await within(registry.call("waits", {}, "ann")))["task_id"]
        held.release()
        assert bus.tasks is not None
        task = await within(bus.tasks.await_result(task_id, user_id="ann"))
        assert task is not None
        assert task.text == "released"
        assert json.loads(await registry.call("check_task", {"task_id": task_id}, "ann"))["result"] == "released"
        assert "administers the bus" in await registry.call("toolbus:stats", {}, "ann")
        registry.offer_task_tools()
        assert json.loads(await registry.call("check_task", {"task_id": task_id}, "ann"))["result"] == "released"


async def test_a_second_task_manager_beside_that_of_the_bus_is_refused(bus: Bus) -> None:
    tasks = TaskManager()
    with pytest.raises(SetupError, match="leave task_manager out"):
        ToolRegistry(tasks, bus=bus)
    tasks.close()


async def test_models_cannot_call_the_admin_tools_of_the_bus(bus: Bus, registry: ToolRegistry) -> None:
    for name in ("toolbus:drain", "drain", "toolbus:permit"):
        text = await registry.call(name, {})
        assert "administers the bus" in text
    assert registry.tool_names() == frozenset()


async def test_rules_hold_for_callers_over_the_wire_who_always_need_a_user(bus: Bus, registry: ToolRegistry) -> None:
    offer(registry, "one")
    registry.set_permissions({"one": ["ann"]})
    assert await registry.call("one", {}) == "one"
    assert "may not call" in await registry.call("one", {}, "eve")
    async with Host(bus.grpc_addresses[0]) as host:
        assert (await host.call("one")).is_error
        assert (await host.call("one", context=CallContext(user_id="ann"))).unwrap() == "one"


async def test_rules_of_the_operator_stay_in_force(bus: Bus, registry: ToolRegistry) -> None:
    for name in ("one", "two"):
        offer(registry, name)
    bus.permit("tools", "one", ["ann"])
    registry.set_permissions({"two": ["bob"]})
    registry.set_permissions({})
    assert not registry.is_allowed("one", "eve")
    assert "may not call" in await registry.call("one", {}, "eve")
    assert registry.is_allowed("two", "eve")
    bus.permit("sources", SOURCE, ["bob"])
    assert [registry.is_allowed("two", user) for user in ("bob", "ann")] == [True, False]
    assert "may not call" in await registry.call("two", {}, "ann")


async def test_rules_that_two_registries_set_at_the_same_time_are_all_in_force(
    bus: Bus, registry: ToolRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, read = ToolRegistry(bus=bus, source="other"), AccessRules.read
    meanwhile = threading.Thread(target=other.set_permissions, args=({"b": ["bob"]},))

    def slowly(tables: object) -> AccessRules:
        if meanwhile.ident is None:
            meanwhile.start()
            meanwhile.join(0.05)  # as much time as it needs, but for who waits for us
        return read(tables)

    monkeypatch.setattr(AccessRules, "read", slowly)
    registry.set_permissions({"a": ["ann"]})
    meanwhile.join(20)
    assert bus.dispatcher.view.permissions.as_tables()["tools"] == {"a": ["ann"], "b": ["bob"]}


async def test_another_registrys_tool_of_the_same_name_replaces_it_and_is_shown_as_theirs(bus: Bus) -> None:
    first, second = ToolRegistry(bus=bus), ToolRegistry(bus=bus)
    offer(first, "same")
    second.tool("same", "The second's.", ANYTHING)(lambda: "second")
    assert [each.description for each in first.list_tools()] == ["The second's."]
    assert await first.call("same", {}) == "second"
    assert first.unregister_tool("same") is False
    assert second.unregister_tool("same") is True


async def test_a_name_that_roles_have_different_tools_for_is_listed_once() -> None:
    async with running_bus(roles=("a", "b")) as bus:
        registry = ToolRegistry(bus=bus)
        registry.tool("same", "For a.", ANYTHING, role="a")(lambda: "a")
        registry.tool("same", "For b.", ANYTHING, role="b")(lambda: "b")
        assert len(registry) == 1
        assert [each.description for each in registry.list_tools()] == ["For a."]
        assert registry.get_openai_tools()[0]["function"]["description"] == "For a."
        assert await registry.call("same", {}) == "a"


async def test_records_are_those_of_the_bus_without_its_own_tools(bus: Bus, registry: ToolRegistry) -> None:
    offer(registry, "one")
    await registry.call("one", {})
    await bus.call("toolbus:stats")
    await bus.call("one")
    assert [each.name for each in registry.records()] == ["one", "one"]
