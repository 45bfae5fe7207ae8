"""Tests what callers see when a bus of several is killed, or stands still and goes on: real processes."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.processes import Running
from tests.support.served_bus import address_of, start_bus
from tests.support.waiting import until, within
from toolbus.errors import Code, Stage
from toolbus.protocol.tool import Result
from toolbus.sdk import Host, Plugin

LATE = 20  # calls of each host after its bus has gone: some of them begin, if it starts what was given up


@dataclass
class Scene:
    """Two buses, a plugin on both, and hosts whose calls of both tools wait in it.

    Attributes:
        gate: ends them.
        runs: of the tool that must not run twice, by the number of its call.
        calls: by tool and number of host.
    """

    buses: list[Running]
    hosts: list[Host]
    gate: asyncio.Event
    runs: Counter[int]
    calls: dict[tuple[str, int], asyncio.Task[Result]] = field(default_factory=dict)


@asynccontextmanager
async def playing(tmp_path: Path) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        buses = [stack.enter_context(start_bus(tmp_path, "--http", "off", "--grpc", "127.0.0.1:0")) for _ in range(2)]
        address = ",".join(address_of(bus) for bus in buses)
        plugin, scene = Plugin("work", address=address), Scene(buses, [], asyncio.Event(), Counter())

        @plugin.tool(read_only=True)
        async def read(number: int) -> int:
            await scene.gate.wait()
            return number

        @plugin.tool
        async def write(number: int) -> int:
            scene.runs[number] += 1
            await scene.gate.wait()
            return number

        await stack.enter_async_context(plugin)
        scene.hosts += [await stack.enter_async_context(Host(address, source=f"host-{number}")) for number in range(8)]
        for host in scene.hosts:
            await within(host.ready())
        for bus in buses:
            async with Host(address_of(bus)) as probe:
                await until_listed(probe, {"read", "write"})
        for number, host in enumerate(scene.hosts):
            for tool in ("read", "write"):
                scene.calls[tool, number] = asyncio.create_task(host.call(tool, {"number": number}))
        await until(lambda: len(scene.runs) == len(scene.hosts))
        yield scene


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_only_calls_that_may_not_run_twice_are_lost_with_their_bus_and_none_runs_twice(
    tmp_path: Path, end: signal.Signals
) -> None:
    async with playing(tmp_path) as scene:
        scene.buses[0].send(end)
        late = [
            asyncio.create_task(host.call("write", {"number": 100 + n * LATE + again}))
            for n, host in enumerate(scene.hosts)
            for again in range(LATE)
        ]
        scene.gate.set()
        results = {key: await within(task) for key, task in scene.calls.items()}
        assert all(results["read", number].output == number for number in range(len(scene.hosts)))
        errors = [result.error for (tool, _), result in results.items() if tool == "write" and result.error is not None]
        for error in errors:
            assert (error.code, error.stage, error.retry_safe) == (Code.UNAVAILABLE, Stage.UNKNOWN, False)
        for number, result in enumerate(await within(asyncio.gather(*late))):
            assert result.output == 100 + number if result.error is None else result.error.code is Code.UNAVAILABLE
        before = dict(scene.runs)
        if end is signal.SIGSTOP:
            # The bus goes on, and starts none of the calls that were sent to it and given up.
            scene.buses[0].send(signal.SIGCONT)
            async with Host(address_of(scene.buses[0])) as probe:
                await until_listed(probe, {"read", "write"})
                assert (await within(probe.call("read", {"number": 7}))).output == 7
        assert dict(scene.runs) == before
        assert max(scene.runs.values()) == 1


async def test_a_bus_that_stood_still_loses_no_call_if_it_goes_on_soon_after_its_hosts_have_left(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path) as scene:
        scene.buses[0].send(signal.SIGSTOP)
        scene.gate.set()
        for (tool, number), task in scene.calls.items():
            if tool == "read":  # at another bus, where its own stands still: that host has left
                assert (await within(task)).output == number
        scene.buses[0].send(signal.SIGCONT)
        for (_, number), task in scene.calls.items():
            assert (await within(task)).output == number
        assert set(scene.runs.values()) == {1}


async def until_listed(host: Host, names: set[str]) -> None:
    async def listed() -> bool:
        return names <= {each.name for each in await host.list()}

    while not await within(listed()):
        await asyncio.sleep(0.01)
