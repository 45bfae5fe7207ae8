"""Calls whose progress is streamed: the events, their order, and readers that are slow, silent or gone."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.bus.gateway.calling import Connection, client, events, invoke
from tests.faults.raw_peer import RawPeer, tool
from tests.support.waiting import until
from toolbus.bus import Bus
from toolbus.bus.gateway.call_routes import MAX_WAITING, OVERHEAD_BYTES, ProgressBuffer
from toolbus.errors import Code
from toolbus.protocol.limits import Timings
from toolbus.protocol.tool import KIB, Limits, Progress
from toolbus.sdk import Plugin, ToolScope
from toolbus.testing import running_bus
from toolbus.v1 import tool_pb2 as pb

STREAM = {"Accept": "text/event-stream"}


@pytest.fixture
def timings() -> Timings:
    return Timings()


@pytest.fixture
async def bus(timings: Timings) -> AsyncIterator[Bus]:
    limits = Limits(result_bytes=512 * KIB)
    async with running_bus(http="127.0.0.1:0", timings=timings, grace_seconds=0.0, limits=limits) as bus:
        yield bus


@pytest.fixture
async def http(bus: Bus) -> AsyncIterator[httpx.AsyncClient]:
    async with client(bus, headers=STREAM) as http:
        yield http


async def _streamed(http: httpx.AsyncClient, name: str, **more: Any) -> list[tuple[str, Any]]:
    async with http.stream("POST", "/api/tools/invoke", json={"name": name, **more}) as answer:
        assert answer.status_code == 200
        return [(kind, data) async for kind, data, _ in events(answer)]


@pytest.mark.parametrize(
    "accept",
    ["text/event-stream;q=0", "application/json, text/event-stream; q=0.0", "*/*", "text/event-streams", "TEXT/*"],
)
async def test_a_client_that_does_not_name_streams_or_refuses_them_gets_a_plain_answer(bus: Bus, accept: str) -> None:
    bus.tool(name="plain")(lambda: 1)
    async with client(bus, headers={"Accept": accept}) as http:
        assert (await invoke(http, "plain", {}))["output"] == 1


@pytest.mark.parametrize("accept", ["Text/Event-Stream", "application/json;q=0.5, text/event-stream;q=0.1"])
async def test_a_client_that_names_streams_in_any_spelling_gets_one(bus: Bus, accept: str) -> None:
    bus.tool(name="plain")(lambda: 1)
    async with client(bus, headers={"Accept": accept}) as http:
        assert [kind for kind, _ in await _streamed(http, "plain")] == ["result"]


async def test_progress_and_chunks_come_in_their_order_before_exactly_one_result(
    bus: Bus, http: httpx.AsyncClient
) -> None:
    async with Plugin("streams", address=bus.grpc_addresses[0]) as plugin:

        async def speak(scope: ToolScope, words: list[str]) -> str:
            scope.progress()
            for number, word in enumerate(words, 1):
                scope.progress(chunk=word)
                scope.progress(number, total=len(words), message=f"said\n{word}")
            scope.progress(1.5, chunk="both")
            return "".join(words)

        plugin.add_tool(speak, name="remote")
        await plugin.ready()
        bus.tool(name="local")(speak)
        for name in ("remote", "local"):
            said = await _streamed(http, name, arguments={"words": ["eins", "二\n\ndata: x"]}, call_id="mine")
            assert [(kind, data) for kind, data in said[:-1]] == [
                ("progress", {"progress": 0.0, "total": 0.0, "message": ""}),
                ("chunk", {"text": "eins"}),
                ("progress", {"progress": 1.0, "total": 2.0, "message": "said\neins"}),
                ("chunk", {"text": "二\n\ndata: x"}),
                ("progress", {"progress": 2.0, "total": 2.0, "message": "said\n二\n\ndata: x"}),
                ("chunk", {"text": "both"}),
                ("progress", {"progress": 1.5, "total": 0.0, "message": ""}),
            ]
            kind, result = said[-1]
            assert (kind, result["call_id"], result["output"]) == ("result", "mine", "eins二\n\ndata: x")


async def test_a_call_that_fails_ends_in_a_result_too(bus: Bus, http: httpx.AsyncClient) -> None:
    @bus.tool
    def refuses() -> None:
        raise ValueError("no \u2028 way")

    @bus.tool
    async def hangs() -> None:
        await asyncio.Event().wait()

    for name, more, code in (
        ("refuses", {}, "TOOL"),
        ("nothing", {}, "NOT_FOUND"),
        ("hangs", {"timeout_seconds": 0.05}, "DEADLINE_EXCEEDED"),
        ("refuses", {"arguments": "{half"}, "INVALID_ARGUMENTS"),
        ("toolbus:drain", {}, "PERMISSION_DENIED"),
    ):
        ((kind, result),) = await _streamed(http, name, **more)
        assert (kind, result["is_error"], result["error"]["code"]) == ("result", True, code)


async def test_a_request_that_breaks_a_rule_is_answered_without_a_stream(http: httpx.AsyncClient) -> None:
    for body, status in (({"name": ""}, 422), ({"name": "x", "role": "Nobody"}, 404)):
        answer = await http.post("/api/tools/invoke", json=body)
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")


@pytest.mark.parametrize("timings", [Timings(ping_seconds=0.01)])
async def test_a_quiet_stream_sends_pings(bus: Bus, http: httpx.AsyncClient) -> None:
    enough = asyncio.Event()

    @bus.tool
    async def waits() -> str:
        await enough.wait()
        return "done"

    kinds = []
    async with http.stream("POST", "/api/tools/invoke", json={"name": "waits"}) as answer:
        async for kind, _, _ in events(answer):
            kinds.append(kind)
            if kinds.count(":") == 3:
                enough.set()
    assert kinds[:3] == [":", ":", ":"]
    assert [kind for kind in kinds if kind != ":"] == ["result"]


class Babbler:
    """A plugin whose tool ``babble`` says as much as the test wants; it must not notice who listens."""

    def __init__(self, bus: Bus) -> None:
        self.peer = RawPeer(bus.grpc_addresses[0])

    async def __aenter__(self) -> "Babbler":
        self.peer.open()
        await self.peer.attach("babbler", tool("babble"))
        return self

    async def __aexit__(self, *how: object) -> None:
        await self.peer.close()

    async def say(self, *signs: pb.ToolProgress) -> None:
        (call,) = await self.peer.received(1)
        for sign in signs:
            sign.call_id = call.call_id
        await self.peer.send(progress=signs)

    async def end(self) -> None:
        (call,) = await self.peer.received(1)
        await self.peer.send(results=[pb.ToolResult(call_id=call.call_id, output_json='"end"')])


async def test_of_a_slow_reader_only_old_progress_is_dropped_and_no_chunk_is(bus: Bus) -> None:
    @bus.tool
    def quick() -> int:
        return 1

    async with Babbler(bus) as babbler, Connection(bus) as connection, client(bus) as other:
        await connection.ask("POST", "/api/tools/invoke", {"name": "babble"}, **STREAM)
        pause = 500
        for batch in range(0, 10_000, pause):
            signs = [pb.ToolProgress(progress=1.0 + n, message="x" * 1000) for n in range(batch, batch + pause)]
            await babbler.say(*signs, pb.ToolProgress(output_chunk=f"<{batch}>"))
        await babbler.end()
        await until(lambda: bus.records.outcomes[0] == 1, "the call to end")
        assert (await invoke(other, "quick"))["output"] == 1  # nobody else waits for the slow one
        text = (await connection.read_until(b'"end"')).decode()
    chunks = [line for line in text.splitlines() if line.startswith('data: {"text"')]
    assert [json.loads(chunk[6:])["text"] for chunk in chunks] == [f"<{batch}>" for batch in range(0, 10_000, pause)]
    assert '"progress":10000.0' in text
    assert text.count("event: progress") < 10_000


async def test_a_reader_that_takes_nothing_ends_its_call_when_the_buffer_is_full(bus: Bus) -> None:
    async with Babbler(bus) as babbler, Connection(bus) as connection:
        await connection.ask("POST", "/api/tools/invoke", {"name": "babble"}, **STREAM)
        chunk = "x" * 100_000
        for _ in range(400):  # far more than the sockets' buffers hold
            await babbler.say(pb.ToolProgress(output_chunk=chunk))
            if babbler.peer.cancels:
                break
        await until(lambda: babbler.peer.cancels, "the call to be cancelled")
        assert bus.records.outcomes[Code.CANCELLED] == 1
        text = await connection.read_until(b"read the stream faster")
    result = json.loads(text.partition(b"event: result\ndata: ")[2].partition(b"\n")[0])
    assert result["error"]["code"] == "RESULT_TOO_LARGE"
    assert result["error"]["limit"] == {"name": "result_bytes", "value": 512 * KIB}
    assert "read the stream faster" in result["error"]["message"]


async def test_a_reader_that_disconnects_while_nothing_can_be_sent_cancels_its_call(bus: Bus) -> None:
    async with Babbler(bus) as babbler, Connection(bus) as connection:
        await connection.ask("POST", "/api/tools/invoke", {"name": "babble"}, **STREAM)
        for _ in range(60):
            await babbler.say(pb.ToolProgress(output_chunk="x" * 100_000))
        connection.cut()
        await until(lambda: babbler.peer.cancels, "the call to be cancelled")


# -- the buffer, without a network ---------------------------------------------------------------------------------


async def test_a_slow_reader_gets_a_bounded_number_of_updates_and_the_newest_of_them() -> None:
    progress = ProgressBuffer(1_000)
    for number in range(10_000):
        progress.put(Progress(progress=number))
    assert not progress.overflowed
    progress.close()
    events = [each async for each in progress.events()]
    assert len(events) == MAX_WAITING
    assert b'"progress":9999' in events[-1]
    assert repr(progress) == "<ProgressBuffer waiting=0 bytes=0>"


async def test_more_chunks_than_an_output_may_have_overflow_once() -> None:
    progress, times = ProgressBuffer(1_000), []
    progress.on_overflow = lambda: times.append(1)
    room = (1_000 + MAX_WAITING * OVERHEAD_BYTES) // (OVERHEAD_BYTES + 100)
    for _ in range(room + 50):
        progress.put(Progress(chunk="x" * 100))
    assert progress.overflowed
    assert len(times) == 1
    progress.close()
    assert len([each async for each in progress.events()]) == room
