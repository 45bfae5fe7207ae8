"""The lane at the bus, met by a peer that writes its frames by hand."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import sys
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest

from lab.stage import free_ports
from tests.support.waiting import WAIT_SECONDS, until, within
from tests.support.waiting_messages import budgets_of, waits
from toolbus.bus import Bus
from toolbus.bus.access.budgets import MANY_TOOLS
from toolbus.bus.access.neighbours import Neighbours
from toolbus.bus.config import Config
from toolbus.bus.streams.lane_server import OPEN_BYTES, LaneServer
from toolbus.bus.streams.listeners import scopes_sockets
from toolbus.errors import Code
from toolbus.functions.tool_spec import llm_tool, spec_of
from toolbus.protocol.lane import HEADER, MESSAGE_ITEMS, FrameKind, lane_names
from toolbus.protocol.limits import Limits, Timings
from toolbus.testing import PATIENT
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the lane is on Linux only"),
]

SERVED = ("127.0.0.1:0",)


class RawPeer:
    """One connection to the lane."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, kind: int, payload: bytes = b"") -> None:
        self.writer.write(HEADER.pack(len(payload), kind) + payload)

    def message(self, **fields: Any) -> None:
        self.send(FrameKind.MESSAGE, wire.InvokeRequest(**fields).SerializeToString())

    def attach(self, source: str = "raw", *tools: str, **fields: Any) -> None:
        self.send(FrameKind.OPEN, b"Invoke")
        offered = [pb.Tool(name=name, parameters_json='{"type":"object"}') for name in tools]
        self.message(attach=wire.Attach(protocol_version=1, source=source, tools=offered, **fields))

    async def frame(self) -> tuple[int, bytes]:
        async with asyncio.timeout(WAIT_SECONDS):
            size, kind = HEADER.unpack(await self.reader.readexactly(HEADER.size))
            return kind, await self.reader.readexactly(size)

    async def response(self) -> wire.InvokeResponse:
        kind, payload = await self.frame()
        assert kind == FrameKind.MESSAGE, payload
        return wire.InvokeResponse.FromString(payload)

    async def attached(self) -> wire.Attached:
        return (await self.response()).attached

    async def status(self) -> tuple[str, str]:
        """Returns the status, whatever comes before it."""
        while True:
            kind, payload = await self.frame()
            if kind == FrameKind.STATUS:
                code, _, text = payload.decode().partition("\n")
                return code, text


@asynccontextmanager
async def peer_of(bus: Bus) -> AsyncIterator[RawPeer]:
    (name,) = lane_names(bus.grpc_addresses[0])
    reader, writer = await asyncio.open_unix_connection(name, limit=1 << 25)
    try:
        yield RawPeer(reader, writer)
    finally:
        writer.close()


def bus_with(timings: Timings | None = None, **settings: Any) -> Bus:
    config = Config(**{"grpc": SERVED, "http": "off", **settings})
    return Bus(config) if timings is None else Bus(config, timings=timings)


async def test_a_session_runs_over_the_lane_and_says_so_to_operators() -> None:
    async with bus_with() as bus, peer_of(bus) as peer:
        peer.attach("raw", "echo")
        attached = await peer.attached()
        assert (list(attached.registered), attached.identity) == (["echo"], "")
        (session,) = bus.core.sessions.presence.sessions.values()
        assert session.address == f"lane:{os.getpid()}"
        call = asyncio.create_task(bus.call("echo", {"a": 1}))
        sent = (await peer.response()).calls[0]
        peer.message(results=[pb.ToolResult(call_id=sent.call_id, output_json=sent.arguments_json)])
        assert (await call).output == {"a": 1}


async def test_what_comes_behind_an_attach_with_many_tools_is_read_after_it() -> None:
    async with bus_with() as bus, peer_of(bus) as peer:
        peer.attach("raw", *(f"t{number}" for number in range(5 * MANY_TOOLS)))
        peer.message(calls=[pb.ToolCall(call_id="1", name="missing")])
        await peer.writer.drain()
        peer.message(calls=[pb.ToolCall(call_id="2", name="missing")])
        peer.send(FrameKind.HALF_CLOSE)
        assert len((await peer.attached()).registered) == 5 * MANY_TOOLS
        results = [*(await peer.response()).results]
        results += (await peer.response()).results if len(results) < 2 else ()
        assert [each.call_id for each in results] == ["1", "2"]
        assert await peer.status() == ("OK", "its stream ended")


async def test_results_reach_a_caller_in_messages_that_it_can_begin_with_early() -> None:
    async with bus_with() as bus, peer_of(bus) as plugin, peer_of(bus) as host:
        plugin.attach("raw", "echo")
        await plugin.attached()
        host.attach("host", max_in_flight=0)
        await host.attached()
        calls = [pb.ToolCall(call_id=str(each), name="echo", arguments_json="{}") for each in range(100)]
        host.message(calls=calls)
        counts, answers = list[int](), list[pb.ToolResult]()
        while len(answers) < len(calls):
            if received := (await plugin.response()).calls:
                counts.append(len(received))
                answers += [pb.ToolResult(call_id=call.call_id, output_json="1") for call in received]
        plugin.message(results=answers)
        back = list[str]()
        while len(back) < len(calls):
            if results := (await host.response()).results:
                counts.append(len(results))
                back += [result.call_id for result in results]
        assert (sorted(back, key=int), max(counts)) == ([call.call_id for call in calls], MESSAGE_ITEMS)


async def test_a_half_close_ends_the_session_in_good_order_and_a_cut_breaks_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bus_with() as bus:
        async with peer_of(bus) as peer:
            peer.attach("leaves", "one")
            await peer.attached()
            peer.send(FrameKind.HALF_CLOSE)
            assert await peer.status() == ("OK", "its stream ended")
        async with peer_of(bus) as peer:
            peer.attach("breaks", "two")
            await peer.attached()
        await until(lambda: not bus.core.sessions.presence.sessions, "the broken session to end")
        assert "offline source=leaves tools=1 why=its stream ended" in caplog.text
        assert "offline source=breaks tools=1 why=its connection broke" in caplog.text


@pytest.mark.parametrize(
    ("frames", "status", "words"),
    [
        ([(FrameKind.MESSAGE, b"")], "INVALID_ARGUMENT", "kind 2"),
        ([(99, b"")], "INVALID_ARGUMENT", "kind 99"),
        ([(FrameKind.OPEN, b"Nothing")], "UNIMPLEMENTED", "choose Invoke, Register"),
        ([(FrameKind.OPEN, b"\xff")], "UNIMPLEMENTED", "choose Invoke, Register"),
        ([(FrameKind.OPEN, b"Invoke"), (FrameKind.OPEN, b"Invoke")], "INVALID_ARGUMENT", "kind 1"),
        ([(FrameKind.OPEN, b"Invoke"), (FrameKind.MESSAGE, b"\xff\xff")], "INVALID_ARGUMENT", "cannot be decoded"),
        ([(FrameKind.OPEN, b"Invoke"), (FrameKind.MESSAGE, b"")], "INVALID_ARGUMENT", "'attach'"),
        ([(FrameKind.OPEN, b"Invoke"), (FrameKind.HALF_CLOSE, b"")], "INVALID_ARGUMENT", "before its first message"),
        ([(FrameKind.OPEN, b"List"), (FrameKind.MESSAGE, b"\xff\xff")], "INVALID_ARGUMENT", "cannot be decoded"),
        ([(FrameKind.OPEN, b"List"), (FrameKind.HALF_CLOSE, b"")], "INVALID_ARGUMENT", "kind 3"),
        ([(FrameKind.OPEN, b"Register"), (FrameKind.MESSAGE, b"")], "INVALID_ARGUMENT", "session_id"),
    ],
)
async def test_what_breaks_a_rule_ends_with_a_status_that_says_so(
    frames: list[tuple[int, bytes]], status: str, words: str
) -> None:
    async with bus_with() as bus, peer_of(bus) as peer:
        for each in frames:
            peer.send(*each)
        code, text = await peer.status()
        assert (code, words in text) == (status, True), text


PAYLOADS = (
    *(b"Invoke", b"List", b"Clear", b"", b"\xff" * 40, b"\x0a\x05"),
    wire.InvokeRequest(attach=wire.Attach(protocol_version=1, source="chance")).SerializeToString(),
    wire.InvokeRequest(calls=[pb.ToolCall(call_id="1", name="echo"), pb.ToolCall(name="no")]).SerializeToString(),
    wire.InvokeRequest(results=[pb.ToolResult(call_id="9", output_json="{")]).SerializeToString(),
    wire.InvokeRequest(drain=wire.Drain(reason="x"), heartbeat=wire.Heartbeat(sequence=7)).SerializeToString(),
)


@pytest.mark.parametrize("seed", range(4))
async def test_frames_by_chance_cause_no_fault_and_disturb_nobody(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    chance = Random(seed)
    async with bus_with() as bus, peer_of(bus) as bystander:
        bystander.attach("bystander")
        await bystander.attached()
        for _ in range(40):
            async with peer_of(bus) as peer:
                if chance.random() < 0.8:
                    peer.send(FrameKind.OPEN, chance.choice((b"Invoke", b"List", b"Register")))
                for _ in range(chance.randrange(6)):
                    peer.send(chance.choice((2, 2, 2, 2, 3, 1, 4, 0)), chance.choice(PAYLOADS))
                if chance.random() < 0.3:
                    peer.writer.write(chance.randbytes(chance.randrange(30)))
                with contextlib.suppress(ConnectionError):  # the bus may have ended it
                    await peer.writer.drain()
        await until(lambda: len(bus.core.sessions.presence.sessions) == 1, "the other sessions to end")
        bystander.message(calls=[pb.ToolCall(call_id="1", name="toolbus:stats")])
        assert (await bystander.response()).results[0].call_id == "1"
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


async def test_a_message_above_the_limit_ends_the_stream_before_it_has_come() -> None:
    async with bus_with(limits=Limits(message_bytes=10_000)) as bus, peer_of(bus) as peer:
        peer.attach()
        await peer.attached()
        peer.writer.write(HEADER.pack(10_001, FrameKind.MESSAGE) + b"\x08" * 5_000)
        code, text = await peer.status()
        assert (code, "10001" in text, "message_bytes = 10000" in text) == ("RESOURCE_EXHAUSTED", True, True)
        await until(lambda: not bus.core.sessions.presence.sessions, "the session to end")


async def test_a_connection_takes_no_more_than_the_name_of_an_rpc_before_its_peer_is_judged() -> None:
    async with bus_with() as bus, peer_of(bus) as peer:
        peer.writer.write(HEADER.pack(OPEN_BYTES + 1, FrameKind.OPEN))
        assert (await peer.status())[0] == "RESOURCE_EXHAUSTED"


async def test_a_peer_that_ends_while_its_message_waits_fails_its_calls_at_once() -> None:
    quiet = replace(PATIENT, busy_heartbeat_seconds=3_600.0, idle_heartbeat_seconds=3_600.0)  # that no write finds out
    async with bus_with(quiet, guarded=("raw",)) as bus, peer_of(bus) as peer:
        peer.attach("raw", "one", token="t")
        await peer.attached()
        calls = [asyncio.create_task(bus.call("one")) for _ in range(2)]
        sent = (await peer.response()).calls
        assert len(sent) == len(calls)
        async with budgets_of(bus).share.turn("another"):  # so that everything waits
            for each in sent:
                peer.message(progress=[pb.ToolProgress(call_id=each.call_id)])
            await peer.writer.drain()
            await until(lambda: waits(bus, "raw"), "a message to wait")
            peer.writer.close()
            errors = [(await within(call)).error for call in calls]
            assert [error and error.code for error in errors] == [Code.UNAVAILABLE] * 2
            await until(lambda: not waits(bus, "raw"), "the memory of its message")


async def test_a_session_is_freed_with_its_end_and_not_by_the_next_garbage_collection() -> None:
    async with bus_with() as bus:
        gc.disable()
        try:
            async with peer_of(bus) as peer:
                peer.attach("raw", "one")
                await peer.attached()
                (session,) = map(weakref.ref, bus.core.sessions.presence.sessions.values())
            await until(lambda: session() is None, "the end of the session")
        finally:
            gc.enable()


async def test_unary_rpcs_answer_over_connections_of_their_own() -> None:
    async with bus_with() as bus, peer_of(bus) as peer, peer_of(bus) as other, peer_of(bus) as third:
        peer.attach("raw", "one")
        session_id = (await peer.attached()).session_id
        two = pb.Tool(name="two", parameters_json='{"type":"object"}')
        request = wire.RegisterRequest(session_id=session_id, tools=[two])
        other.send(FrameKind.OPEN, b"Register")
        other.send(FrameKind.MESSAGE, request.SerializeToString())
        kind, payload = await other.frame()
        assert kind == FrameKind.MESSAGE
        assert list(wire.RegisterResponse.FromString(payload).registered) == ["two"]
        assert await other.status() == ("OK", "")
        third.send(FrameKind.OPEN, b"List")
        third.send(FrameKind.MESSAGE)
        _, payload = await third.frame()
        assert [each.tool.name for each in wire.ListResponse.FromString(payload).tools] == ["one", "two"]


async def test_a_peer_that_reads_nothing_loses_its_own_session_only() -> None:
    limits = Limits(waiting_bytes=1_000_000, result_bytes=400_000)
    async with bus_with(limits=limits) as bus, peer_of(bus) as slow, peer_of(bus) as quick:
        bus.add_tool(spec_of(big))
        quick.attach("quick")
        await quick.attached()
        slow.attach("slow", max_in_flight=200)
        await slow.attached()
        slow.message(calls=[pb.ToolCall(call_id=str(number), name="big") for number in range(100)])
        await until(lambda: len(bus.core.sessions.presence.sessions) == 1, "the slow reader's session to end")
        quick.message(calls=[pb.ToolCall(call_id="1", name="big")])
        assert len((await quick.response()).results[0].output_json) > 200_000
        code, text = await slow.status()
        assert (code, "reads too slowly" in text) == ("RESOURCE_EXHAUSTED", True)


@llm_tool
def big() -> str:
    """Returns much."""
    return "x" * 200_000


async def test_streams_count_against_the_limit_until_they_end() -> None:
    async with bus_with(limits=Limits(sessions=1)) as bus:
        async with peer_of(bus) as peer, peer_of(bus) as second:
            peer.attach()
            await peer.attached()
            second.attach("second")
            code, text = await second.status()
            assert (code, "accepts no more" in text) == ("RESOURCE_EXHAUSTED", True)
            peer.send(FrameKind.HALF_CLOSE)
            await peer.status()
        async with peer_of(bus) as third:
            third.attach("third")
            assert (await third.attached()).session_id


async def test_a_stream_without_an_attach_is_ended_in_time() -> None:
    async with bus_with(Timings(attach_seconds=0.05)) as bus, peer_of(bus) as peer:
        peer.send(FrameKind.OPEN, b"Invoke")
        code, text = await peer.status()
        assert (code, "no attach arrived" in text) == ("UNAVAILABLE", True)


async def test_a_user_who_may_not_use_the_address_is_refused_and_the_audit_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stranger = 4711 if os.geteuid() != 4711 else 4712
    async with bus_with(data_dir=tmp_path) as bus:
        with monkeypatch.context() as patch:
            patch.setattr("toolbus.bus.streams.lane_server.program_of", lambda connection: (1, stranger))
            async with peer_of(bus) as peer:
                peer.attach()
                code, text = await peer.status()
        assert (code, f"uid {stranger}" in text) == ("PERMISSION_DENIED", True)
        assert not bus.core.sessions.presence.sessions


async def test_a_bus_has_no_lane_where_its_setting_says_so() -> None:
    async with bus_with(lane=False) as bus:
        with pytest.raises(ConnectionRefusedError):
            async with peer_of(bus):
                pass


async def test_the_lane_ends_with_the_bus_and_its_name_is_free_again() -> None:
    async with bus_with() as bus:
        address = bus.grpc_addresses
        async with peer_of(bus) as peer:
            peer.attach("raw", "one")
            await peer.attached()
            await bus.stop()
            await peer.status()
    async with bus_with(grpc=address) as bus, peer_of(bus) as peer:
        peer.attach("raw", "one")
        assert (await peer.attached()).session_id


async def test_a_name_that_is_taken_leaves_the_bus_without_a_lane() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(lane_names(address)[0])
        async with bus_with(grpc=(address,)) as bus:
            assert bus.grpc_addresses == (address,)


@pytest.mark.parametrize(
    ("release", "scoped"),
    [("6.12.0-generic", True), ("7.0", True), ("6.8.0-45-generic", False), ("5.15.167", False), ("unknown", False)],
)
async def test_only_newer_kernels_keep_sandboxed_programs_from_the_lane(release: str, scoped: bool) -> None:
    assert scopes_sockets(release) is scoped


@pytest.mark.parametrize("scoped", [True, False])
async def test_the_lane_closes_for_sandboxed_programs_where_the_kernel_does_not_keep_them_out(
    scoped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolbus.bus.streams.listeners.scopes_sockets", lambda: scoped)
    async with bus_with() as bus, peer_of(bus) as before:
        before.attach()
        await before.attached()
        await bus.dropin_address()
        if scoped:
            async with peer_of(bus) as peer:
                peer.attach("second")
                assert (await peer.attached()).session_id
        else:
            with pytest.raises(ConnectionRefusedError):
                async with peer_of(bus):
                    pass
        assert bus.core.sessions.presence.sessions


# After 2 turns asyncio itself would drop the connection of a server that is closed, and leave its end to the garbage
# collector.
@pytest.mark.parametrize("turns", range(5))
async def test_a_connection_that_was_accepted_just_before_the_end_is_ended_too(turns: int) -> None:
    server = LaneServer(Mock(), Limits(), Neighbours(), Mock())
    address = f"127.0.0.1:{os.getpid()}{turns}"  # nobody listens there: the name alone counts
    await server.start((address,))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.setblocking(False)
        peer.connect(lane_names(address)[0])
        for _ in range(turns):
            await asyncio.sleep(0)
        server.stop()
        with contextlib.suppress(ConnectionResetError):
            assert await within(asyncio.get_running_loop().sock_recv(peer, 1)) == b""
    await until(lambda: not server.connections)
