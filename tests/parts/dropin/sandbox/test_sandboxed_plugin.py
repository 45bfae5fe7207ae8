"""A real plugin in its sandbox, on a real bus: its calls, its reconnects and its limit on processor time."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.parts.dropin.sandbox.trial import ROOT
from tests.support.waiting import WAIT_SECONDS
from toolbus.parts.dropin.sandbox import clean_environment
from toolbus.sdk import Host
from toolbus.testing import running_bus


@asynccontextmanager
async def _plugin(bus: str, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.parts.dropin.sandbox.sandboxed_plugin", bus, str(folder)),
        stdin=asyncio.subprocess.DEVNULL,
        env={**clean_environment(), "PYTHONSAFEPATH": ""},
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _wait_until_offered(host: Host) -> None:
    """Waits until the plugin has attached: it starts in a process of its own."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not any(tool.name == "note" for tool in await host.list()):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("unix", [False, True])
async def test_a_sandboxed_plugin_answers_calls_and_writes_only_what_is_granted(tmp_path: Path, unix: bool) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2", encoding="utf-8")
    folder = tmp_path / "granted"
    folder.mkdir()
    async with running_bus(unix=unix) as bus, _plugin(bus.grpc_addresses[0], folder) as process:
        async with Host(bus.grpc_addresses[0]) as host:
            await _wait_until_offered(host)
            results = await asyncio.gather(*(host.call("note", {"text": "x"}) for _ in range(100)))
            assert [result.unwrap() for result in results] == [1] * 100
            assert (folder / "notes").read_text(encoding="utf-8") == "x" * 100
            assert (await host.call("base", {})).unwrap() == "[1]"
            assert (await host.call("tidy", {})).unwrap() is True
            denied = await host.call("look", {"path": str(secret)})
            assert denied.error is not None
            assert "the sandbox denies reading" in denied.error.message
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), WAIT_SECONDS) == 0


async def test_a_sandboxed_plugin_reconnects_after_the_bus_restarts(tmp_path: Path) -> None:
    async with running_bus() as bus:
        address = bus.grpc_addresses[0]
    async with _plugin(address, tmp_path):
        for _ in range(2):
            async with running_bus(grpc=(address,)), Host(address) as host:
                await _wait_until_offered(host)
                assert (await host.call("note", {"text": "x"})).unwrap() == 1


async def test_a_tool_that_spins_has_its_process_ended_by_the_limit_on_processor_time(tmp_path: Path) -> None:
    async with running_bus() as bus, _plugin(bus.grpc_addresses[0], tmp_path) as process:
        async with Host(bus.grpc_addresses[0]) as host:
            await _wait_until_offered(host)
            result = await host.call("spin", {})
            assert result.error is not None
        assert await asyncio.wait_for(process.wait(), WAIT_SECONDS) == -signal.SIGXCPU
