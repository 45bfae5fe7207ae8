from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.sdk.played_bus import SECONDS
from tests.sdk.plugin_client_cases import wait_for
from tests.support.waiting import until, within
from toolbus.errors import Code, SetupError
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import llm_tool
from toolbus.parts.moving.neko.plugin_base import NekoPluginBase
from toolbus.parts.moving.neko.plugin_lifecycle import lifecycle
from toolbus.protocol.tool import Result
from toolbus.sdk.host import Host
from toolbus.sdk.plugin_client import Plugin
from toolbus.testing import running_bus

# -- tools that come and go -------------------------------------------------------------------------------------------


async def test_tools_can_be_added_and_removed_while_connected() -> None:
    async with running_bus() as bus, Host(bus.grpc_addresses[0]) as host:
        plugin = Plugin("calc", address=bus.grpc_addresses[0])
        async with plugin:
            await within(plugin.ready())
            for number in range(100):
                plugin.add_tool(lambda: 1, name=f"t{number}")
            await within(plugin.ready())
            assert len(await host.list()) == 100
            for number in range(99):
                plugin.remove_tool(f"t{number}")
            await within(plugin.ready())
            assert [listed.name for listed in await host.list()] == ["t99"]


async def test_ready_returns_although_a_tool_is_refused_and_says_which() -> None:
    async with running_bus() as bus, Host(bus.grpc_addresses[0]) as host:
        plugin = Plugin("calc", address=bus.grpc_addresses[0])
        plugin.add_tool(lambda: 1, name="bad", parameters={"$ref": "#"})
        plugin.add_tool(lambda: 1, name="good")
        async with plugin:
            await within(plugin.ready())
            assert [each.name for each in plugin.refused] == ["bad"]
            listing = await host.list(include_refused=True)
            assert ([each.name for each in listing], listing.refused_total) == (["good"], 1)
            assert [(each.name, each.source) for each in listing.refused] == [("bad", "calc")]
            assert listing.refused[0].error == plugin.refused[0].error
            plugin.remove_tool("bad")
            await within(plugin.ready())
            assert (plugin.refused, (await host.list(include_refused=True)).refused) == ((), ())


async def test_a_class_with_a_bad_tool_offers_the_others() -> None:
    class Weather(NekoPluginBase):
        plugin_id = "weather"

        @llm_tool(parameters={"$ref": "#"})
        def bad(self) -> int:
            return 1

        @llm_tool()
        def good(self) -> int:
            return 1

    async with running_bus() as bus, Plugin.from_object(Weather(), address=bus.grpc_addresses[0]) as plugin:
        await within(plugin.ready())
        assert [each.tool.name for each in bus.list()] == ["good"]
        assert [each.name for each in plugin.refused] == ["bad"]


async def test_a_role_that_is_added_and_a_right_that_is_granted_change_what_is_refused_without_an_attach() -> None:
    async with running_bus() as bus:
        plugin = Plugin("p", address=bus.grpc_addresses[0])
        plugin.add_tool(lambda: 1, name="a")
        async with plugin:
            await within(plugin.ready())
            bus.revoke("p")
            await until(lambda: plugin.refused, "the refusal")
            assert [(each.name, "toolbus access grant p" in each.error) for each in plugin.refused] == [("a", True)]
            bus.grant("p")
            await until(lambda: not plugin.refused, "the tool to be offered again")


async def test_an_object_runs_with_its_lifecycle_and_its_changes() -> None:
    moments: list[str] = []

    class Weather(NekoPluginBase):
        plugin_id = "weather"

        @lifecycle(id="startup")
        def begin(self) -> None:
            moments.append("startup")

        async def on_shutdown(self) -> None:
            moments.append("shutdown")

        @llm_tool(name="sky")
        async def sky(self, city: str) -> str:
            return f"blue over {city}"

    async with running_bus() as bus, Host(bus.grpc_addresses[0]) as host:
        weather = Weather(None)
        plugin = Plugin.from_object(weather, address=bus.grpc_addresses[0])
        assert plugin.source == "plugin:weather"
        async with plugin:
            await within(plugin.ready())
            assert moments == ["startup"]
            assert (await within(host.call("sky", {"city": "Bonn"}))).unwrap() == "blue over Bonn"
            weather.register_llm_tool("wind", "", None, lambda: "calm")
            await within(plugin.ready())
            assert (await within(host.call("wind"))).unwrap() == "calm"
        assert moments == ["startup", "shutdown"]


async def test_a_handler_that_hangs_holds_up_neither_the_shutdown_nor_the_calls_it_still_makes() -> None:
    began, go, ended = threading.Event(), threading.Event(), threading.Event()
    moments: list[str] = []
    after: list[Any] = []

    class Hung(NekoPluginBase):
        plugin_id = "hung"

        @lifecycle(id="shutdown")
        def end(self) -> None:
            moments.append("shutdown")

        @llm_tool(name="hang")
        def hang(self, ctx: ToolScope) -> None:
            began.set()
            go.wait(SECONDS)
            after.extend(ctx.call_sync("other").error for _ in range(2))
            ended.set()

    async with running_bus() as bus, Host(bus.grpc_addresses[0]) as host:
        plugin = Plugin.from_object(Hung(None), address=bus.grpc_addresses[0], workers=1)
        await plugin.start()
        await within(plugin.ready())
        call = asyncio.create_task(host.call("hang"))
        await wait_for(began)
        await within(plugin.close(0.0))
        assert moments == ["shutdown"]
        go.set()
        await wait_for(ended)
        assert [error.code for error in after] == [Code.UNAVAILABLE, Code.UNAVAILABLE]
        await within(call)


async def test_a_plugin_whose_startup_fails_never_connects() -> None:
    class Broken(NekoPluginBase):
        plugin_id = "broken"

        async def on_start(self) -> None:
            raise ValueError("no key")

    async with running_bus() as bus:
        with pytest.raises(SetupError, match="no key"):
            await Plugin.from_object(Broken(), address=bus.grpc_addresses[0]).start()


async def test_a_result_of_other_values_costs_no_other_call_its_answer() -> None:
    plugin = Plugin("odd")

    @plugin.tool
    async def odd() -> Result:
        return Result(output_json={"a": 1})  # type: ignore[arg-type]

    @plugin.tool
    async def good() -> int:
        return 1

    async with running_bus(plugin) as host:  # the answers of both leave in one message
        results = await within(asyncio.gather(*(host.call(name, timeout=SECONDS) for name in ("odd", "good", "good"))))
    assert [each.output for each in results] == [None, 1, 1]
    assert results[0].error is not None
    assert "Result.output_json is of type dict" in results[0].error.message
