"""Sends MCP requests, lines of MCP servers and streams of events: anything is answered or ignored.

The first byte chooses the entrance: a request to `/mcp` of raw bytes or of parts that collide, standard output of a
mounted server, a stream of events of a remote one, a header. One bus without sockets lives as long as the process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from lab.fuzz.choices import Choices, block_of
from lab.fuzz.target import Target, hold, no_faults
from toolbus.bus import Bus
from toolbus.bus.access.identity import LOCAL
from toolbus.bus.gateway.gateway_parts import IDENTITY
from toolbus.parts.mcp.client.connection import McpConnection
from toolbus.parts.mcp.client.http_link import EventTooLong, SseParser
from toolbus.parts.mcp.client.server_process import ServerProgram
from toolbus.parts.mcp.client.transport import Outgoing, StdioTransport
from toolbus.parts.mcp.messages import headers as mcp_headers
from toolbus.parts.mcp.messages.eras import META_CAPABILITIES, META_LOG_LEVEL, META_VERSION, NEWEST
from toolbus.parts.mcp.messages.jsonrpc import JsonRpcMessage, McpCode, RpcError, decode
from toolbus.parts.mcp.server.mcp_endpoint import McpEndpoint
from toolbus.parts.mcp.server.room import McpServerRoom
from toolbus.testing import running_bus

ANSWER_SECONDS = 10.0
SETTLE_TURNS = 20  # of the loop, in which what a request began has to end
MAX_EVENT_BYTES = 4096
METHODS = (
    *("tools/call", "tools/list", "server/discover", "initialize", "ping", "prompts/list", "prompts/get", "tasks/get"),
    *("resources/list", "resources/read", "resources/templates/list", "resources/subscribe", "completion/complete"),
    *("subscriptions/listen", "logging/setLevel", "tasks/update", "tasks/cancel", "notifications/initialized"),
    *("notifications/cancelled", "", "no/such", "tools/call\n", "é" * 90),
)
VERSIONS: tuple[Any, ...] = (NEWEST, "2025-11-25", "2025-06-18", "2024-11-05", "2031-01-01", "", 7, None)
VALUES: tuple[Any, ...] = (
    *("echo", "ask", "missing", "", "test://x", "é\n\x7f", "\ud83d", None, True, 0, -1, 2.5, 1e300, 2**70, [], {}),
    *({"value": 1}, {"value": [[["x"]]]}, {"a": {"b": None}}, ["toolsListChanged"], {"toolsListChanged": True}),
    *({"action": "accept", "content": {"name": "x"}}, {"name": {"action": "decline"}}, "x" * 300),
)
PARAMS = (
    *("name", "arguments", "cursor", "uri", "taskId", "inputResponses", "requestState", "requestId", "level", "ref"),
    *("argument", "protocolVersion", "capabilities", "clientInfo", "notifications", "task", "context"),
)
CAPABILITIES: tuple[Any, ...] = (
    *({}, {"elicitation": {"form": {}}}, {"extensions": {"io.modelcontextprotocol/tasks": {}}}, {"sampling": 7}, [], 1),
)
IDS: tuple[Any, ...] = (1, "1", 0, "", "x" * 200, 2**70, None, True, 1.5, [], {})
PATHS = ("/mcp", "/mcp/", "/mcp/default", "/mcp/none", "/mcp/a/b", "/mcp/\udce9")
KINDS = (b"application/json", b"application/json; charset=utf-8", b"text/plain", b"", b"application/jsonx")
ACCEPTS = (b"application/json, text/event-stream", b"application/json", b"*/*", b"")
NAMES = (b"mcp-method", b"mcp-name", b"mcp-session-id", b"last-event-id", b"mcp-param-x", b"mcp-protocol-version")


# -- requests to the endpoint ----------------------------------------------------------------------------------------


class Served:
    """A bus on a loop of its own, and its endpoint."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self._running = running_bus(grace_seconds=0.0)
        bus: Bus = self.runner.run(self._running.__aenter__())

        @bus.tool
        async def echo(value: Any = None) -> Any:
            return value

        room = bus.core.rooms.find(McpServerRoom)
        assert room is not None
        self.endpoint = McpEndpoint(room.server)
        self._begun: list[tuple[bytes, bytes]] = []  # headers of the last answer

    def new_session(self) -> bytes:
        """Returns the id of a new session of a legacy client."""
        about = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "fuzz", "version": "1"}}
        first = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": about}
        self.runner.run(self.ask("POST", "/mcp", [(b"content-type", KINDS[0])], json.dumps(first).encode()))
        return dict(self._begun)[b"mcp-session-id"]

    async def ask(self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> tuple[int, bytes]:
        """Returns status and body of an answer; a stream is left once it has begun."""
        before = asyncio.all_tasks()
        given, left = [{"type": "http.request", "body": body, "more_body": False}], asyncio.Event()
        sent: list[Any] = []

        async def receive() -> Any:
            if given:
                return given.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if message.get("more_body"):
                left.set()

        scope: Any = {"type": "http", "method": method, "path": path, "headers": headers, IDENTITY: LOCAL}
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self.endpoint(scope, receive, send)
        except TimeoutError:
            hold(False, f"{method} {path} was not answered in {ANSWER_SECONDS:g} s: {headers} {body[:300]!r}")
        for _ in range(SETTLE_TURNS):
            await asyncio.sleep(0)
        rest = asyncio.all_tasks() - before
        hold(not rest, f"{method} {path} left tasks behind: {rest!r:.500}")
        begins = [message for message in sent if message["type"] == "http.response.start"]
        hold(len(begins) == 1, f"an answer began {len(begins)} times")
        self._begun = begins[0]["headers"]
        return begins[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


@cache
def served() -> Served:
    """Returns the bus of this process."""
    return Served()


def _check_answer(status: int, body: bytes) -> None:
    hold(status < 500, f"HTTP {status}: {body[:500]!r}")
    hold(str(int(McpCode.INTERNAL)).encode() not in body, f"an internal error: {body[:500]!r}")
    if body[:1] == b"{":
        answer = json.loads(body)
        hold(
            answer.get("jsonrpc") == "2.0" and ("result" in answer) != ("error" in answer), f"no answer: {body[:500]!r}"
        )
        if "error" in answer:
            hold(len(answer["error"]["message"]) > 8, f"a refusal without a sentence: {body[:300]!r}")


def _odd(choose: Choices, usual: Any, others: Sequence[Any]) -> Any:
    """Returns what is usual, and one time in eight something else: most requests have to get far."""
    return choose.pick(others) if choose.byte() % 8 == 7 else usual


def _message(choose: Choices) -> dict[str, Any]:
    params: Any = {"name": _odd(choose, "echo", VALUES)} if not choose.flag() else {}
    for _ in range(choose.byte() % 4):
        params[choose.pick(PARAMS)] = choose.pick(VALUES)
    if choose.byte() % 4 != 3:  # modern
        meta = {META_VERSION: _odd(choose, NEWEST, VERSIONS), META_CAPABILITIES: choose.pick(CAPABILITIES[:3])}
        for key in choose.some((META_LOG_LEVEL, "progressToken", META_CAPABILITIES), 1):
            meta[key] = choose.pick(VALUES)
        params["_meta"] = _odd(choose, meta, VALUES)
    method = choose.pick(METHODS)
    message: dict[str, Any] = {"jsonrpc": "2.0", "id": _odd(choose, 1, IDS), "method": method, "params": params}
    wrong = _odd(choose, None, tuple(message))
    if wrong:
        message[wrong] = choose.pick(VALUES)
    return message


def _headers(choose: Choices, message: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    """Returns headers that fit a message, more or less."""
    params = message["params"] if isinstance(message.get("params"), dict) else {}
    meta = params["_meta"] if isinstance(params.get("_meta"), dict) else {}
    version, method = meta.get(META_VERSION), message.get("method")
    headers = [(b"content-type", _odd(choose, KINDS[0], KINDS)), (b"accept", _odd(choose, ACCEPTS[0], ACCEPTS))]
    version = _odd(choose, version if isinstance(version, str) else None, VERSIONS)
    if isinstance(version, str):
        headers.append((b"mcp-protocol-version", version.encode("utf-8", "replace")))
    if isinstance(version, str) and isinstance(method, str):
        headers.append((b"mcp-method", method.encode("latin-1", "replace")))
        named = params.get(mcp_headers.NAMED_BY.get(method, ""))
        if isinstance(named, str):
            headers.append((b"mcp-name", mcp_headers.write_value(named.encode("utf-8", "replace").decode()).encode()))
    elif method != "initialize":
        headers.append((b"mcp-session-id", _odd(choose, served().new_session(), (b"", b"x", b"\xff"))))
    if choose.byte() % 8 == 7:
        value = choose.pick((b"tools/call", b"echo", b"=?base64?ZWNobw==?=", b"=?base64?x?=", b"", b"\xff", b"7-1"))
        headers.append((choose.pick(NAMES), value))
    return headers


def _request(choose: Choices, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    method = _odd(choose, "POST", ("GET", "DELETE", "PUT", "HEAD"))
    status, answer = served().runner.run(served().ask(method, _odd(choose, "/mcp", PATHS), headers, body))
    _check_answer(status, answer)


# -- what mounted servers write --------------------------------------------------------------------------------------


class _Pipe(StdioTransport):
    """Pipes to a server that takes everything and is played by the input."""

    def send(self, message: Outgoing) -> None:
        """Takes a message."""

    def take(self, data: bytes) -> None:
        """Has the server write something."""
        self._take(data)


def _lines(choose: Choices) -> None:
    """Gives a connection what a server wrote to standard output, in pieces, while two requests wait."""
    transport = _Pipe("fuzzed", ServerProgram(("true",), {}), _no_lifeline)
    results: list[list[Any]] = [[], []]
    connection = McpConnection(
        transport, on_request=lambda asked: None, on_notification=lambda *each: None, on_closed=lambda why: None
    )
    transport._receiver = connection
    for ended in results:
        connection.send("tools/call", b'{"name":"x"}', lambda *each, ended=ended: ended.append(each))
    while choose:
        transport.take(choose.block() + (b"\n" if choose.flag() else b""))
    transport.take(b"\n")
    connection.closed("the fuzzer has ended it")
    hold([len(ended) for ended in results] == [1, 1], f"requests did not end once each: {results!r:.300}")


def _no_lifeline() -> Any:
    raise AssertionError("no process is started")


def _events(choose: Choices) -> None:
    """Reads a stream of events in pieces, and again as one piece: both must give the same events."""
    pieces = []
    while choose:
        pieces.append(choose.block())
    read = []
    for way in (pieces, [b"".join(pieces)]):
        parser = SseParser(MAX_EVENT_BYTES)
        events: list[Any] = []
        try:
            for piece in way:
                events += parser.feed(piece)
            read.append((events, parser.last_id, parser.retry_seconds))
        except EventTooLong:
            return  # how many events came before depends on the pieces
    hold(read[0] == read[1], f"pieces change what is read of a stream: {read!r:.500}")


def _header(choose: Choices) -> None:
    text = choose.text()
    written = mcp_headers.write_value(text)
    hold(written.isprintable() and written.isascii(), f"a header cannot hold {written!r:.300}")
    hold(mcp_headers.read_value(written) == text, f"a header was read back otherwise: {text!r:.300}")
    mcp_headers.read_value(choose.block().decode("latin-1"))


def _decode(data: bytes) -> JsonRpcMessage | None:
    try:
        message = decode(data)
    except RpcError as refusal:
        hold(str(refusal), "a refusal without a sentence")
        return None
    hold(isinstance(json.loads(data), dict), "a message that is not an object was taken")
    return message


def _raw(choose: Choices) -> None:
    body = choose.block()
    message = _decode(body)
    method = message.method if message is not None else ""
    _request(choose, body, _headers(choose, {"method": method, "params": {"_meta": {META_VERSION: NEWEST}}}))


def _made(choose: Choices) -> None:
    message = _message(choose)
    body = json.dumps(_odd(choose, message, ([message], message["params"], 7))).encode()
    _decode(body)
    _request(choose, body, _headers(choose, message))


ENTRANCES: tuple[Callable[[Choices], None], ...] = (_made, _raw, _lines, _events, _header)


def run(data: bytes) -> None:
    """Takes one input through the entrance that its first byte chooses."""
    choose = Choices(data)
    entrance = choose.pick(ENTRANCES)
    with no_faults():
        entrance(choose)


def seeds() -> Iterator[bytes]:
    """Requests of both eras, what servers write, streams as servers send them, every method and value."""
    meta = {META_VERSION: NEWEST, META_CAPABILITIES: {}}
    for method, params in (
        ("tools/call", {"name": "echo", "arguments": {"value": 3}, "_meta": meta}),
        ("tools/list", {"_meta": meta}),
        ("subscriptions/listen", {"notifications": {"toolsListChanged": True}, "_meta": meta}),
    ):
        yield b"\1" + block_of(json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode())
    for line in (
        b'{"jsonrpc":"2.0","id":1,"result":{}}',
        b'{"jsonrpc":"2.0","method":"x"}',
        b"listening on 8000",
        b"[]",
    ):
        yield b"\2" + block_of(line) + b"\1" + block_of(line[:9]) + b"\0"
    for stream in (
        b"data: {}\n\n",
        b"id: 7\r\nevent: message\r\ndata: a\r\ndata: b\r\n\r\n",
        b": ping\n\nretry: 5\n\n",
    ):
        yield b"\3" + block_of(stream) + block_of(stream[:5]) + block_of(stream[5:])
    yield b"\4" + block_of("é ".encode()) + block_of(b"=?base64?ZWNobw==?=")
    for number in range(len(METHODS)):
        for era in (bytes([0, 0, 0, 0, 0]), b"\3"):  # modern with its version and capabilities, or legacy
            yield bytes([0, 0, 0, 1, 1, 3]) + era + bytes([number])


TARGET = Target("mcp", "no MCP message, header, line or event ends in a 5xx or leaves a task behind", run, seeds, 2048)
