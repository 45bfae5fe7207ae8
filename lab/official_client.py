"""Compares the client of mounts with the official one for Python: what they cost, and what each does with odd servers.

    python -m lab.official_client [--write] [--seconds 2]

Both talk to the same servers, without a bus between: `lab.load.mcp_child` on pipes, and servers over HTTP that answer
as tests have them. `--write` puts the table into lab/results/mcp-client.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import mcp
import psutil
from mcp.client.stdio import StdioServerParameters

from lab.stage import ROOT, until_async
from tests.parts.mcp.client.remote_server import NOT_MODERN, RemoteServer, answer_with, connected, serving
from toolbus.parts.mcp.client.connection import METHODS, McpConnection, open_connection, read_lists
from toolbus.parts.mcp.client.server_process import ServerProgram
from toolbus.parts.mcp.client.transport import StdioTransport
from toolbus.processes.lifeline import Lifeline

PAGE = ROOT / "lab" / "results" / "mcp-client.md"
CHILD = ROOT / "lab" / "load" / "mcp_child.py"
SECONDS = 20.0  # for one answer
TOOL = {"name": "add", "inputSchema": {"type": "object"}}
COST = """
import psutil, time
import toolbus.bus, aiohttp, msgspec, pydantic  # what a bus with HTTP has anyway
before, began = psutil.Process().memory_info().rss, time.perf_counter()
import {module}
print(psutil.Process().memory_info().rss - before, time.perf_counter() - began)
"""


class Client(Protocol):
    """One of the two clients, connected."""

    async def list(self) -> list[str]:
        """Returns the names of the tools."""

    async def call(self, name: str) -> str:
        """Calls a tool without arguments; returns the text of its result."""


class Ours:
    """The client of mounts."""

    name = "toolbus"

    def __init__(self, connection: McpConnection) -> None:
        self._connection = connection

    @classmethod
    @asynccontextmanager
    async def on_pipes(cls, *command: str) -> AsyncIterator[Client]:
        program = ServerProgram(command, dict(os.environ), str(ROOT))
        with contextlib.closing(Lifeline()) as lifeline:
            transport = StdioTransport("child", program, lambda: lifeline)
            ignore: Callable[..., None] = lambda *_: None  # noqa: E731
            connection = McpConnection(transport, on_request=ignore, on_notification=ignore, on_closed=ignore)
            await transport.start(connection)
            try:
                await open_connection(connection, modern=None)
                yield cls(connection)
            finally:
                await connection.close()

    @classmethod
    @asynccontextmanager
    async def over_http(cls, server: RemoteServer) -> AsyncIterator[Client]:
        async with connected(server) as connection:
            yield cls(connection)

    async def list(self) -> list[str]:
        assert self._connection.peer is not None
        listing = await read_lists(self._connection, self._connection.peer, tuple(METHODS)[:1])
        return [each["name"] for each in listing.entries["tools"]]

    async def call(self, name: str) -> str:
        result = await self._connection.request("tools/call", {"name": name, "arguments": {}}, name=name)
        return str(result["content"][0]["text"])


class Official:
    """The client of the official SDK, without its cache."""

    name = "mcp"

    def __init__(self, client: mcp.Client) -> None:
        self._client = client

    @classmethod
    @asynccontextmanager
    async def on_pipes(cls, *command: str) -> AsyncIterator[Client]:
        parameters = StdioServerParameters(command=command[0], args=[*command[1:]], env=dict(os.environ))
        async with mcp.Client(parameters, cache=None) as client:
            yield cls(client)

    @classmethod
    @asynccontextmanager
    async def over_http(cls, server: RemoteServer) -> AsyncIterator[Client]:
        async with mcp.Client(server.url, cache=None) as client:
            yield cls(client)

    async def list(self) -> list[str]:
        names: list[str] = []
        cursor: str | None = None
        while True:  # as its documentation has it: page by page, until there is no cursor
            page = await self._client.list_tools(cursor=cursor)
            names += [each.name for each in page.tools]
            if (cursor := page.next_cursor) is None:
                return names

    async def call(self, name: str) -> str:
        block: Any = (await self._client.call_tool(name, {})).content[0]
        return str(block.text)


Kind = type[Ours] | type[Official]
Measure = Callable[[Kind], Awaitable[str]]


def _said(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())[:90].replace("|", "/")
    stage = getattr(error, "stage", None)
    return f"{type(error).__name__}: {text}" + (f" (stage {stage.name})" if stage is not None else "")


# -- what they cost ----------------------------------------------------------------------------------------------------


async def imports(kind: Kind) -> str:
    """What the first mount imports, in a process that has a bus."""
    module = "toolbus.parts.mcp.client.mounts" if kind is Ours else "mcp"
    command = (sys.executable, "-c", COST.format(module=module))
    used, seconds = (await asyncio.to_thread(subprocess.check_output, command, text=True)).split()
    return f"{int(used) / 1e6:.0f} MB, {float(seconds):.2f} s"


async def starts(kind: Kind) -> str:
    """From the start of a server on pipes to its list of tools."""
    times = []
    for _ in range(5):
        began = time.monotonic()
        async with kind.on_pipes(sys.executable, str(CHILD)) as client:
            await client.list()
            times.append(time.monotonic() - began)
    return f"{sorted(times)[2] * 1000:.0f} ms"


def calls(in_flight: int, seconds: float) -> Measure:
    """Calls a second to a server on pipes."""

    async def measure(kind: Kind) -> str:
        async with kind.on_pipes(sys.executable, str(CHILD)) as client:
            await client.list()
            await client.call("forecast")
            ends, done = time.monotonic() + seconds, 0

            async def call() -> None:
                nonlocal done
                while time.monotonic() < ends:
                    await client.call("forecast")
                    done += 1

            await asyncio.gather(*(call() for _ in range(in_flight)))
            return f"{done / seconds:,.0f}"

    return measure


# -- what they do with odd servers -------------------------------------------------------------------------------------


async def unusable_probes(kind: Kind) -> str:
    """Servers of the older era that answer `server/discover` in a way that is no answer."""
    good = 0
    for case in NOT_MODERN:
        async with serving(modern=False) as server:
            server.on |= {"server/discover": answer_with(*case), "tools/list": _listed(server)}
            with contextlib.suppress(Exception):
                async with asyncio.timeout(SECONDS), kind.over_http(server) as client:
                    good += await client.list() == ["add"]
    return f"{good} of {len(NOT_MODERN)} list their tool"


def _listed(server: RemoteServer, **more: Any) -> Any:
    async def listed(request: Any, message: Mapping[str, Any]) -> Any:
        return server.result(message, {"tools": [TOOL], "resultType": "complete", **more})

    return listed


async def cursors(kind: Kind) -> str:
    """A list whose next cursor is always the same."""
    async with serving(modern=False) as server:
        server.on["tools/list"] = _listed(server, nextCursor="A")
        try:
            async with asyncio.timeout(2), kind.over_http(server) as client:
                await client.list()
        except BaseException as error:
            return f"{'no end' if isinstance(error, TimeoutError) else _said(error)}: more than {_asked(server)} pages"
    return f"ends after {_asked(server)} pages"


def _asked(server: RemoteServer) -> int:
    return server.methods().count("tools/list")


async def lost_session(kind: Kind) -> str:
    """A server that forgets the session, as one that was restarted does."""
    async with serving(modern=False) as server:
        server.on["tools/list"] = _listed(server)
        try:
            async with asyncio.timeout(SECONDS), kind.over_http(server) as client:
                await client.call("add")
                server.sessions.clear()
                return f"the next call: {await client.call('add')}"
        except BaseException as error:
            return _said(error)


async def killed(kind: Kind) -> str:
    """A server on pipes that is killed in the middle of a call."""
    known = {each.pid for each in psutil.Process().children(recursive=True)}
    try:
        async with asyncio.timeout(SECONDS), kind.on_pipes(sys.executable, str(CHILD)) as client:
            await client.list()
            call = asyncio.ensure_future(client.call("hold"))
            await asyncio.sleep(0.2)
            for each in psutil.Process().children(recursive=True):
                if each.pid not in known and str(CHILD) in each.cmdline():
                    each.kill()
            await call
    except BaseException as error:
        return _said(error)
    return "an answer"


async def left_behind(kind: Kind) -> str:
    """A server that ignores SIGTERM and has children, one of them in a session of its own."""

    def living() -> list[psutil.Process]:
        found = []
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if each.environ().get("LAB_MARK") == mark and each.pid != os.getpid():
                    found.append(each)
        return found

    os.environ["LAB_MARK"] = mark = f"{kind.name}-{time.monotonic()}"
    try:
        async with kind.on_pipes(sys.executable, str(CHILD), "--wild") as client:
            await client.list()
        await until_async(lambda: not living(), 5.0)
        left = living()
        for each in left:
            each.kill()
        return f"{len(left)} processes are left"
    finally:
        del os.environ["LAB_MARK"]


async def broken_result(kind: Kind) -> str:
    """A result that breaks the output schema of its tool, with a text that a model can read."""
    async with serving(modern=False) as server:
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        listed = {"tools": [{**TOOL, "outputSchema": schema}]}

        async def lists(request: Any, message: Mapping[str, Any]) -> Any:
            return server.result(message, listed)

        async def call(request: Any, message: Mapping[str, Any]) -> Any:
            content = [{"type": "text", "text": "n is unknown"}]
            return server.result(message, {"content": content, "structuredContent": {"n": None}})

        server.on |= {"tools/list": lists, "tools/call": call}
        try:
            async with asyncio.timeout(SECONDS), kind.over_http(server) as client:
                await client.list()
                return f"its text: {await client.call('add')}"
        except BaseException as error:
            return _said(error)


def measures(seconds: float) -> dict[str, Measure]:
    """Returns the rows of the table."""
    return {
        "imports of the first mount": imports,
        "start of a server on pipes, until its tools are listed": starts,
        "calls a second on pipes, one after the other": calls(1, seconds),
        "calls a second on pipes, 64 in flight": calls(64, seconds),
        "answers to `server/discover` that are none": unusable_probes,
        "a cursor that leads back to itself": cursors,
        "a session that the server has lost": lost_session,
        "a server that is killed during a call": killed,
        "a server that ignores SIGTERM and has two children": left_behind,
        "a result that breaks its output schema": broken_result,
    }


async def table(seconds: float) -> str:
    """Measures both clients."""
    from importlib.metadata import version

    lines = [f"| what | the client of mounts | `mcp` {version('mcp')} |", "| --- | --- | --- |"]
    for what, measure in measures(seconds).items():
        lines.append(f"| {what} | {await measure(Ours)} | {await measure(Official)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


INTRODUCTION = """# The client of mounts and the official one

`python -m lab.official_client --write` measures this page: both clients, without a bus between, at the same servers.
[Design](../../docs/design.md#8-mcp) says what follows from it; each row is a function of
[`lab/official_client.py`](../official_client.py), which shows the server.

"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.official_client", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    made = asyncio.run(table(given.seconds))
    if given.write:
        PAGE.write_text(f"{INTRODUCTION}{made}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
