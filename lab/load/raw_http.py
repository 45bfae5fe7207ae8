"""Keeps N requests in flight over N bare connections: ``python -m lab.load.raw_http WAY URL``.

The client costs little, so that what differs is the server. Ways: ``invoke`` posts calls to a bus (or to what takes the
same body), ``mcp`` posts `tools/call` to an MCP server, in its newest era: it asks `tools/list` without a handshake
first, and makes the handshake where that is refused.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

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
    """Where requests go, and what is called there."""

    def __init__(self, url: str, path: str) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._path = parts.hostname or "", parts.port or 80, parts.path or path

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

    _session: dict[str, str] | None = None  # headers of a legacy session; None: modern
    _name = ""

    async def prepare(self, connection: Connection) -> None:
        """Finds out which era the server speaks and what it calls the tool.

        Raises:
            BadAnswer: it has no such tool.
        """
        ends_at = time.monotonic() + TOOL_SECONDS
        if (await connection.ask(self._message(0, "tools/list", {}))).status != 200:
            await self._shake_hands(connection)
        while not self._name:
            body = (await connection.ask(self._message(2, "tools/list", {}))).body
            names = [each["name"] for each in _result(body).get("tools", ())]
            self._name = next((name for name in names if name.endswith(workload.TOOL_NAME)), "")
            if not self._name and time.monotonic() > ends_at:
                raise BadAnswer(f"the server has no tool {workload.TOOL_NAME}: {body[:500]!r}")
            await asyncio.sleep(0.02)

    async def _shake_hands(self, connection: Connection) -> None:
        self._session = {}
        status, headers, body = await connection.ask(self._message(1, "initialize", ABOUT))
        if status != 200:
            raise BadAnswer(f"HTTP {status} {body[:500]!r}")
        if session := headers.get("mcp-session-id"):
            self._session["Mcp-Session-Id"] = session
        note = b'{"jsonrpc":"2.0","method":"notifications/initialized"}'
        await connection.ask(self.request(note, {"MCP-Protocol-Version": LEGACY, **self._session}))

    def _message(self, number: int, method: str, params: dict[str, Any]) -> bytes:
        message, headers = mcp_message(number, method, params, self._session)
        return self.request(json.dumps(message, separators=(",", ":")).encode(), headers)

    def write(self, slot: int, arguments_json: str) -> bytes:
        return self._message(slot + 3, "tools/call", {"name": self._name, "arguments": json.loads(arguments_json)})


def _result(body: bytes) -> dict[str, Any]:
    """Returns the result of a JSON-RPC answer, which may be an event of a stream."""
    result: dict[str, Any] = json.JSONDecoder().raw_decode(body[body.find(b'{"') :].decode())[0].get("result", {})
    return result


async def main() -> None:
    """Reads the command line and runs a window for each cell."""
    options = windows.options_of(__doc__).parse_args(sys.argv[2:])
    is_mcp = sys.argv[1] == "mcp"
    target = McpTarget(options.address, "/mcp") if is_mcp else Target(options.address, "/api/tools/invoke")
    async with asyncio.timeout(ANSWER_SECONDS):
        await target.prepare(await target.connect())
    for cell in options.cells:
        connections = [await target.connect() for _ in range(cell.in_flight)]
        requests = [target.write(slot, text) for slot, text in enumerate(windows.arguments(cell))]

        async def ask(slot: int) -> None:
            status, _, body = await connections[slot].ask(requests[slot])  # noqa: B023  # it is called in this turn
            if status != 200 or MARK not in body:
                raise BadAnswer(f"a call failed: HTTP {status} {body[:500]!r}")

        clock = windows.Clock(cell, options, options.middle_pid)
        (await windows.keep_calling(ask, clock, cell.in_flight)).print()
        for connection in connections:
            connection.writer.close()


if __name__ == "__main__":
    uvloop.run(main())
