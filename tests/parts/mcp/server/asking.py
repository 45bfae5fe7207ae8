"""A bus without sockets whose MCP server is asked directly, tools that ask, and stand-ins for mounted servers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus, Config
from toolbus.bus.access.identity import LOCAL, Identity
from toolbus.bus.calls.call import Call
from toolbus.bus.catalog.entry import Slots, Trust, compile_tool
from toolbus.errors import Stage
from toolbus.parts.mcp.features import OnUpdate, Requester
from toolbus.parts.mcp.messages import jsonrpc
from toolbus.parts.mcp.messages.eras import META_CAPABILITIES, META_VERSION, NEWEST, TASKS_EXTENSION
from toolbus.parts.mcp.messages.jsonrpc import RpcError
from toolbus.parts.mcp.server import methods
from toolbus.parts.mcp.server.room import McpServerRoom
from toolbus.parts.mcp.server.server import McpServer
from toolbus.parts.mcp.server.sessions import ClientCapabilities, McpSession
from toolbus.parts.mcp.settings import McpSettings, Profile
from toolbus.parts.tasks.room import TasksRoom
from toolbus.protocol.tool import Limits, Tool
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

Json = dict[str, Any]
FORM: Json = {"elicitation": {"form": {}}}
TASKS: Json = {"extensions": {TASKS_EXTENSION: {}}}


class Channel:
    """Takes the messages before an answer; may answer what the client is asked."""

    def __init__(self, replies: Callable[[str, Json], Json] | None = None, *, takes_messages: bool = True) -> None:
        self.takes_messages = takes_messages
        self.messages: list[Json] = []
        self.came = asyncio.Event()
        self.session: McpSession | None = None
        self._replies = replies

    def send(self, message: bytes) -> None:
        sent = json.loads(message)
        self.messages.append(sent)
        self.came.set()
        if self._replies is not None and self.session is not None and "id" in sent:
            reply = {"jsonrpc": "2.0", "id": sent["id"], **self._replies(sent["method"], sent["params"])}
            asyncio.get_running_loop().call_soon(self.session.answered, jsonrpc.decode(json.dumps(reply).encode()))

    def of(self, method: str) -> list[Json]:
        """Returns the params of the notifications of one method."""
        return [each["params"] for each in self.messages if each.get("method") == method]

    async def wait(self, method: str, count: int = 1) -> list[Json]:
        """Waits for notifications of a method."""
        async with asyncio.timeout(WAIT_SECONDS):
            while len(self.of(method)) < count:
                self.came.clear()
                await self.came.wait()
        return self.of(method)


class McpBench:
    """A bus and its MCP server."""

    def __init__(self, bus: Bus, server: McpServer, profile: Profile) -> None:
        self.bus = bus
        self.server = server
        self.profile = profile
        self.id = 0

    async def ask(
        self,
        method: str,
        params: Json | None = None,
        *,
        capabilities: Json | None = None,
        channel: Channel | None = None,
        session: McpSession | None = None,
        profile: Profile | None = None,
        identity: Identity = LOCAL,
    ) -> Json:
        """Asks as a modern client, or in a session as a legacy one. Returns the result.

        Raises:
            RpcError: what it was answered instead.
        """
        self.id += 1
        params = dict(params or {})
        if session is None:
            params["_meta"] = {META_VERSION: NEWEST, META_CAPABILITIES: capabilities or {}, **params.get("_meta", {})}
        text = json.dumps({"jsonrpc": "2.0", "id": self.id, "method": method, "params": params}).encode()
        channel = channel or Channel()
        channel.session = session
        headers = {"mcp-session-id": session.id} if session is not None else {}
        request = self.server.read(
            jsonrpc.decode(text), profile or self.profile, identity, channel, session=session, headers=headers
        )
        _, answer = await methods.answer(self.server, request)
        answered: Json = json.loads(answer)
        if "error" in answered:
            error = answered["error"]
            raise RpcError(error["code"], error["message"], error.get("data"))
        result: Json = answered["result"]
        return result

    async def call(self, name: str, arguments: Json | None = None, **more: Any) -> Json:
        """Calls a tool; ``sent`` are further params."""
        sent = more.pop("sent", {})
        return await self.ask("tools/call", {"name": name, "arguments": arguments or {}, **sent}, **more)

    def session(self, capabilities: Json | None = None, version: str = "2025-11-25") -> McpSession:
        """Begins a legacy session."""
        return self.server.sessions.begin(version, ClientCapabilities.of(capabilities or {}), self.profile, LOCAL)

    def offer(self, name: str, run: Callable[[Call], pb.ToolResult | None], source: str = "shop", **more: Any) -> None:
        """Offers a tool that a function answers; None: not yet."""
        tool = Tool(name, **more)
        self.bus.registry.register(Scripted(source, self.bus, run), [compile_tool(tool, Limits())])
        self.bus.core.signals.catalog_changed()


@asynccontextmanager
async def mcp_bench(
    profile: Profile | None = None, task_after: float = 5.0, **settings: Any
) -> AsyncIterator[McpBench]:
    profile = profile or Profile()
    mcp = McpSettings(task_after_seconds=task_after, profiles={profile.name: profile})
    config = Config(**{"grpc": ("127.0.0.1:0",), "http": "off", "data_dir": None, "mcp": mcp, **settings})
    async with Bus(config, rooms=(TasksRoom, McpServerRoom)) as bus:
        room = bus.core.rooms.find(McpServerRoom)
        assert room is not None
        yield McpBench(bus, room.server, profile)


class Scripted:
    """A handler whose results are whatever a test says."""

    kind = "function"
    instance = ""
    trust = Trust.OWN
    shares = awaits_roles = remote = persisted = False
    takes_calls = True
    session_state = wire.SESSION_STATE_LIVE
    max_item_bytes = 1 << 62
    max_in_flight = 256

    def __init__(self, source: str, bus: Bus, run: Callable[[Call], pb.ToolResult | None]) -> None:
        self.source = source
        self.pending: dict[str, Any] = {}
        self.slots = Slots()
        self.stuck = 0
        self.cancelled: list[str] = []
        self._bus = bus
        self._run = run

    def send(self, calls: Sequence[Call], now: float) -> None:
        for call in calls:
            result = self._run(call)
            if result is not None:
                result.call_id = call.id
                asyncio.get_running_loop().call_soon(self._answer, result)

    def _answer(self, result: pb.ToolResult) -> None:
        self._bus.dispatcher.results(self, [result], time.monotonic())

    def cancel(self, call: Call, reason: str) -> bool:
        self.cancelled.append(reason)
        return False

    def stage(self, call: Call) -> Stage:
        return Stage.DISPATCHED


def question(message: str = "name?", **properties: Json) -> Json:
    """Returns a form."""
    schema = {"type": "object", "properties": properties or {"name": {"type": "string"}}, "required": []}
    return {
        "method": "elicitation/create",
        "params": {"mode": "form", "message": message, "requestedSchema": schema},
    }


def asks(state: str = "", **questions: Json) -> pb.ToolResult:
    """Returns a result that asks."""
    return pb.ToolResult(input_requests_json=json.dumps(questions), request_state=state)


def accepted(**content: Any) -> Json:
    """Returns the answer to a form."""
    return {"action": "accept", "content": content}


def answers_of(call: Call) -> Json:
    """Returns the answers that came with a call."""
    text = call.exchange.responses_json if call.exchange is not None else ""
    answers: Json = json.loads(text) if text else {}
    return answers


class Mounted:
    """A stand-in for a mounted server: a `FeatureProvider`."""

    def __init__(
        self,
        source: str,
        *,
        capabilities: Collection[str] = ("prompts", "resources", "completions", "subscribe"),
        prompts: Sequence[str] = (),
        resources: Sequence[str] = (),
        templates: Sequence[str] = (),
        answer: Callable[[str, Json], Json] | None = None,
        instructions: str = "",
        role: str = "",
        min_level: int = 0,
    ) -> None:
        self.source = source
        self.instructions = instructions
        self.role = role
        self.min_level = min_level
        self.capabilities = capabilities
        self.prompt_names = list(prompts)
        self.uris = list(resources)
        self.uri_templates = list(templates)
        self.requests: list[tuple[str, Json]] = []
        self.askers: list[Requester] = []
        self.listeners: dict[str, list[OnUpdate]] = {}
        self._answer = answer

    def declared(self, kind: str) -> Sequence[Mapping[str, Any]]:
        if kind == "prompts":
            return [{"name": name, "description": f"of {self.source}"} for name in self.prompt_names]
        if kind == "resources":
            return [{"uri": uri, "name": uri, "description": f"of {self.source}"} for uri in self.uris]
        return [{"uriTemplate": each, "name": each} for each in self.uri_templates]

    async def request(self, method: str, params: Mapping[str, Any], asker: Requester) -> Json:
        self.requests.append((method, dict(params)))
        self.askers.append(asker)
        return self._answer(method, dict(params)) if self._answer is not None else {"of": self.source}

    def subscribe(self, uri: str, on_update: OnUpdate) -> Callable[[], None]:
        self.listeners.setdefault(uri, []).append(on_update)
        return lambda: self.listeners[uri].remove(on_update)
