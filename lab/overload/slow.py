"""Who does not read: ``python -m lab.overload.slow ADDRESS FOLDER NAME --kind host|plugin|watcher [--reads]``.

It attaches, waits for its word to begin and then reads no more, while megabytes are sent to it. Told to end, it reads
what is left and prints how its stream had ended. Those who send so much to it are peers of this process, too. With
``--reads`` it reads all the time, so that what the megabytes cost can be told from what it costs that nobody reads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine

import grpc
import uvloop

from lab.benchmarks import peer
from lab.overload.pace import BEAT_SECONDS, options_of, told
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

RESULT_BYTES = 1_000_000
ARGUMENT_BYTES = 500_000
IN_FLIGHT = 32  # of those who feed it
MAX_CALLS = 150  # 150 MB, more than twice what may wait for a session
DESCRIPTION_BYTES = 10_000
TOOLS = 100  # of the source that changes all of them over and over

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
        for number in range(MAX_CALLS):
            slow.calls.append(peer.call(str(number), name=tool))
            slow.flush()
            await asyncio.sleep(BEAT_SECONDS / 4)
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


async def _keep_up(slow: peer.Peer, word: asyncio.Future[str]) -> None:
    """Reads until the word to begin, so that heartbeats are answered, and one frame after it."""
    while await slow.read() is not None and not word.done():
        pass


async def _ending(slow: peer.Peer, reading: asyncio.Task[None]) -> str:
    """Reads what is left; returns how the stream had ended.

    It writes nothing meanwhile: a write to a stream that has ended hides in grpc why it has (grpc issue 36066).
    """
    try:
        async with asyncio.timeout(5.0):
            await reading
            while await slow.read(echo=False) is not None:
                pass
    except grpc.aio.AioRpcError as problem:
        return f"{problem.code().name} {problem.details()}"
    except TimeoutError:
        return "OPEN"
    return "OK"


async def _until(told_to_end: asyncio.Event, work: Coroutine[None, None, None]) -> None:
    working = asyncio.create_task(work)
    await told_to_end.wait()
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await working


async def run(options: argparse.Namespace) -> None:
    """Attaches, does not read, and says how that ended."""
    told_to_end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told_to_end.set)
    slow = peer.Peer(options.address, own_connection=True)
    flood = await KINDS[options.kind](options.address, slow, options.name)
    word = asyncio.ensure_future(told(options))
    reading = asyncio.create_task(_keep_up(slow, word))
    await word
    flooding = asyncio.create_task(flood())
    if options.reads:
        await reading
        await _until(told_to_end, _answer(slow, "1"))
        print("OK", flush=True)
    else:
        await told_to_end.wait()
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
