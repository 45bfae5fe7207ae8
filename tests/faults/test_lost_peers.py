"""Peers and buses that die, hang or stop reading: noticed in the stated time, and nobody else is harmed."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from pathlib import Path

import grpc
import pytest

from tests.faults.conftest import Connect, until_sessions
from tests.faults.processes import run
from tests.faults.raw_peer import RawPeer, attach, echo, tool
from tests.support.waiting import WAIT_SECONDS, Stopwatch, until, within
from toolbus.bus import Bus, Config
from toolbus.protocol.limits import Timings
from toolbus.protocol.tool import MIB, Limits
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


async def _until_state(peer: RawPeer, name: str, state: int, seconds: float) -> float:
    """Waits for a tool's session to reach a state and returns how long that took."""
    started = time.monotonic()
    while await _state(peer, name) != state:
        assert time.monotonic() < started + seconds, f"the session of {name!r} has not reached state {state}"
        await asyncio.sleep(0.02)
    return time.monotonic() - started


# -- death -------------------------------------------------------------------------------------------------------------


@bystander
@pytest.mark.parametrize("grace_seconds", [5.0])  # the last call is made within it
async def test_a_killed_plugin_ends_its_100_calls_within_a_second_each_once(address: str, connect: Connect) -> None:
    host = await connect("host")
    async with run("mute_plugin.py", address) as plugin:
        await plugin.says("0")
        futures = await host.start(*(host.ask("mute") for _ in range(100)))
        await plugin.says("100")
        plugin.send(signal.SIGKILL)
        stopwatch = Stopwatch()
        results = await asyncio.wait_for(asyncio.gather(*futures), WAIT_SECONDS)
        assert stopwatch.seconds() < 1.0
    assert {result.error.code for result in results} == {pb.ERROR_CODE_UNAVAILABLE}
    assert {result.error.stage for result in results} == {pb.CALL_STAGE_DISPATCHED}
    assert "may have run" in results[0].error.message
    assert "its connection broke" in results[0].error.message  # not that it ended its stream, as a plugin that leaves
    after = await host.call("mute")
    assert (after.error.code, after.error.retry_safe) == (pb.ERROR_CODE_UNAVAILABLE, True)
    assert Counter(result.call_id for result in host.results) == {f"c{n}": 1 for n in range(1, 102)}


async def test_a_bus_that_is_killed_and_restarted_is_noticed_and_its_peers_reconnect(socket: str) -> None:
    async with RawPeer(socket, answer=echo) as plugin, RawPeer(socket) as host:
        async with run("run_bus.py", socket) as process:
            await process.says("ready")
            first = await plugin.attach("plugin", tool("t"), instance="one")
            await host.attach("host")
            assert (await host.call("t", {"n": 1})).output_json == '{"n": 1}'
            process.send(signal.SIGKILL)
            assert (await plugin.ended())[0] is grpc.StatusCode.UNAVAILABLE
            assert (await host.ended())[0] is grpc.StatusCode.UNAVAILABLE
        async with run("run_bus.py", socket) as process:
            await process.says("ready")
            host.open()
            await host.attach("host")
            settling = await host.call("t", {"n": 2})
            assert (settling.error.code, settling.error.stage) == (
                pb.ERROR_CODE_UNAVAILABLE, pb.CALL_STAGE_NOT_DISPATCHED,
            )  # fmt: skip
            assert settling.error.retry_safe
            plugin.open()
            second = await plugin.attach("plugin", tool("t"), instance="one")
            assert (await host.call("t", {"n": 2})).output_json == '{"n": 2}'
    assert first.boot_id != second.boot_id
    assert first.revision < second.revision


async def test_a_nested_call_sent_again_after_a_restart_does_not_run_as_another_user(socket: str) -> None:
    config = Config(grpc=(socket,), http="off")
    tools = (tool("outer"), tool("inner"))
    async with RawPeer(socket) as plugin, RawPeer(socket) as host:
        for user in ("ada", "eve"):
            async with Bus(config):
                plugin.open()
                await plugin.attach("plugin", *tools, instance="one")
                host.open()
                await host.attach("host")
                await host.start(host.ask("outer", context=pb.CallContext(user_id=user)))
                of_ada, *of_eve = await plugin.received(1 if user == "ada" else 2)
                if of_eve:
                    again = await plugin.call("inner", parent_call_id=of_ada.call_id)
    assert [call.context.user_id for call in plugin.calls] == ["ada", "eve"]
    assert again.error.code == pb.ERROR_CODE_INVALID_ARGUMENTS
    assert again.error.stage == pb.CALL_STAGE_NOT_DISPATCHED


# -- silence -----------------------------------------------------------------------------------------------------------


@bystander
@pytest.mark.parametrize(
    "timings",
    [Timings(tick_seconds=0.05, busy_heartbeat_seconds=0.2, idle_heartbeat_seconds=0.2, missed_heartbeats=6)],
)
async def test_a_stopped_plugin_becomes_suspect_then_gone_and_a_continued_one_recovers(
    address: str, connect: Connect
) -> None:
    host = await connect("host")
    async with run("mute_plugin.py", address) as plugin:
        await plugin.says("0")
        (future,) = await host.start(host.ask("mute"))
        await plugin.says("1")
        plugin.send(signal.SIGSTOP)
        await _until_state(host, "mute", wire.SESSION_STATE_SUSPECT, 5)
        refused = await host.call("mute")
        assert (refused.error.code, refused.error.stage) == (pb.ERROR_CODE_UNAVAILABLE, pb.CALL_STAGE_NOT_DISPATCHED)
        assert "does not answer" in refused.error.message
        assert not future.done()
        plugin.send(signal.SIGCONT)
        await _until_state(host, "mute", wire.SESSION_STATE_LIVE, 5)
        plugin.send(signal.SIGSTOP)
        await _until_state(host, "mute", wire.SESSION_STATE_OFFLINE, 8)
        result = await asyncio.wait_for(future, WAIT_SECONDS)
        assert (result.error.code, result.error.stage) == (pb.ERROR_CODE_UNAVAILABLE, pb.CALL_STAGE_DISPATCHED)
        assert "heartbeat" in result.error.message


@bystander
@pytest.mark.parametrize("timings", [Timings(tick_seconds=0.02, busy_heartbeat_seconds=0.1)])
async def test_a_peer_that_echoes_nothing_but_talks_is_alive(connect: Connect) -> None:
    plugin = await connect("plugin", tool("t"), echoes=False)
    host = await connect("host")
    await host.start(host.ask("t"))
    (call,) = await plugin.received()
    for _ in range(30):
        await plugin.send(progress=[pb.ToolProgress(call_id=call.call_id)])
        assert await _state(host, "t") == wire.SESSION_STATE_LIVE
        await asyncio.sleep(0.05)
    assert plugin.code is None


# -- reading slowly, or never ------------------------------------------------------------------------------------------


def megabyte(call: pb.ToolCall) -> pb.ToolResult:
    return pb.ToolResult(call_id=call.call_id, output_json=f'"{"x" * 1_000_000}"')


@bystander
async def test_a_host_that_never_reads_is_closed_when_64_mib_wait_for_it(bus: Bus, connect: Connect) -> None:
    await connect("plugin", tool("big"), answer=megabyte)
    deaf = await connect("deaf", reads=False)
    await deaf.start(*(deaf.ask("big") for _ in range(60)))
    await until(lambda: bus.records.outcomes[0] >= 60, "60 results to wait", 10)
    await until_sessions(bus, 4)
    await deaf.start(*(deaf.ask("big") for _ in range(60)))
    await until_sessions(bus, 3)
    other = await connect("host")
    assert not (await other.call("big")).is_error


@bystander
@pytest.mark.parametrize("limits", [Limits(waiting_bytes=4 * MIB, sessions=4)])
async def test_a_stream_that_cannot_be_closed_counts_against_the_sessions_until_its_connection_ends(
    bus: Bus, connect: Connect, stranger: RawPeer, limits: Limits
) -> None:
    await connect("plugin", tool("big"), answer=megabyte)
    deaf = await connect("deaf", reads=False)
    await deaf.start(*(deaf.ask("big") for _ in range(30)))
    await until(lambda: bus.records.outcomes[0] >= 5, "results to wait")
    await until_sessions(bus, 3)
    code, details = await stranger.refused(wire.InvokeRequest(attach=attach("late")))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "limit sessions = 4" in details
    await deaf.close()
    async with asyncio.timeout(WAIT_SECONDS):
        while not stranger.attached:
            stranger.open()
            await stranger.send(attach=attach("late"))
            await until(lambda: stranger.attached or stranger.code)


@bystander
@pytest.mark.parametrize("limits", [Limits(waiting_bytes=4 * MIB)])
async def test_calls_that_never_left_for_a_plugin_that_does_not_read_are_safe_to_retry(
    connect: Connect, limits: Limits
) -> None:
    await connect("deaf", tool("t"), reads=False)
    host = await connect("host")
    text = {"s": "x" * 900_000}
    futures = []
    for _ in range(8):
        futures += await host.start(*(host.ask("t", text) for _ in range(4)))
    results = await within(asyncio.gather(*futures))
    ended = [result.error for result in results if result.error.code == pb.ERROR_CODE_UNAVAILABLE]
    late = [
        result.error for result in results if result.error.code == pb.ERROR_CODE_NOT_FOUND
    ]  # after its grace period
    assert len(ended) + len(late) == 32
    stages = Counter(error.stage for error in ended)
    assert stages[pb.CALL_STAGE_NOT_DISPATCHED] >= 4
    assert stages[pb.CALL_STAGE_DISPATCHED] >= 1
    assert all(error.retry_safe == (error.stage == pb.CALL_STAGE_NOT_DISPATCHED) for error in ended)


@bystander
async def test_a_call_that_waits_for_a_slow_reader_is_cancelled_without_being_sent(connect: Connect) -> None:
    plugin = await connect("deaf", tool("t"), reads=False)
    host = await connect("host")
    await host.start(*(host.ask("t", {"s": "x" * 900_000}) for _ in range(16)))
    result = await host.call("t", {"s": "taken back"}, timeout_seconds=0.2)
    assert (result.error.code, result.error.stage) == (pb.ERROR_CODE_DEADLINE_EXCEEDED, pb.CALL_STAGE_NOT_DISPATCHED)
    assert result.error.retry_safe
    plugin._reading = asyncio.create_task(plugin._read())
    await plugin.received(16)
    after = await host.start(host.ask("t", {"s": "after"}))
    calls = await plugin.received(17)
    assert not after[0].done()
    assert not [call for call in calls if "taken back" in call.arguments_json]


@bystander
@pytest.mark.parametrize("timings", [Timings(attach_seconds=0.5)])
async def test_a_stream_that_never_attaches_is_ended_with_an_error(stranger: RawPeer) -> None:
    stranger.open()
    code, details = await stranger.ended()
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "no attach arrived within 0.5 s" in details


@bystander
@pytest.mark.parametrize("timings", [Timings(attach_seconds=0.5)])
async def test_a_stream_that_has_attached_may_be_silent(connect: Connect) -> None:
    quiet = await connect("quiet")
    with pytest.raises(AssertionError, match="the end of the stream"):
        await quiet.ended(0.8)
    await quiet.call("steady")
