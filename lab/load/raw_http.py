"""Sends requests over bare connections, which cost little, so that what differs is the server.

They post calls to a bus (or to what takes the same body), or `tools/call` to an MCP server, in its newest era: they ask
for `tools/list` without a handshake first, and make the handshake where that is refused.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from lab.load import windows, workload

MODERN, LEGACY = "2026-07-28", "2025-11-25"
MARK = b"21.5"  # of the tool's answer
ANSWER_SECONDS = 25.0
TOOL_SECONDS = 20.0  # in which a server that is still being mounted has to be listed
_CLIENT = {"name": "lab", "version": "1"}
_ABOUT = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": _CLIENT}  # the parameters of `initialize`
META = {
    f"io.modelcontextprotocol/{name}": value
    for name, value in {"protocolVersion": MODERN, "clientInfo": _CLIENT, "clientCapabilities": {}}.items()
}


class BadAnswer(RuntimeError):
    """A request was not answered as it should be."""


class Answer(NamedTuple):
    """One answer; the names of its headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Connection(NamedTuple):
    """One connection, which sends a request at a time."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, request: bytes) -> Answer:
        self.writer.write(request)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, *lines = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return Answer(int(status.split()[1]), headers, body)


class Target:
    """A server that takes the calls of a bus."""

    _default_path = "/api/tools/invoke"

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._path = parts.hostname or "", parts.port or 80, parts.path or self._default_path

    def request(self, body: bytes, headers: Mapping[str, str] = {}) -> bytes:
        lines = {
            "Host": f"{self._host}:{self._port}",
            "Accept": "application/json, text/event-stream" if headers else "*/*",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"POST {self._path} HTTP/1.1\r\n{head}\r\n".encode() + body

    async def connect(self) -> Connection:
        return Connection(*await asyncio.open_connection(self._host, self._port))

    async def prepare(self, connection: Connection) -> None:
        """Waits for a first answer: what a server still does behind its ready line is not part of a window."""
        await connection.ask(self.write(0, workload.arguments_json(0)))

    def write(self, slot: int, arguments_json: str) -> bytes:
        """Returns a request that makes one call."""
        return self.request(f'{{"name":"{workload.TOOL_NAME}","arguments":{arguments_json}}}'.encode())


class McpTarget(Target):
    """An MCP server; the name of its tool is read from its list."""

    _default_path = "/mcp"
    _session: dict[str, str] | None = None  # headers of a legacy session; None: modern
    _name = ""

    async def prepare(self, connection: Connection) -> None:
        """Finds out which era the server speaks and what it calls the tool.

        Raises:
            BadAnswer: it has no such tool.
        """
        ends_at = time.monotonic() + TOOL_SECONDS
        if (await connection.ask(self.message(0, "tools/list", {}))).status != 200:
            await self.shake_hands(connection)
        while not self._name:
            body = (await connection.ask(self.message(2, "tools/list", {}))).body
            names = [each["name"] for each in _result(body).get("tools", ())]
            self._name = next((name for name in names if name.endswith(workload.TOOL_NAME)), "")
            if not self._name and time.monotonic() > ends_at:
                raise BadAnswer(f"the server has no tool {workload.TOOL_NAME}: {body[:500]!r}")
            await asyncio.sleep(0.02)

    async def shake_hands(self, connection: Connection) -> None:
        self._session = {}
        status, headers, body = await connection.ask(self.message(1, "initialize", _ABOUT))
        if status != 200:
            raise BadAnswer(f"HTTP {status} {body[:500]!r}")
        if session := headers.get("mcp-session-id"):
            self._session["Mcp-Session-Id"] = session
        note = b'{"jsonrpc":"2.0","method":"notifications/initialized"}'
        await connection.ask(self.request(note, {"MCP-Protocol-Version": LEGACY, **self._session}))

    def message(self, number: int, method: str, params: Mapping[str, Any]) -> bytes:
        """Returns a request of the server's era."""
        if self._session is None:
            headers = {"MCP-Protocol-Version": MODERN, "Mcp-Method": method}
            headers |= {"Mcp-Name": params["name"]} if "name" in params else {}
            params = {**params, "_meta": META}
        else:
            headers = {"MCP-Protocol-Version": LEGACY, **self._session}
        body = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        return self.request(json.dumps(body, separators=(",", ":")).encode(), headers)

    def write(self, slot: int, arguments_json: str) -> bytes:
        return self.message(slot + 3, "tools/call", {"name": self._name, "arguments": json.loads(arguments_json)})


def _result(body: bytes) -> dict[str, Any]:
    """Returns the result of a JSON-RPC answer, which may be an event of a stream."""
    result: dict[str, Any] = json.JSONDecoder().raw_decode(body[body.find(b'{"') :].decode())[0].get("result", {})
    return result


@asynccontextmanager
async def by_bare_connections(url: str, kind: type[Target]) -> AsyncIterator[windows.Prepare]:
    """Calls what is at the URL; each task has a connection of its own, which it opens at its first call."""
    target, connections = kind(url), dict[int, Connection]()
    async with asyncio.timeout(ANSWER_SECONDS):
        await target.prepare(await target.connect())

    async def ask(of: tuple[int, bytes]) -> None:
        slot, request = of
        if slot not in connections:
            connections[slot] = await target.connect()
        status, _, body = await connections[slot].ask(request)
        if status != 200 or MARK not in body:
            raise BadAnswer(f"a call failed: HTTP {status} {body[:500]!r}")

    yield windows.preparing(lambda texts: [(slot, target.write(slot, text)) for slot, text in enumerate(texts)], ask)
    for connection in connections.values():
        connection.writer.close()
