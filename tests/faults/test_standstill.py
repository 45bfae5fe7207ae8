"""Processes that are stopped and go on: what was given up meanwhile does not run, and what is waited for does."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.faults.processes import run
from tests.faults.raw_peer import RawPeer, echo, tool
from tests.support.waiting import until, within
from toolbus.errors import Code, Stage
from toolbus.sdk.host import Host
from toolbus.testing import running_bus
from toolbus.v1 import tool_pb2 as pb

CALLS = 100


@pytest.fixture
def socket(tmp_path: Path) -> str:
    """An address for a bus in another process."""
    tmp_path.chmod(0o700)
    return f"unix:{tmp_path}/bus"


async def test_a_bus_that_goes_on_runs_no_call_that_its_caller_gave_up_and_every_other(socket: str) -> None:
    async with (
        run("run_bus.py", socket) as bus,
        RawPeer(socket, answer=echo) as plugin,
        RawPeer(socket) as cancels,
        RawPeer(socket) as leaves,
        RawPeer(socket) as waits,
    ):
        await bus.says("ready")
        await plugin.attach("plugin", tool("t"))
        for raw in (cancels, leaves, waits):
            await raw.attach("raw")
        async with Host(socket) as host:
            assert (await within(host.call("t", {"who": "before"}))).error is None
            bus.send(signal.SIGSTOP)
            given_up = [asyncio.create_task(host.call("t", {"who": "gives up"}, timeout=0.3)) for _ in range(CALLS)]
            patient = asyncio.create_task(host.call("t", {"who": "is patient"}, timeout=60))
            cancelled = cancels.ask("t", {"who": "cancels"})
            (outcome,) = await cancels.start(cancelled)
            await leaves.start(leaves.ask("t", {"who": "leaves"}))
            (waited,) = await waits.start(waits.ask("t", {"who": "waits"}))
            results = await within(asyncio.gather(*given_up))  # after 1.3 s, by the clock of the host
            await cancels.send(cancels=[pb.ToolCancel(call_id=cancelled.call_id)])
            await leaves.close()
            bus.send(signal.SIGCONT)
            assert (await within(patient)).error is None
            assert (await within(waited)).error.code == 0
            assert (await within(outcome)).error.code == pb.ERROR_CODE_CANCELLED
            assert (await within(host.call("t", {"who": "after"}))).error is None
        assert {result.error and result.error.code for result in results} == {Code.DEADLINE_EXCEEDED}
        assert {result.error and result.error.stage for result in results} == {Stage.UNKNOWN}
        ran = sorted(json.loads(call.arguments_json)["who"] for call in plugin.calls)
        assert ran == ["after", "before", "is patient", "waits"]


@pytest.mark.parametrize("count", [1, 2], ids=["one bus", "two buses"])
async def test_a_plugin_that_goes_on_runs_no_call_that_its_bus_has_ended_and_every_other(count: int) -> None:
    async with AsyncExitStack() as stack:
        buses = [await stack.enter_async_context(running_bus()) for _ in range(count)]
        addresses = [bus.grpc_addresses[0] for bus in buses]
        hosts = [await stack.enter_async_context(Host(address)) for address in addresses]
        bus, host = buses[0], hosts[0]
        async with run("sdk_plugin.py", ",".join(addresses)) as plugin:
            await plugin.says("ready")
            await until(lambda: all("u" in each.registry.first for each in buses), "the tools")
            holding = asyncio.create_task(host.call("hold", timeout=60))
            await plugin.says("holding")
            queued = [asyncio.create_task(host.call("t", {"who": "queued"}, timeout=60)) for _ in range(3)]
            await until(lambda: bus.dispatcher.in_flight.active == 4, "the calls in the plugin's queue")
            assert (await within(host.call("u", {"who": "before"}))).error is None  # behind them, so they were read
            plugin.send(signal.SIGSTOP)
            made = [(each, name) for each in hosts for name in ["t", "u"] * (CALLS // 2)]
            given_up = [asyncio.create_task(each.call(name, {"who": "gives up"}, timeout=0.3)) for each, name in made]
            waits = [
                asyncio.create_task(each.call(name, {"who": "waits"}, timeout=60))
                for each in hosts
                for name in ("t", "u")
            ]
            results = await within(asyncio.gather(*given_up))
            for task in queued:
                task.cancel()
            await until(lambda: sum(each.dispatcher.in_flight.active for each in buses) == 1 + len(waits), "cancels")
            await asyncio.sleep(1.0)  # there is nothing to wait for: what counts is how long the stop was
            plugin.send(signal.SIGCONT)
            for each in (holding, *waits):
                assert (await within(each)).error is None
            ran = (await within(host.call("ran"))).unwrap()
        assert {result.error and result.error.code for result in results} == {Code.DEADLINE_EXCEEDED}
        assert ran == ["before", *["waits"] * len(waits)]


async def test_a_client_on_the_stubs_alone_that_goes_on_runs_no_call_that_the_bus_has_ended() -> None:
    async with (
        running_bus() as bus,
        Host(bus.grpc_addresses[0]) as host,
        run("stub_plugin.py", bus.grpc_addresses[0]) as plugin,
    ):
        await plugin.says("ready")
        assert (await within(host.call("t", {"who": "before"}))).error is None
        plugin.send(signal.SIGSTOP)
        given_up = [asyncio.create_task(host.call("t", {"who": "gives up"}, timeout=0.3)) for _ in range(CALLS)]
        patient = asyncio.create_task(host.call("t", {"who": "waits"}, timeout=60))
        await within(asyncio.gather(*given_up))
        await asyncio.sleep(1.0)  # there is nothing to wait for: what counts is how long the stop was
        plugin.send(signal.SIGCONT)
        assert (await within(patient)).error is None
        assert (await within(host.call("ran"))).unwrap() == ["before", "waits"]
