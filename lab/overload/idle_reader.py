"""Does not read its stream: ``python -m lab.overload.idle_reader ADDRESS FOLDER NAME --kind host|plugin|watcher``.

It attaches, waits for the file that lets it begin and then reads no more, while megabytes are sent to it. After SIGTERM
it reads what is left and prints how its stream had ended. The peers that send so much to it are in this process, too.
With ``--reads`` it reads all the time, so that the cost of the megabytes shows apart from that of not reading them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Callable, Coroutine

import grpc
import uvloop

from lab.load import peer
from lab.load.schedule import options_of, wait_to_begin
from lab.stage import stop_event
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

RESULT_BYTES = 1_000_000
ARGUMENT_BYTES = 500_000
IN_FLIGHT = 32  # of those who feed it
MAX_CALLS = 150  # 150 MB, more than twice what may wait for a session
DESCRIPTION_BYTES = 10_000
TOOLS = 100  # of the source that changes all of them over and over

END_SECONDS = 20.0  # in which a stream that the bus has closed is read to its end

Flood = Callable[[], Coroutine[None, None, None]]


async def _answer(plugin: peer.Peer, output: str) -> None:
    """Reads a peer's stream and answers every call on it."""
    while (frame := await plugin.read()) is not None:
        plugin.results += [pb.ToolResult(call_id=call.call_id, output_json=output) for call in frame.calls]
        plugin.flush()


async def as_host(address: str, slow: peer.Peer, name: str) -> Flood:
    """It calls and does not read the results."""
    plugin, tool = peer.Peer(address, own_connection=True), f"bulk_for_{name}"
    await plugin.attach(f"of-{name}", [peer.tool(tool)])
    plugin.slice = 1
    answering = asyncio.create_task(_answer(plugin, '"' + "x" * RESULT_BYTES + '"'))
    await slow.attach(name, [])

    async def flood() -> None:
        # All at once: a later write would meet a stream that the bus has closed, and hide why.
        slow.calls += [peer.call(str(number), name=tool) for number in range(MAX_CALLS)]
        slow.flush()
        await answering

    return flood


async def as_plugin(address: str, slow: peer.Peer, name: str) -> Flood:
    """It takes large calls and does not read them."""
    tool = f"sink_of_{name}"
    await slow.attach(name, [peer.tool(tool)])
    feeders = [peer.Peer(address, own_connection=True) for _ in range(3)]
    for place, feeder in enumerate(feeders):
        await feeder.attach(f"feeder-{place}-of-{name}", [])
        feeder.slice = 1

    reading = [asyncio.create_task(_answer(feeder, "")) for feeder in feeders]

    async def flood() -> None:
        for feeder in feeders:
            feeder.calls += [peer.call(str(n), name=tool, size=ARGUMENT_BYTES) for n in range(MAX_CALLS)]
            feeder.flush()
        await asyncio.gather(*reading)

    return flood


async def as_watcher(address: str, slow: peer.Peer, name: str) -> Flood:
    """It watches the catalog, which changes all the time, and does not read what has changed."""
    restless = peer.Peer(address, own_connection=True)
    await slow.attach(name, [], watch=True)
    attached = await restless.attach(f"of-{name}", [])
    reading = asyncio.create_task(_answer(restless, ""))

    async def flood() -> None:
        version = 0
        while not reading.done():
            version += 1
            text = str(version) + "x" * DESCRIPTION_BYTES
            tools = [
                pb.Tool(name=f"t{n}_of_{name}", description=text, parameters_json='{"type":"object"}')
                for n in range(TOOLS)
            ]
            await restless.stub.Register(wire.RegisterRequest(session_id=attached.session_id, tools=tools))
            await asyncio.sleep(0.02)

    return flood


KINDS = {"host": as_host, "plugin": as_plugin, "watcher": as_watcher}


async def _keep_up(slow: peer.Peer, beginning: asyncio.Future[str]) -> None:
    """Reads until it may begin, so that heartbeats are answered, and one message after that."""
    while await slow.read() is not None and not beginning.done():
        pass


async def _ending(slow: peer.Peer, reading: asyncio.Task[None]) -> str:
    """Reads what is left; returns how the stream had ended."""
    # It writes nothing meanwhile: a write to a stream that has ended hides in grpc why it has (grpc issue 36066).
    try:
        async with asyncio.timeout(END_SECONDS):
            await reading
            while await slow.read(echo=False) is not None:
                pass
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name} {error.details()}"
    except TimeoutError:
        return "OPEN"
    return "OK"


async def _until(stops: asyncio.Event, work: Coroutine[None, None, None]) -> None:
    working = asyncio.create_task(work)
    await stops.wait()
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await working


async def run(options: argparse.Namespace) -> None:
    """Attaches, does not read, and prints how that ended."""
    stops = stop_event()
    slow = peer.Peer(options.address, own_connection=True)
    flood = await KINDS[options.kind](options.address, slow, options.name)
    beginning = asyncio.ensure_future(wait_to_begin(options))
    reading = asyncio.create_task(_keep_up(slow, beginning))
    await beginning
    flooding = asyncio.create_task(flood())
    if options.reads:
        await reading
        await _until(stops, _answer(slow, "1"))
        print("OK", flush=True)
    else:
        await stops.wait()
        print(await _ending(slow, reading), flush=True)
    flooding.cancel()
    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await flooding


def main() -> None:
    """Reads the command line and does not read the stream."""
    parser = options_of(__doc__)
    parser.add_argument("--kind", choices=tuple(KINDS), default="host")
    parser.add_argument("--reads", action="store_true", help="it reads what it is sent, at once")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
