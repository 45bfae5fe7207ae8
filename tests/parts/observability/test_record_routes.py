"""GET /api/calls: which calls there were, asked for and followed, in the same words as the bus's own tool `calls`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.bus.gateway.calling import client, events, invoke
from tests.support.core_model import row
from tests.support.waiting import WAIT_SECONDS, Stopwatch, within
from toolbus.bus import Bus
from toolbus.bus.calls.call_records import MAX_RECORDS, RecordFilter
from toolbus.parts.observability.record_routes import RecordedCalls, SharedBatches
from toolbus.testing import running_bus

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/api/calls"
Words = dict[str, Any]


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[Bus]:
    async with running_bus(http="127.0.0.1:0", grace_seconds=0.0, **settings) as bus:

        @bus.tool
        async def echo(value: int = 0) -> int:
            return value

        @bus.tool
        def fails() -> None:
            raise ValueError("no")

        @bus.tool
        async def rare() -> None:
            """Filtered followers ask for it."""

        yield bus


@pytest_asyncio.fixture(loop_scope="module")
async def bus() -> AsyncIterator[Bus]:
    async with running() as bus:
        yield bus


@pytest_asyncio.fixture(loop_scope="module")
async def http(bus: Bus) -> AsyncIterator[httpx.AsyncClient]:
    async with client(bus) as http:
        yield http


async def call(http: httpx.AsyncClient, number: int, name: str = "echo", user: str = "", **more: Any) -> None:
    context = {"user_id": user, "attributes": {"round": "2", "order": "1"}}
    await invoke(
        http, name, {"value": number} if name == "echo" else {}, call_id=f"c-{number}", context=context, **more
    )


async def listed(http: httpx.AsyncClient, **query: Any) -> tuple[int, list[Words]]:
    answer = await http.get(PATH, params=query)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    RecordedCalls.model_validate(said)
    assert list(said) == ["ok", "newest", "calls"]
    return said["newest"], said["calls"]


def ids(calls: list[Words]) -> list[str]:
    return [each["call_id"] for each in calls]


async def test_the_newest_come_first_and_those_after_a_number_oldest_first(http: httpx.AsyncClient) -> None:
    assert await listed(http) == (0, [])
    for number in range(1, 6):
        await call(http, number)
    newest, calls = await listed(http)
    assert (newest, ids(calls)) == (5, ["c-5", "c-4", "c-3", "c-2", "c-1"])
    assert ids((await listed(http, limit=2))[1]) == ["c-5", "c-4"]
    assert ids((await listed(http, since=2))[1]) == ["c-3", "c-4", "c-5"]
    assert ids((await listed(http, since=2, limit=1))[1]) == ["c-3"]
    assert ids((await listed(http, since=99))[1]) == []
    answer = await http.get(PATH, headers={"Last-Event-ID": "4"})
    assert ids(answer.json()["calls"]) == ["c-5"]


async def test_a_record_says_what_the_bus_s_own_tool_says(http: httpx.AsyncClient) -> None:
    await call(http, 7, user="ann")
    (record,) = (await listed(http))[1]
    own = (await http.post("/api/bus/calls", json={"name": "echo"})).json()["output"]
    assert [record] == own
    newest, calls = await listed(http)
    assert (newest, ids(calls)) == (1, ["c-7"])  # who asks for records is not in them
    assert (record["number"], record["name"], record["source"]) == (1, "echo", "local")
    assert (record["caller"], record["user_id"], record["outcome"]) == ("http", "ann", "OK")
    assert (record["round"], record["order"], record["output_size"]) == (2, 1, 1)
    assert 0 <= record["seconds"] < WAIT_SECONDS
    assert record["ended"] >= record["started"] > 1_600_000_000
    assert "arguments" not in record


async def test_contents_are_listed_where_they_are_recorded() -> None:
    async with running(record_contents=True) as bus, client(bus) as http:
        await call(http, 7)
        (record,) = (await listed(http))[1]
        assert (record["arguments"], record["output"]) == ('{"value":7}', "7")


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"name": "fails"}, ["c-2"]),
        ({"source": "local"}, ["c-3", "c-2", "c-1"]),
        ({"source": "nobody"}, []),
        ({"caller": "http", "user_id": "ann"}, ["c-1"]),
        ({"outcome": "ok"}, ["c-3", "c-1"]),
        ({"outcome": "TOOL"}, ["c-2"]),
        ({"outcome": "ok", "since": "1"}, ["c-3"]),
        ({"outcome": "ok", "limit": "1"}, ["c-3"]),
        ({"outcome": ""}, ["c-3", "c-2", "c-1"]),
    ],
)
async def test_all_filters_have_to_match(http: httpx.AsyncClient, query: dict[str, str], found: list[str]) -> None:
    await call(http, 1, user="ann")
    await call(http, 2, "fails")
    await call(http, 3, user="bob")
    assert ids((await listed(http, **query))[1]) == found


@pytest.mark.parametrize("query", [{"limit": "0"}, {"limit": "1001"}, {"limit": "x"}, {"since": "-1"}])
async def test_an_invalid_number_is_refused(http: httpx.AsyncClient, query: dict[str, str]) -> None:
    answer = await http.get(PATH, params=query)
    assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (422, ["query", next(iter(query))])


@asynccontextmanager
async def following(
    http: httpx.AsyncClient, query: dict[str, str] | None = None, **headers: str
) -> AsyncIterator[Callable[[], Awaitable[Words]]]:
    asked = {"Accept": "text/event-stream", **headers}
    async with http.stream("GET", PATH, params=query, headers=asked) as answer:
        lines = answer.aiter_lines()
        assert [await anext(lines), await anext(lines)] == ["retry: 1000", ""]
        stream = events(answer, lines)

        async def following() -> Words:
            async with asyncio.timeout(WAIT_SECONDS):
                kind, data, id = await anext(stream)
            assert (kind, id) == ("call", str(data["number"]))
            found: Words = data
            return found

        yield following


async def test_a_stream_sends_each_call_from_now_on(http: httpx.AsyncClient) -> None:
    await call(http, 1)
    async with following(http) as everything, following(http, {"outcome": "tool"}) as failures:
        await call(http, 2)
        await call(http, 3, "fails")
        await call(http, 4)
        assert [(await everything())["call_id"] for _ in range(3)] == ["c-2", "c-3", "c-4"]
        assert (await failures())["call_id"] == "c-3"
        await call(http, 5)
        assert (await everything())["call_id"] == "c-5"


@pytest.mark.parametrize(
    ("query", "headers", "first"),
    [
        ({"since": "0"}, {}, "c-1"),
        ({"since": "1"}, {}, "c-2"),
        ({}, {"Last-Event-ID": "2"}, "c-3"),
        ({"since": "0"}, {"Last-Event-ID": "2"}, "c-3"),
        ({}, {"Last-Event-ID": "9000"}, "c-1"),  # of a bus that was there before
    ],
)
async def test_a_client_that_reconnects_gets_the_calls_it_missed(
    http: httpx.AsyncClient, query: dict[str, str], headers: dict[str, str], first: str
) -> None:
    for number in (1, 2, 3):
        await call(http, number)
    async with following(http, query, **headers) as next_call:
        assert (await next_call())["call_id"] == first


async def test_a_stop_of_the_bus_ends_the_streams_at_once() -> None:
    async with running() as bus, client(bus) as http, following(http) as next_call:
        stopwatch = Stopwatch()
        await bus.stop()
        assert stopwatch.seconds() < 0.9  # else their connections would be cut
        with pytest.raises(StopAsyncIteration):
            await next_call()


class Followed:
    """What a follower was told until it knew of a call, or of its loss."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.lost: set[int] = set()

    def take(self, kind: str, data: Words, id: str) -> int:
        """Takes an event; returns the number up to which all is known."""
        if kind == "call":
            self.told.append(data["number"])
            return int(id)
        assert kind == "lost"
        numbers = range(data["first"], data["last"] + 1)
        assert (len(numbers), data["last"]) == (data["count"], int(id))
        assert self.lost.isdisjoint(numbers)
        self.lost.update(numbers)
        return int(id)


async def follow(
    http: httpx.AsyncClient, last: int, begun: asyncio.Barrier, over: asyncio.Event | None = None
) -> Followed:
    """Follows the calls, until all up to a number is known; with an event, reads nothing before it is set."""
    followed = Followed()
    async with http.stream("GET", PATH, headers={"Accept": "text/event-stream"}) as answer:
        lines = answer.aiter_lines()
        assert [await anext(lines), await anext(lines)] == ["retry: 1000", ""]
        await begun.wait()
        if over is not None:
            await over.wait()
        async for event in events(answer, lines):
            if followed.take(*event) >= last:
                return followed
    raise AssertionError("the stream ended")


@pytest.mark.parametrize("rate", [1_000, 3_000])
async def test_followed_and_lost_calls_are_all_calls_for_every_follower(rate: int) -> None:
    small = httpx.AsyncHTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)])
    async with (
        running() as bus,
        client(bus) as http,
        client(bus, params={"name": "rare"}) as some,
        client(bus, transport=small) as slow,
    ):
        begun, over, last = asyncio.Barrier(6), asyncio.Event(), rate + 1
        everything = [asyncio.ensure_future(follow(http, last, begun)) for _ in range(3)]
        filtered = asyncio.ensure_future(follow(some, last, begun))
        late = asyncio.ensure_future(follow(slow, last, begun, over))
        await begun.wait()
        selected = {last}
        for _ in range(rate // 500):
            await asyncio.gather(*(bus.call("rare" if number % 10 == 0 else "echo") for number in range(500)))
            selected.update(record.number for record in bus.records if record.name == "rare")
        await bus.call("rare")
        over.set()
        for followed in await within(asyncio.gather(*everything, late)):
            assert len(followed.told) + len(followed.lost) == last == bus.records.ended
            assert {*followed.told} | followed.lost == set(range(1, last + 1))
            assert followed.told == sorted(followed.told)
        found = await within(filtered)
        assert found.told == sorted(selected - found.lost)


async def test_a_stream_says_exactly_what_was_overwritten_before_it_began() -> None:
    async with running() as bus:
        for number in range(1, 2_501):
            bus.records.add(row(f"c-{number}", "echo", 0.0, 1.0, 0))
        async with client(bus, params={"since": 100}) as since:
            followed = await within(follow(since, 2_500, asyncio.Barrier(1)))
        assert followed.lost == set(range(101, 2_500 - MAX_RECORDS + 1))
        assert followed.told == list(range(2_500 - MAX_RECORDS + 1, 2_501))


async def test_streams_with_the_same_filter_that_keep_up_share_their_bytes(bus: Bus) -> None:
    batches = SharedBatches()
    await bus.call("echo")
    first = batches.after(bus.records, RecordFilter(), 0)
    assert batches.after(bus.records, RecordFilter(), 0) is first
    assert batches.after(bus.records, RecordFilter(name="fails"), 0) is not first
    assert batches.after(bus.records, RecordFilter(), first.position).data == b""


async def test_the_bus_s_own_tool_says_what_a_follower_lost() -> None:
    async with running() as bus:
        for number in range(1, 1_501):
            bus.records.add(row(f"c-{number}", "echo", 0.0, 1.0, 0))
        answer = (await bus.call("toolbus:calls", {"follow": True, "since": 200, "limit": 2})).output
        assert (answer["lost"], answer["next"], ids(answer["calls"])) == (300, 502, ["c-501", "c-502"])
        answer = (await bus.call("toolbus:calls", {"follow": True, "since": 200, "name": "fails"})).output
        assert answer == {"calls": [], "lost": 300, "next": 1500}
        answer = (await bus.call("toolbus:calls", {"follow": True, "limit": 1})).output
        assert (answer["lost"], answer["next"], ids(answer["calls"])) == (0, 1500, ["c-1500"])
        waiting = asyncio.ensure_future(
            bus.call("toolbus:calls", {"follow": True, "since": 1500, "name": "fails", "wait_seconds": WAIT_SECONDS})
        )
        await bus.call("echo")
        await bus.call("fails")
        answer = (await within(waiting)).output
        assert ([each["number"] for each in answer["calls"]], answer["lost"], answer["next"]) == ([1502], 0, 1502)
