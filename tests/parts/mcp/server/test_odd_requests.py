"""The endpoint answers what no client should send with an error that helps, and never with a fault of its own."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from toolbus.bus import Bus
from toolbus.parts.mcp.messages.eras import META_CAPABILITIES, META_VERSION, NEWEST
from toolbus.parts.mcp.messages.jsonrpc import McpCode
from toolbus.testing import running_bus

META = {META_VERSION: NEWEST, META_CAPABILITIES: {}}
LEGACY = "2025-06-18"


class Client:
    """Sends whatever it is given."""

    def __init__(self, bus: Bus, http: aiohttp.ClientSession) -> None:
        self._url = f"http://{bus.http_address}/mcp"
        self._http = http
        self.session: dict[str, str] = {}

    async def post(self, body: Any, **headers: str) -> tuple[int, Any]:
        """Returns the status, and the answer if there is one."""
        data = io.BytesIO(body) if isinstance(body, bytes) else json.dumps({"jsonrpc": "2.0", **body}).encode()
        sent = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", **headers}
        async with self._http.post(self._url, data=data, headers=sent) as response:
            if "mcp-session-id" in response.headers:
                self.session = {"Mcp-Session-Id": response.headers["mcp-session-id"], "MCP-Protocol-Version": LEGACY}
            text = await response.text()
            return response.status, json.loads(text) if text else None

    async def ask(self, method: str, params: dict[str, Any], **headers: str) -> tuple[int, Any]:
        """Makes a request of the modern era."""
        named = next((params[key] for key in ("name", "uri", "taskId") if isinstance(params.get(key), str)), None)
        sent = {"MCP-Protocol-Version": NEWEST, "Mcp-Method": method, **({"Mcp-Name": named} if named else {})}
        return await self.post({"id": 1, "method": method, "params": {**params, "_meta": META}}, **sent, **headers)

    async def initialize(self) -> None:
        """Begins a session of the legacy era."""
        params = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
        await self.post({"id": 1, "method": "initialize", "params": params})


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with running_bus(http="127.0.0.1:0") as bus, aiohttp.ClientSession() as http:

        @bus.tool
        def add(a: int = 1, b: int = 2) -> int:
            return a + b

        yield Client(bus, http)


MESSAGES: list[tuple[bytes, int]] = [
    (b"", McpCode.PARSE_ERROR),
    (b"{", McpCode.PARSE_ERROR),
    (b"\xff\xfe", McpCode.PARSE_ERROR),
    (b"null", McpCode.INVALID_REQUEST),
    (b"[" * 100_000, McpCode.INVALID_REQUEST),
    (b'[{"jsonrpc":"2.0","id":2,"method":"ping"}]', McpCode.INVALID_REQUEST),
    (b'{"jsonrpc":"2.0"}', McpCode.INVALID_REQUEST),
    (b'{"jsonrpc":"2.0","id":{},"method":"ping"}', McpCode.INVALID_REQUEST),
    (b'{"jsonrpc":"2.0","id":1,"result":{}}', McpCode.INVALID_REQUEST),
    (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":%b1%b}' % (b'{"a":' * 3000, b"}" * 3000), McpCode.PARSE_ERROR),
    (b'{"jsonrpc":"2.0","id":1,"method":"tools/list","params":[]}', McpCode.INVALID_PARAMS),
    (b'{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"_meta":5}}', McpCode.INVALID_PARAMS),
]


async def test_what_is_no_message_is_refused_with_its_reason(client: Client) -> None:
    for data, code in MESSAGES:
        status, answer = await client.post(data)
        assert (status, answer["error"]["code"]) == (400, code), data[:60]
        assert len(answer["error"]["message"]) > 20


REQUESTS: list[tuple[str, dict[str, Any], int]] = [
    ("nope", {}, McpCode.METHOD_NOT_FOUND),
    ("initialize", {"protocolVersion": LEGACY}, McpCode.METHOD_NOT_FOUND),
    ("tools/call", {"name": "nope"}, McpCode.INVALID_PARAMS),
    ("tools/call", {"name": "add", "arguments": [1]}, McpCode.INVALID_PARAMS),
    ("tools/call", {"name": "add", "requestState": "x", "inputResponses": {}}, McpCode.INVALID_PARAMS),
    ("tools/call", {"name": 5}, McpCode.INVALID_PARAMS),
    ("tools/call", {}, McpCode.HEADER_MISMATCH),
    ("tools/list", {"cursor": "x"}, McpCode.INVALID_PARAMS),
    ("tools/list", {"cursor": 5}, McpCode.INVALID_PARAMS),
    ("prompts/get", {"name": "x"}, McpCode.INVALID_PARAMS),
    ("resources/read", {"uri": "x://y"}, McpCode.INVALID_PARAMS),
    ("completion/complete", {"ref": {}, "argument": {}}, McpCode.INVALID_PARAMS),
    ("tasks/get", {"taskId": "x"}, McpCode.MISSING_CAPABILITY),
]


async def test_a_wrong_request_of_the_modern_era_is_refused_with_its_code(client: Client) -> None:
    for method, params, code in REQUESTS:
        status, answer = await client.ask(method, params)
        assert answer["error"]["code"] == code, (method, params, answer)
        assert status == (404 if code == McpCode.METHOD_NOT_FOUND else 400)


async def test_a_call_with_null_for_its_arguments_has_none(client: Client) -> None:
    _, answer = await client.ask("tools/call", {"name": "add", "arguments": None})
    assert answer["result"]["structuredContent"] == 3


NULLS: list[str] = [
    '"params":null',
    '"params":{"_meta":null}',
    '"params":{"_meta":{"progressToken":null,"traceparent":null,"tracestate":null}}',
    '"params":{"cursor":null,"_meta":null}',
]


@pytest.mark.parametrize("params", NULLS)
async def test_what_is_null_counts_as_left_out_in_every_method(client: Client, params: str) -> None:
    opening = b'{"jsonrpc":"2.0","id":1,"method":"initialize",%b}' % params.encode()
    assert "protocolVersion" in (await client.post(opening))[1]["error"]["message"]  # what it still lacks
    await client.initialize()
    for method in ("ping", "tools/list", "prompts/list", "resources/list", "resources/templates/list"):
        body = b'{"jsonrpc":"2.0","id":1,"method":"%b",%b}' % (method.encode(), params.encode())
        status, answer = await client.post(body, **client.session)
        assert (status, "result" in answer) == (200, True), answer
    notice = b'{"jsonrpc":"2.0","method":"notifications/initialized",%b}' % params.encode()
    assert await client.post(notice, **client.session) == (202, None)
    modern = b'{"jsonrpc":"2.0","id":1,"method":"tools/list",%b}' % params.encode()
    headers = {"MCP-Protocol-Version": NEWEST, "Mcp-Method": "tools/list"}
    assert META_VERSION in (await client.post(modern, **headers))[1]["error"]["message"]


async def test_optional_parts_of_a_modern_request_may_be_null(client: Client) -> None:
    empty = {"cursor": None, "requestState": None, "inputResponses": None}
    _, answer = await client.ask("tools/call", {"name": "add", "arguments": None, **empty})
    assert answer["result"]["structuredContent"] == 3
    assert "result" in (await client.ask("resources/list", empty))[1]


NOTICES: list[dict[str, Any]] = [
    {"method": "notifications/cancelled"},
    {"method": "notifications/cancelled", "params": []},
    {"method": "notifications/cancelled", "params": {"requestId": {}}},
    {"method": "notifications/nope", "params": 5},
    {"id": 7, "result": 5},
    {"id": 7, "error": {"code": 1, "message": "x"}},
]


async def test_notifications_and_answers_that_mean_nothing_are_taken_and_ignored(client: Client) -> None:
    await client.initialize()
    for message in NOTICES:
        assert await client.post(message, **client.session) == (202, None), message
    assert (await client.post({"id": 2, "method": "ping"}, **client.session))[1]["result"] == {}


async def test_a_wrong_request_in_a_session_is_refused_and_the_session_stays(client: Client) -> None:
    await client.initialize()
    for method, params, code in (
        ("nope", {}, McpCode.METHOD_NOT_FOUND),
        ("server/discover", {}, McpCode.METHOD_NOT_FOUND),
        ("logging/setLevel", {"level": "x"}, McpCode.INVALID_PARAMS),
        ("resources/subscribe", {}, McpCode.INVALID_PARAMS),
        ("resources/read", {"uri": "x://y"}, McpCode.RESOURCE_NOT_FOUND),
    ):
        status, answer = await client.post({"id": 3, "method": method, "params": params}, **client.session)
        assert (status, answer["error"]["code"]) == (200, code), method


async def test_headers_that_would_open_the_endpoint_to_pages_and_strangers_are_refused(client: Client) -> None:
    ping = {"id": 1, "method": "ping"}
    assert (await client.post(ping, **{"Content-Type": "text/plain"}))[0] == 415
    assert (await client.post(ping, Origin="http://elsewhere.example"))[0] == 403
    assert (await client.post(ping, Host="elsewhere.example"))[0] == 403
    assert (await client.post(ping, **{"Mcp-Session-Id": "x"}))[0] == 404
    assert (await client.post(b"x" * 2_000_000))[0] == 413
