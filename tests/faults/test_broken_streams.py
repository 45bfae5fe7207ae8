"""What ended a session is told apart: a killed program, and one that ends its stream on purpose."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.faults.processes import run
from tests.faults.raw_peer import RawPeer, tool
from tests.parts.audit.chains import entries
from tests.support.waiting import until
from toolbus.parts.audit.audit_log import FOLDER
from toolbus.testing import running_bus

BROKE, ENDED = "its connection broke", "its stream ended"
PLUGINS = {"mute_plugin.py": ("mute", "0", "1"), "sdk_plugin.py": ("hold", "ready", "holding")}


def ends(folder: Path) -> list[str]:
    """Returns why each session ended, as the audit says it."""
    return [each["why"] for each in entries(folder / FOLDER) if each["act"] == "end"]


@pytest.mark.parametrize("script", PLUGINS, ids=["gRPC", "lane"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
async def test_a_killed_plugin_broke_its_connection_for_the_caller_the_log_and_the_audit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, script: str, number: signal.Signals
) -> None:
    name, ready, running = PLUGINS[script]
    async with running_bus(unix=True, data_dir=tmp_path) as bus:
        async with run(script, bus.grpc_addresses[0]) as plugin:
            await plugin.says(ready)
            calling = asyncio.create_task(bus.call(name))
            await plugin.says(running)
            plugin.send(number)
            result = await calling
        await until(lambda: not bus.core.sessions.presence.sessions, "the end of its session")
    assert result.error is not None
    assert BROKE in result.error.message
    assert [each.partition("why=")[2] for each in caplog.messages if "offline source=" in each] == [BROKE]
    assert ENDED not in caplog.text
    assert ends(tmp_path) == [BROKE]


async def test_a_plugin_that_ends_its_stream_did_not_break_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_bus(data_dir=tmp_path) as bus, RawPeer(bus.grpc_addresses[0]) as peer:
        await peer.attach("leaves", tool("slow"))
        calling = asyncio.create_task(bus.call("slow"))
        await until(lambda: peer.calls, "the call")
        await peer.half_close()
        result = await calling
        await until(lambda: not bus.core.sessions.presence.sessions, "the end of its session")
    assert result.error is not None
    assert ENDED in result.error.message
    assert f"offline source=leaves tools=1 why={ENDED}" in caplog.text
    assert BROKE not in caplog.text
    assert ends(tmp_path) == [ENDED]
