"""Tests how long a connection may take for the head of a request, and the security headers of every answer
(REST-23)."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import struct
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from tests.bus.gateway.raw_http import Answer, Line, ask, request
from tests.support.waiting import WAIT_SECONDS, until, within
from toolbus.bus import Bus
from toolbus.bus.access.neighbours import Neighbours
from toolbus.bus.gateway.http_connection import CONNECTION, LINES_PER_SECOND, MAX_HEAD_BYTES, NO_PAGE, BoundedProtocol
from toolbus.bus.gateway.http_server import HttpServer
from toolbus.protocol.limits import Timings
from toolbus.protocol.tool import Limits
from toolbus.testing import running_bus

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEAD_SECONDS = 0.25  # of the bus under test
PAUSE_SECONDS = 0.02  # between two bytes of a slow client
HOST = "Host: localhost"
MAX_BODY = 20_000
WHOLE = request("GET /api/tools", HOST)
BODY = b'{"source":"nobody"}'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bus() -> AsyncIterator[Bus]:
    timings, limits = Timings(head_seconds=HEAD_SECONDS), Limits(http_body_bytes=MAX_BODY)
    async with running_bus(http="127.0.0.1:0", grace_seconds=0, timings=timings, limits=limits) as running:
        yield running


@asynccontextmanager
async def serving(application: Any, connections: int = 100) -> AsyncIterator[str]:
    """Serves an application; yields its address."""
    server = HttpServer(connections, HEAD_SECONDS, Neighbours())
    server.bind("127.0.0.1:0")
    await server.start(application, {})
    try:
        yield server.address
    finally:
        await server.stop()


class SlowClient(asyncio.Protocol):
    """A connection that keeps what it is sent, also where the other end closes it while more is on the way."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.heard = asyncio.Event()  # something was received
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.heard.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    async def ask(self, data: bytes) -> bytes:
        """Sends bytes at once and returns the first of what they are answered with."""
        self.heard.clear()
        self.transport.write(data)
        await within(self.heard.wait())
        answer = bytes(self.received)
        self.received.clear()
        return answer

    async def trickle(self, data: Iterable[int]) -> bytes:
        """Sends a byte now and then until the other end closes; returns what it said meanwhile."""
        async with asyncio.timeout(WAIT_SECONDS):
            for byte in data:
                self.transport.write(bytes((byte,)))
                await asyncio.sleep(PAUSE_SECONDS)
                if self.closed.is_set():
                    break
            await self.closed.wait()
        return bytes(self.received)


@asynccontextmanager
async def slow_client(address: str | None) -> AsyncIterator[SlowClient]:
    assert address is not None
    host, _, port = address.rpartition(":")
    _, client = await asyncio.get_running_loop().create_connection(SlowClient, host, int(port))
    try:
        yield client
    finally:
        client.transport.abort()


# -- the time of a head ------------------------------------------------------------------------------------------------

ENDLESS = (*b"GET /", *b"x" * 10_000)


def _is_408(said: bytes) -> bool:
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n"), said
    assert b"\r\nconnection: close" in head
    assert f"{HEAD_SECONDS:g} s" in json.loads(body)["detail"]
    return True


@pytest.mark.parametrize(
    "begun",
    [b"", b"GET /api/", b"GET /api/tools HTTP/1.1\r\n", b"GET /api/tools HTTP/1.1\r\nHost: localhost\r\nX: "],
    ids=["nothing", "half a line", "a line", "half a header"],
)
async def test_a_head_that_comes_a_byte_at_a_time_is_answered_with_408(bus: Bus, begun: bytes) -> None:
    async with slow_client(bus.http_address) as client:
        client.transport.write(begun)
        assert _is_408(await client.trickle(ENDLESS[5:] if begun else ENDLESS))


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
async def test_a_slow_head_is_cut_on_every_event_loop(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def run() -> bytes:
        async with serving(_answers) as address, slow_client(address) as client:
            return await client.trickle(ENDLESS)

    def on_thread() -> bytes:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(run())

    assert _is_408(await asyncio.to_thread(on_thread))


async def test_a_slow_head_after_an_answer_is_cut_too(bus: Bus) -> None:
    async with slow_client(bus.http_address) as client:
        for _ in range(2):
            assert (await client.ask(WHOLE)).startswith(b"HTTP/1.1 200 ")
        assert _is_408(await client.trickle(ENDLESS))


async def test_a_head_that_begins_before_an_answer_has_its_time_from_that_answer_on(bus: Bus) -> None:
    async with slow_client(bus.http_address) as client:
        assert (await client.ask(WHOLE + WHOLE[:20])).startswith(b"HTTP/1.1 200 ")
        assert _is_408(await client.trickle(b""))


@pytest.mark.parametrize("answered", [False, True], ids=["at once", "after an answer"])
async def test_empty_lines_before_a_request_do_not_hold_a_connection(bus: Bus, answered: bool) -> None:
    async with slow_client(bus.http_address) as client:
        if answered:
            await client.ask(WHOLE)
        assert await client.trickle(b"\r\n" * 10_000) == b""


async def test_a_connection_without_a_byte_is_closed_without_an_answer(bus: Bus) -> None:
    async with slow_client(bus.http_address) as client:
        assert await client.trickle(b"") == b""


async def test_a_body_that_goes_on_after_its_answer_does_not_hold_a_connection(bus: Bus) -> None:
    async with slow_client(bus.http_address) as client:
        head = request("POST /api/tools/clear", HOST, f"Content-Length: {MAX_BODY + 1}")
        assert (await client.ask(head)).startswith(b"HTTP/1.1 413 ")
        assert await client.trickle(b"x" * MAX_BODY) == b""


async def test_bytes_after_an_upgrade_that_is_not_granted_do_not_hold_a_connection(bus: Bus) -> None:
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAA")
    async with slow_client(bus.http_address) as client:
        assert (await client.ask(request("GET /api/tools", HOST, *upgrade))).startswith(b"HTTP/1.1 200 ")
        await client.trickle(b"x" * 10_000)


async def test_a_client_that_does_not_read_its_answer_either_is_cut_off(bus: Bus) -> None:
    async def answers_at_length(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 16_000_000})

    async with serving(answers_at_length) as address, slow_client(address) as client:
        client.transport.pause_reading()
        client.transport.write(WHOLE)
        await client.trickle(b"\r\n" * 10_000)


async def test_an_idle_connection_a_slow_body_and_a_stream_outlast_the_time_of_a_head(bus: Bus) -> None:
    idle, body, stream = lines = [Line(bus) for _ in range(3)]
    await idle.say(WHOLE)
    assert (await idle.answer()).status == 200
    await body.say(request("POST /api/tools/clear", HOST, f"Content-Length: {len(BODY)}") + BODY[:5])
    await stream.say(request("GET /api/tools/events", HOST))
    assert (await stream.answer(bodiless=True)).status == 200
    for _ in range(3):  # three times as long as a head may take
        async with slow_client(bus.http_address) as client:
            await client.trickle(b"")
    await idle.say(WHOLE)
    assert (await idle.answer()).status == 200
    await body.say(BODY[5:])
    assert (await body.answer()).status == 200
    assert not await stream.is_closed()  # it has the first event
    for line in lines:
        line.close()


async def _answers(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


# -- the security headers of every answer ------------------------------------------------------------------------------

SECURITY_HEADERS = {
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
FOREIGN = "Origin: http://localhost:1"
ANSWERS = [
    (200, request("GET /api/tools", HOST)),
    (200, request("GET /api/tools/events", HOST)),
    (200, request("GET /openapi.json", HOST)),
    (200, request("GET /static-offline-docs/swagger-ui-bundle.js", HOST)),
    (200, request("GET /healthz", HOST)),
    (304, request("GET /static-offline-docs/swagger-ui.css", HOST, "If-Modified-Since: Fri, 01 Jan 2100 00:00:00 GMT")),
    (307, request("GET /api/tools/", HOST)),
    (400, b"not HTTP\r\n\r\n"),
    (400, b"GET /" + b"x" * MAX_HEAD_BYTES),
    (400, request("POST /api/tools/clear", HOST, "Content-Length: 1", "Transfer-Encoding: chunked")),
    (403, request("GET /api/tools", "Host: evil.example")),
    (403, request("POST /api/bus/stats", HOST, FOREIGN, "Content-Length: 0")),
    (404, request("GET /nowhere", HOST)),
    (405, request("OPTIONS /api/tools/register", HOST, FOREIGN, "Access-Control-Request-Method: POST")),
    (408, b"GET /api/tools HTTP/1.1\r\n"),
    (413, request("POST /api/tools/clear", HOST, f"Content-Length: {MAX_BODY + 1}")),
    (415, request("POST /api/tools/clear", HOST, FOREIGN, "Content-Length: 0")),
    (422, request("POST /api/tools/clear", HOST, "Content-Length: 2", body=b"{}")),
    (501, request("POST /api/tools/clear", HOST, "Transfer-Encoding: gzip, chunked")),
]


async def _head(bus: Bus | str, data: bytes) -> Answer:
    line = Line(bus)
    await line.say(data)
    answer = await line.answer(bodiless=True)
    line.close()
    return answer


@pytest.mark.parametrize(("status", "data"), ANSWERS, ids=[f"{status}-{data[:30]!r}" for status, data in ANSWERS])
async def test_every_answer_has_the_security_headers(bus: Bus, status: int, data: bytes) -> None:
    answer = await _head(bus, data)
    assert answer.status == status
    assert answer.headers.items() >= SECURITY_HEADERS.items()
    assert answer.headers["content-security-policy"] == NO_PAGE
    assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("beyond", [0, 1, 99])
@pytest.mark.parametrize("pieces", [1, 2])
async def test_a_whole_head_has_at_most_so_many_bytes_in_however_many_reads(beyond: int, pieces: int) -> None:
    size = MAX_HEAD_BYTES + beyond
    data = request("GET /api/tools", HOST, "X: ")
    data = data.replace(b"X: ", b"X: " + b"x" * (size - len(data)))
    timings = Timings(head_seconds=WAIT_SECONDS)  # of `bus` they are over where a busy machine reads late
    async with running_bus(http="127.0.0.1:0", grace_seconds=0, timings=timings) as bus:
        line = Line(bus)
        for begin in range(0, size, size // pieces + 1):
            await line.say(data[begin : begin + size // pieces + 1])
            await asyncio.sleep(PAUSE_SECONDS)
        answer = await line.answer()
        line.close()
    if beyond:
        assert (answer.status, f"more than {MAX_HEAD_BYTES} bytes" in answer.body.decode()) == (400, True)
    else:
        assert answer.status == 200


async def test_an_application_that_fails_and_one_connection_too_many_are_answered_with_the_security_headers() -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/raise":
            raise ValueError("the test's own")

    async with serving(fails, connections=1) as address:
        for path in ("/raise", "/say-nothing"):
            answer = await _head(address, request(f"GET {path}", HOST))
            assert answer.status == 500
            assert answer.headers.items() >= SECURITY_HEADERS.items()
        held = Line(address)
        await held.say(b"G")
        answer = await within(_head(address, request("GET /", HOST)))
        assert answer.status == 503
        assert answer.headers.items() >= SECURITY_HEADERS.items()
        held.close()


async def test_clients_can_cause_only_some_lines_of_the_log_in_a_second(
    bus: Bus, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A server of another test that has uvicorn's own log configuration changes both for the whole process.
    monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
    caplog.set_level(logging.WARNING, "uvicorn.error")
    for kind, data in (
        ("Invalid HTTP", b"no request\r\n\r\n"),
        ("refused method", request("GET /", "Host: evil.example")),
    ):
        caplog.clear()
        began = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(ask(bus, data) for _ in range(5 * LINES_PER_SECOND)))
        seconds = asyncio.get_running_loop().time() - began
        assert {answer.status for answer in answers} <= {400, 403}
        logged = sum(kind in line for line in caplog.messages)
        assert 1 <= logged <= LINES_PER_SECOND * (seconds + 2.0)


async def test_the_page_of_documentation_runs_its_own_scripts_alone_and_cannot_be_framed(bus: Bus) -> None:
    answer = await ask(bus, request("GET /docs", HOST))
    assert answer.status == 200
    assert answer.headers.items() >= SECURITY_HEADERS.items()
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    own, *hashes = policy["script-src"].split(" ")
    assert own == "'self'"
    assert len(hashes) == 1
    assert hashes[0].startswith("'sha256-")


async def test_a_lost_connection_leaves_nothing_to_the_garbage_collection(bus: Bus) -> None:
    assert bus.http_address is not None
    host, _, port = bus.http_address.rpartition(":")

    def connections() -> set[int]:
        return {id(each) for each in gc.get_objects() if type(each) is BoundedProtocol}

    gc.collect()
    gc.disable()
    try:
        before = connections()
        for data in (WHOLE, WHOLE[:-2], b"\xff\xff\r\n\r\n"):
            for is_reset in (0, 1):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(data)
                await within(reader.read(1))  # of a head that is not complete after a while
                how = struct.pack("ii", is_reset, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, how)
                writer.close()
        await until(lambda: connections() <= before, "every connection has gone")
    finally:
        gc.enable()


async def test_an_answer_ends_without_a_fault_where_its_connection_is_lost_with_others_behind_it() -> None:
    begun, ended = asyncio.Event(), asyncio.Queue[BaseException | None]()
    gone: list[weakref.ref[BoundedProtocol]] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        connection = scope[CONNECTION]
        gone.append(weakref.ref(connection))
        begun.set()
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while connection in connection.connections:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b""})
        except Exception as fault:
            ended.put_nowait(fault)
        else:
            ended.put_nowait(None)

    gc.collect()
    gc.disable()
    try:
        async with serving(application) as address:
            host, _, port = address.rpartition(":")
            for behind in (WHOLE + WHOLE[:-2], request("POST /api/tools", HOST, "Content-Length: 9") + b"x"):
                begun.clear()
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(WHOLE + behind)
                await within(begun.wait())
                writer.transport.abort()
                assert await within(ended.get()) is None
                await until(lambda: gone[-1]() is None, "the connection has gone")
    finally:
        gc.enable()
