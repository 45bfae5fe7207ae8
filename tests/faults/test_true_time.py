"""The intervals of the heartbeat as they are, without any of them shortened: these tests mostly wait."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.faults.conftest import Connect
from tests.faults.processes import run
from tests.faults.raw_peer import RawPeer, echo, tool
from tests.support.waiting import WAIT_SECONDS, within
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

bystander = pytest.mark.usefixtures("bystander")


@pytest.fixture
def socket(tmp_path: Path) -> str:
    """An address for a bus in another process, the same whenever it starts."""
    tmp_path.chmod(0o700)
    return f"unix:{tmp_path}/bus"


async def _state(peer: RawPeer, name: str) -> wire.SessionState.ValueType:
    response = await peer.stub.List(wire.ListRequest(names=[name], include_offline=True))
    return response.tools[0].session_state if response.tools else wire.SESSION_STATE_UNSPECIFIED


async def _until_state(peer: RawPeer, name: str, state: int) -> None:
    """Waits for a tool's session to reach a state."""
    async with asyncio.timeout(WAIT_SECONDS):
        while await _state(peer, name) != state:
            await asyncio.sleep(0.1)


@pytest.mark.slow
@bystander
async def test_a_stopped_plugin_is_suspect_then_its_calls_end_and_then_it_is_gone(
    address: str, connect: Connect
) -> None:
    """`tests/protocol/test_session.py` and those of presence say when, by a clock of their own."""
    host = await connect("host")
    async with run("mute_plugin.py", address) as plugin:
        await plugin.says("0")
        futures = await host.start(*(host.ask("mute", timeout_seconds=60) for _ in range(10)))
        await plugin.says("10")
        plugin.send(signal.SIGSTOP)
        await _until_state(host, "mute", wire.SESSION_STATE_SUSPECT)
        results = await within(asyncio.gather(*futures))
        await _until_state(host, "mute", wire.SESSION_STATE_OFFLINE)
    assert {result.error.code for result in results} == {pb.ERROR_CODE_UNAVAILABLE}


@pytest.mark.parametrize(
    ("interval", "seconds"), [("0.1", 2.0), pytest.param("", 10.0, marks=pytest.mark.slow)], ids=["short", "true time"]
)
async def test_a_bus_that_was_stopped_declares_no_healthy_session_gone(
    socket: str, interval: str, seconds: float
) -> None:
    """With heartbeats every 0.1 s, 2 s are 20 missed ones, with which a session ends.

    These peers may be slow to echo on a busy machine: a session that is suspect for a moment is not gone.
    """
    async with RawPeer(socket) as plugin, RawPeer(socket) as host, run("run_bus.py", socket, interval) as process:
        await process.says("ready")
        await plugin.attach("plugin", tool("t"))
        await host.attach("host")
        (future,) = await host.start(host.ask("t", {"n": 1}))
        (call,) = await plugin.received()
        process.send(signal.SIGSTOP)
        await asyncio.sleep(seconds)  # there is nothing to wait for: a stopped process says nothing
        process.send(signal.SIGCONT)
        for _ in range(100):  # the first judgements after it woke
            assert await _state(host, "t") in (wire.SESSION_STATE_LIVE, wire.SESSION_STATE_SUSPECT)
            await asyncio.sleep(0.01)
        assert (plugin.code, host.code) == (None, None)
        await plugin.send(results=[echo(call)])
        assert (await within(future)).output_json == '{"n": 1}'
