"""The plugin of a run: ``python -m lab.overload.plugin ADDRESS FOLDER SOURCE``. It writes down which calls it ran.

Calls take ``--work`` seconds and there is room for ``--room`` of them. ``--way sdk`` is a plugin as authors write them,
``raw`` answers at once and costs next to nothing, so that the bus is what is full; ``callback`` is one over HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop
from aiohttp import web

from lab.benchmarks import peer, workload
from lab.benchmarks.callback_plugin import declaration, register
from lab.overload.load import write_numbers
from toolbus.sdk import Plugin
from toolbus.v1 import tool_pb2 as pb

_NOTE = '"note":"'


class Ran:
    """The numbers of the calls that were run, in a file once the process is told to end."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = folder / f"{name}.ran"
        self._numbers = array("d")
        self.told_to_end = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.told_to_end.set)

    def add(self, note: str) -> None:
        """Notes a call; those of a measurement have no number."""
        if note:
            self._numbers.append(float(note))

    def write(self) -> None:
        """Writes them all."""
        write_numbers(self._file, self._numbers)


async def by_sdk(options: argparse.Namespace, ran: Ran) -> None:
    """Runs calls as a plugin of an author does."""
    plugin = Plugin(options.source, address=options.address, max_in_flight=options.room)

    @plugin.tool(name=options.tool, description=workload.DESCRIPTION)
    async def run(place: str, days: int, note: str = "") -> dict[str, object]:
        ran.add(note)
        await asyncio.sleep(options.work)
        return await workload.forecast(place, days, note)

    async with plugin:
        await plugin.ready()
        print("attached", flush=True)
        await ran.told_to_end.wait()


async def by_stream(options: argparse.Namespace, ran: Ran) -> None:
    """Answers at once, frame by frame."""
    plugin = peer.Peer(options.address)
    await plugin.attach(options.source, [peer.tool(options.tool)])
    print("attached", flush=True)

    async def answer() -> None:
        while (frame := await plugin.read()) is not None:
            for call in frame.calls:
                ran.add(call.arguments_json.partition(_NOTE)[2].partition('"')[0])
                plugin.results.append(pb.ToolResult(call_id=call.call_id, output_json=workload.OUTPUT_JSON))
            if frame.calls:
                plugin.flush()

    answering = asyncio.create_task(answer())
    await ran.told_to_end.wait()
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    await plugin.close()


async def by_callback(options: argparse.Namespace, ran: Ran) -> None:
    """Runs calls that come over HTTP; the address is that of the bus's gateway."""

    async def run(request: web.Request) -> web.Response:
        ran.add((await request.json())["arguments"].get("note", ""))
        await asyncio.sleep(options.work)
        return web.Response(body=b'{"output":%s,"is_error":false}' % workload.OUTPUT_JSON.encode())

    application = web.Application()
    application.router.add_post("/call", run)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    host, port = runner.addresses[0][:2]
    body = declaration(f"http://{host}:{port}/call", options.tool, options.source)
    await register(options.address, body)
    print("attached", flush=True)
    await ran.told_to_end.wait()
    await runner.cleanup()


WAYS: dict[str, Callable[[argparse.Namespace, Ran], Awaitable[None]]] = {
    "sdk": by_sdk,
    "raw": by_stream,
    "callback": by_callback,
}


async def run(options: argparse.Namespace) -> None:
    """Serves until it is told to end."""
    ran = Ran(options.folder, options.source)
    try:
        await WAYS[options.way](options, ran)
    finally:
        ran.write()


def main() -> None:
    """Reads the command line and serves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("folder", type=Path)
    parser.add_argument("source")
    parser.add_argument("--way", choices=tuple(WAYS), default="sdk")
    parser.add_argument("--work", type=float, default=0.02)
    parser.add_argument("--room", type=int, default=8)
    parser.add_argument("--tool", default=workload.TOOL_NAME)
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
