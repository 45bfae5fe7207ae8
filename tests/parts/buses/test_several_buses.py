"""Tests plugins that attach to several buses, and hosts that use one after the other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.support.waiting import until, within
from toolbus.bus import Bus
from toolbus.errors import Code, RequestError, Stage
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import llm_tool, spec_of
from toolbus.protocol.tool import Progress
from toolbus.sdk import Host, Plugin, SyncHost
from toolbus.sdk.attempt import WaitingTool
from toolbus.sdk.listing import CatalogChange
from toolbus.testing import running_bus


def at(*buses: Bus) -> str:
    return ",".join(bus.grpc_addresses[0] for bus in buses)


@asynccontextmanager
async def two_buses() -> AsyncIterator[tuple[Bus, Bus]]:
    async with running_bus() as first, running_bus() as second:
        yield first, second


@asynccontextmanager
async def one_to_stop() -> AsyncIterator[tuple[Bus, Bus, AsyncExitStack]]:
    """Runs two buses; the stack stops the first one early, as a shutdown does."""
    async with running_bus() as second, AsyncExitStack() as stack:
        first = await stack.enter_async_context(running_bus())
        stack.push_async_callback(first.drain)
        yield first, second, stack


def worker(address: str, **options: object) -> Plugin:
    plugin = Plugin("work", address=address, **options)  # type: ignore[arg-type]

    @plugin.tool
    async def double(number: int) -> int:
        return 2 * number

    return plugin


def names(bus: Bus) -> set[str]:
    return {each.tool.name for each in bus.list() if not each.tool.name.startswith("toolbus:")}


# -- plugins -----------------------------------------------------------------------------------------------------------


async def test_a_plugin_offers_the_same_tools_at_every_bus_also_those_that_come_later() -> None:
    async with two_buses() as (first, second):
        async with worker(at(first, second)) as plugin:
            await within(plugin.ready())
            await until(lambda: names(first) == names(second) == {"double"})
            plugin.add_tool(llm_tool(name="later")(lambda: "late"))
            await until(lambda: names(first) == names(second) == {"double", "later"})
            for bus in (first, second):
                assert (await within(bus.call("double", {"number": 4}))).output == 8
                assert (await within(bus.call("later"))).output == "late"
            plugin.remove_tool("later")
            await until(lambda: names(first) == names(second) == {"double"})
        await until(lambda: not names(first) and not names(second))


async def test_what_one_bus_refuses_or_lets_wait_is_told_with_its_address() -> None:
    async with two_buses() as (first, second):
        first.add_role("Yui")
        plugin = worker(at(first, second))
        plugin.add_tool(llm_tool(name="sing", role="Yui")(lambda: ""))
        async with plugin:
            await until(lambda: bool(plugin.waiting))
            assert plugin.waiting == (WaitingTool("sing", "Yui", at(second)),)
            second.add_role("Yui")
            await until(lambda: not plugin.waiting)


async def test_the_limit_of_a_plugin_counts_the_calls_of_all_buses() -> None:
    async with two_buses() as (first, second):
        plugin, gate = Plugin("work", address=at(first, second), max_in_flight=2), asyncio.Event()
        begun: list[int] = []

        @plugin.tool
        async def wait() -> str:
            begun.append(1)
            await gate.wait()
            return "done"

        async with plugin:
            await until(lambda: names(first) == names(second) == {"wait"})
            running = [asyncio.create_task(first.call("wait")) for _ in range(2)]
            await until(lambda: len(begun) == 2)
            refused = (await within(second.call("wait"))).error
            assert refused is not None
            assert (refused.code, refused.stage, refused.retry_safe) == (Code.OVERLOADED, Stage.NOT_DISPATCHED, True)
            assert "max_in_flight" in refused.message
            gate.set()
            assert [each.output for each in await within(asyncio.gather(*running))] == ["done"] * 2
            assert (await within(second.call("wait"))).output == "done"


async def test_a_nested_call_and_progress_stay_with_the_bus_of_their_call() -> None:
    async with two_buses() as (first, second):
        for bus, said in ((first, "first"), (second, "second")):
            bus.offer("local", spec_of(llm_tool(name="where")(lambda said=said: said)))
        plugin = Plugin("work", address=at(first, second))

        @plugin.tool
        async def ask(scope: ToolScope) -> str:
            scope.progress(0.5, message="asking")
            return str((await scope.call("where")).output)

        async with plugin:
            await until(lambda: "ask" in names(first) & names(second))
            for bus, said in ((first, "first"), (second, "second")):
                seen: list[Progress] = []
                async with Host(at(bus)) as host:
                    result = await within(host.call("ask", on_progress=seen.append))
                assert (result.output, [each.message for each in seen]) == (said, ["asking"])


async def test_a_notification_reaches_the_hosts_of_every_bus() -> None:
    async with (
        two_buses() as (first, second),
        worker(at(first, second)) as plugin,
        Host(at(first)) as one,
        Host(at(second)) as other,
    ):
        heard: list[str] = []

        async def follow(host: Host) -> None:
            async for notification in host.notifications():
                heard.append(notification.text)

        following = [asyncio.create_task(follow(host)) for host in (one, other)]
        await until(lambda: names(first) == names(second) == {"double"})
        while await within(plugin.notify("", "hello")) != 2:
            await asyncio.sleep(0.01)
        await until(lambda: len(heard) >= 2)
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)


async def test_a_plugin_is_ready_with_the_buses_that_answer() -> None:
    async with running_bus() as bus, worker(f"127.0.0.1:1,{at(bus)}") as plugin:
        await within(plugin.ready())
        assert names(bus) == {"double"}


@pytest.mark.parametrize("peer", [Host, Plugin])
async def test_a_peer_that_every_bus_refuses_ends_with_the_reason(peer: type[Host] | type[Plugin]) -> None:
    async with two_buses() as (first, second):
        made = Host(at(first, second), source="toolbus") if peer is Host else worker(at(first, second))
        if isinstance(made, Plugin):
            made = Plugin("toolbus", address=at(first, second))
        async with made:
            with pytest.raises(RequestError, match="toolbus"):
                await within(made.ready())


# -- hosts -------------------------------------------------------------------------------------------------------------


async def test_calls_go_on_without_a_failure_while_the_bus_in_use_shuts_down() -> None:
    async with one_to_stop() as (first, second, stack), worker(at(first, second)) as plugin:
        await until(lambda: names(first) == names(second) == {"double"})
        async with Host(at(first)) as probe:
            assert (await within(probe.call("double", {"number": 1}))).output == 2
        hosts = [Host(at(first, second), source=f"host-{number}") for number in range(4)]
        async with AsyncExitStack() as entered:
            for host in hosts:
                await entered.enter_async_context(host)
                await within(host.ready())
            done, stopped = [0], asyncio.Event()

            async def caller(host: Host) -> None:
                after = 0
                while after < 20:
                    result = await host.call("double", {"number": done[0]})
                    assert result.error is None, result.error
                    done[0] += 1
                    after += stopped.is_set()

            callers = [asyncio.create_task(caller(host)) for host in hosts for _ in range(4)]
            await until(lambda: done[0] > 100)
            await within(stack.aclose())
            stopped.set()
            await within(asyncio.gather(*callers))
        assert plugin.refused == ()


async def test_a_list_and_a_watch_start_again_at_the_next_bus() -> None:
    async with one_to_stop() as (first, second, stack):
        for bus, tool in ((first, "here"), (second, "there")):
            bus.offer("local", spec_of(llm_tool(name=tool)(lambda: "")))
        address = at(first, second)
        host = await _host_on(first, address)
        async with host:
            changes: list[CatalogChange] = []

            async def watch() -> None:
                async for change in host.watch():
                    changes.append(change)

            watching = asyncio.create_task(watch())
            await until(lambda: any(change.full for change in changes))
            listed = await within(host.list())
            assert "here" in {each.name for each in listed}
            seen = len(changes)
            await within(stack.aclose())
            await until(lambda: any(change.full for change in changes[seen:]))
            assert {each.name for each in changes[-1].added} >= {"there"}
            again = await within(host.list(if_revision=second.core.catalog.registry.revision))
            assert (again.unchanged, "there" in {each.name for each in again}) == (False, True)
            assert not host.settling
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def _host_on(bus: Bus, address: str) -> Host:
    """Returns a host of several buses that begins at a given one: each has an order of its own."""
    while True:
        host = Host(address)
        await within(host.ready())
        if host.source in bus.core.sessions.presence.by_source:
            return host
        await host.close()


def test_a_host_that_blocks_moves_too() -> None:
    started, stop, stopped = threading.Event(), threading.Event(), threading.Event()
    address: list[str] = []

    async def run() -> None:
        async with one_to_stop() as (first, second, stack), worker(at(first, second)):
            await until(lambda: names(first) == names(second) == {"double"})
            address.append(at(first, second))
            started.set()
            await asyncio.to_thread(stop.wait)
            await stack.aclose()
            stopped.set()
            await asyncio.to_thread(over.wait)

    over = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert started.wait(60)
        with SyncHost(address[0]) as host, SyncHost(address[0]) as other:
            for each in (host, other):
                assert each.call("double", {"number": 3}).output == 6
            stop.set()
            assert stopped.wait(60)
            for each in (host, other):
                assert each.call("double", {"number": 3}).output == 6
                assert each.list().revision > 0
    finally:
        stop.set()
        over.set()
        thread.join()


async def test_without_any_bus_a_call_ends_in_time_and_names_all_of_them() -> None:
    async with Host("127.0.0.1:1,127.0.0.1:2") as host:
        result = await within(host.call("double", {"number": 1}, timeout=0.3))
        assert result.error is not None
        assert (result.error.code, result.error.stage) == (Code.UNAVAILABLE, Stage.NOT_DISPATCHED)
        assert "127.0.0.1:1,127.0.0.1:2" in result.error.message
        assert not host.connected


async def test_a_name_is_looked_up_and_its_buses_are_used() -> None:
    async with running_bus() as bus, worker(f"dns:localhost:{at(bus).rpartition(':')[2]}") as plugin:
        await within(plugin.ready())
        async with Host(f"dns:localhost:{at(bus).rpartition(':')[2]}") as host:
            assert (await within(host.call("double", {"number": 5}))).output == 10


async def test_a_host_that_is_closed_leaves_no_call_waiting() -> None:
    async with two_buses() as (first, second):
        host = Host(at(first, second))

        async def wait() -> None:
            await asyncio.Event().wait()

        for bus in (first, second):
            bus.offer("local", spec_of(llm_tool(name="wait")(wait)))
        await within(host.ready())
        calls = [asyncio.create_task(host.call("wait")) for _ in range(3)]
        await until(
            lambda: first.core.calls.dispatcher.in_flight.active + second.core.calls.dispatcher.in_flight.active
        )
        await within(host.close())
        assert {each.error.code for each in await within(asyncio.gather(*calls)) if each.error} == {Code.CANCELLED}
