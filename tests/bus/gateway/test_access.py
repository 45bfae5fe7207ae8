"""Tests who may ask over HTTP (REST-20 to REST-22), and what a connection may do to the bus: bytes on sockets, no
library."""

# ruff: noqa: F401, F811  # fixtures are imported by name and asked for by name

from __future__ import annotations

import logging

import pytest

from tests.bus.gateway.access_cases import CLEAR, HOST, LENGTH, bus
from tests.bus.gateway.calling import client
from tests.bus.gateway.raw_http import ask, request
from toolbus.bus import Bus

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATHS = ("/", "/api/tools", "/api/tools/", "/api/tools/register", "/docs", "/openapi.json", "/readyz", "/nowhere", "//")


# -- the Host header (REST-21) -----------------------------------------------------------------------------------------

HOSTS_TAKEN = (
    "127.0.0.1",
    "127.0.0.1:1",
    "127.0.0.1:65535",
    "127.255.255.254:48911",
    "localhost",
    "LocalHost:80",
    "[::1]",
    "[::1]:48911",
    "[0:0:0:0:0:0:0:1]:80",
    "[::ffff:127.0.0.1]",
    "[::FFFF:7f00:1]:9",
)


HOSTS_REFUSED = (
    "",
    "evil.example",
    "evil.example:48911",
    "localhost.",
    "localhost.:48911",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "127.0.0.1.",
    "user@127.0.0.1",
    "user:secret@127.0.0.1",
    "127.0.0.1@evil.example",
    "2130706433",
    "0x7f000001",
    "0177.0.0.1",
    "127.1",
    "127.0.0.01",
    "0.0.0.0",
    "[::]",
    "::1",
    "[::1%lo]",
    "[::1",
    "[::127.0.0.1]",
    "[::ffff:8.8.8.8]",
    "[fe80::1]",
    "192.168.0.1:48911",
    "127.0.0.1:0",
    "127.0.0.1:65536",
    "127.0.0.1:-1",
    "127.0.0.1:80:80",
    "127.0.0.1:8o",
    "127.0.0.1, evil.example",
    "127.0.0.1/evil.example",
    "127.0.0.1#evil.example",
    "127.0.0.1 evil.example",
    "*",
    "\xe4",
)


async def test_every_spelling_of_this_machine_is_taken_in_the_host_header(bus: Bus) -> None:
    for host in HOSTS_TAKEN:
        answer = await ask(bus, request("GET /api/tools", f"Host: {host}"))
        assert answer.status == 200, (host, answer)


async def test_no_other_name_or_spelling_is_taken_in_the_host_header(bus: Bus) -> None:
    for host in HOSTS_REFUSED:
        answer = await ask(bus, request("GET /api/tools", f"Host: {host}"))
        assert (answer.status, "Host" in answer.json["detail"]) == (403, True), (host, answer)
        assert b"secret" not in answer.body


@pytest.mark.parametrize(
    ("line", "headers", "status"),
    [
        ("GET /api/tools HTTP/1.1", (), 403),
        ("GET /api/tools HTTP/1.0", (), 403),
        ("GET /api/tools HTTP/1.0", (HOST,), 200),
        ("GET /api/tools HTTP/1.1", (HOST, HOST), 403),
        ("GET /api/tools HTTP/1.0", (HOST, HOST), 403),
        ("GET /api/tools HTTP/1.0", (HOST, "Host: evil.example"), 403),
        ("GET /api/tools HTTP/1.1", ("Host: evil.example", " localhost"), 400),
        ("GET /api/tools HTTP/1.1", ("X-Forwarded-Host: localhost", "Host: evil.example"), 403),
    ],
)
async def test_a_host_header_that_is_missing_doubled_or_folded_is_refused(
    bus: Bus, line: str, headers: tuple[str, ...], status: int
) -> None:
    answer = await ask(bus, "\r\n".join([line, *headers, "", ""]).encode())
    assert answer.status == status


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT"])
async def test_no_path_and_no_method_answers_a_foreign_client(bus: Bus, method: str) -> None:
    for path in PATHS:
        answer = await ask(bus, request(f"{method} {path}", "Host: evil.example"))
        assert answer.status == 403, (path, answer)


async def test_probes_may_ask_with_head(bus: Bus) -> None:
    for path in ("/healthz", "/readyz"):
        answer = await ask(bus, request(f"HEAD {path}", HOST))
        assert (answer.status, answer.body) == (200, b"")


async def test_health_answers_with_any_headers_and_no_other_path_passes_as_health(bus: Bus) -> None:
    strange = ("Host: evil.example", "Origin: https://evil.example")
    answer = await ask(bus, request("GET /healthz", *strange))
    assert (answer.status, answer.json) == (200, {"status": "ok"})
    for path in ("/healthz/", "/HEALTHZ", "//healthz", "/healthz/../api/tools", "/healthz%2f", "http://h/readyz"):
        answer = await ask(bus, request(f"GET {path}", *strange))
        assert answer.status == 403, (path, answer)


# -- the Origin header, and headers that name another client -----------------------------------------------------------


@pytest.mark.parametrize("origin", ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:8080"])
async def test_a_page_of_this_machine_may_send_requests_but_gets_no_cors_headers(bus: Bus, origin: str) -> None:
    for path in ("/api/tools", "/docs", "/healthz"):
        answer = await ask(bus, request(f"GET {path}", HOST, f"Origin: {origin}"))
        assert answer.status == 200
        assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize(
    "origins",
    [
        ("null",),
        ("",),
        ("https://evil.example",),
        ("http://localhost.evil.example",),
        ("http://localhost.",),
        ("http://user:secret@localhost",),
        ("http://localhost/page",),
        ("file://",),
        ("file://localhost",),
        ("chrome-extension://localhost",),
        ("http://localhost http://evil.example",),
        ("http://localhost", "https://evil.example"),
        ("https://evil.example", "http://localhost"),
        ("localhost",),
    ],
)
async def test_any_other_page_is_refused(bus: Bus, origins: tuple[str, ...]) -> None:
    headers = [f"Origin: {origin}" for origin in origins]
    answer = await ask(bus, request("POST /api/tools/clear", HOST, LENGTH, *headers, body=CLEAR))
    assert (answer.status, "Origin" in answer.json["detail"]) == (403, True)
    assert b"secret" not in answer.body


# Pages of another port of this machine: a browser sends these without asking (REST-22).
HIDDEN = (
    (),
    ("text/plain",),
    ("text/plain;charset=UTF-8",),
    ("application/x-www-form-urlencoded",),
    ("multipart/form-data; boundary=application/json",),
    ("text/plain, application/json",),
    ("text/plain; application/json",),
    ("application/jsonp",),
    ("application/json, text/plain",),
    ("application/json", "text/plain"),
    ("application/json", "application/json"),
    ("",),
)


SHOWN = ("application/json", "application/json; charset=utf-8", "Application/JSON;x", "application/vnd.x+json")


CHANGES = (
    "POST /api/tools/register",
    "POST /api/tools/unregister",
    "POST /api/tools/clear",
    "POST /api/tools/invoke",
    "POST /api/llm-tools/callback/a/b",
    "POST /api/tasks/x/redirect",
    "DELETE /api/tasks/x",
    "POST /api/council/run",
    "POST /api/council/retry",
    "POST /nowhere",
)


@pytest.mark.parametrize("kinds", HIDDEN)
async def test_a_page_of_another_port_is_refused_unless_it_says_that_its_body_is_json(
    bus: Bus, kinds: tuple[str, ...]
) -> None:
    headers = ("Origin: http://localhost:9000", *(f"Content-Type: {kind}" for kind in kinds))
    for line in CHANGES:
        for length in (LENGTH, "Content-Length: 0", "Transfer-Encoding: chunked"):
            answer = await ask(bus, request(line, HOST, length, *headers))
            assert answer.status == 415, (line, answer)
            assert "Content-Type: application/json" in answer.json["detail"]


@pytest.mark.parametrize("kind", SHOWN)
async def test_a_page_of_another_port_may_send_json_after_a_preflight(bus: Bus, kind: str) -> None:
    headers = ("Origin: http://localhost:9000", f"Content-Type: {kind}", LENGTH)
    assert (await ask(bus, request("POST /api/tools/clear", HOST, *headers, body=CLEAR))).status == 200


@pytest.mark.parametrize("origin", ["http://localhost:9000", "https://127.0.0.1", "http://[::1]:8080"])
async def test_a_page_of_another_port_never_administers_the_bus(bus: Bus, origin: str) -> None:
    for line in ("POST /api/bus/drain", "POST /api/bus/stats", "GET /api/bus/stats", "OPTIONS /api/bus/drain"):
        for kind in ("application/json", "text/plain"):
            headers = (f"Origin: {origin}", f"Content-Type: {kind}", "Content-Length: 2")
            answer = await ask(bus, request(line, HOST, *headers, body=b"{}"))
            assert answer.status == 403
            assert "administer" in answer.json["detail"]
    async with client(bus) as http:
        assert (await http.get("/readyz")).json() == {"status": "ready"}


def _own(bus: Bus, scheme: str = "http", name: str = "127.0.0.1", more: int = 0) -> str:
    assert bus.http_address is not None
    return f"{scheme}://{name}:{int(bus.http_address.rpartition(':')[2]) + more}"


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::1]"])
async def test_a_page_of_the_listener_itself_is_served_like_a_program(bus: Bus, name: str) -> None:
    origin = _own(bus, name=name)
    own = (f"Host: {origin[7:]}", f"Origin: {origin}")
    assert (await ask(bus, request("POST /api/tools/clear", *own, LENGTH, body=CLEAR))).status == 200
    assert (await ask(bus, request("POST /api/bus/stats", *own, "Content-Length: 0"))).status == 200


async def test_any_part_of_an_origin_that_differs_makes_it_a_page_of_another_server(bus: Bus) -> None:
    here = _own(bus)
    for host, origin in (
        (here, _own(bus, name="localhost")),
        (_own(bus, name="localhost"), here),
        (here, _own(bus, scheme="https")),
        (here, _own(bus, more=1)),
        (_own(bus, more=1), _own(bus, more=1)),  # the name that a rebinding page of another port would have
        (here, "http://127.0.0.1"),
        ("http://127.0.0.1", "http://127.0.0.1"),
    ):
        headers = (f"Host: {host.partition('//')[2]}", f"Origin: {origin}", "Content-Length: 0")
        answer = await ask(bus, request("POST /api/bus/stats", *headers))
        assert answer.status == 403, (host, origin)
    both = (f"Host: {here[7:]}", f"Origin: {here}", "Origin: http://localhost:9000", "Content-Length: 0")
    assert (await ask(bus, request("POST /api/bus/stats", *both))).status == 403


async def test_no_preflight_is_granted_on_any_path(bus: Bus) -> None:
    asks = ("Access-Control-Request-Headers: content-type", "Access-Control-Request-Private-Network: true")
    for line in (*CHANGES, "POST /api/bus/drain", "GET /docs", "GET /openapi.json", "GET /healthz", "GET *"):
        method, path = line.split(" ")
        for origin in ("http://localhost:9000", _own(bus), "https://evil.example", "null"):
            wanted = (f"Origin: {origin}", f"Access-Control-Request-Method: {method}", *asks)
            answer = await ask(bus, request(f"OPTIONS {path}", f"Host: {_own(bus)[7:]}", *wanted))
            assert answer.status in (403, 404, 405), (path, origin, answer)
            assert not [name for name in answer.headers if name.startswith("access-control-")]


async def test_a_preflight_of_a_browser_gets_no_cors_headers(bus: Bus) -> None:
    asks = ("Origin: http://localhost:3000", "Access-Control-Request-Method: POST")
    answer = await ask(bus, request("OPTIONS /api/tools/register", HOST, *asks))
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert not [name for name in answer.headers if name.startswith("access-control-")]


async def test_headers_of_proxies_about_the_client_are_ignored(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for value in ("8.8.8.8", "127.0.0.1"):
        said = (f"X-Forwarded-For: {value}", f"X-Real-IP: {value}", f"Forwarded: for={value};host=x;proto=https")
        answer = await ask(bus, request("GET /api/tools", HOST, *said))
        assert answer.status == 200  # the socket says loopback
        answer = await ask(bus, request("GET /api/tools", "Host: evil.example", *said))
        assert answer.status == 403
        answer = await ask(bus, request("GET /api/tools/", HOST, *said, "X-Forwarded-Proto: https"))
        assert answer.headers["location"] == "http://localhost/api/tools"
    assert "8.8.8.8" not in caplog.text


# -- paths and methods (REST-9) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "//api/tools",
        "/api//tools",
        "/api/tools/../tools",
        "/api/%2e%2e/api/tools",
        "/API/TOOLS",
        "/api/tools%00",
        "/api/tools;x",
        "/%ff%fe",
        "/static-offline-docs/../../app.py",
        "/static-offline-docs/%2e%2e/%2e%2e/pyproject.toml",
        "/static-offline-docs/..%2f..%2f..%2fetc/passwd",
        "*",
    ],
)
async def test_manipulated_paths_reach_no_endpoint(bus: Bus, path: str) -> None:
    answer = await ask(bus, request(f"GET {path}", HOST))
    assert (answer.status, answer.json) == (404, {"detail": "Not Found"})


async def test_an_absolute_url_as_the_target_reaches_its_path_only(bus: Bus) -> None:
    assert (await ask(bus, request("GET http://localhost/api/tools", HOST))).status == 200
    assert (await ask(bus, request("GET http://localhost/api/tools", "Host: evil.example"))).status == 403
    assert (await ask(bus, request("GET evil.example:443", HOST))).status == 400


@pytest.mark.parametrize(
    ("path", "host", "location"),
    [
        ("/api/tools/", "127.0.0.1:9", "http://127.0.0.1:9/api/tools"),
        ("/api/tools/?role=a%20b", "[::1]:9", "http://[::1]:9/api/tools?role=a%20b"),
        ("/api/tools/register/", "localhost", "http://localhost/api/tools/register"),
    ],
)
async def test_a_trailing_slash_is_redirected_to_the_same_host(bus: Bus, path: str, host: str, location: str) -> None:
    method = "POST" if "register" in path else "GET"
    answer = await ask(bus, request(f"{method} {path}", f"Host: {host}", "Content-Length: 0"))
    assert (answer.status, answer.headers["location"]) == (307, location)


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ("POST /api/tools", "GET"),
        ("HEAD /api/tools", "GET"),
        ("TRACE /api/tools", "GET"),
        ("GET /api/tools/register", "POST"),
        ("DELETE /api/tools/clear", "POST"),
        ("OPTIONS /api/tools/invoke", "POST"),
        ("GET /api/bus/drain", "POST"),
        ("GET /api/llm-tools/callback/a/b", "POST"),
        ("POST /healthz", "GET"),
    ],
)
async def test_a_wrong_method_gets_405_with_the_right_one(bus: Bus, line: str, allowed: str) -> None:
    answer = await ask(bus, request(line, HOST))
    assert (answer.status, answer.headers["allow"]) == (405, allowed)
    assert line.startswith("HEAD") or answer.json == {"detail": "Method Not Allowed"}


async def test_a_web_socket_is_not_opened(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAA")
    assert (await ask(bus, request("GET /api/tools", HOST, *upgrade))).status == 200  # as if it had not asked
    assert (await ask(bus, request("GET /api/tools", "Host: evil.example", *upgrade))).status == 403
    assert "WebSocket" not in caplog.text  # uvicorn advises to install a library
    assert (await ask(bus, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")).status in (400, 403)
