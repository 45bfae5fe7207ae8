# ruff: noqa: F401, F811  # fixtures are imported by name and asked for by name

from __future__ import annotations

import asyncio

import pytest

from tests.bus.gateway.access_cases import CLEAR, HOST, LENGTH, MOST, bus
from tests.bus.gateway.calling import client
from tests.bus.gateway.raw_http import Line, ask, request
from toolbus.bus import Bus
from toolbus.testing import running_bus

pytestmark = pytest.mark.asyncio(loop_scope="module")

# -- bodies and framing ------------------------------------------------------------------------------------------------


async def test_a_foreign_client_is_refused_before_its_body_is_read(bus: Bus) -> None:
    for length in (f"Content-Length: {MOST}", "Content-Length: 99999999", "Transfer-Encoding: chunked"):
        for expect in ((), ("Expect: 100-continue",)):
            answer = await ask(bus, request("POST /api/tools/register", "Host: evil.example", length, *expect))
            assert answer.status == 403


async def test_a_body_over_the_limit_is_refused_by_its_length_alone(bus: Bus) -> None:
    for path in ("/api/tools/register", "/api/tools/invoke", "/api/bus/drain", "/nowhere"):
        answer = await ask(bus, request(f"POST {path}", HOST, f"Content-Length: {MOST + 1}"))
        assert answer.status == 413
        assert f"http_body_bytes = {MOST}" in answer.json["detail"]


async def test_a_body_of_exactly_the_limit_is_read(bus: Bus) -> None:
    body = CLEAR.ljust(MOST)
    answer = await ask(bus, request("POST /api/tools/clear", HOST, f"Content-Length: {MOST}", body=body))
    assert answer.status == 200


async def test_a_chunked_body_is_refused_once_it_passes_the_limit(bus: Bus) -> None:
    line = Line(bus)
    chunk = b"1000\r\n" + b" " * 0x1000 + b"\r\n"
    await line.say(request("POST /api/tools/clear", HOST, "Transfer-Encoding: chunked") + chunk * (MOST // 0x1000 + 1))
    answer = await line.answer()  # no last chunk was sent
    line.close()
    assert answer.status == 413
    assert f"http_body_bytes = {MOST}" in answer.json["detail"]


async def test_a_slow_body_delays_no_other_request(bus: Bus) -> None:
    slow = [Line(bus) for _ in range(20)]
    for line in slow:
        await line.say(request("POST /api/tools/clear", HOST, LENGTH) + CLEAR[:5])
    async with client(bus) as http:
        assert (await http.get("/api/tools")).status_code == 200
    for line in slow:
        await line.say(CLEAR[5:])
        assert (await line.answer()).status == 200
        line.close()


async def test_a_compressed_body_is_not_unpacked(bus: Bus) -> None:
    packed = b"\x1f\x8b\x08\x00" + b"\0" * 20
    kind = ("Content-Encoding: gzip", "Content-Type: application/json", f"Content-Length: {len(packed)}")
    answer = await ask(bus, request("POST /api/tools/clear", HOST, *kind, body=packed))
    assert answer.status in (400, 422)


@pytest.mark.parametrize(
    "lengths",
    [
        ("Content-Length: 3", LENGTH),
        ("Content-Length: -1",),
        ("Content-Length: +19",),
        ("Content-Length: 1_9",),
        ("Content-Length: 0x13",),
        ("Content-Length: 19, 3",),
        ("Content-Length : 19",),
        ("Content-Length: 9999999999999999999999999",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding: gzip, chunked",),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        (LENGTH, "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", "Content-Length: 0"),
    ],
)
async def test_a_body_whose_length_can_be_read_in_two_ways_is_refused_and_nothing_after_it_is_read(
    bus: Bus, lengths: tuple[str, ...]
) -> None:
    smuggled = request("POST /api/bus/drain", HOST, "Content-Length: 0")
    line = Line(bus)
    await line.say(request("POST /api/tools/clear", HOST, *lengths, body=b"0\r\n\r\n" + smuggled))
    answer = await line.answer()
    assert answer.status in (400, 501)
    assert await line.is_closed()
    line.close()
    async with client(bus) as http:
        assert (await http.get("/readyz")).json() == {"status": "ready"}


@pytest.mark.parametrize("kind", ["header", "target", "many headers", "no end"])
async def test_an_endless_head_is_cut_off(bus: Bus, kind: str) -> None:
    flood = {
        "header": b"GET /api/tools HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 4_000_000,
        "target": b"GET /" + b"a" * 4_000_000,
        "many headers": b"GET /api/tools HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 600_000,
        "no end": b"\r\n" * 2_000_000 + b"G" * 1_000_000,
    }[kind]
    line = Line(bus)
    try:
        for start in range(0, len(flood), 1 << 16):
            await line.say(flood[start : start + (1 << 16)])
        assert (await line.answer()).status in (400, 431)
    except (ConnectionError, asyncio.IncompleteReadError):
        pass  # cut off so early that the answer was lost
    cut = await _is_cut(line)
    line.close()
    assert cut or kind == "no end"
    async with client(bus) as http:
        assert (await http.get("/healthz")).status_code == 200


async def _is_cut(line: Line) -> bool:
    try:
        return await line.is_closed()
    except ConnectionError:
        return True


@pytest.mark.parametrize("data", [b"\x00\x01garbage\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"])
async def test_bytes_that_are_not_http_are_refused(bus: Bus, data: bytes) -> None:
    assert (await ask(bus, data)).status == 400


async def test_requests_in_one_piece_are_answered_in_order_and_a_refusal_among_them_is_one_answer(bus: Bus) -> None:
    line = Line(bus)
    clear = request("POST /api/tools/clear", HOST, LENGTH, body=CLEAR)
    stranger = request("GET /api/tools", "Host: evil.example")
    await line.say(clear + stranger + request("GET /healthz", HOST) + clear)
    assert [(await line.answer()).status for _ in range(4)] == [200, 403, 200, 200]
    line.close()


async def test_a_loopback_bus_on_ipv6_holds_the_same_rule() -> None:
    async with running_bus(http="[::1]:0") as bus:
        assert (await ask(bus, request("GET /api/tools", "Host: [::1]"))).status == 200
        assert (await ask(bus, request("GET /api/tools", "Host: evil.example"))).status == 403
