"""A request that offers an upgrade is served as if it had not (REST-13): Java and ``curl --http2`` send such."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.bus.gateway.raw_http import Line, ask, request
from toolbus.bus import Bus
from toolbus.testing import running_bus

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOST = "Host: localhost"
H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA")
OFFERS = {
    "java": ("Connection: Upgrade, HTTP2-Settings", HOST, "HTTP2-Settings: AAEA", "Upgrade: h2c", "User-Agent: Java"),
    "curl": (HOST, "User-Agent: curl/7.88.1", "Accept: */*", *H2C),
    "close as well": (HOST, "Connection: close, Upgrade", "Upgrade: h2c"),
    "two connection headers": (HOST, "Connection: Upgrade", "Connection: HTTP2-Settings", *H2C[1:]),
    "websocket": (HOST, "Connection: keep-alive, upgrade", "UPGRADE: websocket", "Sec-WebSocket-Version: 13"),
    "no token in Connection": (HOST, "Upgrade: h2c"),
}
BODY = b'{"source":"nobody"}'
CLEARED = {"ok": True, "removed": 0, "source": "nobody", "affected_roles": [], "failed_roles": []}
CLEAR = "POST /api/tools/clear"
JSON = "Content-Type: application/json"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bus() -> AsyncIterator[Bus]:
    async with running_bus(http="127.0.0.1:0") as running:
        yield running


def in_chunks(body: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (body[:5], body[5:], b""))


@pytest.mark.parametrize("headers", OFFERS.values(), ids=OFFERS.keys())
@pytest.mark.parametrize("kind", ["length", "chunked"])
async def test_the_body_of_a_request_that_offers_an_upgrade_is_read(bus: Bus, headers: Any, kind: str) -> None:
    framing = f"Content-Length: {len(BODY)}" if kind == "length" else "Transfer-Encoding: chunked"
    body = BODY if kind == "length" else in_chunks(BODY)
    answer = await ask(bus, request(CLEAR, *headers, JSON, framing, body=body))
    assert (answer.status, answer.json) == (200, CLEARED)


@pytest.mark.parametrize("pieces", [1, 7, 10_000], ids=["at once", "in sevens", "byte by byte"])
async def test_an_open_connection_takes_one_such_request_after_another(bus: Bus, pieces: int) -> None:
    line = Line(bus)
    one = request(CLEAR, *OFFERS["java"], JSON, f"Content-Length: {len(BODY)}", body=BODY)
    size = -(-len(one) // pieces)
    for _ in range(3):
        for start in range(0, len(one), size):
            await line.say(one[start : start + size])
        assert (await line.answer()).json == CLEARED
    await line.say(request("GET /api/tools", HOST, *H2C))
    assert (await line.answer()).status == 200
    line.close()


async def test_requests_that_offer_an_upgrade_may_be_pipelined(bus: Bus) -> None:
    line = Line(bus)
    length = f"Content-Length: {len(BODY)}"
    plain = request(CLEAR, HOST, JSON, length, body=BODY)
    offering = request(CLEAR, HOST, *H2C, JSON, length, body=BODY)
    await line.say(offering + offering + plain + offering + plain)
    for _ in range(5):
        assert (await line.answer()).json == CLEARED
    line.close()


async def test_a_client_that_waits_for_100_continue_gets_it_before_it_sends_the_body(bus: Bus) -> None:
    line = Line(bus)
    await line.say(request(CLEAR, *OFFERS["curl"], JSON, f"Content-Length: {len(BODY)}", "Expect: 100-continue"))
    assert (await line.answer(bodiless=True)).status == 100
    await line.say(BODY)
    assert (await line.answer()).json == CLEARED
    line.close()


async def test_a_request_that_offers_an_upgrade_and_closes_is_answered_and_closed(bus: Bus) -> None:
    line = Line(bus)
    headers = (*OFFERS["close as well"], JSON, f"Content-Length: {len(BODY)}")
    await line.say(request(CLEAR, *headers, body=BODY))
    answer = await line.answer()
    assert (answer.json, answer.headers["connection"]) == (CLEARED, "close")
    assert await line.is_closed()
    line.close()


async def test_an_upgrade_hides_no_second_request_in_a_body(bus: Bus) -> None:
    """What a parser that gave up at the upgrade would take for the next request is a body here."""
    hidden = request("GET /healthz", HOST)
    line = Line(bus)
    await line.say(request(CLEAR, HOST, *H2C, JSON, f"Content-Length: {len(hidden)}", body=hidden))
    assert (await line.answer()).status == 422
    two = (f"Content-Length: {len(BODY)}", "Transfer-Encoding: chunked")
    await line.say(request(CLEAR, HOST, *H2C, JSON, *two, body=BODY))
    assert (await line.answer()).status == 400
    assert await line.is_closed()
    line.close()


async def test_a_tool_is_registered_and_called_with_javas_headers(bus: Bus) -> None:
    tool = {"name": "java", "callback_url": "http://127.0.0.1:9/", "source": "java"}
    body = json.dumps(tool).encode()
    headers = (*OFFERS["java"], JSON, f"Content-Length: {len(body)}")
    assert (await ask(bus, request("POST /api/tools/register", *headers, body=body))).json["registered"] == "java"
    body = json.dumps({"name": "java"}).encode()
    headers = (*OFFERS["java"], JSON, f"Content-Length: {len(body)}")
    answer = await ask(bus, request("POST /api/tools/invoke", *headers, body=body))
    assert answer.json["error"]["code"] == "UNAVAILABLE"  # it was found, and nobody listens there
