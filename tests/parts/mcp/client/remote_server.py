"""Plays an MCP server over HTTP, of either era, that can be killed and started again at its port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from toolbus.parts.mcp.client.connection import Incoming, McpConnection, open_connection
from toolbus.parts.mcp.client.http import HttpTimings, HttpTransport
from toolbus.parts.mcp.client.http_link import Authorization
from toolbus.parts.mcp.messages import eras, headers

QUICK = HttpTimings(gate=5.0, retry=0.01, min_retry=0.01, max_retry=0.05, first_backoff=0.01, drain=0.2, cancel=0.01)

JSON, EVENTS = "application/json", "text/event-stream"
# What servers that are not modern answer to `server/discover`: the status, the type, and the body with $ID for the id.
NOT_MODERN: list[tuple[int, str | None, str]] = [
    (204, None, ""),
    (202, None, ""),
    (200, JSON, ""),
    (200, JSON, " \n "),
    (200, JSON, "{}"),
    (200, JSON, "null"),
    (200, JSON, "[]"),
    (200, JSON, '"ok"'),
    (200, JSON, "{"),
    (200, JSON, '{"jsonrpc":"2.0","id":$ID}'),
    (200, JSON, '{"jsonrpc":"2.0","id":987654,"result":{"supportedVersions":["2026-07-28"],"capabilities":{}}}'),
    (200, JSON, '[{"jsonrpc":"2.0","id":$ID,"result":{}}]'),
    (200, JSON, '{"jsonrpc":"2.0","id":$ID,"result":{}}'),
    (200, JSON, '{"jsonrpc":"2.0","id":$ID,"result":null}'),
    (200, JSON, '{"jsonrpc":"2.0","id":$ID,"result":[]}'),
    (200, JSON, '{"jsonrpc":"2.0","id":$ID,"result":{"supportedVersions":[]}}'),
    (200, JSON, '{"jsonrpc":"2.0","id":$ID,"result":{"supportedVersions":["2025-11-25"],"capabilities":{}}}'),
    (200, JSON, '{"jsonrpc":"2.0","id":$ID,"result":{"supportedVersions":"2026-07-28","capabilities":{}}}'),
    (200, JSON, '{"jsonrpc":"2.0","id":$ID,"result":{"supportedVersions":["2026-07-28"]}}'),
    (200, JSON, '{"jsonrpc":"2.0","id":$ID,"result":{"supportedVersions":["2026-07-28"],"capabilities":[]}}'),
    (200, JSON, '{"jsonrpc":"2.0","id":$ID,"result":{"capabilities":{"tools":{}}}}'),
    (200, JSON, '{"jsonrpc":"2.0","method":"notifications/message","params":{}}'),
    (200, "text/plain", "ok"),
    (200, "text/html", "<html>Welcome</html>"),
    (200, None, "ok"),
    (200, "application/xml", "<ok/>"),
    (200, EVENTS, ""),
    (200, EVENTS, ": nothing\n\n"),
    (200, EVENTS, "data: {}\n\n"),
    (200, EVENTS, "data:\n\n"),
    (201, JSON, "{}"),
    (400, "text/plain", "no session"),
    (403, "text/plain", "method not allowed here"),
    (404, "text/html", "<h1>Not found</h1>"),
    (405, None, ""),
    (406, JSON, '{"error":"x"}'),
    (500, "text/plain", "Internal Server Error"),
    (501, None, ""),
    (200, JSON, '{"jsonrpc":"2.0","id":null,"error":{"code":-32601,"message":"x"}}'),
    (200, EVENTS, "event: endpoint\ndata: /messages?session=1\n\n"),
    (302, None, ""),
    (421, None, ""),
    (429, "text/plain", "slow down"),
    (503, None, ""),
]

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class RemoteServer:
    """One server on loopback.

    Attributes:
        seen: (HTTP method, headers, message) of each request, in order.
        on: what answers a method of MCP, or an HTTP method; replaced by tests.
        sessions: those that are known.
        connections: how many were made.
    """

    def __init__(self, *, modern: bool) -> None:
        self.modern = modern
        self.seen: list[tuple[str, Mapping[str, str], dict[str, Any]]] = []
        self.sessions: list[str] = []
        self.made_sessions = 0
        self.peers: set[Any] = set()
        self.on: dict[str, Handler] = {"GET": self._no_stream, "tools/call": self._call}
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    def methods(self, kind: str = "POST") -> list[str]:
        return [message.get("method", "") for each, _, message in self.seen if each == kind]

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        server: Any = site._server
        self.port = server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Ends as a killed process does: every connection at once, and nothing remembered."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        assert runner.server is not None
        for each in list(runner.server.connections):
            if each.transport is not None:
                each.transport.abort()
        self.sessions.clear()
        await runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.peers.add(request.transport.get_extra_info("peername") if request.transport else None)
        text = await request.text()
        message = json.loads(text) if text else {}
        self.seen.append((request.method, dict(request.headers), message))
        method = message.get("method", "")
        if request.method == "POST" and method in self.on:
            refusal = self._refusal(request)
            return refusal or await self.on[method](request, message)
        if request.method != "POST":
            return await self.on[request.method](request, message) if request.method in self.on else web.Response()
        return self._refusal(request) or self._handshake(method, message)

    def _refusal(self, request: web.Request) -> web.Response | None:
        session = request.headers.get(headers.SESSION)
        if session is not None and session not in self.sessions:
            return web.json_response({"error": "no such session"}, status=404)
        return None

    def _handshake(self, method: str, message: dict[str, Any]) -> web.Response:
        if "id" not in message:
            return web.Response(status=202)
        if method == "server/discover" and self.modern:
            return self.result(message, {"supportedVersions": [eras.NEWEST], "capabilities": {"tools": {}}})
        if method == "initialize" and not self.modern:
            self.made_sessions += 1
            self.sessions.append(f"s{self.made_sessions}")
            result = {"protocolVersion": eras.NEWEST_LEGACY, "capabilities": {"tools": {}}}
            result["serverInfo"] = {"name": "far", "version": "1"}
            return self.result(message, result, {headers.SESSION: self.sessions[-1]})
        error = {"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": "not initialized"}}
        return web.json_response(error, status=400)

    async def _no_stream(self, request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=405)

    async def _call(self, request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return self.result(message, {"content": [{"type": "text", "text": "done"}]})

    def result(
        self, message: Mapping[str, Any], result: Mapping[str, Any], more: Mapping[str, str] | None = None
    ) -> web.Response:
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": result}, headers=more)


def answer_with(status: int, kind: str | None, body: str) -> Handler:
    """Returns what answers each request in one way."""

    async def answer(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        content = body.replace("$ID", json.dumps(message["id"])).encode()
        return web.Response(status=status, body=content, headers={"Content-Type": kind} if kind else {})

    return answer


async def stream(request: web.Request) -> web.StreamResponse:
    """Begins a stream of events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


def event(message: Mapping[str, Any] | None, id: str = "", retry: int | None = None) -> bytes:
    """Returns an event; None: one without data."""
    lines = [f"id: {id}"] if id else []
    lines += [f"retry: {retry}"] if retry is not None else []
    lines.append("data: " + (json.dumps(message) if message is not None else ""))
    return ("\n".join(lines) + "\n\n").encode()


def answer(message: Mapping[str, Any], text: str = "done") -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": message["id"], "result": {"content": [{"type": "text", "text": text}]}}


class Owner:
    """What a connection tells its owner."""

    def __init__(self) -> None:
        self.asked: list[Incoming] = []
        self.told: list[str] = []
        self.closed: list[str] = []
        self.changed = asyncio.Event()

    def take(self, method: str, *_: Any) -> None:
        self.told.append(method)
        self.changed.set()


@asynccontextmanager
async def connected(
    server: RemoteServer,
    owner: Owner | None = None,
    *,
    timings: HttpTimings = QUICK,
    authorization: Authorization | None = None,
    written: Mapping[str, str] | None = None,
) -> AsyncIterator[McpConnection]:
    """Opens a connection to a server, after its handshake."""
    owner = owner or Owner()
    transport = HttpTransport("far", server.url, written or {}, authorization, timings)
    connection = McpConnection(
        transport,
        on_request=owner.asked.append,
        on_notification=owner.take,
        on_closed=owner.closed.append,
        name="far",
    )
    await transport.start(connection)
    try:
        await open_connection(connection, modern=None)
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def serving(*, modern: bool) -> AsyncIterator[RemoteServer]:
    """Runs a server."""
    server = RemoteServer(modern=modern)
    await server.start()
    try:
        yield server
    finally:
        await server.kill()
