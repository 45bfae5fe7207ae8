"""Visits a bus and leaves: ``python -m lab.soak.visits GRPC HTTP FOLDER [leak]``.

A visit leaves nothing with the bus: it withdraws what it attached, registered, watched or permitted, or breaks the
connection, which must have the same effect. Every other visit uses new names. The file is long because it has a method
for each kind of visit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lab.load.callbacks import serve_callbacks
from lab.load.callers import reply_of
from lab.load.line import Line
from lab.load.peer import Peer
from lab.soak import plugin
from lab.soak.calls import CONNECTIONS
from lab.soak.tally import Tally
from lab.stage import stop_event
from toolbus.errors import PeerLost
from toolbus.protocol.tool import Result
from toolbus.sdk import Host, Plugin
from toolbus.v1 import tool_pb2 as pb

NAME = "visits"
SECONDS = 60.0  # that a visit may take, on a slow machine too
BOUNDED = 50  # names that come again and again
# 100 tools that come and go are 200 changes of the catalog; a bus keeps 10,000 of these, and as many counts of tools
# that have left and of what a source wrote into the audit: after 110 crowds it has no more of any.
CROWD, CROWDS, CROWD_EVERY = 100, 110, 1.0
BROKEN = ("leak",)
LEAKED = 100  # connections of one visit
DIALECTS = ("openai", "anthropic", "gemini", "mcp")
_ANY = '{"type":"object"}'
Visit = Callable[[int], Awaitable[None]]


class Wrong(Exception):
    """A visit saw something that should not be."""


class Visits:
    """The kinds of visits, a method for each.

    Args:
        broken: ``leak``: connections that should be broken stay, and some tools are never unregistered.
    """

    def __init__(self, address: str, session: aiohttp.ClientSession, broken: str = "") -> None:
        self._address = address
        self._session = session
        self._broken = broken
        self._url = ""  # where callbacks go
        self._leaked: list[Peer] = []  # that should have been closed
        self._host = Host(address, source="soak-visits")
        self._changing = Plugin("soak-changing", address=address)  # whose tools change while it stays

    def all(self) -> dict[str, tuple[float, Visit]]:
        """Returns the visits: how many seconds lie between two, and what to do."""
        return {
            "crowd": (CROWD_EVERY, self.crowd),
            "plugin": (1.0, self.plugin),
            "replaced plugin": (1.0, self.replaced_plugin),
            "broken plugin": (1.0, self.broken_plugin),
            "broken host": (1.0, self.broken_host),
            "changed tools": (0.25, self.changed_tools),
            "watcher": (1.0, self.watcher),
            "events": (0.5, self.events),
            "callback tool": (0.25, self.callback_tool),
            "dead callback": (2.0, self.dead_callback),
            "looks": (1.0, self.looks),
            "rules": (1.0, self.rules),
            "role": (2.0, self.role),
            "tasks": (1.0, self.tasks),
            "health": (1.0, self.health),
        }

    async def begin(self) -> None:
        """Connects the host and the plugin that stay."""
        self._url = (await serve_callbacks(plugin.answer_callback)).url
        await self._host.ready()
        await self._changing.start()
        await self._changing.ready()

    async def end(self) -> None:
        """Disconnects them."""
        for peer in self._leaked:
            await peer.close()
        await self._changing.close()
        await self._host.close()

    # -- over gRPC --------------------------------------------------------------------------------------------------

    async def plugin(self, number: int) -> None:
        """A plugin attaches, offers, is called, changes a tool, and disconnects."""
        source, name = f"visitor-{_name(number)}", f"visit_{_name(number)}"

        visitor = Plugin(source, address=self._address)
        visitor.add_tool(_echo, name=name, description=f"Visit {number}.", parameters=_schema(number))
        async with visitor:
            await visitor.ready()
            _ok(await self._host.call(name, {"number": number}))
            visitor.add_tool(_echo, replace=True, name=name, description="Changed.", parameters=_schema(number + 1))
            await visitor.ready()
            _ok(await self._host.call(name, {"number": number}))

    async def replaced_plugin(self, number: int) -> None:
        """A plugin attaches as an instance that is attached already, whose place it takes. A token binds both."""
        source, tool = f"twin-{_name(number)}", f"twin_{_name(number)}"
        twins = [Plugin(source, address=self._address, instance="one", token=f"secret {number}") for _ in range(2)]
        for twin in twins:
            twin.add_tool(_echo, name=tool, description="One of two.")
            await twin.start()
            await twin.ready()
        with contextlib.suppress(PeerLost):
            await twins[0].ended()
        _ok(await self._host.call(tool, {"number": number}))
        for twin in twins:
            await twin.close()

    async def crowd(self, number: int) -> None:
        """A plugin with many new tools comes and goes, and as many sources with a tool each, during the warm-up.

        That fills what the bus caches up to a limit: changes of the catalog, compiled schemas, counts by tool.
        """
        if number > CROWDS:
            return
        await asyncio.gather(*(self._pass_by(f"passing_{number}_{each}") for each in range(CROWD)))
        crowd = Plugin(f"crowd-{number}", address=self._address)
        for each in range(number * CROWD, (number + 1) * CROWD):
            crowd.add_tool(_echo, name=f"crowd_{each}", description="One of many.", parameters=_schema(each))
        async with crowd:
            await crowd.ready()

    async def broken_plugin(self, number: int) -> None:
        """A plugin's connection is reset while a call of it is pending."""
        name = f"broken_{_name(number)}"
        if self._broken == "leak":
            self._leaked += [await _attached(self._address, f"leaked-{number}") for _ in range(LEAKED)]
            return
        async with self._line() as address:
            peer = await _attached(address, f"broken-{_name(number)}", name)
            calling = asyncio.create_task(self._host.call(name, {"number": number}, timeout=SECONDS))
            while (frame := await peer.read()) is not None and not frame.calls:
                pass
            if frame is None:
                raise Wrong("the bus ended a stream that was not broken")
        if (reply := reply_of(await calling)).code != "UNAVAILABLE":
            raise Wrong(f"a call of a broken plugin ended otherwise: {reply}")
        await peer.close()

    async def broken_host(self, number: int) -> None:
        """A host's connection is reset while it waits for answers."""
        async with self._line() as address:
            peer = await _attached(address, f"host-{_name(number)}")
            arguments = f'{{"number":{number}}}'
            peer.calls += [
                pb.ToolCall(call_id=str(each), name=plugin.SLOW, arguments_json=arguments) for each in range(3)
            ]
            peer.flush()
            await asyncio.sleep(plugin.SLOW_SECONDS / 2)
        await peer.close()

    async def changed_tools(self, number: int) -> None:
        """A plugin that stays offers one more tool, another one less, and gives a third another schema."""
        add = self._changing.add_tool
        add(_echo, name=f"tool_{number}", description=f"Tool {number}.", parameters=_schema(number))
        add(_echo, replace=True, name="changing", description=f"Time {number}.", parameters=_schema(number))
        self._changing.remove_tool(f"tool_{number - 10}")
        await self._changing.ready()
        _ok(await self._host.call(f"tool_{number}", {"number": number}))

    async def watcher(self, number: int) -> None:
        """A host follows the catalog until it has seen a tool come and go."""
        name = f"watched_{_name(number)}"
        async with Host(self._address, source=f"watcher-{_name(number)}") as host:
            changes = host.watch()
            await anext(changes)
            await self._register(name, name, self._url, number)
            while all(listed.name != name for listed in (await anext(changes)).added):
                pass
            await self._post("clear", {"source": name, "role": None})
            while all(removed.name != name for removed in (await anext(changes)).removed):
                pass

    async def health(self, number: int) -> None:
        """A probe asks about sources that come, that never were, and watches one of them."""
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(self._address, options) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest(service=""))
            await stub.List(health_pb2.HealthListRequest())
            watching = stub.Watch(health_pb2.HealthCheckRequest(service=f"toolbus.source.unknown-{number}"))
            await watching.read()
            watching.cancel()

    # -- over HTTP --------------------------------------------------------------------------------------------------

    async def events(self, number: int) -> None:
        """A reader of events goes away in the middle."""
        async with self._session.get("/api/tools/events", params={"since": 1} if number % 2 else {}) as response:
            await response.content.readline()
            response.close()

    async def callback_tool(self, number: int) -> None:
        """A tool is registered with a callback URL, called, changed, and unregistered."""
        name, source = f"callback_{_name(number)}", f"callback-{_name(number)}"
        await self._register(name, source, f"{self._url}/{number}", number)
        await self._invoke(name, "OK")
        await self._register(name, source, f"{self._url}/{number}", number + 1)
        if self._broken == "leak" and number % 2:
            return
        if number % 4 < 2:
            await self._post("unregister", {"name": name, "role": None})
        else:
            await self._post("clear", {"source": source, "role": None})
        await self._invoke(name, "NOT_FOUND")

    async def dead_callback(self, number: int) -> None:
        """A tool's callback URL does not answer, until the tool is unregistered."""
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            name = f"dead_{number}"
            await self._register(name, name, f"http://127.0.0.1:{closed.getsockname()[1]}/run", number)
            for _ in range(3):
                await self._invoke(name, "UNAVAILABLE")
            await self._post("clear", {"source": name, "role": None})

    async def looks(self, number: int) -> None:
        """A host lists, exports and searches everything."""
        await self._host.list(include_offline=True)
        _ok(await self._host.call("toolbus:calls", {"limit": 20}))
        dialect = DIALECTS[number % len(DIALECTS)]
        for path in (
            "/api/tools",
            f"/api/tools?user_id=reader_{number}&level=50",
            f"/api/tools/export?dialect={dialect}&user_id=reader_{number}",
            # By words: vectors of texts are cached up to 64 MiB, which takes longer to fill than a soak.
            f"/api/tools/search?q=visit+{number}&mode=keyword",
            f"/api/tools/search?q=tool_{number}&mode=keyword&include_parameters=true",
        ):
            async with self._session.get(path, raise_for_status=True) as response:
                await response.read()

    async def tasks(self, number: int) -> None:
        """A call becomes a task of a user, which is awaited; another one is ended."""
        user = {"user_id": f"owner {_name(number)}"}
        begun = [await self._task(user) for _ in range(2)]
        async with self._session.delete(f"/api/tasks/{begun[1]}", params=user) as response:
            await response.read()
        async with self._session.get(f"/api/tasks/{begun[0]}/await", params=user) as response:
            if (task := await response.json())["status"] != "completed":
                raise Wrong(f"a task ended otherwise: {task}")

    # -- rules ------------------------------------------------------------------------------------------------------

    async def rules(self, number: int) -> None:
        """Operators permit, forbid, and withdraw both."""
        for kind, name in (("tools", f"rule_{number}"), ("sources", f"source-{number}"), ("tools", plugin.SLOW)):
            users = ["*"] if name == plugin.SLOW else [f"user {number}"]
            _ok(await self._host.call("toolbus:permit", {"kind": kind, "name": name, "users": users}))
            _ok(await self._host.call("toolbus:permit", {"kind": kind, "name": name, "users": None}))
        for verb in ("revoke", "grant"):
            _ok(await self._host.call(f"toolbus:{verb}", {"source": f"stranger-{number}"}))

    async def role(self, number: int) -> None:
        """A role comes, gets a tool of its own, and goes before that tool or after it."""
        role, after = f"role-{_name(number)}", number % 4 < 2
        clear = {"source": "soak-role", "role": None}
        _ok(await self._host.call("toolbus:role_add", {"role": role}))
        try:
            await self._register(f"role_{number}", "soak-role", self._url, number, role)
            async with self._session.get(f"/api/tools?role={role}", raise_for_status=True) as response:
                await response.read()
            if after:
                await self._post("clear", clear)
        finally:
            _ok(await self._host.call("toolbus:role_remove", {"role": role}))
        await self._post("clear", clear)

    # -- parts of the above -----------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _line(self) -> AsyncIterator[str]:
        """Opens another way to the bus, at the end of which what came over it is reset: the bus gets no drain."""
        line = Line(0, int(self._address.rpartition(":")[2]))
        await line.open()
        try:
            yield f"127.0.0.1:{line.port}"
        finally:
            await line.close()

    async def _pass_by(self, name: str) -> None:
        """A source registers a tool, which is called once, and leaves."""
        await self._register(name, name, self._url, 1)
        await self._invoke(name, "OK")
        await self._post("clear", {"source": name, "role": None})

    async def _register(self, name: str, source: str, url: str, number: int, role: str | None = None) -> None:
        body = {"name": name, "description": f"Number {number}.", "parameters": _schema(number)}
        await self._post("register", {**body, "callback_url": url, "source": source, "role": role})

    async def _post(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._session.post(f"/api/tools/{verb}", json=body) as response:
            answer: dict[str, Any] = await response.json()
            if response.status != 200 or not answer.get("ok", True):
                raise Wrong(f"{verb} was answered with {response.status}: {answer}")
            return answer

    async def _invoke(self, name: str, code: str) -> None:
        answer = await self._post("invoke", {"name": name, "arguments": {"number": 1}})
        found = answer["error"]["code"] if answer["error"] else "OK"
        if found != code:
            raise Wrong(f"{name} was answered with {found}, not {code}: {answer}")

    async def _task(self, user: dict[str, str]) -> str:
        body = {"name": plugin.SLOW, "arguments": {"number": 1}, "context": user, "background_after_seconds": 0.01}
        answer = await self._post("invoke", body)
        if answer["is_error"]:
            raise Wrong(f"a call did not become a task: {answer}")
        return str(answer["output"]["task_id"])


async def _echo(number: int = 0) -> int:
    return number


def _name(number: int) -> str:
    """Returns a name that comes again and again, or a new one, in turns."""
    return f"new{number}" if number % 2 else f"old{number % BOUNDED}"


def _schema(number: int) -> dict[str, Any]:
    """Returns a schema that no other number has."""
    more = {f"field_{number}_{each}": {"type": "string", "maxLength": number + each} for each in range(number % 5)}
    return {"type": "object", "properties": {"number": {"type": "integer"}, **more}}


def _ok(result: Result) -> None:
    if result.error is not None:
        raise Wrong(f"a call failed: {result.error}")


async def _attached(address: str, source: str, tool: str = "") -> Peer:
    """Attaches on a connection of its own."""
    peer = Peer(address, own_connection=True)
    await peer.attach(source, [pb.Tool(name=tool, description="Breaks.", parameters_json=_ANY)] if tool else [])
    return peer


async def _go_on(what: str, seconds: float, visit: Visit, tally: Tally, ends: asyncio.Event) -> None:
    """Visits one after the other until it is terminated. A visit that has begun is finished."""
    number, due = 0, time.monotonic()
    while not ends.is_set():
        number += 1
        try:
            async with asyncio.timeout(SECONDS):
                await visit(number)
            tally.note(what, "OK")
        except Exception as error:  # of whatever kind: it is counted, and the next one comes
            tally.note(what, type(error).__name__, None, str(error))
        due = max(due + seconds, time.monotonic())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ends.wait(), due - time.monotonic())


async def main(address: str, http: str, folder: str, broken: str = "") -> None:
    """Visits until it is terminated."""
    logging.basicConfig(level=logging.WARNING)
    ends = stop_event()
    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    timeout = aiohttp.ClientTimeout(SECONDS)
    async with aiohttp.ClientSession(f"http://{http}", connector=connector, timeout=timeout) as session:
        visits = Visits(address, session, broken)
        await visits.begin()
        plans = visits.all()
        tally = Tally(Path(folder), NAME, {what: frozenset({"OK"}) for what in plans})
        working = [asyncio.create_task(_go_on(what, *plan, tally, ends)) for what, plan in plans.items()]
        writing = asyncio.create_task(tally.write_every_second())
        await asyncio.gather(*working)
        writing.cancel()
        await visits.end()
    tally.write()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
