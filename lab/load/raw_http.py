"""Keeps N requests in flight over N bare connections: ``python -m lab.load.raw_http WAY URL``.

The client costs as little as this stack allows, so that what differs is the server. Ways: ``invoke`` posts calls to a
bus (or to what takes the same body), ``mcp`` posts `tools/call` to an MCP server, in its newest era: it asks
`tools/list` without a handshake first, and makes the handshake where that is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import httptools
import uvloop

from lab.load import windows, workload

MODERN, LEGACY = "2026-07-28", "2025-11-25"
MARK = b"21.5"  # of the tool's answer
ANSWER_SECONDS = 25.0
TOOL_SECONDS = 20.0  # in which a server that is still being mounted has to be listed
_CLIENT = {"name": "lab", "version": "1"}
ABOUT = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": _CLIENT}  # the parameters of `initialize`
_META = {
    f"io.modelcontextprotocol/{name}": value
    for name, value in {"protocolVersion": MODERN, "clientInfo": _CLIENT, "clientCapabilities": {}}.items()
}


def mcp_message(
    number: int, method: str, params: Mapping[str, Any], session: Mapping[str, str] | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns an MCP request and its headers.

    Args:
        session: the headers of a legacy session; None: it is a request of the newest era.
    """
    if session is None:
        headers = {"MCP-Protocol-Version": MODERN, "Mcp-Method": method}
        headers |= {"Mcp-Name": params["name"]} if "name" in params else {}
        params = {**params, "_meta": _META}
    else:
        headers = {"MCP-Protocol-Version": LEGACY, **session}
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}, headers


class BadAnswer(RuntimeError):
    """A request was not answered as it should be."""


class Answer(NamedTuple):
    """One answer; the names of its headers are in lower case."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes


class Connection(asyncio.Protocol):
    """One connection, which sends a request at a time and ends a future with its answer."""

    def __init__(self) -> None:
        self._answered: asyncio.Future[Answer] | None = None  # None before the first request
        self._transport: asyncio.Transport | None = None  # None until connected
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(BadAnswer(f"the server closed the connection: {self._body[:300]!r}"))

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        assert self._transport is not None
        self._answered = asyncio.get_running_loop().create_future()
        self._headers, self._body = {}, b""
        self._transport.write(request)
        return self._answered

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        assert self._answered is not None
        self._answered.set_result(Answer(self._parser.get_status_code(), self._headers, self._body))


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    path: str

    def request(self, body: bytes, headers: Mapping[str, str] = {}) -> bytes:
        lines = {
            "Host": f"{self.host}:{self.port}",
            "Accept": "application/json, text/event-stream" if headers else "*/*",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"POST {self.path} HTTP/1.1\r\n{head}\r\n".encode() + body

    async def connect(self) -> Connection:
        return (await asyncio.get_running_loop().create_connection(Connection, self.host, self.port))[1]


class Invoking:
    """Writes calls for a bus."""

    def __init__(self, target: Target) -> None:
        self._target = target

    async def prepare(self) -> None:
        """Waits for a first answer: what a server still does behind its ready line is not part of a window."""
        connection = await self._target.connect()
        await connection.ask(self.write(0, workload.arguments_json(0)))
        connection.close()

    def write(self, slot: int, arguments_json: str) -> bytes:
        return self._target.request(f'{{"name":"{workload.TOOL_NAME}","arguments":{arguments_json}}}'.encode())


class Mcp:
    """Writes calls for an MCP server, after it has read the name of the tool from its list."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._session: dict[str, str] | None = None  # headers of a legacy session; None: modern
        self._name = ""

    async def prepare(self) -> None:
        """Finds out which era the server speaks and what it calls the tool.

        Raises:
            BadAnswer: it has no such tool.
        """
        connection = await self._target.connect()
        ends_at = time.monotonic() + TOOL_SECONDS
        try:
            if (await connection.ask(self._message(0, "tools/list", {}))).status != 200:
                await self._shake_hands(connection)
            while not self._name:
                _, _, body = await connection.ask(self._message(2, "tools/list", {}))
                names = [each["name"] for each in _result(body).get("tools", ())]
                self._name = next((name for name in names if name.endswith(workload.TOOL_NAME)), "")
                if not self._name and time.monotonic() > ends_at:
                    raise BadAnswer(f"the server has no tool {workload.TOOL_NAME}: {body[:500]!r}")
                await asyncio.sleep(0.02)
        finally:
            connection.close()

    async def _shake_hands(self, connection: Connection) -> None:
        self._session = {}
        answer = await connection.ask(self._message(1, "initialize", ABOUT))
        if answer.status != 200:
            raise BadAnswer(f"HTTP {answer.status} {answer.body[:500]!r}")
        if session := answer.headers.get(b"mcp-session-id"):
            self._session["Mcp-Session-Id"] = session.decode("latin-1")
        note = b'{"jsonrpc":"2.0","method":"notifications/initialized"}'
        await connection.ask(self._target.request(note, {"MCP-Protocol-Version": LEGACY, **self._session}))

    def _message(self, number: int, method: str, params: dict[str, Any]) -> bytes:
        message, headers = mcp_message(number, method, params, self._session)
        return self._target.request(json.dumps(message, separators=(",", ":")).encode(), headers)

    def write(self, slot: int, arguments_json: str) -> bytes:
        return self._message(slot + 3, "tools/call", {"name": self._name, "arguments": json.loads(arguments_json)})


def _result(body: bytes) -> dict[str, Any]:
    """Returns the result of a JSON-RPC answer, which may be an event of a stream."""
    begin = body.find(b'{"')
    text = body[begin:].decode()
    result: dict[str, Any] = json.JSONDecoder().raw_decode(text)[0].get("result", {})
    return result


async def _call_again(target: Target, request: bytes, clock: windows.Clock) -> None:
    connection = await target.connect()
    try:
        while not clock.is_over:
            began_at = time.perf_counter_ns()
            status, _, body = await connection.ask(request)
            if status != 200 or MARK not in body:
                raise BadAnswer(f"a call failed: HTTP {status} {body[:500]!r}")
            clock.ended(began_at, time.perf_counter_ns())
    finally:
        connection.close()


async def main() -> None:
    """Reads the command line and runs a window for each cell."""
    way = sys.argv[1]
    options: argparse.Namespace = windows.options_of(__doc__).parse_args(sys.argv[2:])
    url = urlsplit(options.address)
    path = url.path or ("/api/tools/invoke" if way == "invoke" else "/mcp")
    target = Target(url.hostname or "", url.port or 80, path)
    writer: Invoking | Mcp = Mcp(target) if way == "mcp" else Invoking(target)
    async with asyncio.timeout(ANSWER_SECONDS):
        await writer.prepare()
    for cell in options.cells:
        clock = windows.Clock(cell, options, options.middle_pid)
        texts = [workload.arguments_json(slot, cell.size) for slot in range(cell.in_flight)]
        await asyncio.gather(*(_call_again(target, writer.write(*each), clock) for each in enumerate(texts)))
        clock.window.print()


if __name__ == "__main__":
    uvloop.run(main())
