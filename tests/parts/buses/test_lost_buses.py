"""Tests what callers see when a bus of several is killed, or stands still and goes on: real processes."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.served_bus import address_of, start_bus
from tests.support.waiting import until, within
from toolbus.errors import Code, Stage
from toolbus.sdk import Host, Plugin


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_only_calls_that_may_not_run_twice_are_lost_with_their_bus_and_none_runs_twice(
    tmp_path: Path, end: signal.Signals
) -> None:
    async with AsyncExitStack() as stack:
        buses = [stack.enter_context(start_bus(tmp_path, "--http", "off", "--grpc", "127.0.0.1:0")) for _ in range(2)]
        address = ",".join(address_of(bus) for bus in buses)
        plugin, gate, runs = Plugin("work", address=address), asyncio.Event(), Counter[int]()

        @plugin.tool(read_only=True)
        async def read(number: int) -> int:
            await gate.wait()
            return number

        @plugin.tool
        async def write(number: int) -> int:
            runs[number] += 1
            await gate.wait()
            return number

        await stack.enter_async_context(plugin)
        hosts = [await stack.enter_async_context(Host(address, source=f"host-{number}")) for number in range(8)]
        for host in hosts:
            await within(host.ready())
        for bus in buses:
            async with Host(address_of(bus)) as probe:
                await until_listed(probe, {"read", "write"})
        calls = {
            (tool, number): asyncio.create_task(host.call(tool, {"number": number}))
            for number, host in enumerate(hosts)
            for tool in ("read", "write")
        }
        await until(lambda: len(runs) == len(hosts))
        buses[0].send(end)
        late = [asyncio.create_task(host.call("write", {"number": 100 + n})) for n, host in enumerate(hosts)]
        gate.set()
        results = {key: await within(task) for key, task in calls.items()}
        lost = [number for (tool, number), result in results.items() if result.error is not None and tool == "write"]
        assert all(results["read", number].output == number for number in range(len(hosts)))
        for number in lost:
            error = results["write", number].error
            assert error is not None
            assert (error.code, error.stage, error.retry_safe) == (Code.UNAVAILABLE, Stage.UNKNOWN, False)
        for number, result in enumerate(await within(asyncio.gather(*late))):
            assert result.output == 100 + number if result.error is None else result.error.code is Code.UNAVAILABLE
        before = dict(runs)
        if end is signal.SIGSTOP:
            # The bus goes on, and starts none of the calls that were sent to it and given up.
            buses[0].send(signal.SIGCONT)
            async with Host(address_of(buses[0])) as probe:
                await until_listed(probe, {"read", "write"})
                assert (await within(probe.call("read", {"number": 7}))).output == 7
        assert dict(runs) == before
        assert max(runs.values()) == 1


async def until_listed(host: Host, names: set[str]) -> None:
    async def listed() -> bool:
        return names <= {each.name for each in await host.list()}

    while not await within(listed()):
        await asyncio.sleep(0.01)
