"""Offers the workload's tool and answers its calls: ``python -m lab.load.plugin ADDRESS [--way WAY]``.

Each prints ``attached`` when its tool is offered. Ways: ``raw`` answers at once and costs next to nothing, so that the
bus is the bottleneck. ``plain`` and ``async`` are functions on the SDK that answer at once, on the event loop of
asyncio, as functions of authors run. The calls of ``sdk`` take ``--work`` seconds, ``--room`` of them at once; ``hold``
never answers. ``nats`` answers requests and ``tcp`` lines of text. ``callback`` answers over HTTP, at the URL that it
prints (``http=URL``); ADDRESS is the URL of a bus, or ``-``. With ``--ledger FILE`` it writes the numbers of the calls
that it ran to the file after SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from lab.ledger import write_numbers
from lab.load import peer, workload
from lab.load.callbacks import answer_at_once, declaration, register_at, serve_callbacks, workload_response
from lab.stage import stop_event
from toolbus.sdk import Plugin
from toolbus.v1 import tool_pb2 as pb

_NOTE = '"note":"'


class Ran:
    """The numbers of the calls that were run, in a file once the process is terminated."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._numbers = array("d")
        self.stops = stop_event()

    def add(self, note: str) -> None:
        """Notes a call; those of a measurement have no number."""
        if note:
            self._numbers.append(float(note))

    def write(self) -> None:
        if self._file is not None:
            write_numbers(self._file, self._numbers)


def forecast(place: str, days: int, note: str = "") -> dict[str, object]:
    return {"celsius": 21.5, "sky": "clear"}


def run_function(options: argparse.Namespace) -> None:
    """Runs a function of an author that answers at once, as the README's plugin does."""
    way = workload.choose_transport(options.way)
    plugin = Plugin(options.source, address=options.address, max_in_flight=workload.MAX_IN_FLIGHT)
    plugin.add_tool(AS_AUTHORS[way], name=options.tool)
    plugin.run(lambda: print("attached", flush=True))


async def _offer(plugin: Plugin, ran: Ran) -> None:
    async with plugin:
        await plugin.ready()
        print("attached", flush=True)
        await ran.stops.wait()


async def by_sdk(options: argparse.Namespace, ran: Ran) -> None:
    """Runs calls as a plugin of an author does."""
    plugin = Plugin(options.source, address=options.address, max_in_flight=options.room)

    @plugin.tool(name=options.tool, description=workload.DESCRIPTION)
    async def run(place: str, days: int, note: str = "") -> dict[str, object]:
        ran.add(note)
        await asyncio.sleep(options.work)
        return await workload.forecast(place, days, note)

    await _offer(plugin, ran)


async def hold_by_sdk(options: argparse.Namespace, ran: Ran) -> None:
    """Takes calls and never answers.

    A call prints ``started``, and ``cancelled`` with the moment (``time.monotonic_ns``, one clock for the whole
    machine) at which its handler is cancelled.
    """
    plugin = Plugin(options.source, address=options.address)

    @plugin.tool(name=options.tool, description="Waits until it is cancelled.")
    async def hold() -> None:
        print("started", flush=True)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            print(f"cancelled {time.monotonic_ns()}", flush=True)
            raise

    async with plugin:
        await ran.stops.wait()


async def by_stream(options: argparse.Namespace, ran: Ran) -> None:
    """Answers at once; with ``--hold N`` never answers, and prints ``held`` once it holds N calls."""
    plugin = peer.Peer(options.address)
    plugin.slice = options.slice
    await plugin.attach(options.source, [peer.tool(options.tool)])
    print("attached", flush=True)

    async def answer() -> None:
        held = 0
        while (frame := await plugin.read()) is not None:
            if not frame.calls:
                continue
            if options.hold:
                held += len(frame.calls)
                if held >= options.hold:
                    print("held", flush=True)
                continue
            if options.ledger:
                for call in frame.calls:
                    ran.add(call.arguments_json.partition(_NOTE)[2].partition('"')[0])
            plugin.results += [
                pb.ToolResult(call_id=call.call_id, output_json=workload.OUTPUT_JSON) for call in frame.calls
            ]
            plugin.flush()

    answering = asyncio.create_task(answer())
    await asyncio.wait([answering, asyncio.create_task(ran.stops.wait())], return_when=asyncio.FIRST_COMPLETED)
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    await plugin.close()


async def by_callback(options: argparse.Namespace, ran: Ran) -> None:

    async def run(request: web.Request) -> web.Response:
        ran.add((await request.json())["arguments"].get("note", ""))
        await asyncio.sleep(options.work)
        return workload_response()

    url, runner = await serve_callbacks(run if options.work else answer_at_once)
    if options.address != "-":
        await register_at(options.address, declaration(url, options.tool, options.source))
    print(f"attached http={url}", flush=True)
    await ran.stops.wait()
    await runner.cleanup()


async def by_nats(options: argparse.Namespace, ran: Ran) -> None:
    import nats

    client = await nats.connect(options.address, allow_reconnect=False)
    output = workload.OUTPUT_JSON.encode()

    async def on_request(message: Any) -> None:
        await message.respond(output)

    await client.subscribe(workload.SUBJECT, cb=on_request)
    await client.flush()
    print("attached", flush=True)
    await ran.stops.wait()


async def by_tcp(options: argparse.Namespace, ran: Ran) -> None:
    """Answers every line with its slot and the workload's output."""
    reader, writer = await workload.connect(options.address)
    writer.write(workload.PLUGIN_LINE)
    await reader.readline()
    print("attached", flush=True)
    output = b" " + workload.OUTPUT_JSON.encode() + b"\n"
    while line := await reader.readline():
        writer.write(line.partition(b" ")[0] + output)


WAYS: dict[str, Callable[[argparse.Namespace, Ran], Awaitable[None]]] = {
    "raw": by_stream,
    "sdk": by_sdk,
    "hold": hold_by_sdk,
    "callback": by_callback,
    "nats": by_nats,
    "tcp": by_tcp,
}
AS_AUTHORS: dict[str, Callable[..., Any]] = {"plain": forecast, "async": workload.forecast}


async def serve(options: argparse.Namespace) -> None:
    ran = Ran(options.ledger)
    try:
        await WAYS[options.way](options, ran)
    finally:
        ran.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--way", choices=(*WAYS, *AS_AUTHORS, *(f"{way}+lane" for way in AS_AUTHORS)), default="raw")
    parser.add_argument("--source", default="bench-plugin")
    parser.add_argument("--tool", default=workload.TOOL_NAME)
    parser.add_argument("--work", type=float, default=0.0, help="seconds that a call takes")
    parser.add_argument("--room", type=int, default=8, help="calls that it takes at once")
    parser.add_argument("--hold", type=int, default=0, metavar="N", help="never answer; print `held` at N calls")
    parser.add_argument("--ledger", type=Path, metavar="FILE", help="write the numbers of the calls there")
    parser.add_argument("--slice", type=int, default=peer.SLICE, metavar="N", help="results of one message, at most")
    options = parser.parse_args()
    if options.way in WAYS:
        uvloop.run(serve(options))
    else:
        run_function(options)


if __name__ == "__main__":
    main()
