"""Speaks with the endpoint for MCP clients as HTTP does, without a socket: ASGI messages in, ASGI messages out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.waiting import until, within
from toolbus.bus import Bus, Config
from toolbus.bus.access.identity import LOCAL, Identity
from toolbus.bus.gateway.gateway_parts import IDENTITY
from toolbus.bus.web_paths import Message
from toolbus.parts.mcp.messages.eras import META_CAPABILITIES, META_VERSION, NEWEST, NEWEST_LEGACY
from toolbus.parts.mcp.server.room import McpServerRoom
from toolbus.parts.mcp.settings import McpSettings, Profile
from toolbus.parts.models.room import ModelsRoom
from toolbus.protocol.limits import Timings

Json = dict[str, Any]
BOTH = "application/json, text/event-stream"
META = {META_VERSION: NEWEST, META_CAPABILITIES: Json()}


class Exchange:
    """One HTTP request, which goes on while a test looks at its answer."""

    def __init__(
        self, client: HttpClient, method: str, path: str, headers: list[tuple[str, str]], body: bytes = b""
    ) -> None:
        self.status = 0  # 0 until the answer begins
        self.headers: dict[str, str] = {}
        self.body = b""
        self.ended = False
        self._left = asyncio.Event()
        self._parts = [body]
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers],
            IDENTITY: client.identity,
        }
        self.task: asyncio.Future[None] = asyncio.ensure_future(client.application(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._parts:
            return {"type": "http.request", "body": self._parts.pop(), "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._left.is_set():
            return  # as uvicorn does
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message["body"]
            self.ended = not message.get("more_body", False)

    def leave(self) -> None:
        """Disconnects."""
        self._left.set()

    async def done(self) -> Exchange:
        """Waits for the end of the answer."""
        await until(lambda: self.ended or self.task.done(), "the end of an answer")
        if self.task.done():
            await self.task
        return self

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type") == "text/event-stream"

    @property
    def events(self) -> list[dict[str, str]]:
        """The events so far, by their fields."""
        texts = self.body.decode().split("\n\n")[:-1]
        parted = ([line.partition(": ") for line in text.split("\n")] for text in texts if not text.startswith(":"))
        return [{name: value for name, _, value in fields} for fields in parted]

    @property
    def messages(self) -> list[Json]:
        """The messages so far, of a stream or the one of a plain answer."""
        if self.is_stream:
            return [json.loads(event["data"]) for event in self.events if event.get("data")]
        return [json.loads(self.body)] if self.body else []

    @property
    def answer(self) -> Json:
        """The last message: what answers the request."""
        return self.messages[-1]

    @property
    def result(self) -> Json:
        assert "result" in self.answer, self.answer
        result: Json = self.answer["result"]
        return result

    @property
    def error(self) -> Json:
        assert "error" in self.answer, self.answer
        error: Json = self.answer["error"]
        return error

    async def told(self, count: int) -> list[Json]:
        """Waits until so many messages have come."""
        await until(lambda: len(self.messages) >= count, f"{count} messages")
        return self.messages


class HttpClient:
    """A client of one profile."""

    def __init__(self, bus: Bus, path: str = "/mcp", identity: Identity = LOCAL) -> None:
        application = bus.core.rooms.web.find("/mcp")
        assert application is not None
        self.application = application
        self.path = path
        self.identity = identity
        self.session: str | None = None  # the id of a session; None in the modern era

    def begin(
        self,
        method: str,
        params: Json | None = None,
        *,
        meta: Mapping[str, Any] | None = None,
        headers: Mapping[str, str | None] | None = None,
        id: int | str | None = 1,
    ) -> Exchange:
        """Begins a request, in the era of the client.

        Args:
            meta: more for `_meta`.
            headers: others than a client sends; None leaves one out.
        """
        params = dict(params or {})
        sent: dict[str, str | None] = {"Content-Type": "application/json", "Accept": BOTH}
        if self.session is not None:
            sent["Mcp-Session-Id"] = self.session
            more = dict(meta or {})
        else:
            more = {**META, **(meta or {})}
            name = params.get("name") or params.get("uri") or params.get("taskId")
            sent |= {"MCP-Protocol-Version": more.get(META_VERSION), "Mcp-Method": method, "Mcp-Name": name}
        if more:
            params["_meta"] = more
        message = {"jsonrpc": "2.0", "id": id, "method": method, "params": params}
        if id is None:
            del message["id"]
        return self.send(json.dumps(message).encode(), {**sent, **(headers or {})})

    def send(self, body: bytes, headers: Mapping[str, str | None], method: str = "POST") -> Exchange:
        """Sends a request as it is."""
        given = [(name, value) for name, value in headers.items() if value is not None]
        return Exchange(self, method, self.path, given, body)

    async def ask(self, method: str, params: Json | None = None, **more: Any) -> Exchange:
        """Makes a request and waits for its answer."""
        return await self.begin(method, params, **more).done()

    async def call(self, name: str, arguments: Json | None = None, **more: Any) -> Exchange:
        """Calls a tool and waits for its result."""
        return await self.ask("tools/call", {"name": name, "arguments": arguments or {}}, **more)

    async def names(self) -> list[str]:
        """Lists the tools by their names."""
        return [tool["name"] for tool in (await self.ask("tools/list")).result["tools"]]

    async def initialize(self, version: str = NEWEST_LEGACY, capabilities: Json | None = None) -> Exchange:
        """Begins a session."""
        params = {"protocolVersion": version, "capabilities": capabilities or {}, "clientInfo": {"name": "t"}}
        message = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
        headers = {"Content-Type": "application/json", "Accept": BOTH}
        answer = await self.send(json.dumps(message).encode(), headers).done()
        self.session = answer.headers["mcp-session-id"]
        return answer

    def listen(self, last: str | None = None) -> Exchange:
        """Opens the standing stream of a session, or resumes a stream behind an event."""
        return self.send(
            b"", {"Accept": "text/event-stream", "Mcp-Session-Id": self.session, "Last-Event-ID": last}, "GET"
        )


@asynccontextmanager
async def serving(
    *profiles: Profile, data_dir: Path | None = None, timings: Timings | None = None
) -> AsyncIterator[Bus]:
    """Runs a bus that listens nowhere."""
    settings = McpSettings(profiles={"default": Profile()} | {profile.name: profile for profile in profiles})
    bus = Bus(Config(data_dir=data_dir, mcp=settings), rooms=(McpServerRoom, ModelsRoom), timings=timings)
    await within(bus.start())
    try:
        yield bus
    finally:
        await within(bus.stop())
