"""Ends in good order: half-closes, drains from either side, stops, takeover. Nothing that was read is lost."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import grpc
import pytest

from tests.faults.conftest import Connect
from tests.faults.raw_peer import RawPeer, attach, echo, opening, tool
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus import Bus, Config
from toolbus.errors import SetupError
from toolbus.protocol.tool import MIB, Limits
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

bystander = pytest.mark.usefixtures("bystander")
OK = grpc.StatusCode.OK


# -- half-close --------------------------------------------------------------------------------------------------------


@bystander
async def test_a_half_close_with_nothing_left_to_do_ends_the_stream_with_ok(connect: Connect) -> None:
    host = await connect("host")
    await host.half_close()
    assert (await host.ended())[0] is OK


@bystander
async def test_one_frame_and_a_half_close_make_a_complete_call(connect: Connect, stranger: RawPeer) -> None:
    await connect("plugin", tool("t"), answer=echo)
    stranger.open()
    await stranger.send(attach=attach("once"), calls=[stranger.ask("t", {"n": 1}), stranger.ask("nothing")])
    await stranger.half_close()
    assert (await stranger.ended())[0] is OK
    assert {result.call_id: result.error.code for result in stranger.results} == {
        "c1": 0, "c2": pb.ERROR_CODE_NOT_FOUND,
    }  # fmt: skip


@bystander
async def test_one_frame_can_hold_attach_call_and_drain(connect: Connect, stranger: RawPeer) -> None:
    await connect("plugin", tool("t"), answer=echo)
    stranger.open()
    await stranger.send(attach=attach("once"), calls=[stranger.ask("t", {"n": 1})], drain=wire.Drain(reason="done"))
    assert (await stranger.ended())[0] is OK
    assert [result.output_json for result in stranger.results] == ['{"n": 1}']


@bystander
async def test_a_half_closed_plugin_loses_its_pending_calls_at_once(connect: Connect) -> None:
    plugin = await connect("plugin", tool("t"))
    host = await connect("host")
    (future,) = await host.start(host.ask("t"))
    await plugin.received()
    await plugin.half_close()
    result = await asyncio.wait_for(future, WAIT_SECONDS)
    assert (result.error.code, result.error.stage) == (pb.ERROR_CODE_UNAVAILABLE, pb.CALL_STAGE_DISPATCHED)
    assert (await plugin.ended())[0] is OK
    assert (await host.call("t")).error.code == pb.ERROR_CODE_UNAVAILABLE


@bystander
async def test_a_half_closed_caller_that_then_disconnects_has_its_calls_cancelled(connect: Connect) -> None:
    plugin = await connect("plugin", tool("t"))
    host = await connect("host")
    await host.start(host.ask("t"))
    await plugin.received()
    await host.half_close()
    assert not plugin.cancels
    await host.close()
    await until(lambda: plugin.cancels, "the cancel")
    assert plugin.cancels[0].reason == "caller gone"


# -- drain -------------------------------------------------------------------------------------------------------------


@bystander
async def test_a_plugin_that_drains_under_load_loses_nothing(connect: Connect) -> None:
    """A rolling deploy: the old session drains while calls run, the new one takes what comes."""
    old = await connect("deploy", tool("t"))
    new = None
    host = await connect("host", max_in_flight=1_000)
    futures = await host.start(*(host.ask("t", {"n": n}) for n in range(100)))
    await old.received(100)
    new = await connect("deploy", tool("t"), answer=echo)
    await old.send(drain=wire.Drain(reason="deploy"))
    for start in range(100, 300, 50):
        futures += await host.start(*(host.ask("t", {"n": n}) for n in range(start, start + 50)))
    await new.received(1)
    await old.send(results=[echo(call) for call in old.calls])
    results = await asyncio.wait_for(asyncio.gather(*futures), WAIT_SECONDS)
    assert [result.output_json for result in results] == [f'{{"n": {n}}}' for n in range(300)]
    assert (await old.ended())[0] is OK
    assert len(host.results) == 300


@bystander
async def test_the_tools_of_a_plugin_that_drains_are_withdrawn_at_once(bus: Bus, connect: Connect) -> None:
    plugin = await connect("plugin", tool("t"))
    host = await connect("host")
    await plugin.send(drain=wire.Drain())
    assert (await plugin.ended())[0] is OK
    assert (await host.call("t")).error.code == pb.ERROR_CODE_NOT_FOUND
    assert "t" not in [item.tool.name for item in bus.list(include_offline=True)]


@bystander
async def test_an_attach_after_a_drain_breaks_the_protocol(connect: Connect) -> None:
    plugin = await connect("plugin", tool("t"))
    host = await connect("host")
    await host.start(host.ask("t"))
    await plugin.received()
    await plugin.send(drain=wire.Drain())
    await plugin.send(attach=attach("plugin", tool("t")))
    code, details = await plugin.ended()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "leaving" in details


async def test_a_bus_that_drains_under_load_loses_nothing(bus: Bus, connect: Connect, stranger: RawPeer) -> None:
    plugin = await connect("plugin", tool("t"))
    inner = await connect("inner", tool("inner"), answer=echo)
    host = await connect("host")
    futures = await host.start(*(host.ask("t", {"n": n}) for n in range(100)))
    calls = await plugin.received(100)
    draining = asyncio.create_task(bus.drain(grace_seconds=WAIT_SECONDS))
    await until(lambda: host.drains, "the drain")
    assert host.drains[0].reason == "shutdown"
    refused = await host.call("t")
    assert (refused.error.code, refused.error.stage) == (pb.ERROR_CODE_UNAVAILABLE, pb.CALL_STAGE_NOT_DISPATCHED)
    nested = await plugin.call("inner", {"n": 1}, parent_call_id=calls[0].call_id)
    assert nested.output_json == '{"n": 1}'
    code, details = await stranger.refused(opening("late"))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "draining" in details
    await plugin.send(results=[echo(call) for call in calls])
    results = await asyncio.wait_for(asyncio.gather(*futures), WAIT_SECONDS)
    assert [result.output_json for result in results] == [f'{{"n": {n}}}' for n in range(100)]
    await until(lambda: plugin.drains and inner.drains, "the drains of those whose tools may have been needed")
    for peer in (plugin, inner, host):
        await peer.half_close()
        assert (await peer.ended())[0] is OK
    await asyncio.wait_for(draining, WAIT_SECONDS)


async def test_a_drained_bus_ends_the_streams_of_peers_that_stay(bus: Bus, connect: Connect) -> None:
    host = await connect("host")
    await asyncio.wait_for(bus.drain(grace_seconds=WAIT_SECONDS), WAIT_SECONDS)
    assert (await host.ended())[0] is OK


async def test_a_bus_that_stops_ends_calls_and_streams_with_unavailable(bus: Bus, connect: Connect) -> None:
    plugin = await connect("plugin", tool("t"))
    host = await connect("host")
    await host.start(host.ask("t"))
    await plugin.received()
    await asyncio.wait_for(bus.stop(), WAIT_SECONDS)
    for peer in (plugin, host):
        assert (await peer.ended())[0] is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("limits", [Limits(waiting_bytes=1 * MIB)])
async def test_a_bus_stops_although_one_stream_cannot_be_closed(bus: Bus, connect: Connect, limits: Limits) -> None:
    await connect("deaf", tool("t"), reads=False)
    host = await connect("host")
    for _ in range(12):
        await host.start(host.ask("t", {"s": "x" * 900_000}))
    await until(lambda: host.results, "the deaf plugin to be given up")
    await asyncio.wait_for(bus.stop(), WAIT_SECONDS)
    code, details = await host.ended()
    assert code is grpc.StatusCode.UNAVAILABLE, details


@bystander
async def test_an_operator_drains_one_source(connect: Connect) -> None:
    plugin = await connect("plugin", tool("t"))
    host = await connect("host")
    (future,) = await host.start(host.ask("t", {"n": 1}))
    (call,) = await plugin.received()
    answer = await host.call("toolbus:drain", {"source": "plugin"})
    assert '"sessions":1' in answer.output_json.replace(" ", "")
    await until(lambda: plugin.drains, "the drain")
    assert plugin.drains[0].reason == "requested"
    await plugin.send(results=[echo(call)])
    assert (await asyncio.wait_for(future, WAIT_SECONDS)).output_json == '{"n": 1}'
    assert (await plugin.ended())[0] is OK


# -- addresses ---------------------------------------------------------------------------------------------------------


@bystander
async def test_a_second_bus_on_the_same_port_is_refused_with_an_error(bus: Bus, address: str) -> None:
    with pytest.raises(SetupError, match="is taken"):
        await Bus(Config(grpc=(address,), http="off")).start()


@bystander
async def test_a_second_bus_on_the_same_unix_socket_is_refused_and_the_first_serves_on(
    tmp_path: Path,
) -> None:
    os.chmod(tmp_path, 0o700)
    address = f"unix:{tmp_path}/socket"
    config = Config(grpc=("127.0.0.1:0", address), http="off")
    async with Bus(config):
        with pytest.raises(SetupError, match="taken by another toolbus"):
            await Bus(Config(grpc=("127.0.0.1:0", address), http="off")).start()
        assert (tmp_path / "socket.lock").read_text() == f"{os.getpid()}\n"
        async with RawPeer(address, answer=echo) as peer:
            await peer.attach("both", tool("t"))
            assert not (await peer.call("t")).is_error
    async with Bus(config) as again:
        assert again.grpc_addresses[1] == address


async def test_a_socket_in_a_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    with pytest.raises(SetupError, match="chmod 0700"):
        await Bus(Config(grpc=(f"unix:{tmp_path}/socket",), http="off")).start()
