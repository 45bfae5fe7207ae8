"""The bridge over HTTP, against a bus."""

from __future__ import annotations

import asyncio
import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lab.stage import free_ports
from tests.support.waiting import until
from toolbus.parts.mcp.bridge.bridge import Bridge
from toolbus.parts.mcp.bridge.bus_http_link import RESUME_SECONDS, BusHttpLink
from toolbus.parts.mcp.bridge.links import Link, NoBus, TakeEnd, TakeLine
from toolbus.parts.mcp.messages.headers import SESSION, VERSION
from toolbus.parts.mcp.settings import McpSettings, Profile
from toolbus.sdk import Plugin, ToolScope
from toolbus.testing import running_bus

Json = dict[str, Any]
META = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
INITIALIZE = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
REGION = {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}


class Client:
    """A client whose bridge uses HTTP."""

    def __init__(self, url: str, profile: str = "", then: str = "") -> None:
        self.got: list[Json] = []
        self.ends: list[str] = []  # why connections have ended
        self._urls = [url, then or url]  # of the bus, and of the one that connects after it
        self._moves = bool(then)
        self.bridge = Bridge(self._connect, lambda line: self.got.append(json.loads(line)), profile)

    def _connect(self, take: TakeLine, end: TakeEnd) -> Link:
        def note(link: Link, why: str) -> None:
            end(link, why)
            self.ends.append(why)

        link = BusHttpLink(self._urls[0], take, note, moves=self._moves)
        self._urls = self._urls[1:] or self._urls
        return link

    async def say(self, method: str, id: int | None = None, **params: Any) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params, **({} if id is None else {"id": id})}
        await asyncio.to_thread(self.bridge.take, json.dumps(message).encode() + b"\n")

    async def ask(self, method: str, id: int, **params: Any) -> Json:
        await self.say(method, id, **params)
        await until(lambda: self.answers(id), f"the answer to {method}")
        (answer,) = self.answers(id)
        return answer

    def answers(self, id: int) -> list[Json]:
        return [each for each in self.got if each.get("id") == id and "method" not in each]

    def was_notified(self, method: str) -> bool:
        return any(each.get("method") == method for each in self.got)


def offered(address: str, released: asyncio.Event | None = None) -> Plugin:
    plugin = Plugin("here", address=address)

    @plugin.tool(parameters=REGION)
    def where(region: str) -> str:
        """Says a region"""
        return region

    @plugin.tool
    async def held(number: int) -> int:
        """Returns a number once it is released"""
        await (released or asyncio.Event()).wait()
        return number

    @plugin.tool
    async def wait(scope: ToolScope) -> str:
        """Waits until it is cancelled"""
        scope.progress(1, message="waiting")
        await asyncio.Event().wait()
        return "never"

    return plugin


async def test_both_eras_go_over_http() -> None:
    async with running_bus(http="127.0.0.1:0") as bus:
        client = Client(f"http://{bus.http_address}/mcp")
        await asyncio.to_thread(client.bridge.connect_once)
        assert "no tools" not in (await client.ask("initialize", 1, **INITIALIZE))["result"]["instructions"]
        await client.say("notifications/initialized")
        assert (await client.ask("tools/list", 2))["result"]["tools"] == []
        async with offered(bus.grpc_addresses[0]) as plugin:
            await plugin.ready()
            await until(lambda: client.was_notified("notifications/tools/list_changed"), "the notification")
            legacy = await client.ask("tools/call", 3, name="where", arguments={"region": "süd"})
            await client.ask("tools/list", 4, _meta=META)
            modern = await client.ask("tools/call", 5, name="where", arguments={"region": "süd"}, _meta=META)
            for answer in (legacy, modern):
                assert answer["result"]["content"][0]["text"] == "süd"
        await asyncio.to_thread(client.bridge.finish)


async def test_a_cancelled_call_of_a_session_leaves_its_other_calls_alone() -> None:
    async with running_bus(http="127.0.0.1:0") as bus, offered(bus.grpc_addresses[0]) as plugin:
        await plugin.ready()
        client = Client(f"http://{bus.http_address}/mcp")
        await asyncio.to_thread(client.bridge.connect_once)
        await client.ask("initialize", 1, **INITIALIZE)
        for id in (2, 3):
            await client.say("tools/call", id, name="wait", arguments={}, _meta={"progressToken": id})
            await until(lambda: client.was_notified("notifications/progress"), "progress")
            client.got.clear()
        await client.say("notifications/cancelled", requestId=2)
        await asyncio.sleep(2 * RESUME_SECONDS)  # the stream of the cancelled call would be resumed meanwhile
        assert client.answers(2) == client.answers(3) == []
        await client.say("notifications/cancelled", requestId=3)
        await asyncio.to_thread(client.bridge.finish)


@pytest.mark.parametrize("meta", [{}, META], ids=["legacy", "modern"])
async def test_a_cancelled_call_is_not_answered(meta: Json) -> None:
    async with running_bus(http="127.0.0.1:0") as bus, offered(bus.grpc_addresses[0]) as plugin:
        await plugin.ready()
        client = Client(f"http://{bus.http_address}/mcp")
        await asyncio.to_thread(client.bridge.connect_once)
        await client.ask("initialize", 1, **INITIALIZE)
        await client.say("tools/call", 2, name="wait", arguments={}, _meta={**meta, "progressToken": "p"})
        await until(lambda: client.was_notified("notifications/progress"), "progress")
        await client.say("notifications/cancelled", requestId=2)
        assert (await client.ask("tools/list", 3, _meta=meta))["result"]["tools"]
        assert client.answers(2) == []
        await asyncio.to_thread(client.bridge.finish)


async def test_a_profile_is_a_path_and_an_unknown_one_is_named() -> None:
    settings = McpSettings(profiles={"default": Profile(), "desk": Profile("desk", deny=("*",))})
    async with running_bus(http="127.0.0.1:0", mcp=settings) as bus, offered(bus.grpc_addresses[0]) as plugin:
        await plugin.ready()
        url = f"http://{bus.http_address}/mcp"
        desk, unknown = Client(url, "desk"), Client(url, "unknown")
        for client in (desk, unknown):
            await asyncio.to_thread(client.bridge.connect_once)
        assert (await desk.ask("tools/list", 1, _meta=META))["result"]["tools"] == []
        assert "'unknown'" in (await unknown.ask("initialize", 1, **INITIALIZE))["result"]["instructions"]
        await asyncio.to_thread(desk.bridge.finish)


async def test_requests_wait_for_the_next_bus_which_gets_the_handshake() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    client = Client(f"http://{address}/mcp")
    async with running_bus(http=address):
        await asyncio.to_thread(client.bridge.connect_once)
        await client.ask("initialize", 1, **INITIALIZE)
        await client.say("notifications/initialized")
        await client.ask("tools/list", 2)
    await until(lambda: client.ends, "the end of the connection")
    await client.say("tools/list", 3)  # it waits for the next bus
    async with running_bus(http=address):
        await asyncio.to_thread(client.bridge.connect_once)
        await until(lambda: client.answers(3), "the answer of the next bus")
        assert client.answers(3)[0]["result"]["tools"] == []
        assert client.was_notified("notifications/tools/list_changed")
        await asyncio.to_thread(client.bridge.finish)


async def test_a_request_that_no_bus_can_have_read_waits_for_the_next_one() -> None:
    async with running_bus(http="127.0.0.1:0") as bus, running_bus(http="127.0.0.1:0") as after:
        client = Client(f"http://{bus.http_address}/mcp", then=f"http://{after.http_address}/mcp")
        await asyncio.to_thread(client.bridge.connect_once)
        await client.ask("tools/list", 2, _meta=META)
        await bus.stop()  # of which a client without a stream learns with its next request
        await client.say("tools/list", 3, _meta=META)
        await until(lambda: client.ends, "the end of the connection")
        assert client.answers(3) == []
        await asyncio.to_thread(client.bridge.connect_once)
        await until(lambda: client.answers(3), "the answer of the next bus")
        assert client.answers(3)[0]["result"]["tools"] == []
        await asyncio.to_thread(client.bridge.finish)


async def test_a_draining_bus_answers_what_it_runs_while_the_next_one_runs_what_it_refuses() -> None:
    released = asyncio.Event()
    async with running_bus(http="127.0.0.1:0") as bus, running_bus(http="127.0.0.1:0") as after:
        address = f"{bus.grpc_addresses[0]},{after.grpc_addresses[0]}"
        client = Client(f"http://{bus.http_address}/mcp", then=f"http://{after.http_address}/mcp")
        async with offered(address, released) as plugin:
            await plugin.ready()
            await until(lambda: all("held" in each.registry.first for each in (bus, after)), "the tools")
            await asyncio.to_thread(client.bridge.connect_once)
            await client.ask("initialize", 1, **INITIALIZE)
            await client.say("notifications/initialized")
            await client.say("tools/call", 2, name="held", arguments={"number": 2})
            await until(lambda: bus.dispatcher.in_flight.active, "the call that the bus runs")
            draining = asyncio.create_task(bus.drain(60))
            await until(lambda: not bus.core.takes_calls, "the drain")
            await client.say("tools/call", 3, name="held", arguments={"number": 3})
            await until(lambda: client.ends, "the end of the connection")
            await asyncio.to_thread(client.bridge.connect_once)
            await until(lambda: after.dispatcher.in_flight.active, "the call that the next bus runs")
            assert client.answers(2) == client.answers(3) == []
            released.set()
            for id in (2, 3):
                await until(lambda id=id: client.answers(id), "the answer")  # type: ignore[misc]
                assert client.answers(id)[0]["result"]["content"][0]["text"] == str(id)
            await draining
        await asyncio.to_thread(client.bridge.finish)


async def test_what_follows_a_handshake_waits_for_its_session() -> None:
    """A client goes on after 0.9 s, when the bridge has answered in place of a slow bus."""
    seen: list[tuple[str, ...]] = []

    class Slow(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if message["method"] == "initialize":
                time.sleep(0.2)
            else:
                seen.append((message["method"], *(self.headers.get(name, "") for name in (SESSION, VERSION))))
            answer = json.dumps({"jsonrpc": "2.0", "id": message.get("id"), "result": INITIALIZE}).encode()
            self.send_response(200)
            for name, value in ((SESSION, "s1"), ("Content-Type", "application/json"), ("Content-Length", len(answer))):
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *words: Any) -> None:
            """Logs nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        serving = asyncio.create_task(asyncio.to_thread(server.serve_forever, 0.01))
        client = Client(f"http://127.0.0.1:{server.server_port}/mcp")
        await asyncio.to_thread(client.bridge.connect_once)
        await client.say("initialize", 1, **INITIALIZE)
        await client.say("tools/list", 2)
        await client.say("notifications/initialized")
        await until(lambda: client.answers(2), "the answer")
        await asyncio.to_thread(client.bridge.finish)
        server.shutdown()
        await serving
    assert sorted(seen[1:]) == [(each, "s1", "2025-11-25") for each in ("notifications/initialized", "tools/list")]


def test_an_error_names_an_invalid_address_and_one_where_nothing_listens() -> None:
    for url in ("48911", "http://127.0.0.1:1/mcp", "https://127.0.0.1:1/mcp"):
        with pytest.raises(NoBus, match=url):
            BusHttpLink(url, lambda line: None, lambda link, why: None)
