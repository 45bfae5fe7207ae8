"""A bus embedded in a program: its functions, its calls, its life."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

import pytest

from tests.support.waiting import WAIT_SECONDS, until, within
from toolbus.bus import Bus, Config
from toolbus.errors import Code, SetupError
from toolbus.parts.models.search import REQUEST_TOOL_INJECTION, SEARCH_TOOLS, IndexCache, ToolIndex, search_tool
from toolbus.protocol.limits import Limits
from toolbus.sdk import CallContext, Host, Plugin, ToolScope
from toolbus.testing import running_bus


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with Bus(Config(grpc=("127.0.0.1:0",), http="off", grace_seconds=0.0)) as bus:
        yield bus


async def test_a_function_calls_another_tool_with_the_context_of_its_own_call(bus: Bus) -> None:
    @bus.tool
    async def inner(n: int, ctx: ToolScope) -> list[object]:
        return [n, ctx.context.user_id]

    @bus.tool
    async def outer(n: int, ctx: ToolScope) -> object:
        return (await ctx.call("inner", {"n": n + 1})).unwrap()

    result = await bus.call("outer", {"n": 1}, context=CallContext(user_id="ada"))
    assert result.unwrap() == [2, "ada"]


async def test_a_plain_function_calls_another_tool_from_its_thread(bus: Bus) -> None:
    @bus.tool
    def inner() -> str:
        return "inner"

    @bus.tool
    def outer(ctx: ToolScope) -> object:
        return ctx.call_sync("inner").unwrap()

    assert (await bus.call("outer")).unwrap() == "inner"


async def test_a_function_that_calls_itself_ends_at_the_depth_limit(bus: Bus) -> None:
    deepest = 0

    @bus.tool
    async def again(depth: int, ctx: ToolScope) -> object:
        nonlocal deepest
        deepest = max(deepest, depth)
        return await ctx.call("again", {"depth": depth + 1})

    result = await bus.call("again", {"depth": 1})
    assert result.error is not None
    assert (result.error.code, "8 deep" in result.error.message) == (Code.TOOL, True)  # as told by the tool above
    assert deepest == 8


async def test_the_end_of_a_call_ends_the_calls_it_made(bus: Bus) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    @bus.tool
    async def inner() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    @bus.tool
    async def outer(ctx: ToolScope) -> object:
        return await ctx.call("inner")

    calling = asyncio.create_task(bus.call("outer"))
    await asyncio.wait_for(began.wait(), WAIT_SECONDS)
    calling.cancel()
    await asyncio.wait_for(ended.wait(), WAIT_SECONDS)


async def test_a_function_of_the_program_may_not_call_the_bus_s_own_tools(bus: Bus) -> None:
    @bus.tool
    async def sneaky(ctx: ToolScope) -> object:
        return await ctx.call("toolbus:drain")

    result = await bus.call("sneaky")
    assert result.error is not None
    assert (result.error.code, result.error.reason) == (Code.TOOL, "PERMISSION_DENIED")
    assert (await bus.call("toolbus:stats")).error is None


async def test_operators_see_the_limits_in_force() -> None:
    limits = Limits(call_depth=3)
    async with Bus(Config(grpc=("127.0.0.1:0",), http="off", limits=limits)) as bus:
        assert (await bus.call("toolbus:stats")).output["limits"] == asdict(limits)


async def test_a_taken_address_is_a_sentence_and_leaves_nothing_listening(bus: Bus) -> None:
    taken = bus.grpc_addresses[0]
    with pytest.raises(SetupError, match=f"{taken} is taken.*--grpc"):
        await Bus(Config(grpc=(taken,), http="off")).start()
    assert (await bus.call("toolbus:stats")).error is None
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    refused = Bus(Config(grpc=(f"127.0.0.1:{port}", taken), http="off"))
    with pytest.raises(SetupError, match="is taken"):
        await refused.start()
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", port))


async def test_a_bus_whose_http_does_not_start_leaves_nothing_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "toolbus.bus.gateway.app", None)  # as where FastAPI is not installed
    refused = Bus(Config(grpc=("127.0.0.1:0",), http="127.0.0.1:0"))
    with pytest.raises(ImportError):
        await refused.start()
    assert refused.http_address is not None
    for address in (*refused.grpc_addresses, refused.http_address):
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", int(address.rpartition(":")[2])))


async def test_a_bus_that_stops_ends_the_calls_of_its_own_functions_and_takes_no_more(bus: Bus) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    @bus.tool
    async def endless() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    calling = asyncio.create_task(bus.call("endless"))
    await asyncio.wait_for(began.wait(), WAIT_SECONDS)
    await bus.stop()
    for result in (
        await asyncio.wait_for(calling, WAIT_SECONDS),
        await asyncio.wait_for(bus.call("endless"), WAIT_SECONDS),
    ):
        assert result.error is not None
        assert result.error.code is Code.UNAVAILABLE
    await asyncio.wait_for(ended.wait(), WAIT_SECONDS)


async def test_a_program_that_watches_hears_of_a_role_that_an_operator_adds(bus: Bus) -> None:
    @bus.tool
    def add() -> int:
        return 1

    watching = bus.watch()
    assert [listing.roles for listing in (await asyncio.wait_for(anext(watching), WAIT_SECONDS)).added] == [
        ("default",)
    ]
    assert (await bus.call("toolbus:role_add", {"role": "cat"})).error is None
    change = await asyncio.wait_for(anext(watching), WAIT_SECONDS)
    assert [listing.roles for listing in change.changed] == [("default", "cat")]
    assert change.removed == ()  # the bus's own tools are nobody's news


async def test_a_draining_bus_leaves_plugins_attached_that_running_calls_may_need() -> None:
    began, go = asyncio.Event(), asyncio.Event()
    async with Bus(Config(grpc=("127.0.0.1:0",), http="off")) as bus:
        address = bus.grpc_addresses[0]
        leaf, stem = Plugin("leaf", address=address), Plugin("stem", address=address)

        @leaf.tool
        async def inner() -> int:
            return 7

        @stem.tool
        async def outer(ctx: ToolScope) -> object:
            began.set()
            await go.wait()
            return await ctx.call("inner")

        async with leaf, stem, Host(address) as host:
            await asyncio.wait_for(asyncio.gather(leaf.ready(), stem.ready(), host.ready()), WAIT_SECONDS)
            calling = asyncio.create_task(host.call("outer"))
            await asyncio.wait_for(began.wait(), WAIT_SECONDS)
            draining = asyncio.create_task(bus.drain(5))
            while (refused := await bus.call("inner")).error is None:
                pass
            assert "draining" in refused.error.message
            go.set()
            assert (await asyncio.wait_for(calling, WAIT_SECONDS)).unwrap() == 7
            await asyncio.wait_for(draining, WAIT_SECONDS)


async def test_the_log_of_a_drain_counts_the_calls_for_which_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    go = asyncio.Event()

    async def stubborn() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await go.wait()
        await go.wait()

    async with Bus(Config(grpc=("127.0.0.1:0",), http="off")) as bus:
        plugin = Plugin("slow", address=bus.grpc_addresses[0])
        plugin.tool(stubborn)
        async with plugin:
            await within(plugin.ready())
            assert (await bus.call("stubborn", timeout=0.05)).error is not None
            with caplog.at_level(logging.INFO, "toolbus"):
                draining = asyncio.create_task(bus.drain(WAIT_SECONDS))
                await until(lambda: "draining sessions" in caplog.text)
            assert "draining sessions=1 in_flight=0 stuck=1" in caplog.text
            await asyncio.sleep(0.05)
            assert not draining.done()
            go.set()
            await within(draining)


async def test_a_search_leaves_the_loop_free_and_users_share_an_index_while_all_see_the_same(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    make = ToolIndex.__init__

    def noting(index: ToolIndex, *args: Any, **options: Any) -> None:
        threads.append(threading.get_ident())
        make(index, *args, **options)

    monkeypatch.setattr(ToolIndex, "__init__", noting)
    bus.tool(lambda: 1, name="weather")

    async def found(user_id: str) -> list[str]:
        context = CallContext(user_id=user_id)
        answer = (await bus.call("toolbus:search_tools", {"query": "weather"}, context=context)).unwrap()
        return [each["name"] for each in answer["results"]]

    assert [await found(user) for user in ("", "ann", "bob")] == [["weather"]] * 3
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
    bus.permit("tools", "weather", ["ann"])
    assert [await found(user) for user in ("", "ann", "bob")] == [[], ["weather"], []]


async def test_the_search_of_the_bus_speaks_of_no_tool_that_only_a_loop_has() -> None:
    async with running_bus(offered=("search",)) as bus:
        (listed,) = bus.list()
        assert listed.tool.name == SEARCH_TOOLS
        assert REQUEST_TOOL_INJECTION not in listed.tool.description
        assert "by its name only if your host offers it" in listed.tool.description
        assert listed.tool.parameters == search_tool(bus.core.rooms.providers(IndexCache)[0].modes).parameters
