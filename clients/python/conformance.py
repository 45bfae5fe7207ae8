"""Offers the tools of a client under test, for `toolbus conformance`, with peer.py.

    toolbus conformance -- python clients/python/conformance.py

Exits with 0 after SIGTERM or a final drain of the bus, with 1 when the bus refused it.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import platform
import signal
import sys
import time
from contextlib import aclosing
from typing import Any

from call import questions, to_json
from peer import Call, Peer, Refused

from toolbus.v1 import tool_bus_service_pb2 as messages
from toolbus.v1 import tool_pb2 as pb

OBJECT: dict[str, Any] = {"type": "object"}
LATE_SECONDS = 0.05  # after its result a call of `late_progress` reports


async def echo(arguments: dict[str, Any], call: Call) -> Any:
    """Returns its arguments."""
    return arguments


async def fail(arguments: dict[str, Any], call: Call) -> Any:
    """Raises `message`."""
    raise ValueError(arguments["message"])


async def slow(arguments: dict[str, Any], call: Call) -> Any:
    """Reports progress once, then works until it is cancelled."""
    call.progress()
    try:
        await asyncio.Event().wait()
    finally:
        print("slow stopped", file=sys.stderr, flush=True)


async def steps(arguments: dict[str, Any], call: Call) -> Any:
    """Reports `count` steps of progress, then returns the count."""
    count = arguments["count"]
    for step in range(1, count + 1):
        call.progress(step, count, f"step {step}")
    return {"count": count}


async def relay(arguments: dict[str, Any], call: Call) -> Any:
    """Calls the tool `name` with `arguments` through the bus and returns its output."""
    result = await call.invoke(arguments["name"], arguments["arguments"])
    if result.is_error:
        raise RuntimeError(result.error.message)
    return json.loads(result.output_json or "null")


async def context(arguments: dict[str, Any], call: Call) -> Any:
    """Returns the context of its call."""
    return {"user_id": call.context.user_id, "attributes": dict(call.context.attributes)}


async def chunks(arguments: dict[str, Any], call: Call) -> Any:
    """Sends each of `texts` as a piece of the output, and returns them joined."""
    for text in arguments["texts"]:
        call.chunk(text)
    return "".join(arguments["texts"])


async def picture(arguments: dict[str, Any], call: Call) -> Any:
    """Returns a text and an image."""
    image = pb.ImageContent(data=b"\x89PNG\r\n\x1a\n", mime_type="image/png")
    return pb.ToolResult(output_json='"a picture"', content=[pb.ContentBlock(image=image)])


async def ask(arguments: dict[str, Any], call: Call) -> Any:
    """Asks two questions, one after the other, and returns both answers."""
    answers = json.loads(call.message.request_state or "{}") | call.answers
    for key in ("first", "second"):
        if key not in answers:
            schema = {"type": "object", "properties": {"text": {"type": "string"}}}
            params = {"message": f"{key}?", "requestedSchema": schema}
            question = {key: {"method": "elicitation/create", "params": params}}
            return questions(question, to_json(answers) if answers else "")
    return {**answers, "accepts": list(call.message.accepts)}


async def big(arguments: dict[str, Any], call: Call) -> Any:
    """Returns a text of `bytes` letters."""
    return "x" * arguments["bytes"]


async def late_progress(arguments: dict[str, Any], call: Call) -> Any:
    """Reports progress after it has returned."""
    asyncio.get_running_loop().call_later(LATE_SECONDS, call.progress)


async def about(arguments: dict[str, Any], call: Call) -> Any:
    """Returns name, version, language and roles of this client."""
    try:
        version = importlib.metadata.version("toolbus")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    language = ".".join(platform.python_version_tuple()[:2])
    roles = ["plugin", "host", "remote"]
    return {"name": "clients/python", "version": version, "language": f"python {language}", "roles": roles}


class Meeting:
    """The tool `meet`."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []  # one for each call that waits for the others

    async def meet(self, arguments: dict[str, Any], call: Call) -> Any:
        """Returns once `people` calls of it run at the same time."""
        arrived = asyncio.get_running_loop().create_future()
        self._waiting.append(arrived)
        if len(self._waiting) >= arguments["people"]:
            for each in self._waiting:
                if not each.done():
                    each.set_result(None)
            self._waiting.clear()
        await arrived
        return {"met": arguments["people"]}


class Catalog:
    """The tools that change the tools of this plugin."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def offer(self, arguments: dict[str, Any], call: Call) -> Any:
        """Offers another tool `name` that returns its arguments."""
        self._peer.tool("Returns its arguments.", OBJECT, name=arguments["name"])(echo)

    async def withdraw(self, arguments: dict[str, Any], call: Call) -> Any:
        """Withdraws the tool `name`."""
        self._peer.remove_tool(arguments["name"])


class Hosts:
    """The tool `host`: makes calls with this client, and returns the application's view."""

    def __init__(self) -> None:
        self._peers: dict[str, tuple[Peer, asyncio.Task[None]]] = {}  # by the address of their bus

    async def host(self, arguments: dict[str, Any], call: Call) -> Any:
        """Makes a call by a host of its own, lists, watches, or closes that host."""
        address = arguments["address"]
        if arguments.get("close"):
            return await self._close(address)
        if address not in self._peers:
            peer = Peer(address, "conformance-host")
            self._peers[address] = peer, asyncio.create_task(peer.run())
        peer, _ = self._peers[address]
        if arguments.get("list"):
            listing = await peer.list()
            return {"tools": [listed.tool.name for listed in listing.tools], "revision": listing.revision}
        if count := arguments.get("watch"):
            return {"changes": [_shown(change) async for change in _first(count, peer)]}
        return await _called(peer, arguments)

    async def close(self) -> None:
        """Closes all."""
        for address in list(self._peers):
            await self._close(address)

    async def _close(self, address: str) -> None:
        if address in self._peers:
            peer, running = self._peers.pop(address)
            peer.drain()
            await asyncio.wait([running])


async def _called(peer: Peer, arguments: dict[str, Any]) -> dict[str, Any]:
    """Makes a call, and returns its outcome."""
    items: list[pb.ToolProgress] = []
    started = time.monotonic()
    timeout, cancel_after = arguments.get("timeout") or 0.0, arguments.get("cancel_after")
    cancelled, result = False, pb.ToolResult()
    try:
        async with asyncio.timeout(cancel_after):
            result = await peer.call(
                arguments["name"], arguments.get("arguments", {}), timeout=timeout, on_progress=items.append
            )
    except TimeoutError:
        cancelled = True
    error = result.error
    named = result.HasField("error")
    parts = [*(part for item in items for part in item.content), *result.content]
    return {
        "failed": result.is_error,
        "cancelled": cancelled,
        "code": _name(pb.ErrorCode.DESCRIPTOR, "ERROR_CODE_", error.code) if named else "",
        "stage": _name(pb.CallStage.DESCRIPTOR, "CALL_STAGE_", error.stage) if named else "",
        "retry_safe": error.retry_safe,
        "message": error.message,
        "output": json.loads(result.output_json or "null"),
        "progress": [[item.progress, item.total, item.message] for item in items if not item.output_chunk],
        "chunks": [item.output_chunk for item in items if item.output_chunk],
        "content": [_mime_type(part) for part in parts],
        "seconds": time.monotonic() - started,
    }


def _name(enum: Any, prefix: str, number: int) -> str:
    """Returns a name without its prefix; the number of one that a later version added."""
    value = enum.values_by_number.get(number)
    return str(number) if value is None else value.name.removeprefix(prefix)


def _mime_type(part: pb.ContentBlock) -> str:
    kind = part.WhichOneof("kind")
    return "text/plain" if kind in (None, "text") else str(getattr(part, kind).mime_type)


async def _first(count: int, peer: Peer) -> Any:
    async with aclosing(peer.watch()) as changes:
        async for change in changes:
            yield change
            count -= 1
            if not count:
                return


def _shown(change: messages.CatalogChange) -> dict[str, Any]:
    return {
        "full": change.full,
        "added": [listed.tool.name for listed in change.added],
        "changed": [listed.tool.name for listed in change.changed],
        "removed": [removed.name for removed in change.removed],
    }


def conformance_peer(address: str, hosts: Hosts) -> Peer:
    """Returns a peer with all tools."""
    peer = Peer(address, "conformance")
    catalog = Catalog(peer)
    plain = (echo, fail, slow, steps, relay, context, chunks, picture, ask, big, late_progress, about)
    for handler in (*plain, Meeting().meet, catalog.offer, catalog.withdraw, hosts.host):
        peer.tool(handler.__doc__ or "", OBJECT)(handler)
    return peer


async def main() -> int:
    """Serves until SIGTERM or a final drain."""
    hosts = Hosts()
    peer = conformance_peer("", hosts)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, peer.drain)
    try:
        await peer.run()
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 1
    finally:
        await hosts.close()
    return 0


if __name__ == "__main__":
    logging.basicConfig(format="%(name)s: %(message)s")
    sys.exit(asyncio.run(main()))
