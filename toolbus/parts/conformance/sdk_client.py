"""Offers the tools of a client under test with toolbus.sdk, so that the conformance suite can play it.

    TOOLBUS_ADDRESS=127.0.0.1:PORT TOOLBUS_TOKEN=… python -m toolbus.parts.conformance.sdk_client [--plain]

`--plain` offers the quick tools as plain functions, which run on threads. Ends with 0 after SIGTERM or a final drain of
the bus, with 1 and the text on stderr where the bus refused it.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from toolbus.common.version import VERSION
from toolbus.errors import PeerLost, ToolBusError
from toolbus.functions.reply import Reply, image
from toolbus.functions.scope import ToolScope
from toolbus.protocol.tool import Progress, Result
from toolbus.sdk.host import Host
from toolbus.sdk.plugin_client import Plugin

OBJECT = {"type": "object"}
LIBRARY = {
    "name": "toolbus.sdk",
    "version": VERSION,
    "language": f"python {sys.version_info.major}.{sys.version_info.minor}",
    "roles": ["plugin", "host", "remote"],
}
ONE_PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010804000000b51c0c020000000b4944415478da6364f80f00010501012718e366"
    "0000000049454e44ae426082"
)
WORKERS = 256  # threads for plain functions: as many as calls that the bus may have in flight here


# -- tools that wait for nothing: plain functions, or the same as async ones -------------------------------------------


def echo(**arguments: Any) -> Any:
    """Returns its arguments."""
    return Reply(arguments)


def fail(message: str) -> None:
    """Fails with the message."""
    raise RuntimeError(message)


def steps(count: int, ctx: ToolScope) -> Any:
    """Reports so many steps of progress, then returns the count."""
    for step in range(1, count + 1):
        ctx.progress(step, total=count, message=f"step {step}")
    return {"count": count}


def context(ctx: ToolScope) -> Any:
    """Returns the context of its call."""
    return {"user_id": ctx.user_id, "attributes": dict(ctx.context.attributes)}


def big(bytes: int) -> str:
    """Returns a text of so many letters."""
    return "x" * bytes


def _as_async(tool: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(tool)
    async def run(*args: Any, **arguments: Any) -> Any:
        return tool(*args, **arguments)

    return run


# -- the others --------------------------------------------------------------------------------------------------------


class AsyncTools:
    """The tools as async functions.

    Args:
        plugin: the plugin that offers them, for `offer` and `withdraw`.
    """

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._waiting: set[asyncio.Event] = set()  # of calls of `meet` that wait for the others

    async def slow(self, ctx: ToolScope) -> None:
        """Reports progress once, then works until it is cancelled."""
        ctx.progress()
        try:
            await asyncio.Event().wait()
        finally:
            print("slow stopped", file=sys.stderr, flush=True)

    async def meet(self, people: int) -> Any:
        """Returns once ``people`` calls of it run at the same time."""
        arrived = asyncio.Event()
        self._waiting.add(arrived)
        if len(self._waiting) >= people:
            for each in self._waiting:
                each.set()
        try:
            await arrived.wait()
        finally:
            self._waiting.discard(arrived)
        return {"met": people}

    async def relay(self, name: str, arguments: dict[str, Any], ctx: ToolScope) -> Result:
        """Calls another tool as part of its call, and returns its output or fails with its message."""
        return await ctx.call(name, arguments)

    async def chunks(self, texts: Sequence[str]) -> AsyncIterator[str]:
        """Sends each text as a chunk of its output, which is all of them joined."""
        for text in texts:
            yield text

    async def picture(self) -> Reply:
        """Returns a picture in addition to a text."""
        return Reply("a picture", [image(ONE_PIXEL, "image/png")])

    async def ask(self, ctx: ToolScope) -> Any:
        """Asks two questions, one after the other, and returns both answers."""
        first = await ctx.ask({"first": _question("first")})
        return {**first, **await ctx.ask({"second": _question("second")}), "accepts": list(ctx.accepts)}

    async def late_progress(self, ctx: ToolScope) -> None:
        """Reports progress after it has returned."""
        asyncio.get_running_loop().call_later(0.05, ctx.progress)

    async def record(self, file: str, text: str, seconds: float) -> str:
        """Appends the text as a line to the file, works for so long, and returns the text."""
        _append(file, text)
        await asyncio.sleep(seconds)
        return text

    async def offer(self, name: str) -> None:
        """Offers another tool of that name, which returns its arguments."""
        self._plugin.add_tool(_as_async(echo), name=name, parameters=OBJECT, replace=True)

    async def withdraw(self, name: str) -> None:
        """Withdraws that tool."""
        self._plugin.remove_tool(name)


class PlainTools:
    """Tools as plain functions, which replace the async ones of the same names."""

    def __init__(self) -> None:
        self._waiting: set[threading.Event] = set()  # of calls of `meet` that wait for the others
        self._lock = threading.Lock()  # of the set

    def slow(self, ctx: ToolScope) -> None:
        """Reports progress once, then works until it is cancelled."""
        ctx.progress()
        ctx.cancelled.wait()
        print("slow stopped", file=sys.stderr, flush=True)
        ctx.raise_if_cancelled()

    def meet(self, people: int, ctx: ToolScope) -> Any:
        """Returns once ``people`` calls of it run at the same time."""
        arrived = threading.Event()
        with self._lock:
            self._waiting.add(arrived)
            if len(self._waiting) >= people:
                for each in self._waiting:
                    each.set()
        try:
            while not arrived.wait(0.01):
                ctx.raise_if_cancelled()
        finally:
            with self._lock:
                self._waiting.discard(arrived)
        return {"met": people}

    def relay(self, name: str, arguments: dict[str, Any], ctx: ToolScope) -> Result:
        """Calls another tool as part of its call, and returns its output or fails with its message."""
        return ctx.call_sync(name, arguments)

    def ask(self, ctx: ToolScope) -> Any:
        """Asks two questions, one after the other, and returns both answers."""
        first = ctx.ask_sync({"first": _question("first")})
        return {**first, **ctx.ask_sync({"second": _question("second")}), "accepts": list(ctx.accepts)}


def _append(file: str, line: str) -> None:
    with open(file, "a", encoding="utf-8") as lines:
        lines.write(f"{line}\n")


def _question(key: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    return {"method": "elicitation/create", "params": {"message": f"{key}?", "requestedSchema": schema}}


class Hosts:
    """The hosts of this process, one for each address, each on a stream of its own."""

    def __init__(self) -> None:
        self._hosts: dict[str, Host] = {}  # by address

    async def host(
        self,
        address: str,
        name: str = "",
        arguments: dict[str, Any] | None = None,
        timeout: float | None = None,
        cancel_after: float | None = None,
        form: dict[str, Any] | None = None,
        list: bool = False,
        watch: int = 0,
        close: bool = False,
    ) -> Any:
        """Makes a call by a Host, or lists, watches or closes with it, and returns the application's view."""
        host = self._hosts.get(address)
        if host is None:
            host = self._hosts[address] = Host(address, source="conformance-host")
        if close:
            await self._hosts.pop(address).close()
            return None
        if list:
            listing = await host.list()
            return {"tools": [tool.name for tool in listing], "revision": listing.revision}
        if watch:
            return {"changes": await _changes(host, watch)}
        return await _call(host, name, arguments, timeout, cancel_after, form)

    async def close(self) -> None:
        for host in self._hosts.values():
            await host.close()


async def _changes(host: Host, count: int) -> list[dict[str, Any]]:
    changes: list[dict[str, Any]] = []
    async for change in host.watch():
        kinds = {kind: [tool.name for tool in getattr(change, kind)] for kind in ("added", "changed", "removed")}
        changes.append({"full": change.full, **kinds})
        if len(changes) == count:
            break
    return changes


async def _call(
    host: Host,
    name: str,
    arguments: dict[str, Any] | None,
    timeout: float | None,
    cancel_after: float | None,
    form: dict[str, Any] | None,
) -> dict[str, Any]:
    items: list[Progress] = []
    started = time.monotonic()
    cancelled, result = False, Result()
    try:
        async with asyncio.timeout(cancel_after):
            on_input = None if form is None else lambda question: form
            result = await host.call(name, arguments, timeout=timeout, on_progress=items.append, on_input=on_input)
    except TimeoutError:
        cancelled = True
    error = result.error
    return {
        "failed": result.is_error,
        "cancelled": cancelled,
        "code": error.code.name if error else "",
        "stage": error.stage.name if error else "",
        "retry_safe": error.retry_safe if error else False,
        "message": error.message if error else "",
        "output": result.output,
        "progress": [[each.progress, each.total, each.message] for each in items if not each.chunk],
        "chunks": [each.chunk for each in items if each.chunk],
        "content": [block.image.mime_type for block in result.content if block.HasField("image")],
        "seconds": time.monotonic() - started,
    }


def client(hosts: Hosts, *, plain: bool) -> Plugin:
    """Returns the plugin with all tools."""
    plugin = Plugin("conformance", workers=WORKERS)

    def about() -> Any:
        """Names the client library."""
        return {**LIBRARY, "name": "toolbus.sdk, plain functions"} if plain else LIBRARY

    quick = (echo, fail, steps, context, big, about)
    offered: dict[str, Callable[..., Any]] = {each.__name__: each if plain else _as_async(each) for each in quick}
    for owner in (AsyncTools(plugin), *([PlainTools()] if plain else ())):
        offered |= {name: getattr(owner, name) for name in vars(type(owner)) if not name.startswith("_")}
    for function in (*offered.values(), hosts.host):
        plugin.add_tool(function, parameters=OBJECT, timeout=300.0)
    return plugin


def main() -> int:
    """Serves until SIGTERM or a final drain of the bus."""
    parser = argparse.ArgumentParser(description="Offer the tools of a client under test with toolbus.sdk.")
    parser.add_argument("--plain", action="store_true", help="the quick tools as plain functions, on threads")
    options = parser.parse_args()
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING)
    hosts = Hosts()
    try:
        client(hosts, plain=options.plain).run()
    except PeerLost:  # it was replaced, or requested to leave, which the log has reported
        return 0
    except ToolBusError as refusal:
        print(refusal, file=sys.stderr)
        return 1
    finally:
        asyncio.run(hosts.close())
    return 0


if __name__ == "__main__":
    sys.exit(main())
