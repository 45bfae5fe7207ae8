"""Graceful shutdown of a plugin on a real bus: its tools are withdrawn, its call in flight ends or is answered."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.fork_server import forked_plugins
from tests.support.processes import environment
from tests.support.waiting import WAIT_SECONDS, until_sync
from toolbus.bus import Bus
from toolbus.errors import Code
from toolbus.processes.supervisor import Command, PluginReport, ReportKind, Supervisor
from toolbus.protocol.tool import Result
from toolbus.testing import running_bus

WAITS = """
import os, time
from toolbus import llm_tool
@llm_tool(timeout=60.0)
def wait(folder: str) -> str:
    open(folder + "/called", "w").close()
    while not os.path.exists(folder + "/go"):
        time.sleep(0.01)
    return "done"
"""
IGNORES = WAITS + "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
HANGS = """
import re
from toolbus import llm_tool
@llm_tool(timeout=60.0)
def wait(folder: str) -> None:
    open(folder + "/called", "w").close()
    re.match("(a+)+$", "a" * 64 + "b")
"""


class _Calling:
    """A plugin that is supervised, with a call in flight."""

    def __init__(self, bus: Bus, supervisor: Supervisor, call: asyncio.Task[Result], ends: list[str]) -> None:
        self.bus = bus
        self.supervisor = supervisor
        self.call = call
        self.ends = ends

    def names(self) -> list[str]:
        return [each.entry.tool.name for each in self.bus.list()]

    async def until_withdrawn(self) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            async for _ in self.bus.watch():
                if not self.names():
                    return


@asynccontextmanager
async def _calling(folder: Path, text: str, *, stop_seconds: float, kill_seconds: float) -> AsyncIterator[_Calling]:
    file = folder / "plugin.py"
    file.write_text(text)
    ends: list[str] = []

    def emit(report: PluginReport) -> None:
        if report.kind is ReportKind.ENDED:
            ends.append(report.text)

    async with running_bus() as bus:
        supervisor = Supervisor(emit, stop_seconds=stop_seconds, kill_seconds=kill_seconds)
        supervisor.add("plugin", Command.of_file(file, environment({"TOOLBUS_ADDRESS": bus.grpc_addresses[0]})))
        running = asyncio.create_task(supervisor.run())
        async with asyncio.timeout(WAIT_SECONDS):
            with forked_plugins():
                async for _ in bus.watch():
                    if bus.list():
                        break
        call = asyncio.create_task(bus.call("wait", {"folder": str(folder)}))
        await asyncio.to_thread(until_sync, (folder / "called").exists, "the call")
        try:
            yield _Calling(bus, supervisor, call, ends)
        finally:
            supervisor.stop()
            async with asyncio.timeout(WAIT_SECONDS):
                await running


async def test_a_graceful_shutdown_withdraws_the_tools_at_once_and_finishes_the_call(tmp_path: Path) -> None:
    async with _calling(tmp_path, WAITS, stop_seconds=60.0, kill_seconds=60.0) as plugin:
        plugin.supervisor.remove("plugin")
        await plugin.until_withdrawn()
        assert not plugin.call.done()
        (tmp_path / "go").touch()
        assert (await plugin.call).output == "done"
    assert plugin.ends == ["ended (exit code 0)"]


async def test_a_call_that_does_not_end_is_answered_when_its_group_gets_sigterm(tmp_path: Path) -> None:
    async with _calling(tmp_path, WAITS, stop_seconds=0.3, kill_seconds=60.0) as plugin:
        plugin.supervisor.stop()
        await plugin.until_withdrawn()
        error = (await asyncio.wait_for(plugin.call, WAIT_SECONDS)).error
        assert error is not None
        assert error.code is Code.UNAVAILABLE
        assert plugin.names() == []
        # Otherwise leaving this block would be the second signal, which kills.
        await asyncio.to_thread(until_sync, lambda: bool(plugin.ends), "the end")
    assert plugin.ends == ["ended (SIGTERM)"]


async def test_a_plugin_that_ignores_sigterm_is_killed_and_its_call_answered_at_once(tmp_path: Path) -> None:
    async with _calling(tmp_path, IGNORES, stop_seconds=0.1, kill_seconds=0.1) as plugin:
        plugin.supervisor.remove("plugin")
        error = (await asyncio.wait_for(plugin.call, WAIT_SECONDS)).error
        assert error is not None
        assert error.code is Code.UNAVAILABLE
    assert plugin.ends == ["ended (SIGKILL)"]


async def test_a_plugin_that_hangs_is_killed_and_its_call_answered_at_once(tmp_path: Path) -> None:
    async with _calling(tmp_path, HANGS, stop_seconds=0.1, kill_seconds=0.1) as plugin:
        plugin.supervisor.stop()
        error = (await asyncio.wait_for(plugin.call, WAIT_SECONDS)).error
        assert error is not None
        assert error.code is Code.UNAVAILABLE
    assert plugin.ends == ["ended (SIGKILL)"]


async def test_a_second_stop_kills_without_waiting(tmp_path: Path) -> None:
    async with _calling(tmp_path, WAITS, stop_seconds=60.0, kill_seconds=60.0) as plugin:
        plugin.supervisor.stop()
        await plugin.until_withdrawn()
        plugin.supervisor.stop()
        error = (await asyncio.wait_for(plugin.call, WAIT_SECONDS)).error
        assert error is not None
        assert error.code is Code.UNAVAILABLE
